"""`GradientSync`: autograd's hooks -> buckets -> lane -> the agreed gradient in ``.grad`` when backward returns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradwire.comm.world import World
from gradwire.compress.exact import AllReduce
from gradwire.core.plan import Plan
from gradwire.core.policy import SyncPolicy
from gradwire.core.reducer import Link, Reducer
from gradwire.errors import UsageError
from gradwire.sync.autograd import at_end_of_backward
from gradwire.sync.buckets import START_BUCKET_BYTES, ParamSpec, best_bucket_bytes, lay_out
from gradwire.sync.buffers import BufferExchange
from gradwire.sync.exchange import Exchange
from gradwire.sync.opening import Opening
from gradwire.sync.weighting import Weight, Weighting

Mode = Literal["sync", "withhold", "local", "alone"]
MEASURED_ROUND = 3  # the exchange after which the bucket size follows the measured backward time


class GradientSync:
    """One model's gradients, agreed over the data axis.

    A *round* is one backward: ``_begin`` at the first hook, ``_finish`` from the engine's end-of-backward callback. Its mode:
    ``sync`` exchanges; ``withhold`` keeps a window's earlier micro-batches in the buckets (``.grad`` is None);
    ``local`` leaves this rank's own gradient in ``.grad`` (``gw.no_sync``); ``alone`` is a world of one, where autograd's
    own tensors stay untouched.

    What a parameter may carry into a round: an *agreed* gradient of an earlier backward (held aside and added back), or
    a *local* one from ``no_sync`` (part of this rank's contribution).
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        *,
        world: World,
        plan: Plan,
        exchange: Exchange,
        policy: SyncPolicy,
        weighting: Weighting,
        buffers: BufferExchange,
        sparse: frozenset[int],
        link: Link,
    ) -> None:
        self._names = [name for name, _ in params]
        self._params = [param for _, param in params]
        self._world = world
        self._plan = plan
        self._exchange = exchange
        self._policy = policy
        self._reducer = policy.reducer or AllReduce()
        self._weighting = weighting
        self._buffers = buffers
        self._sparse = sparse
        self._link = link
        self._mode: Mode | None = None
        self._scale = 1.0
        self._began_s = 0.0
        self._window_count = 0.0
        self._relative = False
        self._unit = 0.0
        self._filled: set[int] = set()
        self._local: set[int] = set()
        self._arrived: set[int] = set()
        self._held: dict[int, Tensor] = {}
        self._pending: dict[int, Tensor] = {}
        self._rows: dict[int, Tensor] = {}
        self._finite: list[tuple[str, Tensor]] = []
        self._window_closed = False
        self.rounds = 0
        self.nonfinite: tuple[str, ...] = ()
        self._build(plan.bucket_bytes or START_BUCKET_BYTES)
        self._nodes: list[Node] = []
        self._handles: list[RemovableHandle] = []
        for index, param in enumerate(self._params):
            self._hook(index, param)

    def _hook(self, index: int, param: nn.Parameter) -> None:
        # The node's pre-hook, unlike the tensor's, does not fire for torch.autograd.grad. The node is kept alive here:
        # autograd only holds it weakly and would make a new one without the hook.
        node = get_gradient_edge(param).node
        self._nodes.append(node)
        self._handles.append(node.register_prehook(lambda _: self._before(index)))
        self._handles.append(param.register_post_accumulate_grad_hook(lambda _: self._after(index)))

    def close(self) -> None:
        """Remove every hook; the model is the user's again."""
        for handle in self._handles:
            handle.remove()

    def _build(self, bucket_bytes: int) -> None:
        dense = [
            _spec_of(i, name, p, self._reducer)
            for i, (name, p) in enumerate(zip(self._names, self._params, strict=True))
            if i not in self._sparse
        ]
        self._layout = lay_out(dense, bucket_bytes)
        self._bucket_of = {slot.param.index: b for b, spec in enumerate(self._layout) for slot in spec.slots}
        self._views: dict[int, Tensor] = {}
        if self._world.size == 1 and self._plan.accumulate == 1:
            return  # buckets are made when a window first needs them
        self._allocate()

    def _allocate(self) -> None:
        self._exchange.build(self._layout)
        for b, spec in enumerate(self._layout):
            for slot in spec.slots:
                index = slot.param.index
                flat = self._exchange.flat(b)[slot.offset : slot.offset + slot.param.numel]
                self._views[index] = flat.view(self._params[index].shape)

    # --- a round -----------------------------------------------------------------------------------------------------

    def _begin(self, *, idle: bool = False) -> None:
        self.rounds += 1
        self.nonfinite = ()
        weight = self._weighting.begin()
        self._began_s = time.monotonic()
        if self._window_closed and weight.first:
            self._window_count, self._unit, self._relative, self._window_closed = 0.0, 0.0, False, False
        if not idle:
            self._weigh(weight)
        self._mode = self._choose_mode(weight)
        if self._mode == "alone":
            return
        if not self._views and self._layout:
            self._allocate()
        self._arrived.clear()
        self._waiting = [len(spec.slots) for spec in self._layout]
        self._next_bucket = 0
        if self._mode == "sync":
            self._exchange.open(self._opening())
            if self._world.size > 1:
                self._buffers.collect(self._window_count)
                self._exchange.buffers(self._buffers, self._window_count)

    def _opening(self) -> Opening:
        micro = self._weighting.microbatch
        return Opening(count=self._window_count, unit=self._unit or 1.0, explicit=self._relative, microbatch=micro)

    def _choose_mode(self, weight: Weight) -> Mode:
        if self._world.local_only:
            return "local"
        turn = self._policy.at_backward(self._weighting.microbatch, 0)
        if turn == "keep":
            return "withhold"
        whole = self._scale == 1.0 and (not self._relative or self._window_count == weight.count)
        alone = self._world.size == 1 and whole and not self._filled and not self._local
        return "alone" if alone else "sync"

    def _weigh(self, weight: Weight) -> None:
        """Set the factor of this backward's gradients.

        With a known total it is n_r/N. Otherwise gradients are kept relative to the window's first count (never large,
        for half precision's sake) and the exchange divides by the total.
        """
        count, total = weight.count, weight.total
        explicit = total is None
        if self._window_count and count and explicit is not self._relative:
            raise UsageError(
                "gw.weight was called for some micro-batches of a window only; call it before each backward"
            )
        if count or not self._window_count:
            self._relative = explicit
        self._window_count += count if weight.first else 0.0
        if total is not None and not self._relative:
            self._unit = total
        elif not self._unit:
            self._unit = count
        self._scale = count / self._unit if self._unit else 0.0

    @property
    def _local_unit(self) -> float:
        """Under ``no_sync``, ``.grad`` holds scale x this, so that equal weights leave autograd's own values (as DDP)."""
        return 1.0 if self._relative else float(self._world.size)

    def _before(self, index: int) -> None:
        if self._mode is None:
            at_end_of_backward(self._finish)
            self._begin()
        if self._mode != "alone":
            self._set_aside(index)

    def _set_aside(self, index: int) -> None:
        param = self._params[index]
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if index in self._local:
            self._pending[index] = grad
        else:
            view = self._views.get(index)
            in_bucket = view is not None and not grad.is_sparse and grad.data_ptr() == view.data_ptr()
            self._held[index] = grad.clone() if in_bucket else grad

    def _after(self, index: int) -> None:
        if self._mode == "alone":
            return
        param = self._params[index]
        fresh, param.grad = param.grad, None
        if fresh is not None and self._mode == "local":
            self._keep_local(index, fresh)
        elif fresh is not None:
            self._absorb(index, fresh.detach(), self._scale)
        if self._mode == "sync":
            self._arrive(index)

    def _keep_local(self, index: int, fresh: Tensor) -> None:
        scale = self._scale * self._local_unit
        kept = self._pending.pop(index, None)
        if scale and scale != 1.0:
            fresh.mul_(scale)
        if scale:
            kept = fresh if kept is None else kept.add_(fresh)
        if kept is not None:
            self._params[index].grad = kept
            self._local.add(index)

    def _absorb(self, index: int, grad: Tensor, scale: float) -> None:
        """Add ``scale`` x ``grad`` to this rank's contribution; a weight of 0 adds nothing, not even a NaN."""
        if not scale:
            return
        if index in self._sparse:
            rows = grad * scale if grad.is_sparse else (grad * scale).to_sparse(1)
            self._rows[index] = self._rows[index] + rows if index in self._rows else rows
            return
        view = self._views[index]
        dense = grad.to_dense() if grad.is_sparse else grad
        if index in self._filled:
            view.add_(dense, alpha=scale)
        else:
            torch.mul(dense, scale, out=view)
            self._filled.add(index)

    def _arrive(self, index: int) -> None:
        pending = self._pending.pop(index, None)
        if pending is not None:
            self._absorb(index, pending, 1.0 / self._local_unit)
        self._arrived.add(index)
        if index in self._sparse:
            return
        if index in self._filled:
            self._finite.append((self._names[index], _is_finite(self._views[index])))
        else:
            self._views[index].zero_()
        self._waiting[self._bucket_of[index]] -= 1
        while self._next_bucket < len(self._waiting) and not self._waiting[self._next_bucket]:
            self._exchange.bucket(self._next_bucket)
            self._next_bucket += 1

    def _finish(self) -> None:
        mode, self._mode = self._mode, None
        self._weighting.end()
        backward_s = time.monotonic() - self._began_s
        micro = self._weighting.microbatch
        exchange_s = self._exchange_rest(backward_s) if mode == "sync" else 0.0
        if mode in ("sync", "alone"):
            self._window_closed = True
        samples = (micro.global_samples or 0) if micro else 0
        self._world.clock.trained(exchange_s=exchange_s, samples=samples)

    def _exchange_rest(self, backward_s: float) -> float:
        for index in range(len(self._params)):
            if index not in self._arrived:
                self._set_aside(index)
                self._arrive(index)
        present = [index in self._filled or index in self._rows for index in range(len(self._params))]
        for index in sorted(self._sparse):
            rows = self._rows.pop(index, None)
            if rows is not None:
                self._finite.append((self._names[index], _is_finite(rows.coalesce().values())))
            self._exchange.rows(index, rows, self._params[index])
        finite, self._finite = self._finite, []
        blocked_s = time.monotonic()
        agreement = self._exchange.agree(present, [name for name, fine in finite if not fine])
        blocked_s = time.monotonic() - blocked_s
        self.nonfinite = agreement.nonfinite
        self._deliver(agreement.used)
        if self.rounds == MEASURED_ROUND:
            self._follow_measurement(backward_s)
        return blocked_s

    def _deliver(self, used: tuple[bool, ...]) -> None:
        for index, param in enumerate(self._params):
            held = self._held.pop(index, None)
            agreed = None
            if used[index]:
                agreed = self._exchange.sparse.pop(index) if index in self._sparse else self._views[index]
                if held is not None:
                    agreed = agreed + held if agreed.is_sparse else agreed.add_(held)
            param.grad = held if agreed is None else agreed
        self._filled.clear()
        self._local.clear()
        if self._world.size > 1:
            self._buffers.apply()

    def _follow_measurement(self, backward_s: float) -> None:
        """Once, all ranks alike: choose the bucket size from rank 0's link and backward time."""
        if self._plan.bucket_bytes or self._world.size == 1 or not self._exchange.stateless:
            return
        mine = [self._link.latency_s, self._link.bandwidth_bytes_per_s, backward_s]
        latency_s, bandwidth, backward_s = self._exchange.measure(mine)
        link = Link(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, num_ranks=self._world.size)
        total = sum(param.nbytes for index, param in enumerate(self._params) if index not in self._sparse)
        self._build(best_bucket_bytes(total, link, backward_s=backward_s))

    # --- the optimizer -----------------------------------------------------------------------------------------------

    def take_part(self) -> None:
        """The optimizer steps although this rank's loss touched no parameter: join the others' exchange with nothing."""
        self._begin(idle=True)
        self._finish()

    @property
    def count(self) -> float:
        """What this rank counts in the window that is open or was closed last."""
        return self._window_count

    def stepped(self) -> None:
        """The optimizer steps now."""
        self._weighting.settle()

    def refuse_new_parameters(self, frozen: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Parameters unfrozen after ``distribute`` would silently go their own way on each rank."""
        for name, param in frozen:
            if param.requires_grad:
                raise UsageError(
                    f"{name} was frozen when gw.distribute was called and is trained now; call gw.distribute again"
                )


def _spec_of(index: int, name: str, param: nn.Parameter, reducer: Reducer) -> ParamSpec:
    shape = tuple(param.shape)
    chosen = reducer.choose(name, shape)
    return ParamSpec(index=index, name=name, shape=shape, dtype=param.dtype, device=param.device, reducer=chosen)


def _is_finite(values: Tensor) -> Tensor:
    """Whether no value is NaN or infinite: a bool tensor (), not waited for. The sum tells, 60 times faster than a look at each.

    Half precision is summed in float32; values so large that their sum overflows count as infinite.
    """
    total = values.sum(dtype=torch.float32) if values.dtype in (torch.float16, torch.bfloat16) else values.sum()
    return torch.isfinite(total)
