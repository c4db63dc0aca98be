"""`Compressor`: a lossy code for rows of float32 numbers. Pure: no I/O, no state of its own."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Compressor(Protocol):
    """A frozen dataclass; what it lost comes back as a residual that the caller keeps and gives again.

    Rows are independent: each is one message to one rank. Zero in, zero out, and never NaN out of finite in.
    """

    @property
    def phases(self) -> int:
        """2: a sum of decoded rows may be encoded again, so an exchange is an all-to-all of shares and an all-gather.

        1: every rank sends its whole message to every other one.
        """
        ...

    def wire_bytes(self, numel: int) -> int:
        """Bytes of the message for a row of ``numel`` numbers."""
        ...

    def encode(self, values: Tensor, residual: Tensor | None, *, key: int) -> tuple[Tensor, Tensor | None]:
        """Encode ``values + residual``; neither is changed.

        values: (rows, numel) float32. residual: the same shape, or None for no error feedback.
        key: equal on all ranks, another one for each bucket and step: the seed of whatever is drawn by lot.
        Returns the messages (rows, wire_bytes(numel)) uint8 and what they lost (None if residual is None).
        """
        ...

    def decode(self, messages: Tensor, numel: int, *, key: int) -> Tensor:
        """(rows, wire_bytes(numel)) uint8 -> (rows, numel) float32, the same bits on every rank."""
        ...

    def decode_sum(self, messages: Tensor, out: Tensor, *, key: int) -> None:
        """``out``, (numel,) float32, becomes the sum of the decoded rows, added in row order; `add_rows` will do."""
        ...

    def words(self) -> str:
        """A few words for people: ``4 bits in blocks of 256``."""
        ...


def add_rows(codec: Compressor, messages: Tensor, out: Tensor, *, key: int) -> None:
    """What `Compressor.decode_sum` must give, by ``decode``: one row at a time, as a row fits the cache and all do not."""
    if not out.numel():
        return
    out.copy_(codec.decode(messages[:1], out.numel(), key=key)[0])
    for row in range(1, len(messages)):
        out += codec.decode(messages[row : row + 1], out.numel(), key=key)[0]
