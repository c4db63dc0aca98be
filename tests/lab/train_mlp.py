"""A small MLP on numbers from a formula; prints a hash of the weights on every rank. Started by test_multihost.py."""

import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gradwire as gw

with gw.init() as world:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(210, 12)  # 210 = 6 x 32 + 18: the last batch is short, and 3 does not divide 32
    y = x.sin().sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train = gw.DataLoader(TensorDataset(x, y), batch_size=32, seed=0)
    gw.distribute(model, optimizer, train)
    for _epoch in range(3):
        for inputs, targets in train:
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"rank {world.rank} of {world.size} has {hashlib.sha256(weights).hexdigest()}", flush=True)
