"""`ByShape`, `ByName`, `After`: which reducer takes which parameter, and from when on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import cast

from torch import Tensor

from gradwire.compress.exact import AllReduce
from gradwire.core.arguments import require_reducers, require_whole
from gradwire.core.group import Group
from gradwire.core.reducer import Bucket, Link, Reducer, State
from gradwire.errors import UsageError


class _Delegated:
    """Everything but the choice is ``other``'s: a bucket whose parameters were not chosen for is its own."""

    other: Reducer

    def init(self, bucket: Bucket, group: Group) -> State:
        return self.other.init(bucket, group)

    def reduce(self, bucket: Bucket, state: State, group: Group, step: int) -> tuple[Tensor, State]:
        return self.other.reduce(bucket, state, group, step)

    def resplit(self, states: Sequence[State], bucket: Bucket, group: Group) -> State:
        return self.other.resplit(states, bucket, group)

    def plain(self, group: Group) -> bool:
        return self.other.plain(group)

    def sent_bytes(self, numel: int, num_ranks: int) -> float:
        return self.other.sent_bytes(numel, num_ranks)

    def cost(self, numel: int, link: Link) -> float:
        return self.other.cost(numel, link)


@dataclass(frozen=True, kw_only=True)
class ByShape(_Delegated):
    """Parameters of two or more dimensions go to ``matrix``, the rest to ``other``.

    Bytes and cost are those of ``matrix``, which holds nearly all numbers of a usual model.

    >>> ByShape(matrix=AllReduce(), other=AllReduce()).choose("bias", (8,))
    AllReduce()
    """

    matrix: Reducer
    other: Reducer

    def __post_init__(self) -> None:
        require_reducers("ByShape", matrix=self.matrix, other=self.other)

    def choose(self, name: str, shape: tuple[int, ...]) -> Reducer:
        return (self.matrix if len(shape) >= 2 else self.other).choose(name, shape)

    def sent_bytes(self, numel: int, num_ranks: int) -> float:
        return self.matrix.sent_bytes(numel, num_ranks)

    def cost(self, numel: int, link: Link) -> float:
        return self.matrix.cost(numel, link)

    def words(self) -> str:
        return f"matrices: {self.matrix.words()}; others: {self.other.words()}"


@dataclass(frozen=True)
class ByName(_Delegated):
    """The first pattern (``*``, ``?``, ``[...]``) that a parameter's whole name matches says its reducer; none: ``other``.

    >>> rule = ByName({"embedding.*": AllReduce()}, other=AllReduce())
    >>> rule.choose("embedding.weight", (1000, 64)), hash(rule) == hash(rule)
    (AllReduce(), True)
    """

    rules: Mapping[str, Reducer] | tuple[tuple[str, Reducer], ...]
    other: Reducer = field(kw_only=True)

    def __post_init__(self) -> None:
        pairs = tuple(self.rules.items()) if isinstance(self.rules, Mapping) else self.rules
        if not isinstance(pairs, tuple):
            raise UsageError(f"ByName({pairs!r}) must map patterns to reducers: {{'head.*': AllReduce()}}, say")
        require_reducers("ByName", **dict(pairs), other=self.other)
        object.__setattr__(self, "rules", pairs)  # a dict cannot be hashed

    def check(self, names: Sequence[str]) -> None:
        """Raise UsageError for a pattern that none of these parameters matches."""
        for pattern, _ in cast("tuple[tuple[str, Reducer], ...]", self.rules):
            if not any(fnmatchcase(name, pattern) for name in names):
                few = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
                raise UsageError(f"ByName: {pattern!r} matches no trained parameter; there are {few}")

    def choose(self, name: str, shape: tuple[int, ...]) -> Reducer:
        pairs = cast("tuple[tuple[str, Reducer], ...]", self.rules)
        return next((rule for pattern, rule in pairs if fnmatchcase(name, pattern)), self.other).choose(name, shape)

    def words(self) -> str:
        pairs = cast("tuple[tuple[str, Reducer], ...]", self.rules)
        named = [f"{pattern}: {rule.words()}" for pattern, rule in pairs]
        return "; ".join([*named, f"others: {self.other.words()}"])


@dataclass(frozen=True, kw_only=True)
class After:
    """Exact for the first ``steps`` exchanges, while gradients are large and change fast; then ``reducer``, from its start.

    Bytes and cost are those of the long run.

    >>> After(steps=100, reducer=AllReduce()).words()
    'exact all-reduce for 100 steps, then exact all-reduce'
    """

    steps: int
    reducer: Reducer

    def __post_init__(self) -> None:
        require_whole("After", "steps", self.steps, 0)
        require_reducers("After", reducer=self.reducer)

    def choose(self, name: str, shape: tuple[int, ...]) -> Reducer:
        chosen = self.reducer.choose(name, shape)
        return chosen if chosen == AllReduce() else After(steps=self.steps, reducer=chosen)

    def init(self, bucket: Bucket, group: Group) -> State:
        return self.reducer.init(bucket, group)

    def reduce(self, bucket: Bucket, state: State, group: Group, step: int) -> tuple[Tensor, State]:
        return (self.reducer if step >= self.steps else AllReduce()).reduce(bucket, state, group, step)

    def resplit(self, states: Sequence[State], bucket: Bucket, group: Group) -> State:
        return self.reducer.resplit(states, bucket, group)

    def plain(self, group: Group) -> bool:
        return self.reducer.plain(group) and AllReduce().plain(group)

    def sent_bytes(self, numel: int, num_ranks: int) -> float:
        return self.reducer.sent_bytes(numel, num_ranks)

    def cost(self, numel: int, link: Link) -> float:
        return self.reducer.cost(numel, link)

    def words(self) -> str:
        return f"{AllReduce().words()} for {self.steps} steps, then {self.reducer.words()}"
