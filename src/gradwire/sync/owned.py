"""`Owned`: each rank along ``shard`` owns rows of every parameter, and steps those alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from gradwire.comm.dtensor import is_parted, local_of, part_of, rows_of
from gradwire.compress.exact import AllReduce
from gradwire.errors import PlanError
from gradwire.sync.buckets import BucketSpec, lay_out, spec_of
from gradwire.sync.exchange import Route

GATHER_BYTES = 4 << 20
# These step every element by itself, so rows can be stepped as plain tensors. Others see the whole by DTensor's arithmetic.
ELEMENTWISE = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Adagrad, Adadelta, Rprop, ASGD)

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Owned:
    """Which rows are this rank's. as_rows: a rank's rows, and a tensor of the whole shape -> a `DTensor`."""

    rank: int = 0
    num_ranks: int = 1
    as_rows: Callable[[Tensor, Tensor], Tensor] = part_of

    def of(self, whole: Tensor) -> Tensor:
        """This rank's rows, a view."""
        return whole[rows_of(whole.shape[0], self.num_ranks, self.rank)]


def refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raise PlanError for one that cannot step rows."""
    for each in optimizers:
        if isinstance(each, LBFGS):
            raise PlanError(
                "LBFGS decides over all parameters at once and keeps its history in one long vector, so its state cannot be "
                "parted; use another optimizer, or a mesh without shard"
            )


@dataclass(kw_only=True)
class Row:
    """This rank's rows of one parameter as the optimizer steps them; kept: its state, by key, as the user sees it."""

    param: nn.Parameter
    stepped: nn.Parameter
    kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


class RowSteps:
    """Around each optimizer's step: it steps rows, then all ranks gather what the others stepped.

    Between steps ``param_groups`` holds the user's parameters, and the optimizer's state `DTensor`s of this rank's rows.
    """

    def __init__(self, params: Sequence[tuple[str, nn.Parameter]], owned: Owned, routes: Sequence[Route]) -> None:
        self._owned = owned
        self._routes = routes
        self._names = {id(param): name for name, param in params if param.dim()}
        self._rows: dict[int, Row] = {}
        self._stepped: dict[int, Row] = {}

    # --- before the step ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def enter(self, optimizer: Optimizer) -> None:
        """``optimizer`` holds rows from here on."""
        self._put_back(optimizer)  # if its last step raised
        parted = type(optimizer) not in ELEMENTWISE
        for param_group in optimizer.param_groups:
            param_group["params"] = [
                self._taken(param, optimizer, parted) if id(param) in self._names else param
                for param in param_group["params"]
            ]

    def _taken(self, param: nn.Parameter, optimizer: Optimizer, parted: bool) -> nn.Parameter:
        row = self._row(param, parted)
        stepped, grad = row.stepped, param.grad
        if grad is not None:
            grad = grad if is_parted(grad) else self._owned.as_rows(self._owned.of(grad), param)
            grad = grad if parted else local_of(grad)
        stepped.grad = grad
        if param in optimizer.state:
            optimizer.state[stepped] = self._to_rows(optimizer.state.pop(param), row, parted)
        return stepped

    def _row(self, param: nn.Parameter, parted: bool) -> Row:
        mine, row = self._owned.of(param.data), self._rows.get(id(param))
        if row is None or row.param is not param or local_of(row.stepped).data_ptr() != mine.data_ptr():
            stepped = nn.Parameter(self._owned.as_rows(mine, param) if parted else mine)
            row = self._rows[id(param)] = Row(param=param, stepped=stepped)
        self._stepped[id(row.stepped)] = row
        return row

    def _to_rows(self, state: State, row: Row, parted: bool) -> State:
        """What was made before, or loaded, for whole parameters is cut."""
        mine: State = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == row.param.shape:
                whole = value if is_parted(value) else self._owned.as_rows(self._owned.of(value).clone(), row.param)
                row.kept[key] = whole
                mine[key] = whole if parted else local_of(whole)
            else:
                mine[key] = value
        return mine

    # --- after it ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def leave(self, optimizer: Optimizer) -> None:
        """The user's parameters are back, and whole again."""
        self._put_back(optimizer)
        params = [param for param_group in optimizer.param_groups for param in param_group["params"]]
        if any(param.grad is not None for param in params):
            self._gather([param for param in params if id(param) in self._names])

    def _put_back(self, optimizer: Optimizer) -> None:
        for param_group in optimizer.param_groups:
            param_group["params"] = [self._given_back(param, optimizer) for param in param_group["params"]]

    def _given_back(self, param: nn.Parameter, optimizer: Optimizer) -> nn.Parameter:
        row = self._stepped.pop(id(param), None)
        if row is None:
            return param
        if param in optimizer.state:
            optimizer.state[row.param] = self._from_rows(optimizer.state.pop(param), row)
        param.grad = None
        return row.param

    def _from_rows(self, state: State, row: Row) -> State:
        shape, whole = local_of(row.stepped).shape, State()
        for key, value in state.items():
            whole[key] = value
            if isinstance(value, Tensor) and value.dim() and not is_parted(value) and value.shape == shape:
                kept = row.kept.get(key)
                if kept is None or local_of(kept) is not value:
                    kept = row.kept[key] = self._owned.as_rows(value, row.param)
                whole[key] = kept
        return whole

    def _gather(self, params: Sequence[nn.Parameter]) -> None:
        num = self._owned.num_ranks
        specs = [spec_of(i, self._names[id(p)], p, AllReduce(), num_parts=num) for i, p in enumerate(params)]
        for number, spec in enumerate(lay_out(specs, GATHER_BYTES)):
            route = self._routes[number % len(self._routes)]
            route.lane.submit(lambda spec=spec, route=route: self._gather_bucket(spec, params, route))
        for route in self._routes:
            route.lane.drain()

    @torch.no_grad()
    def _gather_bucket(self, spec: BucketSpec, params: Sequence[nn.Parameter], route: Route) -> None:
        mine = torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device)
        for place, rows in self._parts(spec, params, mine, self._owned.rank):
            place.copy_(rows)
        everybody = route.owners.all_gather(mine)
        for rank in range(self._owned.num_ranks):
            if rank != self._owned.rank:
                for place, rows in self._parts(spec, params, everybody[rank], rank):
                    rows.copy_(place)

    def _parts(
        self, spec: BucketSpec, params: Sequence[nn.Parameter], flat: Tensor, rank: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter's rows of ``rank``: where they lie in ``flat``, and in the parameter."""
        for slot in spec.slots:
            param = params[slot.param.index]
            rows = param[rows_of(param.shape[0], self._owned.num_ranks, rank)]
            yield flat[slot.offset : slot.offset + rows.numel()].view(rows.shape), rows
