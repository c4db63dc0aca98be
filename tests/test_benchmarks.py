"""The parts of the benchmarks that decide what is claimed: the summary, the table, the data files, the rates."""

from __future__ import annotations

import argparse
import gzip
import importlib
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks.baselines import Hook
from benchmarks.cells import CELLS, Row, RunFailedError, Variant
from benchmarks.contenders import CONTENDERS, EVERY, FOUR_BITS, for_quality
from benchmarks.data import MissingDataError, idx
from benchmarks.lab import Lab, LabError
from benchmarks.lab.__main__ import rate_mbit
from benchmarks.models import loss_of
from benchmarks.plot import picture
from benchmarks.quality_report import over_exact, target_lines
from benchmarks.quality_report import words as quality_words
from benchmarks.report import Span, keep, markdown, summarize, window_s
from benchmarks.results import RESULTS, read
from benchmarks.shared_memory import table
from benchmarks.slow_networks import words as slow_words
from benchmarks.targets import bytes_lines, speed_lines
from benchmarks.timed import curves, seconds_to
from benchmarks.turns import take_turns
from benchmarks.which_plan import PAGE, page
from benchmarks.workloads import WORKLOADS


def rows(*step_s: float, sent: float = 0.0, interface: str = "eth0") -> list[Row]:
    """Two ranks; the second is a tenth slower."""
    common = {"first_step_s": 2.0, "peak_bytes": 1 << 20, "parameters": 1000, "interface": interface}
    common |= {"training_thread_s": 0.2, "other_threads_s": 0.1}
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


@pytest.mark.parametrize(("name", "millions"), [("conv", 11.2), ("transformer", 7.5), ("big", 25.4)])
def test_a_workload_has_the_size_it_claims_and_trains(name: str, millions: float) -> None:
    workload = WORKLOADS[name]
    model = workload.model(0)
    x, y = workload.dataset(1, 0).tensors
    loss_of(model(torch.cat([x, x])), torch.cat([y, y])).backward()
    parameters = list(model.parameters())
    assert sum(each.numel() for each in parameters) / 1e6 == pytest.approx(millions, abs=0.1)
    assert all(each.grad is not None for each in parameters)


def run(variant: str, seed: int, loss: float, task: str = "text") -> dict[str, Any]:
    """A quality run of 80 steps that ends at ``loss``."""
    curve = [[40, 4.0, 2 * loss], [80, 8.0, loss]]
    return {"task": task, "variant": variant, "seed": seed, "steps": 80, "loss": loss, "curve": curve}


def part(cell: str, model: str, step_s: dict[str, float], sent: dict[str, float] | None = None) -> dict[str, Any]:
    """Two repetitions on one network, the second twice as slow for everybody."""
    measured = {
        name: [rows(each / 1.1, sent=1000 * (sent or {}).get(name, 0.0)), rows(each / 1.1 * 2)]
        for name, each in step_s.items()
    }
    summaries = [
        keep(summarize(name, each[:1], measured["ddp"][:1], seconds=window_s, bytes_per_parameter=1.0))
        for name, each in measured.items()
    ]
    return {"cell": cell, "model": model, "about": {}, "baseline": "ddp", "summaries": summaries, "rows": measured}


ABOUT = {"about": {"machine": "m", "repetitions": "2"}}


def test_the_mean_over_the_window_counts_the_rare_slow_step() -> None:
    assert window_s(rows(0.0, 0.0, 0.0, 4.0)) == pytest.approx(1.1)


@pytest.mark.parametrize("name", [name for name, each in CONTENDERS.items() if each.window > 1])
@pytest.mark.parametrize("cell", ["lab-1000", "lab-100"])
def test_only_whole_windows_are_measured(name: str, cell: str) -> None:
    fitted = CONTENDERS[name].fitted(CELLS[cell], 25_000_000)
    assert fitted.steps % CONTENDERS[name].window == 0
    assert fitted.warm_up % CONTENDERS[name].window == 0
    assert fitted.warm_up >= 1


def test_powersgd_is_measured_only_once_it_compresses() -> None:
    contender = CONTENDERS["ddp-powersgd-r4-one-bucket"]
    assert contender.fitted(CELLS["lab-100"], 10**9).warm_up >= 3


def test_local_steps_divide_the_bytes() -> None:
    assert CONTENDERS["q4-h8"].bytes_per_parameter == FOUR_BITS / EVERY == pytest.approx(0.064, abs=3e-4)


def test_quality_runs_begin_with_exact_steps_only_where_steps_are_local() -> None:
    assert for_quality(CONTENDERS["q4"], 1000) == CONTENDERS["q4"]
    local = for_quality(CONTENDERS["q4-h8"], 1000)
    assert "local:every=8,codec=q4,exact_steps=24" in local.variant.words
    assert local.exact_steps % EVERY == 0


@pytest.mark.parametrize("text", ["", "bf16", "powersgd", "powersgd:0", "fp16:2", "accumulate:x", "none:"])
def test_an_unknown_hook_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="powersgd:RANK"):
        Hook.parse(text)


def test_accumulated_gradients_are_a_mean_and_exchanged_once() -> None:
    hook = Hook.parse("accumulate:4")
    assert [hook.keeps(step) for step in range(5)] == [True, True, True, False, True]
    assert hook.share * 4 == 1
    assert Hook.parse("none").share == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slow_networks", "--variants", "q4"], "--variants must name ddp"),
        (["slow_networks", "--repetitions", "0"], "at least 1"),
        (["slow_networks", "--cells", "loopback"], "invalid choice"),
        (["quality", "--task", "text", "--steps", "100"], "multiple of 8"),
        (["quality", "--task", "text", "--sync", "q5"], "unknown name 'q5'"),
        (["quality"], "--task for one run, or --all"),
        (["train_ddp", "--model", "conv", "--hook", "q4"], "accumulate:EVERY"),
        (["train_gradwire", "--model", "conv", "--evaluate-every", "8"], "random"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{words[0]}").main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_variant_that_fails_leaves_the_others_their_turns() -> None:
    class Broken:
        cell = CELLS["loopback"]

        def measure(self, variant: Variant, model: str) -> list[Row]:
            if variant.name == "bad":
                raise RunFailedError("it printed much\nand then this")
            return rows(1.0)

    good, bad = Variant(name="good", script=""), Variant(name="bad", script="")
    place: Any = Broken()
    measured, failed = take_turns({"bad": (place, bad), "good": (place, good)}, "conv", 2)
    assert list(measured) == ["good"] and len(measured["good"]) == 2
    assert failed == {"bad": "and then this"}


def test_a_target_is_judged_within_each_repetition() -> None:
    lines = speed_lines([part("lab-1000", "conv", {"ddp": 1.0, "ddp-fp16": 0.6, "q4": 0.55})])
    assert "| lab-1000, conv | q4 | ddp | 1.82 (1.82-1.82) | 1.8 |  | yes |" in lines
    assert "| lab-1000, conv | q4 | ddp-fp16 | 1.09 (1.09-1.09) | 1.15 |  | **no** |" in lines
    assert len(lines) == 4


@pytest.mark.parametrize(("alone", "verdict"), [(0.5, "2.00 | **no** |"), (0.6, "1.67 | **no**, beyond the limit |")])
def test_a_target_beyond_what_no_network_gives_is_told(alone: float, verdict: str) -> None:
    lines = speed_lines([part("lab-1000", "conv", {"ddp": 1.0, "q4": 0.75, "alone": alone})])
    assert lines[2].endswith(f"1.33 (1.33-1.33) | 1.8 | {verdict}")


def test_bytes_away_from_their_formula_are_told() -> None:
    measured = part("lab-100", "conv", {"ddp": 1.0, "q4": 0.5}, {"ddp": 4.01, "q4": 0.55})
    assert bytes_lines([measured])[2:] == ["| lab-100, conv | q4 | 0.5500 | 0.5100 | +7.8% |"]
    assert "within" in bytes_lines([part("lab-100", "conv", {"ddp": 1.0}, {"ddp": 4.01})])[0]


def test_the_table_of_a_slow_network_has_the_formula_beside_the_bytes() -> None:
    text = slow_words(
        {"name": "n", **ABOUT, "parts": [part("lab-100", "conv", {"ddp": 1.0, "q4": 0.5}, {"q4": 0.511})]}
    )
    assert '| q4 | Plan(sync="q4") | 500 (500-500) | 2.00 (2.00-2.00) | 0.511 (0.511-0.511) | 0.51 |' in text


def test_a_loss_is_compared_with_exact_training_of_the_same_seed() -> None:
    found = {"exact": {0: 1.0, 1: 2.0}, "q4": {0: 1.01, 1: 2.0, 2: 9.0}}
    assert over_exact(found, "q4") == Span(median=pytest.approx(0.005), low=0.0, high=pytest.approx(0.01))
    assert over_exact(found, "q8") is None


def test_quality_targets_are_judged() -> None:
    runs = [run("exact", 0, 1.0), run("q4", 0, 1.004), run("q4-h8", 0, 1.004), run("lowrank-r16", 0, 1.02)]
    runs.append(run("ddp-powersgd-r4-one-bucket", 0, 1.03))
    lines = target_lines(runs, "text", 80)
    assert [[cell.strip() for cell in line.split("|")[4:6]] for line in lines[2:]] == [
        ["**no**", "0 of 1"],
        ["yes", "1 of 1"],
        ["yes", "1 of 1"],
    ]
    assert "## text, 80 steps" in quality_words({"name": "quality", "about": {}, "runs": runs})


def test_time_to_a_loss_is_never_before_it_was_reached() -> None:
    curve = [(1.0, 3.0), (2.0, 2.0), (3.0, 2.5), (4.0, 1.0)]
    assert seconds_to(curve, 3.5) == 1.0
    assert seconds_to(curve, 2.5) == pytest.approx(1.5)
    assert seconds_to(curve, 0.5) is None


def slow_and_quality() -> tuple[dict[str, Any], dict[str, Any]]:
    steps_s = {"ddp": 1.0, "exact": 1.0, "q4": 0.5, "q4-h8": 0.25}
    parts = [part(cell, model, steps_s) for cell in ("lab-1000", "lab-100") for model in ("conv", "text")]
    runs = [run(name, seed, 1.0 + seed) for name in ("exact", "q4", "q4-h8") for seed in (0, 1)]
    return {"name": "slow-networks", **ABOUT, "parts": parts}, {"name": "quality", "about": {}, "runs": runs}


def test_the_exact_first_steps_of_local_plans_cost_exact_time() -> None:
    slow, quality = slow_and_quality()
    found = curves(slow, quality["runs"], "lab-100")
    assert found["ddp"] == [(pytest.approx(40.0), 3.0), (pytest.approx(80.0), 1.5)]
    assert found["q4-h8"][-1][0] == pytest.approx(24 * 1.0 + 56 * 0.25)


def test_the_plot_is_well_formed_and_draws_every_known_curve_on_both_networks() -> None:
    drawn = picture(*slow_and_quality())
    assert drawn is not None
    lines = ElementTree.fromstring(drawn).findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * 3
    assert picture({}, {}) is None


def test_the_page_advises_what_was_measured() -> None:
    text = page(*slow_and_quality())
    assert "- 100 Mbit/s, conv net: at most 0.3% lost: `local:every=8,codec=q4` (4.0 times DDP)." in text
    assert "| `q4` | 2.00 |" in text


def test_the_page_gives_the_bytes_of_the_formula_and_measured_ones_where_there_is_none() -> None:
    sent = {"q4-h8-late": 0.08, "lowrank-r16": 0.095}
    measured = part("lab-100", "conv", {"ddp": 1.0, "q4-h8-late": 0.25, "lowrank-r16": 0.5}, sent)
    text = page({"name": "slow-networks", **ABOUT, "parts": [measured]}, {"name": "quality", "about": {}, "runs": []})
    assert "| `local:every=8,codec=q4,late=6` | 4.00 | 0.064 |" in text
    assert "| `lowrank:rank=16` | 2.00 | 0.095 |" in text


@pytest.mark.skipif(
    not all((RESULTS / f"{name}.json").exists() for name in ("slow-networks", "quality")), reason="not measured yet"
)
def test_the_committed_page_is_what_the_committed_results_give() -> None:
    made = page(read(RESULTS / "slow-networks.json"), read(RESULTS / "quality.json"))
    assert PAGE.read_text() == made, "run: make plot"


def test_shared_memory_is_compared_with_gloo_within_each_round() -> None:
    rounds = {"resident": [1e-6, 2e-6, 4e-6], "copied": [2e-6] * 3, "gloo": [8e-6, 8e-6, 40e-6], "copy": [1e-6] * 3}
    line = table({64 << 10: rounds})[-1]
    assert line == "| 64 KiB | 2 (1-4) | 2 (2-2) | 8 (8-40) | 1 (1-1) | 8.0 (4.0-10.0) | 4.0 (4.0-20.0) |"
