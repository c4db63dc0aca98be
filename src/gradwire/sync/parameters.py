"""`ParameterSync`: after some local steps the ranks agree on their parameters, a fragment at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from gradwire.compress.exact import AllReduce
from gradwire.core.microbatch import Microbatch
from gradwire.core.outer import Outer
from gradwire.core.reducer import Reducer
from gradwire.sync.buckets import START_BUCKET_BYTES, ParamSpec, is_finite, lay_out, spec_of, views_of
from gradwire.sync.exchange import Exchange
from gradwire.sync.kept import FragmentState
from gradwire.sync.opening import Opening

HALVES = (torch.float16, torch.bfloat16)


@dataclass(kw_only=True)
class Fragment:
    """Parameters that are agreed together.

    anchors: what they were when last agreed, by bucket (numel,); velocities: the outer momentum. count: samples that this
    rank has stepped on since.
    """

    params: list[tuple[str, nn.Parameter]]
    exchange: Exchange
    views: dict[int, Tensor]
    anchors: list[Tensor] = field(default_factory=list[Tensor])
    velocities: list[Tensor] = field(default_factory=list[Tensor])
    count: float = 0.0


class ParameterSync:
    """Holds, for each fragment, what all ranks agreed on last; half-precision parameters are held in float32.

    ``agree`` sends (agreed - own), weighted by the samples each rank stepped on, and moves everybody to the new agreed values.
    A NaN on any rank throws the round away: all ranks go back to the last agreed values.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        exchanges: Sequence[Exchange],
        *,
        reducer: Reducer | None,
        outer: Outer,
        bucket_bytes: int | None,
    ) -> None:
        self._outer = outer
        self._reducer = reducer or AllReduce()
        self._bucket_bytes = bucket_bytes or START_BUCKET_BYTES
        parts = split_evenly(params, len(exchanges))
        self._fragments = [self._fragment(part, each) for part, each in zip(parts, exchanges, strict=True)]

    def _fragment(self, params: list[tuple[str, nn.Parameter]], exchange: Exchange) -> Fragment:
        layout = lay_out([self._spec(i, name, param) for i, (name, param) in enumerate(params)], self._bucket_bytes)
        exchange.build(layout)
        fragment = Fragment(params=params, exchange=exchange, views=views_of(layout, exchange.flats(0)))
        self._read_own(fragment)
        fragment.anchors = [flat.clone() for flat in exchange.flats(0)]
        fragment.velocities = [torch.zeros_like(flat) for flat in exchange.flats(0)]
        return fragment

    def _spec(self, index: int, name: str, param: nn.Parameter) -> ParamSpec:
        spec = spec_of(index, name, param, self._reducer)
        return replace(spec, dtype=torch.float32) if spec.dtype in HALVES else spec

    def follow(self) -> None:
        """The parameters were agreed by other means (an exact step): they are the new anchors."""
        for fragment in self._fragments:
            self._read_own(fragment)
            for anchor, flat in zip(fragment.anchors, fragment.exchange.flats(0), strict=True):
                anchor.copy_(flat)
            fragment.count = 0.0

    def stepped(self, count: float) -> None:
        """This rank has made a local step on ``count`` samples."""
        for fragment in self._fragments:
            fragment.count += count

    def agree(self, number: int, microbatch: Microbatch | None) -> tuple[str, ...]:
        """Agree on fragment ``number``; all ranks call it. Returns who met a NaN, usually nobody."""
        fragment = self._fragments[number]
        exchange, flats = fragment.exchange, fragment.exchange.flats(0)
        self._read_own(fragment)
        counts = fragment.count > 0
        for anchor, flat in zip(fragment.anchors, flats, strict=True):
            torch.sub(anchor, flat, out=flat)
            if not counts:
                flat.zero_()
        bad = [name for index, (name, _) in enumerate(fragment.params) if not is_finite(fragment.views[index])]
        unit = fragment.count if counts else 1.0
        exchange.open(Opening(count=fragment.count, unit=unit, explicit=True, microbatch=microbatch))
        for index in range(len(flats)):
            exchange.bucket(index)
        agreement = exchange.seal([counts] * len(fragment.params), bad)()
        if not agreement.nonfinite and any(agreement.used):
            for index, flat in enumerate(flats):
                move, fragment.velocities[index] = self._outer.update(flat, fragment.velocities[index])
                fragment.anchors[index] -= move
        self._write(fragment, fragment.anchors)
        fragment.count = 0.0
        return agreement.nonfinite

    @torch.no_grad()
    def _read_own(self, fragment: Fragment) -> None:
        for index, (_, param) in enumerate(fragment.params):
            fragment.views[index].copy_(param)

    @torch.no_grad()
    def _write(self, fragment: Fragment, values: Sequence[Tensor]) -> None:
        for flat, value in zip(fragment.exchange.flats(0), values, strict=True):
            flat.copy_(value)
        for index, (_, param) in enumerate(fragment.params):
            param.copy_(fragment.views[index])

    # --- kept --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> list[FragmentState]:
        """By fragment: what was agreed, the momentum, this rank's own parameters, its count, its reducers' states."""
        return [
            FragmentState(
                anchors=[anchor.clone() for anchor in fragment.anchors],
                velocities=[velocity.clone() for velocity in fragment.velocities],
                own=[param.detach().clone() for _, param in fragment.params],
                count=fragment.count,
                step=fragment.exchange.step,
                reducers=[dict(state) for state in fragment.exchange.states],
            )
            for fragment in self._fragments
        ]

    def load(self, worlds: Sequence[Sequence[FragmentState]], *, same: int | None) -> None:
        """Go on from what the ranks of an earlier world kept, by rank and fragment.

        same: this rank's place in it if the world has the same size. Otherwise every rank starts from the mean of the ranks'
        own parameters, and what their reducers had still to send is shared out.
        """
        for number, fragment in enumerate(self._fragments):
            kept = [world[number] for world in worlds]
            if same is None:
                self._load_other(fragment, kept)
            else:
                self._load_own(fragment, kept[same])

    @torch.no_grad()
    def _load_agreed(self, fragment: Fragment, kept: FragmentState) -> None:
        for target, value in zip(fragment.anchors, kept["anchors"], strict=True):
            target.copy_(value)
        for target, value in zip(fragment.velocities, kept["velocities"], strict=True):
            target.copy_(value)
        fragment.exchange.step = kept["step"]

    @torch.no_grad()
    def _load_own(self, fragment: Fragment, kept: FragmentState) -> None:
        self._load_agreed(fragment, kept)
        fragment.exchange.restore(kept["reducers"])
        fragment.count = kept["count"]
        for (_, param), value in zip(fragment.params, kept["own"], strict=True):
            param.copy_(value)

    @torch.no_grad()
    def _load_other(self, fragment: Fragment, kept: Sequence[FragmentState]) -> None:
        self._load_agreed(fragment, kept[0])
        fragment.exchange.restore(fragment.exchange.resplit([each["reducers"] for each in kept]))
        fragment.count = sum(each["count"] for each in kept) / len(kept)
        for index, (_, param) in enumerate(fragment.params):
            param.copy_(torch.stack([each["own"][index].double() for each in kept]).mean(0))


def split_evenly(params: Sequence[tuple[str, nn.Parameter]], num_parts: int) -> list[list[tuple[str, nn.Parameter]]]:
    """Consecutive parts of about equal size, in registration order; some may be empty."""
    total = sum(param.numel() for _, param in params)
    parts: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(num_parts)]
    before = 0
    for name, param in params:
        middle = before + param.numel() / 2
        parts[min(num_parts - 1, int(middle * num_parts / total))].append((name, param))
        before += param.numel()
    return parts
