"""Slurm's compact lists: ``n[01-03,7]`` names hosts, ``2(x3),1`` counts tasks a node. Pure functions."""

from __future__ import annotations

import re

from gradwire.errors import LaunchError

__all__ = ["expand_counts", "expand_hosts"]

MAX_HOSTS = 65536
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(node_list: str) -> list[str]:
    """The host names of a Slurm node list, in order.

    Raises LaunchError for a list that is empty, malformed or longer than 65,536 hosts.

    >>> expand_hosts("n[01-03,7],gpu5")
    ['n01', 'n02', 'n03', 'n7', 'gpu5']
    """
    items = _ITEM.findall(node_list)
    if not items or ",".join(items) != node_list:
        raise _bad_list(node_list)
    hosts: list[str] = []
    for item in items:
        hosts.extend(_expand_item(item, node_list))
        if len(hosts) > MAX_HOSTS:
            raise _bad_list(node_list)
    return hosts


def _expand_item(item: str, node_list: str) -> list[str]:
    match = _BRACKET.search(item)
    if match is None:
        return [item]
    hosts: list[str] = []
    for piece in match[1].split(","):
        for number in _expand_range(piece, node_list):
            hosts.extend(_expand_item(item[: match.start()] + number + item[match.end() :], node_list))
            if len(hosts) > MAX_HOSTS:
                raise _bad_list(node_list)
    return hosts


def _expand_range(piece: str, node_list: str) -> list[str]:
    first, dash, last = piece.partition("-")
    numbers = (first, last) if dash else (first,)
    if not all(re.fullmatch(r"[0-9]{1,18}", number) for number in numbers):
        raise _bad_list(node_list)
    if not dash:
        return [first]
    if not 0 <= int(last) - int(first) < MAX_HOSTS:
        raise _bad_list(node_list)
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _bad_list(node_list: str) -> LaunchError:
    return LaunchError(
        f"the Slurm node list {node_list[:200]!r} cannot be read; it should look like n[01-03,7],gpu5: "
        "set MASTER_ADDR and MASTER_PORT, RANK and WORLD_SIZE by hand"
    )


def expand_counts(tasks_per_node: str) -> list[int]:
    """Tasks on each node, from SLURM_STEP_TASKS_PER_NODE; empty if it cannot be read.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for piece in tasks_per_node.split(","):
        match = _COUNT.fullmatch(piece)
        if match is None or len(counts) + int(match[2] or 1) > MAX_HOSTS:
            return []
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts
