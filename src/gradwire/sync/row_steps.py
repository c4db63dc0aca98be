"""Around an optimizer's step where ranks own parts of its state: it steps what this rank owns, and the others get that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
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

from gradwire.comm.dtensor import is_parted, local_of, part_of
from gradwire.core.plan import ShardedParts
from gradwire.errors import PlanError
from gradwire.sync.owned import Gatherer, Gathering, Owned

# These step every element by itself, so a rank may step its rows alone.
ELEMENTWISE = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Adagrad, Adadelta, Rprop, ASGD)

Named = Sequence[tuple[str, nn.Parameter]]
State = dict[str, Any]


class PartSteps(Protocol):
    """What happens around each step."""

    def enter(self, optimizer: Optimizer) -> None:
        """``optimizer`` holds this rank's parts from here on."""
        ...

    def leave(self, optimizer: Optimizer) -> None:
        """The user's parameters are back, and whole again."""
        ...


def refuse_optimizers(optimizers: Sequence[Optimizer], sharding: ShardedParts) -> None:
    """Raise PlanError for one that cannot step where ranks along ``shard`` have parts."""
    for each in optimizers:
        if isinstance(each, LBFGS):
            raise PlanError(
                "LBFGS decides over all parameters at once and keeps its history in one long vector, so its state cannot be "
                "parted; use AdamW or another optimizer, or a mesh without shard"
            )
        if isinstance(each, Adafactor) and sharding != "optimizer":
            raise PlanError(
                f'Adafactor cannot step on sharded parameters (sharding="{sharding}"): torch cannot square the norms of columns '
                'that lie on several ranks; use AdamW, or sharding="optimizer"'
            )


class OwnedSteps:
    """Rows for optimizers that step every element by itself, whole parameters for the others (Adafactor, Muon).

    Of parameters that ranks have parts of (`DTensor`) the others step what torch makes of it.
    """

    def __init__(self, params: Named, owned: Owned, gatherer: Gatherer) -> None:
        rows = owned.num_ranks > 1
        some = [(name, param) for name, param in params if param.dim() and (rows or is_parted(param))]
        self._rows = RowSteps(some, owned, gatherer)
        self._wholes = WholeSteps(some if rows else (), owned, gatherer)

    def enter(self, optimizer: Optimizer) -> None:
        """Before the step."""
        self._of(optimizer).enter(optimizer)

    def leave(self, optimizer: Optimizer) -> None:
        """After it."""
        self._of(optimizer).leave(optimizer)

    def _of(self, optimizer: Optimizer) -> PartSteps:
        return self._rows if type(optimizer) in ELEMENTWISE else self._wholes


@dataclass(kw_only=True)
class Row:
    """This rank's rows of one parameter as the optimizer steps them; kept: its state, by key, as the user sees it."""

    param: nn.Parameter
    stepped: nn.Parameter
    kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


class RowSteps:
    """The optimizer steps plain tensors: views of this rank's rows.

    Between steps ``param_groups`` holds the user's parameters, and the optimizer's state `DTensor`s of this rank's rows.
    """

    def __init__(self, params: Named, owned: Owned, gatherer: Gatherer) -> None:
        self._owned = owned
        self._gatherer = gatherer
        self._names = {id(param): name for name, param in params}
        self._rows: dict[int, Row] = {}
        self._stepped: dict[int, Row] = {}

    @torch.no_grad()
    def enter(self, optimizer: Optimizer) -> None:
        self._put_back(optimizer)  # if its last step raised
        for param_group in optimizer.param_groups:
            param_group["params"] = [
                self._taken(param, optimizer) if id(param) in self._names else param for param in param_group["params"]
            ]

    def _taken(self, param: nn.Parameter, optimizer: Optimizer) -> nn.Parameter:
        row, grad = self._row(param), param.grad
        row.stepped.grad = None if grad is None else self._owned.mine(grad, param)
        if param in optimizer.state:
            optimizer.state[row.stepped] = self._to_rows(optimizer.state.pop(param), row)
        return row.stepped

    def _row(self, param: nn.Parameter) -> Row:
        mine, row = self._owned.of(param.data), self._rows.get(id(param))
        if row is None or row.param is not param or row.stepped.data_ptr() != mine.data_ptr():
            row = self._rows[id(param)] = Row(param=param, stepped=nn.Parameter(mine))
        self._stepped[id(row.stepped)] = row
        return row

    def _to_rows(self, state: State, row: Row) -> State:
        """What was made before, or loaded, for whole parameters is cut."""
        mine: State = {}
        for key, value in state.items():
            mine[key] = value
            if isinstance(value, Tensor) and value.dim() and value.shape == row.param.shape:
                rows = mine[key] = self._owned.mine(value, row.param)
                as_it_was = is_parted(value) and local_of(value).data_ptr() == rows.data_ptr()
                row.kept[key] = value if as_it_was else self._owned.as_rows(rows, row.param)
        return mine

    @torch.no_grad()
    def leave(self, optimizer: Optimizer) -> None:
        self._put_back(optimizer)
        params = [param for param_group in optimizer.param_groups for param in param_group["params"]]
        if any(param.grad is not None for param in params):
            owned = [param for param in params if id(param) in self._names and self._owned.num_ranks > 1]
            self._gatherer.gather(
                [Gathering(name=self._names[id(p)], rows=self._owned.of(p), whole=local_of(p)) for p in owned]
            )

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
        whole: State = {}
        for key, value in state.items():
            whole[key] = value
            if isinstance(value, Tensor) and value.dim() and value.shape == row.stepped.shape:
                kept = row.kept.get(key)
                if kept is None or local_of(kept) is not value:
                    kept = row.kept[key] = self._owned.as_rows(value, row.param)
                whole[key] = kept
        return whole


class WholeSteps:
    """Each parameter is stepped, as a whole, by one rank, which gets its whole gradient and keeps its whole state."""

    def __init__(self, params: Named, owned: Owned, gatherer: Gatherer) -> None:
        self._owned = owned
        self._gatherer = gatherer
        self._names = {id(param): name for name, param in params}
        self._owner_of = dict(
            zip(self._names, owners_by_size([p.numel() for _, p in params], owned.num_ranks), strict=True)
        )
        self._away: dict[int, list[list[nn.Parameter]]] = {}
        self._grads: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}

    @torch.no_grad()
    def enter(self, optimizer: Optimizer) -> None:
        self._put_back(optimizer)
        params = [param for param_group in optimizer.param_groups for param in param_group["params"]]
        owned = [param for param in params if id(param) in self._names and param.grad is not None]
        self._grads[id(optimizer)] = self._take_gradients(owned)
        self._away[id(optimizer)] = [param_group["params"] for param_group in optimizer.param_groups]
        for param_group in optimizer.param_groups:
            param_group["params"] = [param for param in param_group["params"] if self._is_mine(param)]
        for param in params:
            if not self._is_mine(param):
                optimizer.state.pop(param, None)

    def _is_mine(self, param: nn.Parameter) -> bool:
        return self._owner_of.get(id(param), self._owned.rank) == self._owned.rank

    def _take_gradients(self, params: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
        """Owners get the whole gradient; returns what stood in ``.grad``."""
        grads: list[tuple[nn.Parameter, Tensor]] = []
        gatherings: list[Gathering] = []
        for param in params:
            grad, wanted = param.grad, self._is_mine(param)
            if grad is not None and is_parted(grad):
                whole = torch.empty_like(local_of(param)) if wanted else local_of(param)
                gatherings.append(
                    Gathering(name=self._names[id(param)], rows=local_of(grad), whole=whole, wanted=wanted)
                )
                grads.append((param, grad))
        self._gatherer.gather(gatherings)
        for (param, _), gathering in zip(grads, gatherings, strict=True):
            if gathering.wanted:
                param.grad = part_of(gathering.whole, param)
        return grads

    @torch.no_grad()
    def leave(self, optimizer: Optimizer) -> None:
        stepped = [param for param, _ in self._grads[id(optimizer)]]
        self._put_back(optimizer)
        self._gatherer.broadcast([(local_of(param), self._owner_of[id(param)]) for param in stepped])

    def _put_back(self, optimizer: Optimizer) -> None:
        for param, grad in self._grads.pop(id(optimizer), []):
            param.grad = grad
        for param_group, params in zip(optimizer.param_groups, self._away.pop(id(optimizer), []), strict=False):
            param_group["params"] = params


def owners_by_size(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Who owns each: the largest first, always to the rank that has least.

    >>> owners_by_size([4, 1, 3, 2], 2)
    [0, 0, 1, 1]
    """
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners
