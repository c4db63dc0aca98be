"""What was promised, beside what was measured. Pure: results in, lines of a table out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.contenders import CONTENDERS
from benchmarks.report import Span, summaries_of, window_s

BYTES_WITHIN = 0.03


@dataclass(frozen=True, kw_only=True)
class Promise:
    """On ``cell`` the variant is at least ``least`` times as fast as ``over``."""

    cell: str
    variant: str
    over: str
    least: float


JUDGED_MODELS = ("big", "conv")  # the text model of the plot is too small for the network to matter as much
NO_NETWORK = "alone"
POWERSGD = "ddp-powersgd-r4-one-bucket"
PROMISES = (
    Promise(cell="lab-1000", variant="q4", over="ddp", least=1.8),
    Promise(cell="lab-1000", variant="q4", over="ddp-fp16", least=1.15),
    Promise(cell="lab-1000", variant="lowrank-r16", over=POWERSGD, least=1.4),
    Promise(cell="lab-1000", variant="q4-h8", over=POWERSGD, least=1.4),
    Promise(cell="lab-100", variant="q4", over="ddp", least=5.0),
    Promise(cell="lab-100", variant="q4-h8", over="ddp", least=9.0),
    Promise(cell="lab-100", variant="lowrank-r16", over=POWERSGD, least=1.4),
    Promise(cell="lab-100", variant="q4-h8", over=POWERSGD, least=1.4),
    Promise(cell="lab-100", variant="q4-h8-late", over=POWERSGD, least=1.4),
    Promise(cell="lab-100", variant="q4-h8-late", over=NO_NETWORK, least=0.9),
)


def faster(part: dict[str, Any], variant: str, over: str) -> Span | None:
    """How many times as fast ``variant`` is as ``over``, repetition by repetition; None if one was not measured."""
    rows = part.get("rows", {})
    if variant not in rows or over not in rows:
        return None
    pairs = zip(rows[over], rows[variant], strict=True)
    return Span.of([window_s(slow) / window_s(fast) for slow, fast in pairs])


def speed_lines(parts: Sequence[dict[str, Any]]) -> list[str]:
    """A table of the promises of speed that these parts can judge."""
    lines = [
        "| network, model | variant | times as fast as | measured | target | limit | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in parts:
        for promise in PROMISES if part["model"] in JUDGED_MODELS else ():
            found = faster(part, promise.variant, promise.over) if promise.cell == part["cell"] else None
            if found is not None:
                cells = [f"{part['cell']}, {part['model']}", promise.variant, promise.over, found.words(1, ".2f")]
                limit = faster(part, NO_NETWORK, promise.over)
                cells += [f"{promise.least:g}", "" if limit is None else f"{limit.median:.2f}"]
                lines.append(f"| {' | '.join(cells)} | {_verdict(found.median, promise.least, limit)} |")
    return lines


def bytes_lines(parts: Sequence[dict[str, Any]]) -> list[str]:
    """A table of the variants whose bytes are further from their formula than promised, or one line if none is."""
    lines = ["| network, model | variant | bytes a parameter and step | formula | off by |", "|---|---|---|---|---|"]
    for part in parts:
        for each in summaries_of(part) if "summaries" in part else []:
            formula = CONTENDERS[each.variant].bytes_per_parameter
            if each.sent is None or not formula:
                continue
            off = each.sent.median / formula - 1
            if abs(off) > BYTES_WITHIN:
                where = f"{part['cell']}, {part['model']}"
                lines.append(f"| {where} | {each.variant} | {each.sent.median:.4f} | {formula:.4f} | {off:+.1%} |")
    return lines if len(lines) > 2 else [f"All are within {BYTES_WITHIN:.0%} of their formula."]


def _verdict(found: float, least: float, limit: Span | None) -> str:
    if found >= least:
        return "yes"
    return "**no**" if limit is None or limit.median >= least else "**no**, beyond the limit"
