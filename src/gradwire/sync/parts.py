"""The parts of one distributed model, each made of the others' pieces."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn

from gradwire.comm.dtensor import is_parted, local_of, row_maker
from gradwire.comm.world import World
from gradwire.compress.exact import AllReduce
from gradwire.compress.hierarchical import Hierarchical
from gradwire.core.group import Group
from gradwire.core.mesh import AXES
from gradwire.core.microbatch import MicrobatchSource
from gradwire.core.names import plain_name
from gradwire.core.plan import Plan
from gradwire.core.policy import SyncPolicy
from gradwire.core.reducer import Link, Reducer
from gradwire.sync.autograd import GradientHooks, MakeHooks
from gradwire.sync.batchnorm import has_synchronised, refuse_single_samples, synchronise_batch_norm
from gradwire.sync.buffers import BufferExchange
from gradwire.sync.exchange import Exchange, Route
from gradwire.sync.gradients import GradientSync
from gradwire.sync.loading import Loading
from gradwire.sync.owned import Gatherer, Owned
from gradwire.sync.parameters import ParameterSync
from gradwire.sync.row_steps import OwnedSteps
from gradwire.sync.weighting import Weighting

NUM_LANES = 2
PROBE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Channels:
    """lanes: a group for each lane, of the ranks that read samples of their own; owners, across: its two axes (`Route`).

    buffers: the group that agrees on the model's buffers. everybody: all ranks of the mesh; None where the lanes reach them all.
    """

    lanes: tuple[Group, ...]
    owners: tuple[Group, ...]
    across: tuple[Group, ...]
    buffers: Group
    everybody: Group | None

    @property
    def names(self) -> list[str]:
        """Of all these groups."""
        groups = (*self.lanes, *self.owners, *self.across, self.buffers, self.everybody)
        return [group.name for group in groups if group is not None]


def open_channels(world: World, policy: SyncPolicy) -> Channels:
    """Two lanes, but one for NCCL, which keeps the wire busy by itself, and one for what must stay in order (``delay``).

    Where an exchange may still be on its way when the buffers are agreed, they have a group of their own.
    """
    serial = world.next_serial()
    num_lanes = 1 if world.num_readers == 1 or world.device.type == "cuda" or policy.delay else NUM_LANES
    lanes = tuple(world.group(channel=f"gradients{serial}.{lane}") for lane in range(num_lanes))
    apart = world.num_readers > 1 and (policy.delay or policy.late)
    return Channels(
        lanes=lanes,
        owners=tuple(world.group("shard", channel=f"rows{serial}.{lane}") for lane in range(num_lanes)),
        across=tuple(world.group("data", channel=f"copies{serial}.{lane}") for lane in range(num_lanes)),
        buffers=world.group(channel=f"buffers{serial}") if apart else lanes[0],
        everybody=world.group(*AXES, channel=f"agreement{serial}") if world.size > world.num_readers else None,
    )


class Parts:
    """What `distribute` puts together."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        channels: Channels,
        plan: Plan,
        policy: SyncPolicy,
        loader: MicrobatchSource | None,
        make_hooks: MakeHooks = GradientHooks,
    ) -> None:
        self.world = world
        self.plan = plan
        self.policy = policy
        self._reducer = _on_levels(policy.reducer or AllReduce(), channels.lanes[0])
        self._routes = [
            Route(lane=world.lane(group.name), group=group, owners=owners, across=across)
            for group, owners, across in zip(channels.lanes, channels.owners, channels.across, strict=True)
        ]
        rows_apart = world.mesh.length(("shard",)) > 1 and plan.sharding != "optimizer"
        self.loading = Loading(model.modules() if world.size > 1 else (), alike=not rows_apart)
        self.weighting = Weighting(world, loader, self.loading, spans_batches=policy.spans_batches)
        self._make_hooks = make_hooks
        self._everybody = channels.everybody
        self.group_names = channels.names
        new_norms = plan.batch_norm == "sync" and world.num_readers > 1
        if new_norms or has_synchronised(model):
            group = world.group(channel=f"batchnorm{world.next_serial()}")
            self.group_names.append(group.name)
            synchronise_batch_norm(model, group, self.weighting, new=new_norms)
        self.guards = refuse_single_samples(model) if world.num_readers > 1 and plan.batch_norm == "local" else []
        named = [(plain_name(name), param) for name, param in model.named_parameters()]
        self.trained = [(name, param) for name, param in named if param.requires_grad]
        self.frozen = [(name, param) for name, param in named if not param.requires_grad]
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
        self._sparse = frozenset(index for index, (_, param) in enumerate(self.trained) if id(param) in tables)
        self._owned = _owned(world, plan)
        self.buffers = BufferExchange(model, channels.buffers, skip_statistics=plan.batch_norm == "sync")

    def gradients(self) -> GradientSync:
        """Who agrees on gradients."""
        return GradientSync(
            self.trained,
            world=self.world,
            plan=self.plan,
            policy=self.policy,
            reducer=self._reducer,
            exchange=Exchange(self._routes, self.world.device, delay=self.policy.delay, everybody=self._everybody),
            weighting=self.weighting,
            buffers=self.buffers,
            sparse=self._sparse,
            owned=self._owned,
            make_hooks=self._make_hooks,
            link=_measured_link(self._routes[0].group, self.world.device),
        )

    def owned_steps(self) -> OwnedSteps | None:
        """Who lets optimizers step this rank's parts, where ranks have or own parts."""
        if self._owned.num_ranks == 1 and not any(is_parted(param) for _, param in self.trained):
            return None
        dense = [pair for index, pair in enumerate(self.trained) if index not in self._sparse]
        return OwnedSteps(dense, self._owned, Gatherer(self._owned, self._routes))

    def parameters(self) -> ParameterSync | None:
        """Who agrees on parameters, where the policy does."""
        if self.policy.outer is None:
            return None
        exchanges = [Exchange(self._routes, self.world.device) for _ in range(self.policy.num_fragments)]
        parameters = ParameterSync(
            [(name, local_of(param)) for name, param in self.trained],
            exchanges,
            reducer=self._reducer,
            outer=self.policy.outer,
            late=self.policy.late,
            loading=self.loading,
            bucket_bytes=self.plan.bucket_bytes,
        )
        self.loading.on_load = lambda params: parameters.loaded([local_of(param) for param in params])
        return parameters


def _owned(world: World, plan: Plan) -> Owned:
    """Rows of the optimizer's state, where the plan parts that alone."""
    num_ranks = world.mesh.length(("shard",))
    if plan.sharding != "optimizer" or num_ranks == 1:
        return Owned()
    return Owned(
        rank=world.mesh.coordinate(world.rank)["shard"],
        num_ranks=num_ranks,
        make=row_maker(world.torch_mesh()),
    )


def _on_levels(reducer: Reducer, group: Group) -> Reducer:
    """Exact inside each host, ``reducer`` between hosts, where hosts have several ranks each."""
    return reducer if group.levels is None else Hierarchical(outer=reducer)


def _measured_link(group: Group, device: torch.device) -> Link:
    """The group's link: the median of ten 8-byte all-reduces, the better of two of 1 MiB."""
    if group.size == 1:
        return Link(latency_s=0.0, bandwidth_bytes_per_s=math.inf, num_ranks=1)
    latency_s = median(_all_reduce_s(group, torch.zeros(1, dtype=torch.float64, device=device)) for _ in range(10))
    probe = torch.zeros(PROBE_BYTES // 4, device=device)
    seconds = min(_all_reduce_s(group, probe) for _ in range(2)) - latency_s
    unit = Link(latency_s=latency_s, bandwidth_bytes_per_s=1.0, num_ranks=group.size)
    return replace(unit, bandwidth_bytes_per_s=unit.ring_factor * PROBE_BYTES / max(seconds, 1e-6))


def _all_reduce_s(group: Group, probe: Tensor) -> float:
    began_s = time.monotonic()
    float(group.all_reduce(probe)[0])
    return time.monotonic() - began_s
