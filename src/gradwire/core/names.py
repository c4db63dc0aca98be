"""Names of parameters, as the user knows them."""

from __future__ import annotations


def plain_name(name: str) -> str:
    """Without what ``torch.compile`` puts in front.

    >>> plain_name("_orig_mod.head.weight")
    'head.weight'
    """
    return name.replace("_orig_mod.", "")
