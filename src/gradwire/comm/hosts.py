"""Which ranks share a host, and the groups that follow from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gradwire.comm.gloo import SoloGroup, TorchGroup
from gradwire.comm.shared import open_shared
from gradwire.comm.text import all_gather_text
from gradwire.core.group import Group, Levels

Hosts = tuple[tuple[int, ...], ...]
Open = Callable[[str, Sequence[int]], TorchGroup | SoloGroup]  # name, the ranks of the group in the job


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank says it is: the launcher's number of its host, the host's name, its number among ``local_size``."""

    node_rank: int
    host: str
    local_rank: int
    local_size: int


def hosts_of(places: Sequence[Place]) -> Hosts:
    """The ranks of every host, in the order of their first ranks. Pure.

    A host is a node_rank under one host name; not a kernel, because the lab's hosts share one. It is believed only if its
    ranks are numbered 0 to local_size - 1: launchers that set RANK alone give every rank node_rank 0, and those count
    as a host each.

    >>> here = dict(node_rank=0, host="a", local_size=2)
    >>> hosts_of([Place(local_rank=0, **here), Place(local_rank=1, **here)])
    ((0, 1),)
    >>> hosts_of([Place(local_rank=0, **here), Place(local_rank=0, **here)])
    ((0,), (1,))
    """
    claimed: dict[tuple[int, str], list[int]] = {}
    for rank, place in enumerate(places):
        claimed.setdefault((place.node_rank, place.host), []).append(rank)
    hosts: list[tuple[int, ...]] = []
    for ranks in claimed.values():
        numbers = sorted(places[rank].local_rank for rank in ranks)
        sure = numbers == list(range(len(ranks))) and all(places[rank].local_size == len(ranks) for rank in ranks)
        hosts += [tuple(ranks)] if sure else [(rank,) for rank in ranks]
    return tuple(sorted(hosts))


def within(hosts: Hosts, ranks: Sequence[int]) -> Hosts:
    """The hosts of some ranks, by their places among them. Pure.

    >>> within(((0, 1), (2, 3)), (1, 2, 3))
    ((0,), (1, 2))
    """
    found = (tuple(ranks.index(rank) for rank in host if rank in ranks) for host in hosts)
    return tuple(sorted(host for host in found if host))


def find_hosts(group: Group, place: Place) -> Hosts:
    """`hosts_of` all ranks of the job, which ``group`` holds; every rank calls it. Two collectives."""
    mine = json.dumps([place.node_rank, place.host, place.local_rank, place.local_size])
    said = [json.loads(text) for text in all_gather_text(group, mine, torch.device("cpu"))]
    return hosts_of(
        [Place(node_rank=node, host=host, local_rank=local, local_size=size) for node, host, local, size in said]
    )


def open_on_hosts(
    group: TorchGroup | SoloGroup,
    hosts: Hosts,
    *,
    open_inner: Open,
    dress: Callable[[Group, Sequence[int]], Group],
    timeout_s: float,
) -> Group:
    """``group`` as fast as its hosts allow; every rank of it calls it.

    hosts: by places in the group. All on one host: shared memory. Several hosts, some with several ranks: ``group``
    itself, with ``levels``. Otherwise ``group``. open_inner: opens a group of some ranks, by their places in this one.
    dress: wraps a level, of these places, in what the caller watches it with.
    """
    if len(hosts) == 1:
        return open_shared(group, timeout_s=timeout_s)
    if len(hosts) == group.size:
        return group
    mine = next(number for number, ranks in enumerate(hosts) if group.rank in ranks)
    ranks = hosts[mine]
    inside: Group = open_inner(f"{group.name}/host{mine}", ranks)
    if inside.size > 1:
        inside = open_shared(inside, timeout_s=timeout_s)
    between: Group | None = None
    if ranks[0] == group.rank:
        firsts = tuple(each[0] for each in hosts)
        between = dress(open_inner(f"{group.name}/hosts", firsts), firsts)
    group.levels = Levels(inside=dress(inside, ranks), between=between)
    return group
