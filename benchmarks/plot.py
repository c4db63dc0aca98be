"""The plot of loss over time: ``python -m benchmarks.plot`` (``make plot``).

Reads slow-networks.json and quality.json, writes loss-over-time.svg beside them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, read, say
from benchmarks.timed import Curve, curves

NAME = "loss-over-time.svg"
LINES = {  # variant -> (name on the plot, colour readable on white and on black, dashes)
    "ddp": ("DDP", "#8a8f98", "6 4"),
    "ddp-fp16": ("DDP, fp16 hook", "#b08a3c", "6 4"),
    "ddp-powersgd-r4-one-bucket": ("DDP, PowerSGD r4", "#b0619e", "6 4"),
    "q4": ("gradwire q4", "#2f8fd6", ""),
    "lowrank-r16": ("gradwire lowrank r16", "#2fa36b", ""),
    "q4-h8": ("gradwire q4, 8 local steps", "#e0613c", ""),
}
PANELS = {"lab-100": "100 Mbit/s", "lab-1000": "1 Gbit/s"}
WIDTH, HEIGHT = 940, 470
TOP, BOTTOM, LEFT, GAP, RIGHT = 64, 152, 58, 60, 16
TICKS = 5
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.small{font-size:11.5px}.title{font-size:16px;font-weight:600}"
    ".axis{stroke:#888;fill:none}.grid{stroke:#888;stroke-opacity:.25}polyline{fill:none;stroke-width:2.2}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A panel: where it stands, and the values at its edges."""

    left: float
    width: float
    most_s: float
    low: float
    high: float

    def x(self, time_s: float) -> float:
        return self.left + self.width * time_s / self.most_s

    def y(self, loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - loss) / (self.high - self.low)


def round_up(value: float) -> float:
    """The next of 1, 2, 2.5 or 5 times a power of ten.

    >>> [round_up(value) for value in (0.7, 18.0, 210.0)]
    [1.0, 20.0, 250.0]
    """
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9))


def svg(panels: Mapping[str, Mapping[str, Curve]], caption: list[str]) -> str:
    """The picture. panels: heading -> variant -> curve, only variants in LINES are drawn; at least one curve a panel."""
    shown = [loss for each in panels.values() for curve in each.values() for _, loss in curve]
    low, high = min(shown), min(max(shown), 2.5 * min(shown))
    margin = 0.05 * (high - low)
    width = (WIDTH - LEFT - RIGHT - GAP * (len(panels) - 1)) / len(panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t">',
        f"<title id='t'>Loss over wall-clock time</title><style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="24">Loss on held-out text over wall-clock time, two machines</text>',
    ]
    for place, (heading, each) in enumerate(panels.items()):
        most_s = max(curve[-1][0] for curve in each.values())
        left = LEFT + place * (width + GAP)
        frame = Frame(left=left, width=width, most_s=most_s, low=low - margin, high=high)
        lines += _panel(frame, heading, each, clip=f"panel{place}")
    lines += _legend({variant for each in panels.values() for variant in each})
    start = HEIGHT - 14 * len(caption)
    lines += [
        f'<text class="small" x="{LEFT}" y="{start + 14 * row}">{escape(line)}</text>'
        for row, line in enumerate(caption)
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(frame: Frame, heading: str, variants: Mapping[str, Curve], clip: str) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, frame.left + frame.width
    lines = [
        f'<clipPath id="{clip}"><rect x="{frame.left}" y="{TOP}" width="{frame.width}" height="{bottom - TOP}"/></clipPath>',
        f'<text x="{frame.left}" y="{TOP - 14}">{escape(heading)}</text>',
    ]
    step_s, step_loss = round_up(frame.most_s / TICKS), round_up((frame.high - frame.low) / TICKS)
    for tick in range(int(frame.most_s / step_s) + 1):
        x = frame.x(tick * step_s)
        lines.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        lines.append(
            f'<text class="small" text-anchor="middle" x="{x:.1f}" y="{bottom + 17}">{tick * step_s:g} s</text>'
        )
    for tick in range(math.ceil(frame.low / step_loss), int(frame.high / step_loss) + 1):
        y = frame.y(tick * step_loss)
        lines.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{right}"/>')
        lines.append(
            f'<text class="small" text-anchor="end" x="{frame.left - 7}" y="{y + 4:.1f}">{tick * step_loss:.4g}</text>'
        )
    lines.append(f'<path class="axis" d="M{frame.left} {TOP}V{bottom}H{right}"/>')
    for variant, curve in variants.items():
        _, colour, dashes = LINES[variant]
        points = " ".join(f"{frame.x(time_s):.1f},{frame.y(loss):.1f}" for time_s, loss in curve)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        end_x, end_y = points.split()[-1].split(",")
        lines.append(f'<polyline clip-path="url(#{clip})" stroke="{colour}"{dashed} points="{points}"/>')
        lines.append(f'<circle cx="{end_x}" cy="{end_y}" r="3.5" fill="{colour}"/>')
    return lines


def _legend(drawn: set[str]) -> list[str]:
    lines: list[str] = []
    for place, variant in enumerate(name for name in LINES if name in drawn):
        name, colour, dashes = LINES[variant]
        x, y = LEFT + place % 3 * 290, HEIGHT - BOTTOM + 42 + place // 3 * 20
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        lines.append(f'<path stroke="{colour}" stroke-width="2.2"{dashed} d="M{x} {y - 4}h28"/>')
        lines.append(f'<text x="{x + 36}" y="{y}">{escape(name)}</text>')
    return lines


def picture(slow: Mapping[str, Any], quality: Mapping[str, Any]) -> str | None:
    """The plot of two results; None if there is nothing that both know."""
    panels: dict[str, dict[str, Curve]] = {}
    for cell, heading in PANELS.items():
        known = curves(slow, quality.get("runs", []), cell)
        if drawn := {variant: known[variant] for variant in LINES if variant in known}:
            panels[heading] = drawn
    if not panels:
        return None
    seeds = len({run["seed"] for run in quality["runs"]})
    repetitions = slow["about"]["repetitions"]
    caption = [
        f"Loss per step (seeds averaged: {seeds}) times the seconds that a step of the same model was measured to take on a",
        f"wire of that rate (repetitions: {repetitions}). All see the same batches. DDP is drawn with the loss of exact",
        "training, the same arithmetic. A dot is the end of the run. Evaluation takes no time here; no delay is added to wires.",
    ]
    return svg(panels, caption)


def main() -> int:
    """Draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results and of the plot")
    args = parser.parse_args()
    drawn = picture(read(args.results / "slow-networks.json"), read(args.results / "quality.json"))
    if drawn is None:
        say(
            f"nothing to draw in {args.results}: it needs quality.json (make quality) and slow-networks.json with the model "
            "text (make bench-slow)"
        )
        return 1
    (args.results / NAME).write_text(drawn)
    print(args.results / NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
