# The same cut in three over three workers. gradwire run -n 3 examples/perceptron_pipeline.py
# A perceptron 1024-512-256-10 on handwritten digits, on one process. python examples/perceptron_plain.py
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradwire as gw

rows = torch.from_numpy(np.loadtxt(Path(__file__).parent / "data/digits.csv.gz", delimiter=",", dtype=np.float32))
images = F.interpolate(rows[:, :64].reshape(-1, 1, 8, 8) / 16, size=32).flatten(1)  # 8 x 8 drawn as 32 x 32
labels = rows[:, 64].long()

print = gw.init().log  # rank 0 speaks for all
torch.manual_seed(0)
train = DataLoader(TensorDataset(images[:-360], labels[:-360]), batch_size=64, shuffle=True)
train = gw.shard(train)  # the workers of a pipeline read the same batches
model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
gw.distribute(model, optimizer, train, plan=gw.Plan(mesh={"pipeline": 3}))

for epoch in range(3):
    for x, y in train:
        loss = gw.forward_backward(model, F.cross_entropy, x, y)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        held_out = gw.forward_backward(model, F.cross_entropy, images[-360:], labels[-360:])
    print(f"epoch {epoch + 1}  loss on held-out digits {held_out:.4f}")
