"""`LowRank`: a matrix travels as two thin factors, one of them a step."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compress.exact import AllReduce
from gradwire.compress.feedback import SMALLEST_CODED, still_to_send
from gradwire.core.group import Group
from gradwire.core.reducer import Bucket, Link, Piece, Reducer, State
from gradwire.errors import UsageError

USUAL_SIDE = 512  # of a matrix, for the cost of a model whose shapes are not known
CODEC_S_PER_NUMBER_AND_RANK = 0.5e-9  # three thin products on one core, about


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """Alternating low rank with error feedback (ACP-SGD, Zhang et al., ICDCS 2023): one plain all-reduce a step.

    A parameter is a matrix M (rows, cols): its first dimension by all the others. L (rank, rows) and R (rank, cols) are its
    factors, M about ``L^T R``. On even steps R, made orthonormal, stays and ``L = R M^T`` is summed over the ranks; on odd
    steps L stays and ``R = L M`` is summed: rank x (rows + cols) / 2 numbers a step instead of rows x cols. What the product
    lacks of this rank's M is added to its next M. Low rank loses more than 8 or 4 bits do, and sends far less.

    Only matrices that get smaller by it, of at least 1,024 numbers; others travel exact. Factors are float32 on the wire,
    as Gloo would round a sum of bfloat16 at every hop. The products are made on each rank, so replicas are
    bit-identical where all hosts have one kind of processor and the same number of threads.

    State: ``residual`` (numel,), and ``left``, ``right``: the factors of all matrices one behind the other.

    >>> LowRank(rank=2).choose("weight", (64, 32)), LowRank(rank=2).choose("bias", (64,))
    (LowRank(rank=2), AllReduce())
    """

    rank: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise UsageError(f"LowRank(rank={self.rank!r}) must be a whole number, at least 1; 4 to 32 is usual")

    def choose(self, name: str, shape: tuple[int, ...]) -> Reducer:
        return self if self._shrinks(shape) else AllReduce()

    def init(self, bucket: Bucket, group: Group) -> State:
        work = _work_dtype(bucket)
        drawn = [_drawn(bucket.index, piece, self.rank, work) for piece in self._matrices(bucket)]
        none = torch.zeros(0, dtype=work)
        return {
            "residual": torch.zeros_like(bucket.flat, dtype=work),
            "left": torch.cat([none, *(left.view(-1) for left, _ in drawn)]).to(bucket.flat.device),
            "right": torch.cat([none, *(right.view(-1) for _, right in drawn)]).to(bucket.flat.device),
        }

    def reduce(self, bucket: Bucket, state: State, group: Group, step: int) -> tuple[Tensor, State]:
        kept, sent = ("right", "left") if step % 2 == 0 else ("left", "right")
        wanted = bucket.flat + state["residual"]
        residual = wanted.clone()
        basis = [_orthonormal(factor) for factor in self._factors(bucket, state[kept], kept)]
        message = torch.cat([state[sent], wanted])
        fresh, rest = message.split([state[sent].numel(), wanted.numel()])
        matrices = list(self._matrices(bucket))
        for piece, fixed, made in zip(matrices, basis, self._factors(bucket, fresh, sent), strict=True):
            matrix = _matrix(wanted, piece)
            torch.matmul(fixed, matrix.t() if sent == "left" else matrix, out=made)
            left, right = (made, fixed) if sent == "left" else (fixed, made)
            _matrix(residual, piece).sub_(left.t() @ right)
        raise NotImplementedError
        return rest, {}

    def resplit(self, states: Sequence[State], bucket: Bucket, group: Group) -> State:
        raise NotImplementedError
