"""Train a small conv net on handwritten digits.

On one process:  python examples/digits.py
On two:          gradwire run -n 2 examples/digits.py
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gradwire as gw

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--save", type=Path, help="where rank 0 writes the weights")
args = parser.parse_args()

rows = torch.from_numpy(np.loadtxt(Path(__file__).parent / "data/digits.csv.gz", delimiter=",", dtype=np.float32))
images, labels = rows[:, :64].reshape(-1, 1, 8, 8) / 16, rows[:, 64].long()
held_out = slice(len(rows) - 360, None)

with gw.init() as world:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = gw.DataLoader(TensorDataset(images[:-360], labels[:-360]), batch_size=64, seed=0)  # 64 over all processes
    gw.distribute(model, optimizer, train)

    for epoch in range(args.epochs):
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # the gradients are agreed when it returns
            optimizer.step()
            optimizer.zero_grad()

        mine = torch.arange(len(rows))[held_out][world.rank :: world.size]  # each process judges its share
        with torch.no_grad():
            correct = gw.sum(int((model(images[mine]).argmax(1) == labels[mine]).sum()))
        world.log(f"epoch {epoch + 1:2}  accuracy {correct / 360:.1%}")

    used = world.account()
    world.log(f"{world.size} process(es), {used.samples_per_s:,.0f} samples/s. A step: {used.step_s * 1e3:.1f} ms =")
    world.log(
        f"  data {used.data_s * 1e3:.1f} + compute {used.compute_s * 1e3:.1f} + exchange {used.exchange_s * 1e3:.1f}"
    )
    if args.save and world.rank == 0:
        torch.save(model.state_dict(), args.save)
