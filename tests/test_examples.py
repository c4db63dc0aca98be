"""The examples do what they say, started as a user starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
GRADWIRE = ["-m", "gradwire", "run"]
DIGITS = [str(ROOT / "examples/digits.py"), "--epochs", "2", "--save"]


def python(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *(str(word) for word in words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_two_workers_learn_the_digits_and_end_with_the_weights_of_one(tmp_path: Path) -> None:
    two, one = tmp_path / "two.pt", tmp_path / "one.pt"
    for command in ([*GRADWIRE, "-n", "2", *DIGITS, two], [*DIGITS, one]):
        done = python(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)%", done.stdout)]
        assert len(accuracies) == 2, done.stdout  # rank 0 speaks for all
        assert accuracies[-1] > 70
    compared = python(ROOT / "examples/compare.py", two, one)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert float(compared.stdout.split()[-1]) < 1e-5  # float32 rounding over 46 steps; 1e-6 is usual


def test_compare_fails_on_other_weights_and_on_nan(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.1), ("nan", float("nan"))):
        torch.save({"w": torch.tensor([value])}, tmp_path / f"{name}.pt")
    compare = ROOT / "examples/compare.py"
    assert python(compare, tmp_path / "a.pt", tmp_path / "a.pt").returncode == 0
    for other in ("b", "nan"):
        done = python(compare, tmp_path / "a.pt", tmp_path / f"{other}.pt")
        assert done.returncode == 1
        assert "more than rounding" in done.stderr


def test_a_perceptron_in_three_parts_learns_what_it_learns_whole() -> None:
    parts = python(*GRADWIRE, "-n", "3", ROOT / "examples/perceptron_pipeline.py")
    whole = python(ROOT / "examples/perceptron_plain.py")
    assert parts.returncode == whole.returncode == 0, parts.stderr + whole.stderr
    losses = [[float(found) for found in re.findall(r"digits ([\d.]+)", done.stdout)] for done in (parts, whole)]
    assert len(losses[0]) == 3
    assert max(abs(one - other) for one, other in zip(*losses, strict=True)) < 2e-4  # float32, printed to four places
