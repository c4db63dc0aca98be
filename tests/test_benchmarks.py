"""The parts of the benchmarks that decide what is claimed: the summary, the table, the data files, the rates."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.cells import Row
from benchmarks.data import MissingDataError, idx
from benchmarks.lab import Lab, LabError
from benchmarks.lab.__main__ import rate_mbit
from benchmarks.models import WORKLOADS, loss_of
from benchmarks.report import Span, keep, markdown, summarize
from benchmarks.shared_memory import table


def rows(*step_s: float, sent: float = 0.0, interface: str = "eth0") -> list[Row]:
    """Two ranks; the second is a tenth slower."""
    common = {"first_step_s": 2.0, "peak_bytes": 1 << 20, "parameters": 1000, "interface": interface}
    return [
        common | {"step_s": [value * slower for value in step_s], "sent_bytes_per_step": sent, "loss": float(rank)}
        for rank, slower in enumerate((1.0, 1.1))
    ]


def test_a_step_is_the_median_of_the_slower_rank() -> None:
    summary = summarize("a", [rows(1.0, 5.0, 2.0)], [rows(1.0, 5.0, 2.0)])
    assert summary.step_s.median == pytest.approx(2.2)
    assert summary.loss == 0.5


def test_ratios_are_taken_within_a_repetition() -> None:
    baseline = [rows(1.0), rows(10.0), rows(2.0)]
    faster = [rows(0.5), rows(5.0), rows(1.8)]
    assert summarize("b", faster, baseline).ratio == Span(
        median=pytest.approx(0.5), low=pytest.approx(0.5), high=pytest.approx(0.9)
    )


def test_sent_bytes_stand_beside_the_formula() -> None:
    measured = [rows(1.0, sent=4040.0)]  # two ranks, 1,000 parameters: 2(n-1)/n x 4 x 1000 = 4,000
    sent = summarize("a", measured, measured).sent
    assert sent is not None
    assert sent.median == pytest.approx(1.01)


def test_loopback_counts_both_ranks_bytes_so_none_are_claimed() -> None:
    measured = [rows(1.0, sent=8000.0, interface="lo")]
    assert summarize("a", measured, measured).sent is None


def test_the_table_says_what_was_not_run() -> None:
    summary = keep(summarize("ddp", [rows(0.5)], [rows(0.5)]))
    parts = [
        {"cell": "loopback", "model": "conv", "baseline": "ddp", "about": {"ranks": "2"}, "summaries": [summary]},
        {"cell": "lab-100", "model": "conv", "not_run": "a lab needs root"},
    ]
    text = markdown({"name": "n", "about": {"machine": "m"}, "parts": parts})
    assert "| ddp | 550 (550-550) | 1.000 (1.000-1.000) |" in text
    assert "Not run: a lab needs root." in text


def test_an_idx_file_is_read_in_its_own_shape(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    header = b"\0\0\x08\x03" + b"".join(size.to_bytes(4, "big") for size in values.shape)
    whole = tmp_path / "whole.gz"
    whole.write_bytes(gzip.compress(header + values.tobytes()))
    assert np.array_equal(idx(whole), values)


@pytest.mark.parametrize(
    ("content", "said"), [(b"\0\0\x08\x01\0\0\0\x05abc", "holds 3 values"), (b"text", "not an IDX")]
)
def test_a_damaged_idx_file_is_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(content))
    with pytest.raises(MissingDataError, match=f"broken.gz.*{said}"):
        idx(broken)


def test_missing_data_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="make data"):
        idx(tmp_path / "none.gz")


@pytest.mark.parametrize("text", ["1", "fast", "-1gbit", "1gbit/s", ""])
def test_a_wrong_rate_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a rate"):
        rate_mbit(text)


@pytest.mark.parametrize("hosts", [0, 201])
def test_a_lab_of_no_or_too_many_hosts_is_refused(hosts: int) -> None:
    with pytest.raises(LabError, match=str(hosts)):
        Lab(hosts=hosts)


@pytest.mark.parametrize(("name", "millions"), [("conv", 11.2), ("transformer", 7.5)])
def test_a_workload_has_the_size_it_claims_and_trains(name: str, millions: float) -> None:
    workload = WORKLOADS[name]
    model = workload.model(0)
    x, y = workload.dataset(1, 0).tensors
    loss_of(model(torch.cat([x, x])), torch.cat([y, y])).backward()
    parameters = list(model.parameters())
    assert sum(each.numel() for each in parameters) / 1e6 == pytest.approx(millions, abs=0.1)
    assert all(each.grad is not None for each in parameters)


def test_shared_memory_is_compared_with_gloo_within_each_round() -> None:
    rounds = {"resident": [1e-6, 2e-6, 4e-6], "copied": [2e-6] * 3, "gloo": [8e-6, 8e-6, 40e-6], "copy": [1e-6] * 3}
    line = table({64 << 10: rounds})[-1]
    assert line == "| 64 KiB | 2 (1-4) | 2 (2-2) | 8 (8-40) | 1 (1-1) | 8.0 (4.0-10.0) | 4.0 (4.0-20.0) |"
