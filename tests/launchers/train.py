"""The one training script that every launcher starts, unchanged. It prints the hash of each rank's weights."""

import hashlib
import sys

import torch
from torch.utils.data import Dataset

import gradwire as gw


class Numbers(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.full((4,), index / 200), torch.tensor([index / 200])


torch.set_num_threads(1)
failing = int(sys.argv[1]) if len(sys.argv) > 1 else None  # the rank that shall raise at step 10
with gw.init() as world:
    torch.manual_seed(world.rank)  # gw.distribute gives every rank the weights of rank 0
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = gw.DataLoader(Numbers(), 16)
    gw.distribute(model, optimizer, train)
    for _ in range(2):
        for x, y in train:
            if world.rank == failing and world.step == 10:
                raise ValueError("the cause")
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    print(f"WEIGHTS {world.rank} {world.size} {digest} {weights.tolist()}\n", end="", flush=True)  # one write
