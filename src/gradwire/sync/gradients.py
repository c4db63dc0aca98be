"""`GradientSync`: autograd's hooks -> buckets -> lane -> the agreed gradient in ``.grad`` when backward returns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from torch import Tensor, nn

from gradwire.comm.dtensor import laid_as, local_of, part_of
from gradwire.comm.world import World
from gradwire.core.autograd import at_end_of_backward
from gradwire.core.plan import Plan
from gradwire.core.policy import SyncPolicy
from gradwire.core.reducer import Link, Reducer
from gradwire.errors import UsageError
from gradwire.sync.autograd import MakeHooks
from gradwire.sync.buckets import START_BUCKET_BYTES, lay_out, nonfinite_grads, spec_of
from gradwire.sync.buffers import BufferExchange
from gradwire.sync.carried import Carried
from gradwire.sync.contribution import Contribution
from gradwire.sync.exchange import Agreement, Exchange
from gradwire.sync.kept import GradientState, PendingState, WindowState
from gradwire.sync.lending import Lending
from gradwire.sync.owned import Owned
from gradwire.sync.places import Place, places_of
from gradwire.sync.sizing import Sizing
from gradwire.sync.weighting import Weight, Weighting, Window

Mode = Literal["sync", "withhold", "own", "local", "alone"]


class GradientSync:
    """One model's gradients, agreed over the data axis.

    A *round* is one backward: ``_begin`` at the first hook, ``_finish`` from the engine's end-of-backward callback. Its mode:
    ``sync`` exchanges; ``withhold`` keeps a window's earlier micro-batches in the buckets (``.grad`` is None);
    ``own`` ends a window with this rank's own mean in ``.grad`` (local steps); ``alone`` is the same where autograd's own
    tensors are that mean already and stay untouched (also: a world of one); ``local`` leaves this rank's own gradient in
    ``.grad`` for a later exchange (``gw.no_sync``).

    Where ranks own rows of the optimizer's state (``owned``) buckets are laid out by rank, and ``.grad`` has this rank's rows.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        *,
        world: World,
        plan: Plan,
        exchange: Exchange,
        policy: SyncPolicy,
        reducer: Reducer,
        weighting: Weighting,
        buffers: BufferExchange,
        sparse: frozenset[int],
        link: Link,
        owned: Owned,
        make_hooks: MakeHooks,
    ) -> None:
        self._names = [name for name, _ in params]
        self._params = [param for _, param in params]
        self._world = world
        self._plan = plan
        self._exchange = exchange
        self._policy = policy
        self._reducer = reducer
        self._weighting = weighting
        self._buffers = buffers
        self._sparse = sparse
        self._owned = owned
        self._mode: Mode | None = None
        self._mine = Contribution(self._names, sparse)
        self._sealed: deque[tuple[Callable[[], Agreement], int]] = deque()
        self._window_ended = False
        self._began_s = 0.0
        self._carried = Carried(self._params)
        self._arrived: set[int] = set()
        self._lending = Lending()
        self._sizing = Sizing(
            exchange,
            reducer,
            link,
            total_bytes=sum(local_of(param).nbytes for index, param in enumerate(self._params) if index not in sparse),
            fixed=bool(plan.bucket_bytes or world.num_readers == 1 or policy.delay),
        )
        self.at_begin: Callable[[], None] | None = None
        self.agreed = False
        self.rounds = self.joined = 0
        self.steps = 0
        self.nonfinite: tuple[str, ...] = ()
        self._hooks = make_hooks(self._params, before=self._before, after=self._after, scale=lambda: self._window.scale)
        self._window = Window(common_unit=bool(self._hooks.weighed))
        self._build(plan.bucket_bytes or START_BUCKET_BYTES)

    def close(self) -> None:
        """The model is the user's again; nobody holds anybody in a circle."""
        self._hooks.close()
        self.at_begin = None

    def _build(self, bucket_bytes: int) -> None:
        dense = [
            spec_of(i, name, p, self._reducer, num_parts=self._owned.num_ranks, summed=i in self._hooks.weighed)
            for i, (name, p) in enumerate(zip(self._names, self._params, strict=True))
            if i not in self._sparse
        ]
        self._owned_rows = {spec.index for spec in dense if spec.num_parts > 1}
        self._layout = lay_out(dense, bucket_bytes)
        self._bucket_of = {slot.param.index: b for b, spec in enumerate(self._layout) for slot in spec.slots}
        self.bucket_bytes = bucket_bytes
        self._sets: list[dict[int, Place]] = []
        if self._world.size > 1:
            self._allocate()  # alone, buckets are made when a window first needs them

    def _allocate(self) -> None:
        self._exchange.build(self._layout)
        numbers, rank = range(self._exchange.num_sets), self._owned.rank
        self._sets = [places_of(self._layout, self._exchange.flats(number), rank=rank) for number in numbers]
        self._mine.places = self._sets[self._exchange.current]

    # --- a round -----------------------------------------------------------------------------------------------------

    def _begin(self, *, idle: bool = False) -> None:
        if self.at_begin and not idle:
            self.at_begin()
        self.rounds += 1
        self.nonfinite = ()
        weight = self._weighting.begin()
        self._began_s = time.monotonic()
        self._window.begin(weight, idle=idle)
        self._mode = self._choose_mode(weight)
        if self._mode == "alone":
            return
        self._lending.call_in(self._params)
        if self._mode == "sync" and self._sizing.wanted is not None:
            self._rebuild(self._sizing.wanted)
        if not self._sets:
            self._allocate()
        self._mine.places = self._sets[self._exchange.current]
        self._arrived.clear()
        self._waiting = [len(spec.slots) for spec in self._layout]
        self._next_bucket = 0
        if self._mode == "sync":
            self._exchange.open(self._weighting.opening(self._window))
            if self._world.size > 1:
                self._buffers.collect(self._window.count)
                if not self._policy.delay:
                    self._exchange.buffers(self._buffers, self._window.count)

    def _choose_mode(self, weight: Weight) -> Mode:
        if self._world.local_only:
            return "local"
        turn = self._policy.at_backward(self._weighting.microbatch, self.steps)
        if turn == "keep":
            return "withhold"
        untouched = self._mine.empty and self._carried.no_local
        if turn == "own":
            return "alone" if untouched and self._window.count == weight.count > 0 else "own"
        whole = self._window.scale == 1.0 and (not self._window.relative or self._window.count == weight.count)
        return "alone" if self._world.size == 1 and whole and untouched else "sync"

    def _before(self, index: int) -> None:
        if self._mode is None:
            at_end_of_backward(self._finish)
            self._begin()
        if self._mode == "sync" and index in self._arrived:
            self._refuse_second(index)
        if self._mode != "alone":
            self._carried.set_aside(index, self._mine.places.get(index))

    def _after(self, index: int) -> None:
        if self._mode == "alone":
            return
        param = self._params[index]
        fresh, param.grad = param.grad, None
        if fresh is not None:
            fresh = laid_as(fresh.detach(), param)
        if fresh is not None and self._mode == "local":
            unit = self._window.local_unit(self._world.num_readers)
            scale = 1.0 if index in self._hooks.weighed else self._window.scale
            self._carried.keep_local(index, fresh, scale * unit)
        elif fresh is not None:
            self._mine.add(index, local_of(fresh), 1.0 if index in self._hooks.weighed else self._window.scale)
        if self._mode in ("sync", "own"):
            self._arrive(index, send=self._mode == "sync")

    def _arrive(self, index: int, *, send: bool) -> None:
        pending = self._carried.take_pending(index)
        if pending is not None:
            self._mine.add(index, local_of(pending), 1.0 / self._window.local_unit(self._world.num_readers))
        again = index in self._arrived
        self._arrived.add(index)
        self._mine.complete(index)
        if index in self._sparse or not send or again:
            return
        self._waiting[self._bucket_of[index]] -= 1
        while self._next_bucket < len(self._waiting) and not self._waiting[self._next_bucket]:
            self._exchange.bucket(self._next_bucket)
            self._next_bucket += 1

    def _finish(self) -> None:
        self._hooks.settle()
        mode = self._end_round()
        backward_s = time.monotonic() - self._began_s
        micro = self._weighting.microbatch
        exchange_s = self._exchange_rest(backward_s) if mode == "sync" else 0.0
        if mode == "own":
            self._deliver_own()
        if mode in ("own", "alone") and self._world.size > 1:  # a local step: the others need not know
            bad = nonfinite_grads(self._names, self._params)
            self.nonfinite = tuple(f"rank {self._world.rank}: {name}" for name in bad)
        samples = (micro.global_samples or 0) if micro else 0
        self._world.clock.trained(exchange_s=exchange_s, samples=samples)

    def _end_round(self) -> Mode | None:
        mode, self._mode = self._mode, None
        self._weighting.end()
        micro = self._weighting.microbatch
        self.agreed = mode == "sync"
        self.joined += mode != "local"
        self._window.closed |= mode in ("sync", "own", "alone")
        self._window_ended |= micro is None or micro.last
        return mode

    def abandon(self) -> None:
        """The backward that runs ended in an exception which the script caught: all ranks skip the whole window.

        The exchange that it opened, or that its window comes to, is brought to its end, so that the others do not wait for
        ever. A backward of this rank alone leaves what plain PyTorch leaves.
        """
        mode = self._end_round()
        self._hooks.abandon()
        self._carried.drop()
        if mode in ("sync", "withhold"):
            self._mine.fail("backward raised an exception")
        if mode == "sync":
            self._exchange_rest(0.0)
        elif mode == "own":
            self._mine.clear()
        for param in self._params if mode in ("sync", "withhold", "own") else ():
            param.grad = None

    def _refuse_second(self, index: int) -> None:
        """A second gradient in one backward is added as long as the first has not been sent."""
        if index not in self._sparse and self._bucket_of[index] < self._next_bucket:
            raise UsageError(
                f"{self._names[index]} got a second gradient in one backward after the first was sent. For a module inside "
                "two reentrant checkpoints: torch.utils.checkpoint.checkpoint(..., use_reentrant=False). Or an earlier "
                "backward ended in an exception that was caught: give gw.distribute the loader, then that batch is skipped"
            )

    def _exchange_rest(self, backward_s: float) -> float:
        self._arrive_rest(send=True)
        for index in sorted(self._sparse):
            self._exchange.rows(index, self._mine.rows(index), self._params[index])
        filled = self._exchange.current
        self._sealed.append((self._exchange.seal(self._mine.present(), self._mine.bad()), filled))
        blocked_s = self._collect()
        self._sizing.exchanged(backward_s)
        return blocked_s

    def _arrive_rest(self, *, send: bool) -> None:
        for index in range(len(self._params)):
            if index not in self._arrived:
                self._carried.set_aside(index, self._mine.places.get(index))
                self._arrive(index, send=send)

    def _collect(self) -> float:
        """Put what was agreed ``delay`` exchanges ago into ``.grad``; returns the seconds that this thread was blocked."""
        began_s = time.monotonic()
        if self._policy.delay and self._world.size > 1:
            self._buffers.exchange(self._window.count)
        agreed: dict[int, Tensor] = {}
        if len(self._sealed) > self._policy.delay:
            wait, filled = self._sealed.popleft()
            agreement = wait()
            self.nonfinite = agreement.nonfinite
            places, rows = self._sets[filled], agreement.rows
            used = [index for index, anybody in enumerate(agreement.used) if anybody]
            agreed = {index: rows[index] if index in rows else places[index].own for index in used}
        blocked_s = time.monotonic() - began_s
        self._deliver(agreed)
        if self._world.size > 1:
            self._buffers.apply()
        return blocked_s

    def _deliver(self, agreed: Mapping[int, Tensor]) -> None:
        for index, param in enumerate(self._params):
            fresh = None if index not in agreed else self._part(index, agreed[index])
            grad = self._carried.with_held(index, fresh)
            if grad is not None and fresh is not None and not grad.is_sparse:
                grad = self._lending.lend(grad)
            param.grad = grad
        self._mine.clear()
        self._carried.delivered()

    def _part(self, index: int, agreed: Tensor) -> Tensor:
        """What was agreed, as the parameter's gradient is seen by the user."""
        if index in self._owned_rows:
            return self._owned.as_rows(agreed, self._params[index])
        return part_of(agreed, self._params[index])

    def _deliver_own(self) -> None:
        """The window's own mean, from what its micro-batches left in the buckets."""
        self._arrive_rest(send=False)
        self._deliver(self._mine.own_mean(self._window.share))

    def _rebuild(self, bucket_bytes: int) -> None:
        """Once the step has used the old buckets' gradients, so that old and new ones never both take memory."""
        self._sizing.wanted = None
        kept = self._mine.take_out()
        self._sets.clear()
        self._exchange.build(())
        self._build(bucket_bytes)
        self._mine.put_back(kept)

    # --- kept --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> GradientState:
        """What later steps depend on; waits for what is on its way. Only between steps, on all ranks."""
        pending: list[PendingState] = []
        for place, (wait, filled) in enumerate(self._sealed):
            agreement = wait()
            self._sealed[place] = (lambda told=agreement: told, filled)
            flats = [flat.clone() for flat in self._exchange.flats(filled)]
            pending.append(PendingState(used=list(agreement.used), rows=dict(agreement.rows), flats=flats))
        return GradientState(
            steps=self.steps,
            exchanges=self._sizing.exchanges,
            bucket_bytes=self.bucket_bytes,
            exchange_step=self._exchange.step,
            reducers=[dict(state) for state in self._exchange.states],
            pending=pending,
            window=self._mine.state_dict(self._window),
        )

    def load(self, worlds: Sequence[GradientState], *, same: int | None) -> None:
        """Go on from what the ranks of an earlier world kept, by rank. same: this rank's place in one of the same size."""
        kept = worlds[0 if same is None else same]
        self.steps, self._sizing.exchanges, self._sizing.wanted = kept["steps"], kept["exchanges"], None
        self._build(kept["bucket_bytes"])
        self._allocate()
        self._exchange.step = kept["exchange_step"]
        states = [world["reducers"] for world in worlds]
        if self._world.size > 1:
            self._exchange.restore(states[same] if same is not None else self._exchange.resplit(states))
        self._sealed.clear()
        for number, pending in enumerate(kept["pending"] if self._policy.delay else ()):
            for flat, value in zip(self._exchange.flats(number), pending["flats"], strict=True):
                flat.copy_(value)
            agreement = Agreement(used=tuple(pending["used"]), nonfinite=(), rows=pending["rows"])
            self._sealed.append((lambda told=agreement: told, number))
        self._exchange.fill(len(self._sealed))
        self._load_window([world["window"] for world in worlds], same=same)

    def _load_window(self, windows: Sequence[WindowState], *, same: int | None) -> None:
        """Each rank goes on in its own; in a world of another size rank 0 takes everybody's part."""
        self._mine.places = self._sets[self._exchange.current]
        self._mine.clear()
        self._window = Window(common_unit=bool(self._hooks.weighed))
        taken = [windows[same]] if same is not None else windows if self._world.reader_rank == 0 else []
        for window in taken:
            self._mine.join(window, self._window)

    # --- the optimizer -----------------------------------------------------------------------------------------------

    def take_part(self) -> None:
        """The optimizer steps although this rank's loss touched no parameter: join the others' exchange with nothing."""
        self._begin(idle=True)
        self._finish()

    @property
    def count(self) -> float:
        """What this rank counts in the window that is open or was closed last."""
        return self._window.count

    def stepping(self) -> None:
        """The optimizer steps now."""
        self._weighting.settle()

    @property
    def running(self) -> bool:
        """Whether a backward has begun and not come to its end: asked outside of one, an exception ended it."""
        return self._mode is not None

    def stepped(self) -> int | None:
        """It has stepped. Returns the step's number if a window has ended with it, else None."""
        if not self._window_ended:
            return None
        self._window_ended = False
        self.steps += 1
        return self.steps - 1
