"""One large matrix, six steps; each host's first worker prints what its interface sent. Started by test_multihost.py."""

import torch
from torch import nn

import gradwire as gw
from benchmarks.lab.hosts import WIRE
from benchmarks.measure import sent_bytes

STEPS = 6

with gw.init() as world:
    torch.set_num_threads(1)
    model = nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gw.distribute(model, optimizer)
    world.sum(0)
    before = sent_bytes(WIRE)
    for _step in range(STEPS):
        model(torch.randn(2, 2048)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    world.sum(0)
    if world.local_rank == 0:
        sent = (sent_bytes(WIRE) - before) / STEPS / model.weight.numel()
        print(f"sent {sent:.4f} bytes per parameter and step", flush=True)
