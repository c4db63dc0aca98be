"""`Owned`: each rank along ``shard`` owns rows of every parameter; how the others get them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.comm.dtensor import cut_as, is_parted, local_of, part_of, rows_of
from gradwire.compress.exact import AllReduce
from gradwire.sync.buckets import BucketSpec, lay_out, spec_of
from gradwire.sync.exchange import Route

GATHER_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Owned:
    """Which rows are this rank's, of what it has of each parameter: all, or its part of a `DTensor`.

    make: a rank's rows, and the parameter -> a `DTensor` of the parameter's shape.
    """

    rank: int = 0
    num_ranks: int = 1
    make: Callable[[Tensor, Tensor], Tensor] = part_of

    def of(self, param: Tensor) -> Tensor:
        """This rank's rows of a parameter, a view."""
        return self.rows(local_of(param), self.rank)

    def mine(self, value: Tensor, param: Tensor) -> Tensor:
        """This rank's rows of a gradient, or of state: given as rows, parted as the parameter is, or whole."""
        local = local_of(value) if is_parted(value) else cut_as(value, param)
        return local if local.shape == self.of(param).shape else self.rows(local, self.rank).clone()

    def as_rows(self, rows: Tensor, param: Tensor) -> Tensor:
        """``rows`` as this rank's part of a tensor in the parameter's shape."""
        return part_of(rows, param) if self.num_ranks == 1 else self.make(rows, param)

    def rows(self, whole: Tensor, rank: int) -> Tensor:
        """Those of ``rank``, a view."""
        return whole[rows_of(whole.shape[0], self.num_ranks, rank)]


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """rows: this rank's. whole: what becomes whole, if that is wanted here, else any tensor of the shape."""

    name: str
    rows: Tensor
    whole: Tensor
    wanted: bool = True


class Gatherer:
    """Brings every rank's rows together, some at a time, on all lanes."""

    def __init__(self, owned: Owned, routes: Sequence[Route]) -> None:
        self._owned = owned
        self._routes = routes

    def gather(self, each: Sequence[Gathering]) -> None:
        """All ranks, the same tensors in the same order. Waits."""
        num = self._owned.num_ranks
        specs = [spec_of(i, one.name, one.whole, AllReduce(), num_parts=num) for i, one in enumerate(each)]
        for number, spec in enumerate(lay_out(specs, GATHER_BYTES)):
            route = self._routes[number % len(self._routes)]
            route.lane.submit(lambda spec=spec, route=route: self._bucket(spec, each, route))
        for route in self._routes:
            route.lane.drain()

    @torch.no_grad()
    def broadcast(self, each: Sequence[tuple[Tensor, int]]) -> None:
        """All ranks get every tensor from the rank beside it. Waits."""
        for number, (tensor, src) in enumerate(each):
            route = self._routes[number % len(self._routes)]
            route.lane.submit(lambda tensor=tensor, src=src, route=route: route.owners.broadcast(tensor.data, src))
        for route in self._routes:
            route.lane.drain()

    @torch.no_grad()
    def _bucket(self, spec: BucketSpec, each: Sequence[Gathering], route: Route) -> None:
        mine = torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device)
        for one, place in _places(spec, each, mine):
            place(one.rows.shape).copy_(one.rows)
        for rank, flat in enumerate(route.owners.all_gather(mine)):
            for one, place in _places(spec, each, flat):
                if one.wanted:
                    rows = self._owned.rows(one.whole, rank)
                    rows.copy_(place(rows.shape))


def _places(
    spec: BucketSpec, each: Sequence[Gathering], flat: Tensor
) -> Iterator[tuple[Gathering, Callable[[torch.Size], Tensor]]]:
    """For each tensor of a bucket: where rows of a given shape lie in ``flat``."""
    for slot in spec.slots:
        begin = flat[slot.offset :]
        yield each[slot.param.index], lambda shape, begin=begin: begin[: shape.numel()].view(shape)
