# A linear classifier of Fashion-MNIST on one process. Needs `make data`. python examples/linear_plain.py
import gzip
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(__file__).parent.parent / "data/fashion-mnist"
if not FOLDER.exists():
    sys.exit(f"{FOLDER} is missing; run: make data")


def idx(name, header):
    return np.frombuffer(gzip.decompress((FOLDER / name).read_bytes()), np.uint8, offset=header)


x_train = torch.from_numpy(idx("train-images-idx3-ubyte.gz", 16).reshape(-1, 784) / np.float32(255))
x_test = torch.from_numpy(idx("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 784) / np.float32(255))
y_train = torch.from_numpy(idx("train-labels-idx1-ubyte.gz", 8).astype(np.int64))
y_test = torch.from_numpy(idx("t10k-labels-idx1-ubyte.gz", 8).astype(np.int64))

torch.manual_seed(0)
train = DataLoader(TensorDataset(x_train, y_train), batch_size=256, shuffle=True)
model = nn.Linear(784, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    print(f"epoch {epoch + 1}  accuracy {accuracy:.1%}")
