"""Small texts over a group of tensors: facts to compare, names to report."""

from __future__ import annotations

import torch

from gradwire.core.group import Group


def all_gather_text(group: Group, text: str, device: torch.device) -> list[str]:
    """Every rank's ``text``, in rank order. Two collectives; the second as long as the longest text.

    Never evaluated or unpickled: what comes back is text.
    """
    data = text.encode()
    lengths = group.all_gather(torch.tensor([len(data)], dtype=torch.int64, device=device)).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = group.all_gather(padded).cpu()
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]
