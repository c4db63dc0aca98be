"""`LowRank`: a matrix travels as two thin factors, one of them a step."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compress.exact import AllReduce
from gradwire.compress.feedback import SMALL_EXACT, SMALLEST_CODED, still_to_send
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
        matrices = [piece for piece in bucket.pieces if self._shrinks(piece.shape)]
        return {
            "residual": torch.zeros_like(bucket.flat, dtype=_work_dtype(bucket)),
            "left": _drawn(bucket, matrices, self.rank, 0),
            "right": _drawn(bucket, matrices, self.rank, 1),
        }

    def reduce(self, bucket: Bucket, state: State, group: Group, step: int) -> tuple[Tensor, State]:
        kept, sent = ("right", "left") if step % 2 == 0 else ("left", "right")
        matrices = [piece for piece in bucket.pieces if self._shrinks(piece.shape)]
        others = [piece for piece in bucket.pieces if not self._shrinks(piece.shape)]
        wanted = bucket.flat + state["residual"]
        bases = [_orthonormal(factor) for factor in self._factors(matrices, state[kept], kept)]
        made: list[Tensor] = []
        for piece, basis in zip(matrices, bases, strict=True):
            matrix = _matrix(wanted, piece)
            made.append(basis @ (matrix.t() if sent == "left" else matrix))
        numbers = [*(factor.view(-1) for factor in made), *(_part(wanted, piece) for piece in others)]
        message = torch.cat([wanted[:0], *numbers])
        for piece, basis, factor in zip(matrices, bases, made, strict=True):
            _matrix(wanted, piece).addmm_(*_ordered(sent, factor, basis), alpha=-1)  # what is left of it
        for piece in others:
            _part(wanted, piece).zero_()
        total = group.all_reduce(message)
        factors = total[: state[sent].numel()]
        mean = bucket.flat if bucket.flat.dtype is wanted.dtype else torch.zeros_like(wanted)
        for piece, basis, factor in zip(matrices, bases, self._factors(matrices, factors, sent), strict=True):
            torch.mm(*_ordered(sent, factor, basis), out=_matrix(mean, piece))
        for piece, number in zip(others, _split(total[factors.numel() :], others), strict=True):
            _part(mean, piece).copy_(number)
        return mean.to(bucket.flat.dtype), {"residual": wanted, kept: state[kept], sent: factors}

    def resplit(self, states: Sequence[State], bucket: Bucket, group: Group) -> State:
        following = dict(self.init(bucket, group))
        if states:
            total = still_to_send(states, bucket.flat.numel())
            following["residual"].copy_(total / group.size)
            following |= {side: states[0][side].to(bucket.flat.device) for side in ("left", "right")}
        return following

    def plain(self, group: Group) -> bool:
        return False

    def sent_bytes(self, numel: int, num_ranks: int) -> float:
        side = max(1.0, min(USUAL_SIDE, math.sqrt(numel)))
        return 4 * min(1.0, self.rank / side) * numel * 2 * (num_ranks - 1) / num_ranks

    def cost(self, numel: int, link: Link) -> float:
        codec_s = CODEC_S_PER_NUMBER_AND_RANK * self.rank * numel
        return link.seconds(self.sent_bytes(numel, link.num_ranks)) + codec_s

    def words(self) -> str:
        return f"rank {self.rank}, one factor a step, error feedback, vectors and {SMALL_EXACT}"

    def _shrinks(self, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2 or math.prod(shape) < SMALLEST_CODED:
            return False
        rows, cols = _sides(shape)
        return self.rank * (rows + cols) < rows * cols

    def _factors(self, matrices: Sequence[Piece], flat: Tensor, side: str) -> list[Tensor]:
        """The (rank, rows) or (rank, cols) views of ``flat``, for each of ``matrices``."""
        lengths = [_sides(piece.shape)[0 if side == "left" else 1] for piece in matrices]
        parts = flat.split([self.rank * length for length in lengths])
        return [part.view(self.rank, length) for part, length in zip(parts, lengths, strict=True)]


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _part(flat: Tensor, piece: Piece) -> Tensor:
    return flat[piece.offset : piece.offset + piece.numel]


def _matrix(flat: Tensor, piece: Piece) -> Tensor:
    return _part(flat, piece).view(_sides(piece.shape))


def _split(flat: Tensor, pieces: Sequence[Piece]) -> tuple[Tensor, ...]:
    return flat.split([piece.numel for piece in pieces])


def _ordered(sent: str, factor: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The two terms of the product ``L^T R``: (rows, rank) and (rank, cols)."""
    return (factor.t(), basis) if sent == "left" else (basis.t(), factor)


def _orthonormal(factor: Tensor) -> Tensor:
    """Rows (rank, length) with the span of ``factor``'s; Householder's QR gives orthonormal rows for any, zeros included."""
    return torch.linalg.qr(factor.t()).Q.t().contiguous()


def _drawn(bucket: Bucket, pieces: Sequence[Piece], rank: int, side: int) -> Tensor:
    """Random first factors, the same on all ranks and machines: only whole numbers are drawn, no vectorised logarithm."""
    drawn: list[Tensor] = []
    for piece in pieces:
        seed = zlib.crc32(f"{bucket.index} {side} {piece.name}".encode())
        generator = torch.Generator().manual_seed(seed)
        shape = (rank * _sides(piece.shape)[side],)
        drawn.append(torch.randint(-(1 << 20), 1 << 20, shape, generator=generator) / (1 << 20))
    none = torch.zeros(0)
    return torch.cat([none, *drawn]).to(bucket.flat.device, _work_dtype(bucket))


def _work_dtype(bucket: Bucket) -> torch.dtype:
    """float64 stays so, for what travels exact; halves are summed in float32."""
    return torch.promote_types(bucket.flat.dtype, torch.float32)
