"""Deleting every gradwire line leaves a script that trains on one process, to the bit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.faults.scripts import environment

SCRIPT = """
import sys
import torch
import gradwire as gw
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

gw.init()
torch.manual_seed(0)
images, labels = torch.randn(200, 1, 8, 8), torch.randint(0, 5, (200,))
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 5))
optimizer = torch.optim.AdamW(model.parameters())
train = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True, num_workers=int(sys.argv[2]))
train = gw.shard(train)
gw.distribute(model, optimizer, train)
for epoch in range(3):
    for x, y in train:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
torch.save(model.state_dict(), sys.argv[1])
"""


def stripped(script: str) -> str:
    return "\n".join(line for line in script.splitlines() if not re.search(r"\bgw\b|gradwire", line)) + "\n"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_script_without_its_gradwire_lines_gives_the_same_bits(tmp_path: Path, num_workers: int) -> None:
    weights = []
    for name, text in (("with", SCRIPT), ("without", stripped(SCRIPT))):
        path, out = tmp_path / f"{name}.py", tmp_path / f"{name}.pt"
        path.write_text(text)
        command = [sys.executable, str(path), str(out), str(num_workers)]
        subprocess.run(command, env=environment(), check=True, timeout=120)
        weights.append(torch.load(out, weights_only=True))
    assert "gw" not in stripped(SCRIPT)
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())
