"""From raw rows to medians, spreads and ratios; and the table in Markdown. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from benchmarks.cells import Row

MIB = 1 << 20
FLOAT32_BYTES = 4.0
NOTES = (
    "Median over the repetitions (lowest-highest). A ratio is taken within each repetition, whose variants run one",
    "after the other; below 1 is faster than the baseline. One pinned core and one torch thread a rank. Peak:",
    "resident memory of the larger rank, shared pages by share. The formula for bytes is 2(n-1)/n x 4 x parameters,",
    "headers not included.",
)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A median and the smallest and largest value over the repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Span:
        """The median of some values, and their range.

        >>> Span.of([3.0, 1.0, 2.0])
        Span(median=2.0, low=1.0, high=3.0)
        """
        return cls(median=median(values), low=min(values), high=max(values))

    def inverse(self) -> Span:
        """Of one over each value (of an even number of values the median is not exact)."""
        return Span(median=1 / self.median, low=1 / self.high, high=1 / self.low)

    def words(self, scale: float, form: str) -> str:
        """``median (low-high)``, each times ``scale`` in format ``form``."""
        return f"{self.median * scale:{form}} ({self.low * scale:{form}}-{self.high * scale:{form}})"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One variant in one cell, over its repetitions.

    step_s: a step of the slower rank. ratio: step time over the baseline's in the same repetition.
    first_step_s: from launch to the end of the first step. peak_bytes: resident, the larger rank's. sent: bytes per
    step and rank over a formula's; None on loopback. training_thread_s, other_threads_s: of processor time a step, mean over
    the ranks. loss: mean over the ranks.
    """

    variant: str
    step_s: Span
    ratio: Span
    first_step_s: Span
    peak_bytes: Span
    training_thread_s: Span
    other_threads_s: Span
    sent: Span | None
    loss: float


def step_s(rows: Sequence[Row]) -> float:
    """The median step of one repetition, of the slower rank."""
    return max(median(row["step_s"]) for row in rows)


def window_s(rows: Sequence[Row]) -> float:
    """The mean step over the whole measured window, of the slower rank: the one that is true when steps differ by design."""
    return max(mean(row["step_s"]) for row in rows)


def summarize(
    variant: str,
    repetitions: Sequence[Sequence[Row]],
    baseline: Sequence[Sequence[Row]],
    *,
    seconds: Callable[[Sequence[Row]], float] = step_s,
    bytes_per_parameter: float = FLOAT32_BYTES,
) -> Summary:
    """Put the repetitions of one variant together, beside the baseline's of the same numbers.

    seconds: what a step is. bytes_per_parameter: of the formula 2(n-1)/n x that x parameters.
    """
    steps = [seconds(rows) for rows in repetitions]
    pairs = zip(steps, baseline, strict=False)
    return Summary(
        variant=variant,
        step_s=Span.of(steps),
        ratio=Span.of([step / seconds(rows) for step, rows in pairs]),
        first_step_s=Span.of([max(row["first_step_s"] for row in rows) for rows in repetitions]),
        peak_bytes=Span.of([max(row["peak_bytes"] for row in rows) for rows in repetitions]),
        training_thread_s=_mean_of("training_thread_s", repetitions),
        other_threads_s=_mean_of("other_threads_s", repetitions),
        sent=_sent(repetitions, bytes_per_parameter),
        loss=mean(row["loss"] for row in repetitions[-1]),
    )


def _mean_of(key: str, repetitions: Sequence[Sequence[Row]]) -> Span:
    return Span.of([mean(row[key] for row in rows) for rows in repetitions])


def _sent(repetitions: Sequence[Sequence[Row]], bytes_per_parameter: float) -> Span | None:
    first = repetitions[0]
    ranks = len(first)
    formula = 2 * (ranks - 1) / ranks * bytes_per_parameter * first[0]["parameters"]
    counted = [mean(row["sent_bytes_per_step"] for row in rows) for rows in repetitions]
    if formula == 0 or any(row["interface"] == "lo" for row in first):
        return None
    return Span.of([each / formula for each in counted])


def table(summaries: Sequence[Summary], baseline: str) -> list[str]:
    """The lines of a Markdown table: median (lowest-highest)."""
    lines = [
        f"| variant | step, ms | step / {baseline} | first step after, s | peak, MiB | sent / formula | last loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in summaries:
        sent = "" if each.sent is None else each.sent.words(1, ".3f")
        cells = [
            each.variant,
            each.step_s.words(1e3, ".0f"),
            each.ratio.words(1, ".3f"),
            each.first_step_s.words(1, ".1f"),
            each.peak_bytes.words(1 / MIB, ".0f"),
            sent,
            f"{each.loss:.6f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _part_table(part: dict[str, Any]) -> list[str]:
    return table(summaries_of(part), part["baseline"])


def markdown(
    result: dict[str, Any],
    *,
    notes: Sequence[str] = NOTES,
    part_table: Callable[[dict[str, Any]], list[str]] = _part_table,
) -> str:
    """A whole result, as the drivers keep it, for people: ``part_table`` makes the lines of one part."""
    lines = [f"# {result['name']}", ""]
    lines += [f"- {key}: {value}" for key, value in result["about"].items()]
    lines += ["", *notes]
    for part in result["parts"]:
        lines += ["", f"## {part['cell']}, {part['model']}", ""]
        if "not_run" in part:
            lines.append(f"Not run: {part['not_run']}.")
            continue
        lines += [f"- {key}: {value}" for key, value in part["about"].items()]
        lines += ["", *part_table(part)]
    return "\n".join(lines) + "\n"


def summaries_of(part: dict[str, Any]) -> list[Summary]:
    """The summaries that ``keep`` put into a part."""
    return [
        Summary(**{key: Span(**value) if isinstance(value, dict) else value for key, value in kept.items()})
        for kept in part["summaries"]
    ]


def keep(summary: Summary) -> dict[str, Any]:
    """A summary as JSON can hold it."""
    return asdict(summary)
