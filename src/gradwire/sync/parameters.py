"""`ParameterSync`: after some local steps the ranks agree on their parameters, a fragment at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.core.microbatch import Microbatch
from gradwire.core.outer import Outer
from gradwire.core.reducer import Reducer
from gradwire.sync.buckets import START_BUCKET_BYTES, ParamSpec, difference, lay_out, spec_of
from gradwire.sync.exchange import Agreement, Exchange
from gradwire.sync.kept import FragmentState, take_mean
from gradwire.sync.loading import Loading
from gradwire.sync.opening import Opening
from gradwire.sync.places import places_of

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Stand:
    """One parameter and where it stands: in its bucket's values, in what was agreed last, and in the outer momentum."""

    name: str
    param: Tensor
    sent: Tensor
    anchor: Tensor
    velocity: Tensor


@dataclass(kw_only=True)
class Fragment:
    """Parameters that are agreed together.

    stands: by bucket. anchors: what they were when last agreed, by bucket (numel,); velocities: the outer momentum. owns: with
    late agreement, what this rank's were when it sent them. count: samples that this rank has stepped on since.
    wait: for what is on its way; due: steps until it is taken.
    """

    params: list[tuple[str, Tensor]]
    exchange: Exchange
    stands: list[list[Stand]]
    anchors: list[Tensor]
    velocities: list[Tensor]
    owns: list[Tensor]
    count: float = 0.0
    wait: Callable[[], Agreement] | None = None
    due: int = 0


class ParameterSync:
    """Holds, for each fragment, what all ranks agreed on last; half-precision parameters are held in float32.

    ``send`` sends (agreed - own), weighted by the samples each rank stepped on; ``take`` waits for the sum and moves this rank
    to the new agreed values, plus what it has stepped meanwhile. A NaN on any rank throws the round away: all ranks go back to
    the last agreed values. All work is done bucket by bucket, so that it stays in the cache.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, Tensor]],
        exchanges: Sequence[Exchange],
        *,
        reducer: Reducer,
        outer: Outer,
        late: int,
        loading: Loading,
        bucket_bytes: int | None,
    ) -> None:
        self._outer = outer
        self._late = late
        self._loading = loading
        self._reducer = reducer
        self._bucket_bytes = bucket_bytes or START_BUCKET_BYTES
        parts = split_evenly(params, len(exchanges))
        self._fragments = [self._fragment(part, each) for part, each in zip(parts, exchanges, strict=True)]

    def _fragment(self, params: list[tuple[str, Tensor]], exchange: Exchange) -> Fragment:
        layout = lay_out([self._spec(i, name, param) for i, (name, param) in enumerate(params)], self._bucket_bytes)
        exchange.build(layout)
        flats = exchange.flats(0)
        anchors = [torch.zeros_like(flat) for flat in flats]
        velocities = [torch.zeros_like(flat) for flat in flats]
        sent, anchor, velocity = (places_of(layout, each) for each in (flats, anchors, velocities))
        stands = [
            [
                Stand(
                    name=params[i][0],
                    param=params[i][1],
                    sent=sent[i].own,
                    anchor=anchor[i].own,
                    velocity=velocity[i].own,
                )
                for i in (slot.param.index for slot in spec.slots)
            ]
            for spec in layout
        ]
        fragment = Fragment(
            params=params,
            exchange=exchange,
            stands=stands,
            anchors=anchors,
            velocities=velocities,
            owns=[torch.zeros_like(flat) for flat in flats] if self._late else [],
        )
        _follow(fragment)
        return fragment

    def _spec(self, index: int, name: str, param: Tensor) -> ParamSpec:
        spec = spec_of(index, name, param, self._reducer)
        return replace(spec, dtype=torch.float32) if spec.dtype in HALVES else spec

    def follow(self) -> None:
        """The parameters were agreed by other means (an exact step): they are the new anchors."""
        for fragment in self._fragments:
            _follow(fragment)

    @torch.no_grad()
    def loaded(self, params: Sequence[Tensor]) -> None:
        """The user has loaded these: they are what the ranks agree on, whatever is on its way, and they do not move."""
        for fragment in self._fragments:
            found = [stand for stands in fragment.stands for stand in stands if any(stand.param is p for p in params)]
            if found:
                self._drop(fragment)
            for stand in found:
                stand.anchor.copy_(stand.param)
                stand.velocity.zero_()

    def _drop(self, fragment: Fragment) -> None:
        """Forget what is on its way."""
        wait, fragment.wait = fragment.wait, None
        if wait is not None:
            wait()

    def stepped(self, count: float) -> tuple[str, ...]:
        """This rank has made a local step on ``count`` samples. Takes what is due; returns who met a NaN in it."""
        nonfinite: tuple[str, ...] = ()
        for fragment in self._fragments:
            fragment.count += count
            fragment.due -= 1
            if fragment.wait is not None and fragment.due <= 0:
                nonfinite += self._take(fragment)
        return nonfinite

    def agree(self, number: int, microbatch: Microbatch | None) -> tuple[str, ...]:
        """Send fragment ``number``, and take it unless it may come late; all ranks call it. Returns who met a NaN."""
        fragment = self._fragments[number]
        self._send(fragment, microbatch)
        fragment.due = self._late
        return () if self._late else self._take(fragment)

    @torch.no_grad()
    def _send(self, fragment: Fragment, microbatch: Microbatch | None) -> None:
        exchange, flats = fragment.exchange, fragment.exchange.flats(0)
        counts = fragment.count > 0
        unit = fragment.count if counts else 1.0
        loaded = self._loading.take()
        exchange.open(Opening(count=fragment.count, unit=unit, explicit=True, microbatch=microbatch, loaded=loaded))
        bad: list[str] = []
        for index, stands in enumerate(fragment.stands):
            for stand in stands:
                if not difference(stand.anchor, stand.param, out=stand.sent):
                    bad.append(stand.name)
            if fragment.owns:
                torch.sub(fragment.anchors[index], flats[index], out=fragment.owns[index])
            if not counts:
                flats[index].zero_()
            exchange.bucket(index)
        fragment.wait = exchange.seal([counts] * len(fragment.params), bad)
        fragment.count = 0.0

    @torch.no_grad()
    def _take(self, fragment: Fragment, *, keep_own: bool = True) -> tuple[str, ...]:
        """keep_own: with late agreement, put what this rank has stepped since it sent on top of what was agreed."""
        wait, fragment.wait = fragment.wait, None
        if wait is None:
            return ()
        agreement = wait()
        moved = not agreement.nonfinite and any(agreement.used)
        on_top = moved and keep_own and bool(fragment.owns)
        for index, flat in enumerate(fragment.exchange.flats(0)):
            if moved:
                self._outer.step(fragment.anchors[index], flat, fragment.velocities[index])
            if on_top:
                torch.sub(fragment.anchors[index], fragment.owns[index], out=flat)
            for stand in fragment.stands[index]:
                if on_top:
                    stand.param.add_(stand.sent)
                else:
                    stand.param.copy_(stand.anchor)
        return agreement.nonfinite

    def finish(self) -> tuple[str, ...]:
        """Take whatever is on its way: all ranks, between steps. Returns who met a NaN in it."""
        self._loading.take_up()  # what was loaded must not be moved by what was sent before
        return tuple(name for fragment in self._fragments for name in self._take(fragment))

    def agree_now(self, microbatch: Microbatch | None) -> tuple[str, ...]:
        """Agree on everything, so that all ranks hold the same: all ranks, between steps. Returns who met a NaN."""
        nonfinite = self.finish()
        for fragment in self._fragments:
            self._send(fragment, microbatch)
            nonfinite += self._take(fragment, keep_own=False)
        return nonfinite

    # --- kept --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> list[FragmentState]:
        """By fragment: what was agreed, the momentum, this rank's own parameters, its count, its reducers' states.

        What is on its way must have been taken (`finish`).
        """
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
        own parameters, and what their reducers had still to send is shared out. A world of one kept nothing: its parameters
        are the agreed ones.
        """
        if not any(worlds):
            self.follow()
            return
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
        take_mean([param for _, param in fragment.params], [each["own"] for each in kept])


def split_evenly(params: Sequence[tuple[str, Tensor]], num_parts: int) -> list[list[tuple[str, Tensor]]]:
    """Consecutive parts of about equal size, in registration order; some may be empty."""
    total = sum(param.numel() for _, param in params)
    parts: list[list[tuple[str, Tensor]]] = [[] for _ in range(num_parts)]
    before = 0
    for name, param in params:
        middle = before + param.numel() / 2
        parts[min(num_parts - 1, int(middle * num_parts / total))].append((name, param))
        before += param.numel()
    return parts


@torch.no_grad()
def _follow(fragment: Fragment) -> None:
    for stands in fragment.stands:
        for stand in stands:
            stand.anchor.copy_(stand.param)
    fragment.count = 0.0
