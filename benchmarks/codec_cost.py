"""What the codecs cost a core: ``python -m benchmarks.codec_cost`` (``make bench-host``; half a minute).

Nanoseconds a number of ``encode`` with error feedback and of ``decode``, in torch's own operations and compiled, beside a
memcpy of the same numbers in the same run. One pinned core, one thread; in every repetition all variants take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measure import pin
from benchmarks.report import Span
from benchmarks.results import RESULTS, about, write
from gradwire.comm.gloo import SoloGroup
from gradwire.compress import cast, kernels, quantize
from gradwire.compress.cast import Cast
from gradwire.compress.lowrank import LowRank
from gradwire.compress.quantize import Quantize
from gradwire.compress.sampled import Sampled
from gradwire.compress.topk import TopK
from gradwire.core.compressor import Compressor
from gradwire.core.reducer import Bucket, Piece

SIDE = 1024  # the numbers of a 4 MiB bucket, also as a matrix
SECONDS_EACH = 0.02  # a repetition of a variant runs at least so long
NOTES = (
    "Nanoseconds a number, encode with error feedback; median (lowest-highest). One pinned core, one thread; the variants take",
    "turns. A decoded message costs what `decode` says for each rank's message.",
)
Work = Callable[[], object]


def main() -> None:
    """Measure, print the table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the two files written")
    args = parser.parse_args()
    if args.repetitions < 7:
        parser.error("--repetitions must be at least 7: a median of fewer says little")
    pin(args.core)
    spans = measure(works(torch.randn(1, SIDE * SIDE), 0.1 * torch.randn(1, SIDE * SIDE)), args.repetitions)
    print(markdown(spans))
    facts = about("benchmarks.codec_cost", "none", args.repetitions)
    facts |= {"kernels": kernels.available(), "numbers": f"{SIDE * SIDE:,}, float32"}
    figures = {name: asdict(span) for name, span in spans.items()}
    lines = [
        "# codec-cost",
        "",
        *(f"- {key}: {value}" for key, value in facts.items()),
        "",
        *NOTES,
        "",
        markdown(spans),
    ]
    write({"name": "codec-cost", "about": facts, "ns_a_number": figures}, "\n".join(lines) + "\n", args.results)


def works(values: Tensor, residual: Tensor) -> dict[str, Work]:
    """Every variant by name: what it does, how."""
    copy = torch.empty_like(values)
    made: dict[str, Work] = {"memcpy": lambda: copy.copy_(values)}
    for bits in (4, 8):
        made |= _quantised(Quantize(bits=bits), values, residual)
    made |= _bfloat16(values, residual)
    for codec in (Cast(torch.float16), TopK(ratio=0.01), Sampled(ratio=0.01)):
        message, _ = codec.encode(values, residual, key=0)
        made |= _calls(codec, values, residual, message, "eager")
    made["LowRank(rank=4) | whole step | eager"] = _low_rank(values, step=0)
    return made


def _quantised(codec: Quantize, values: Tensor, residual: Tensor) -> dict[str, Work]:
    message, _ = quantize.encode_eager(values, residual, codec.bits)
    made: dict[str, Work] = {
        f"{codec} | encode | eager": lambda: quantize.encode_eager(values, residual, codec.bits),
        f"{codec} | decode | eager": lambda: quantize.decode_eager(message, values.shape[1], codec.bits),
    }
    return made | (_calls(codec, values, residual, message, "compiled") if kernels.built().library else {})


def _bfloat16(values: Tensor, residual: Tensor) -> dict[str, Work]:
    codec = Cast(torch.bfloat16)
    message, _ = cast.encode_eager(values, residual, codec.dtype)
    made: dict[str, Work] = {f"{codec} | encode | eager": lambda: cast.encode_eager(values, residual, codec.dtype)}
    return made | (_calls(codec, values, residual, message, "compiled") if kernels.built().library else {})


def _calls(codec: Compressor, values: Tensor, residual: Tensor, message: Tensor, how: str) -> dict[str, Work]:
    return {
        f"{codec} | encode | {how}": lambda: codec.encode(values, residual, key=0),
        f"{codec} | decode | {how}": lambda: codec.decode(message, values.shape[1], key=0),
    }


def _low_rank(values: Tensor, *, step: int) -> Work:
    reducer, group = LowRank(rank=4), SoloGroup("solo")
    bucket = Bucket(index=0, flat=values[0], pieces=(Piece(name="matrix", shape=(SIDE, SIDE), offset=0),))
    state = reducer.init(bucket, group)
    return lambda: reducer.reduce(bucket, state, group, step)


def measure(works: dict[str, Work], repetitions: int) -> dict[str, Span]:
    """Nanoseconds a number of each; the first round, which warms up, is thrown away."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for repetition in range(repetitions + 1):
        for name, work in works.items():
            seconds = _seconds(work)
            if repetition:
                times[name].append(1e9 * seconds / SIDE**2)
    return {name: Span.of(values) for name, values in times.items()}


def _seconds(work: Work) -> float:
    calls, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < SECONDS_EACH:
        work()
        calls += 1
    return elapsed / calls


def markdown(spans: dict[str, Span]) -> str:
    """One row a variant: median (low-high), and the median over memcpy's.

    >>> print(markdown({"memcpy": Span.of([0.5]), "Q | encode | eager": Span.of([2.0])}))
    | codec | what | how | ns a number | times memcpy |
    |---|---|---|---|---|
    | memcpy | | | 0.50 (0.50-0.50) | 1.0 |
    | Q | encode | eager | 2.00 (2.00-2.00) | 4.0 |
    """
    lines = ["| codec | what | how | ns a number | times memcpy |", "|---|---|---|---|---|"]
    for name, span in spans.items():
        cells = name if "|" in name else f"{name} | | "
        lines.append(f"| {cells.strip()} | {span.words(1, '.2f')} | {span.median / spans['memcpy'].median:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
