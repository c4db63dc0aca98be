"""What ranks do in test_across_plans.py: half of a run under one plan, the other half under another."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import gradwire as gw
from gradwire.checkpoint.api import load, save
from gradwire.comm.world import World
from tests.conformance.meshes import BATCH_SIZE, NUM_EPOCHS, Weights, adam, data, model

NAME = "tied"
Run = tuple[nn.Module, torch.optim.Optimizer, gw.DataLoader]


def made() -> Run:
    net = model(NAME)
    optimizer = adam(net)
    loader = gw.DataLoader(data(NAME), BATCH_SIZE, shuffle=False)
    gw.distribute(net, optimizer, loader)
    return net, optimizer, loader


def train(run: Run, num_epochs: int) -> None:
    net, optimizer, loader = run
    for _ in range(num_epochs):
        for x, y in loader:
            gw.forward_backward(net, F.cross_entropy, x, y)
            gw.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def first_half(_: World, folder: Path) -> None:
    run = made()
    train(run, NUM_EPOCHS // 2)
    save(folder, *run)


def second_half(_: World, folder: Path) -> Weights:
    run = made()
    with torch.no_grad():
        for param in run[0].parameters():
            param.zero_()
    load(folder, *run)
    train(run, NUM_EPOCHS // 2)
    return gw.whole_state_dict(run[0])
