"""``GroupMachine``: every decision about a group of ranks, and nothing else.

It composes four parts, and each fact reaches those parts that it concerns in one call of ``handle``:

=================  ===========================================================  ================
part               what it knows                                                module
=================  ===========================================================  ================
wake rule          which wave to start and when; what is unproven               ``wave``
registry           which requests are in flight, and on which rank              ``registry``
selector           reported load; whose turn it is                              ``selection``
stall watches      who has been silent for too long                             ``stalls``
phases             whether a rank serves, the group is open, the ranks work     ``lifecycle``
=================  ===========================================================  ================

Events go in, effects come out, time is an argument. There is no I/O, no clock and no randomness, and ``handle``
never waits: whoever calls it in a single thread gets add, wake and rollback in one indivisible step.

Blame: ``Submit`` raises for the caller's own mistakes and for bounds, and then nothing has changed. A rank's
mistakes are the driver's to find; it reports them as ``RankLost``. Anything else that raises is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Self, TypeAlias, assert_never, final

import attrs

from lockstep_trio.errors import Fault, FaultKind, GroupClosed, GroupFailed, Overloaded, RankFailed, RequestRejected

from .events import (
    Abort,
    Close,
    Drain,
    Effect,
    EndRequests,
    Event,
    FenceAnswered,
    Ignored,
    LoadReported,
    Look,
    LoseGroup,
    LoseRank,
    Nudge,
    Paused,
    Pausing,
    Progress,
    RankDraining,
    RankLost,
    Request,
    Resumed,
    SendAbort,
    SendAdd,
    SendFence,
    SendProbe,
    SendStart,
    Settled,
    Split,
    Submit,
    Suspected,
    WaveAsked,
    WaveDone,
)
from .history import History
from .lifecycle import (
    GROUP_TABLE,
    PAUSE_TABLE,
    RANK_TABLE,
    GroupPhase,
    GroupStep,
    PausePhase,
    PauseStep,
    RankPhase,
    RankStep,
)
from .registry import Registry
from .selection import Load, Selector
from .stalls import Ask, Mend, StallAction, StallWatch
from .wave import ExactWake, NoWaves, Start, WaveAction, WaveRule

WaveMethod: TypeAlias = Callable[[int, int], tuple[WaveAction, ...]]

DEFAULT_MAX_IN_FLIGHT = 65_536
DEFAULT_OUTBOX_LIMIT = 256 * 1024 * 1024


@final
@attrs.frozen
class RankSnapshot:
    """One rank as the machine sees it."""

    rank: int
    phase: RankPhase
    in_flight: int
    """Requests of ours on this rank."""
    unproven: int
    """Ids of which nothing has come back, aborted ones included; 0 where there are no waves."""
    fence_pending: bool
    load: Load
    """The rank's last report, without queue counts once we hold nothing on it."""


@final
@attrs.frozen
class GroupSnapshot:
    """The machine's state as a value."""

    phase: GroupPhase
    lockstep: bool
    clock: int | None
    """The wave that the next START names; None for independent ranks."""
    stepping: bool
    """A START for ``clock`` has left and no DONE for it has come back; False for independent ranks."""
    pause: PausePhase
    """Whether the ranks work or are paused."""
    in_flight: int
    last_start: tuple[int, float] | None
    """(wave, time) of the last START, None if there was none."""
    fault: Fault | None
    """Why the group failed, None if it did not."""
    ranks: tuple[RankSnapshot, ...]


@final
class GroupMachine:
    """The decisions for one group, sans-IO. Not thread-safe.

    Args:
        ranks: Number of ranks, at least 1.
        lockstep: True for ranks that step together and need waves, False for independent ones.
        rule: Another wake rule for a lockstep group; None for the exact one. Owned by the machine from then on.
        max_in_flight: Requests in flight at once, all ranks together; beyond it ``Overloaded``.
        outbox_limit: Bytes that may wait for one rank; a request that would exceed it is ``Overloaded``.
        stall_timeout: Seconds for which a rank with work may be silent before it is probed; None for ever.
        probe_timeout: Seconds of further silence after which it is lost.
        probes: Whether ranks can be asked anything: without that a silent one is lost unasked, and there is no
            lockstep, because no abort could be proven.
        history_limit: Events to keep for replay; 0 keeps none.
    """

    __slots__ = (
        "_fault",
        "_heard_from",
        "_history",
        "_last_start",
        "_pause",
        "_phase",
        "_phases",
        "_quiet",
        "_rank_faults",
        "_registry",
        "_rule",
        "_selector",
        "_watches",
        "_working_since",
        "lockstep",
        "max_in_flight",
        "outbox_limit",
        "probes",
        "ranks",
        "stall_timeout",
    )

    def __init__(
        self,
        ranks: int,
        *,
        lockstep: bool,
        rule: WaveRule | None = None,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        outbox_limit: int = DEFAULT_OUTBOX_LIMIT,
        stall_timeout: float | None = None,
        probe_timeout: float = 0.0,
        probes: bool = True,
        history_limit: int = 0,
    ) -> None:
        if ranks < 1:
            raise ValueError(f"ranks is {ranks}; it must be at least 1")
        if rule is not None and not lockstep:
            raise ValueError("rule is given; it must be None for independent ranks")
        if lockstep and not probes:
            raise ValueError("probes is False; it must be True for a lockstep group, which needs fences")
        self.ranks = ranks
        self.lockstep = lockstep
        self.max_in_flight = max_in_flight
        self.outbox_limit = outbox_limit
        self.stall_timeout = stall_timeout
        self.probes = probes
        self._rule: WaveRule = NoWaves() if not lockstep else ExactWake(ranks) if rule is None else rule
        self._registry = Registry.of(ranks)
        self._selector = Selector.of(ranks)
        self._phases = [RankPhase.SERVING] * ranks
        self._rank_faults: dict[int, Fault] = {}
        self._phase = GroupPhase.OPEN
        self._pause = PausePhase.WORKING
        self._quiet = False
        """While they pause silence means nothing."""
        self._heard_from = 0.0
        """Silence before that means nothing: they were paused, or told to be."""
        self._fault: Fault | None = None
        self._last_start: tuple[int, float] | None = None
        self._working_since = [0.0] * ranks
        """When each rank was given work that had none. Means nothing while it has none."""
        domains = [tuple(range(ranks))] if lockstep else [(rank,) for rank in range(ranks)]
        self._watches = (
            []
            if stall_timeout is None
            else [StallWatch(each, stall_timeout, probe_timeout, probes=probes) for each in domains]
        )
        self._history = History(self.copy(), history_limit) if history_limit else None

    # -- what it is told -----------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Take in one event and return what must be done, in order.

        Args:
            event: What happened.
            now: When, in seconds of any monotonic clock.

        Raises:
            RequestRejected: ``Submit`` pins a rank that is not in the group, or is larger than ``outbox_limit``.
            Overloaded: ``Submit`` would exceed ``max_in_flight`` or ``outbox_limit``.
            RankFailed: ``Submit`` pins an independent rank that is lost.
            GroupFailed: ``Submit`` after the group was lost.
            GroupClosed: ``Submit`` after ``Drain`` or ``Close``, or when no rank takes requests any more.
        """
        effects = tuple(self._handle(event, now))
        if self._history is not None:
            self._history.record(event, now)
        return effects

    def _handle(self, event: Event, now: float) -> Iterable[Effect]:
        match event:
            case Submit():
                return self._submit(event.request, event.backlog, now)
            case Close():
                return self._close(now)
            case Drain():
                self._move_group(GroupStep.DRAIN)
                return ()
            case RankLost():
                return self._rank_lost(event.fault)
            case _ if self._phase in (GroupPhase.FAILED, GroupPhase.CLOSED):
                return ()  # late news of a group that is over
            case Abort():
                return self._abort(event.wire_ids, now)
            case Progress():
                return self._progress(event)
            case LoadReported():
                self._report(event)
                return ()
            case FenceAnswered():
                return self._then_settled(self._act(self._rule.fenced(event.rank), now))
            case WaveDone():
                return self._wave_message(event.rank, f"wave_complete {event.wave}", self._rule.done, event.wave, now)
            case WaveAsked():
                return self._wave_message(event.rank, f"start_wave {event.wave}", self._rule.asked, event.wave, now)
            case RankDraining():
                self._move_rank(event.rank, RankStep.DRAIN)
                return ()
            case Look():
                return self._look(event.seen, now)
            case Nudge():
                return self._act(self._rule.nudged(), now)
            case Pausing():
                self._pause = PAUSE_TABLE[self._pause, PauseStep.BEGIN]
                self._quiet = event.quiet
                self._heard_from = now
                self._rule.paused()
                return ()
            case Paused():
                self._pause = PAUSE_TABLE[self._pause, PauseStep.COMPLETE]
                return ()
            case Resumed():
                self._pause = PAUSE_TABLE[self._pause, PauseStep.RESUME]
                self._heard_from = now
                return self._then_settled(self._act(self._rule.resumed(), now))
            case _:
                assert_never(event)

    def _submit(self, request: Request, backlog: Mapping[int, int], now: float) -> Iterable[Effect]:
        self._refuse_if_over()
        assert self._pause is PausePhase.WORKING, "a submit has to wait until the ranks have resumed"
        if len(self._registry) >= self.max_in_flight:
            raise Overloaded("max_in_flight", self.max_in_flight)
        rank = self._place(request, backlog)
        if not self.has_work(rank):
            self._working_since[rank] = now
        self._registry.add(rank, request.wire_id)
        woken = self._rule.submitted(rank, request.wire_id)
        return [SendAdd(rank, request.wire_id), *self._act(woken, now)]

    def _refuse_if_over(self) -> None:
        if self._fault is not None:
            raise GroupFailed(self._fault)
        if self._phase is GroupPhase.DRAINING:
            raise GroupClosed("the group is being drained and takes nothing new")
        if self._phase is not GroupPhase.OPEN:
            raise GroupClosed

    def _place(self, request: Request, backlog: Mapping[int, int]) -> int:
        """The rank for a request. Changes nothing but whose turn it is, and that only if it succeeds."""
        if request.size > self.outbox_limit:
            raise RequestRejected("request", f"{request.size} bytes", f"at most outbox_limit={self.outbox_limit} bytes")
        if request.pin is not None:
            return self._place_pinned(request.pin, request.size, backlog)
        serving = [rank for rank, phase in enumerate(self._phases) if phase is RankPhase.SERVING]
        room = self.outbox_limit - request.size
        rank = self._selector.select(
            (rank, self._registry.count(rank)) for rank in serving if backlog.get(rank, 0) <= room
        )
        if rank is None:
            if not serving:
                raise GroupClosed("every rank is draining or lost")
            raise Overloaded("outbox_limit", self.outbox_limit)
        return rank

    def _place_pinned(self, rank: int, size: int, backlog: Mapping[int, int]) -> int:
        if not 0 <= rank < self.ranks:
            raise RequestRejected("data_parallel_rank", rank, f"a rank of the group, 0 to {self.ranks - 1}")
        if self._phases[rank] is RankPhase.LOST:
            raise RankFailed(self._rank_faults[rank])
        if self._phases[rank] is RankPhase.DRAINING:
            raise RequestRejected("data_parallel_rank", rank, "a rank that takes requests; this one is draining")
        if backlog.get(rank, 0) + size > self.outbox_limit:
            raise Overloaded("outbox_limit", self.outbox_limit, rank)
        return rank

    def _abort(self, wire_ids: Sequence[str], now: float) -> list[Effect]:
        by_rank: dict[int, list[str]] = {}
        for wire_id in wire_ids:
            rank = self._registry.rank_of(wire_id)
            if rank is not None:
                self._release(wire_id, rank)
                by_rank.setdefault(rank, []).append(wire_id)
        effects: list[Effect] = []
        for rank, ids in by_rank.items():
            effects.append(SendAbort(rank, tuple(ids)))
            effects += self._act(self._rule.aborted(rank, ids), now)
        return effects

    def _progress(self, event: Progress) -> Iterable[Effect]:
        for wire_id in event.first:
            self._rule.proven(event.rank, wire_id)
        for wire_id in event.finished:
            self._rule.proven(event.rank, wire_id)
            if self._registry.rank_of(wire_id) == event.rank:
                self._release(wire_id, event.rank)
        return self._then_settled([])

    def _report(self, event: LoadReported) -> None:
        load = Load(event.waiting, event.running, event.kv_usage)
        gone = not event.while_idle and not self._registry.count(event.rank)
        self._selector.report(event.rank, load.emptied() if gone else load)

    def _release(self, wire_id: str, rank: int) -> None:
        self._registry.remove(wire_id)
        if not self._registry.count(rank):
            self._selector.emptied(rank)

    def _wave_message(self, rank: int, what: str, rule: WaveMethod, wave: int, now: float) -> Iterable[Effect]:
        if not self.lockstep:
            return (Ignored(rank, f"{what} from an independent rank"),)
        return self._then_settled(self._act(rule(rank, wave), now))

    def _act(self, actions: Iterable[WaveAction], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for action in actions:
            if isinstance(action, Start):
                self._last_start = (action.wave, now)
                effects.append(SendStart(action.wave, action.exclude))
            else:
                effects.append(SendFence(action.rank))
        return effects

    # -- ends ----------------------------------------------------------------------------------------------------

    def _close(self, now: float) -> Iterable[Effect]:
        before = self._phase
        self._move_group(GroupStep.CLOSE)
        if before not in (GroupPhase.OPEN, GroupPhase.DRAINING):
            return () if before is GroupPhase.CLOSING else (Settled(),)
        ids = tuple(wire_id for rank in range(self.ranks) for wire_id in self._registry.ids(rank))
        ended = (EndRequests(ids, None),) if ids else ()
        return self._then_settled([*self._abort(ids, now), *ended])

    def _then_settled(self, effects: list[Effect]) -> list[Effect]:
        if self._phase is GroupPhase.CLOSING and self._rule.settled:
            self._move_group(GroupStep.SETTLE)
            effects.append(Settled())
        return effects

    # -- silence -------------------------------------------------------------------------------------------------

    def _look(self, seen: Sequence[float], now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._may_be_silent:
            return effects
        since = self._silence(seen)
        for watch in self._watches:
            action = watch.look(now, seen, since)
            if action is not None:
                effects += self._suspect(action, now)
        return effects

    @property
    def _may_be_silent(self) -> bool:
        return self._pause is PausePhase.PAUSED or (self._pause is PausePhase.PAUSING and self._quiet)

    def _silence(self, seen: Sequence[float]) -> Callable[[int], float | None]:
        if self.lockstep and self._rule.stepping and not any(map(self.has_work, range(self.ranks))):
            # All that is awaited is the DONE, and that any rank may bring: the group as a whole owes a sign of life.
            assert self._last_start is not None
            latest = max(*seen, self._last_start[1], self._heard_from)
            return lambda _: latest

        def since(rank: int) -> float | None:
            if self._phases[rank] is RankPhase.LOST or not self.has_work(rank):
                return None
            return max(seen[rank], self._working_since[rank], self._heard_from)

        return since

    def _suspect(self, action: StallAction, now: float) -> list[Effect]:
        match action:
            case Ask(ranks, silent):
                return [Suspected(silent), SendProbe(ranks)] if self.probes else [Suspected(silent)]
            case Mend(ranks, silent, answered):
                return [Split(silent, answered), *self._act(self._rule.nudged(), now), SendProbe(ranks)]
            case _:
                return list(self._rank_lost(Fault(action.rank, FaultKind.STALLED, action.detail)))

    def next_look(self, seen: Sequence[float]) -> float | None:
        """When a ``Look`` may find something if nothing happens until then; None if there is nothing to look for.

        Args:
            seen: By rank, when it was last heard of.
        """
        if self._phase in (GroupPhase.FAILED, GroupPhase.CLOSED) or self._may_be_silent:
            return None
        since = self._silence(seen)
        return min((time for watch in self._watches if (time := watch.next_look(since)) is not None), default=None)

    def _rank_lost(self, fault: Fault) -> Iterable[Effect]:
        known = self._phases[fault.rank] is RankPhase.LOST
        self._move_rank(fault.rank, RankStep.LOSE)
        if known or self._phase in (GroupPhase.FAILED, GroupPhase.CLOSED):
            return ()
        self._rank_faults[fault.rank] = fault
        # A lockstep group is one failure domain: its other ranks cannot step without the lost one.
        taken = range(self.ranks) if self.lockstep else (fault.rank,)
        effects: list[Effect] = []
        lost_ids: list[str] = []
        for rank in taken:
            ids = self._registry.take(rank)
            lost_ids += ids
            # One that has only stalled may go on some day, and shall not work for nobody then.
            if ids and (rank != fault.rank or fault.kind is FaultKind.STALLED):
                effects.append(SendAbort(rank, ids))
        if lost_ids:
            effects.append(EndRequests(tuple(lost_ids), fault))
        effects.append(LoseRank(fault))
        if self.lockstep or all(phase is RankPhase.LOST for phase in self._phases):
            effects += self._fail(fault)
        return effects

    def _fail(self, fault: Fault) -> Iterator[Effect]:
        self._fault = fault
        closing = self._phase is GroupPhase.CLOSING
        self._move_group(GroupStep.FAIL)
        yield LoseGroup(fault)
        if closing:  # nothing can settle any more: whoever waits for it must not wait out the grace
            yield Settled()

    def _move_rank(self, rank: int, step: RankStep) -> None:
        self._phases[rank] = RANK_TABLE[self._phases[rank], step]

    def _move_group(self, step: GroupStep) -> None:
        self._phase = GROUP_TABLE[self._phase, step]

    # -- what it can be asked ------------------------------------------------------------------------------------

    @property
    def phase(self) -> GroupPhase:
        return self._phase

    @property
    def fault(self) -> Fault | None:
        """Why the group failed, None if it did not."""
        return self._fault

    @property
    def submit_wakes(self) -> bool:
        """A submit made now would make a wave transition. Where it would not, it may be handled out of turn."""
        return not self._rule.stepping

    @property
    def pause(self) -> PausePhase:
        """Whether the ranks work. Unless they do nothing may be submitted."""
        return self._pause

    @property
    def in_flight(self) -> int:
        """Requests in flight, all ranks together."""
        return len(self._registry)

    def has_work(self, rank: int) -> bool:
        """Requests of ours are in flight on it, or something of it is awaited: its silence means something."""
        return bool(self._registry.count(rank) or self._rule.unproven(rank) or self._rule.fence_pending(rank))

    def held(self, rank: int, limit: int) -> tuple[tuple[str, bool], ...]:
        """(wire id, whether something has come back of it) of requests on a rank, the ``limit`` oldest."""
        ids = self._registry.ids(rank)[:limit]
        return tuple((wire_id, not self._rule.awaits(rank, wire_id)) for wire_id in ids)

    def is_in_flight(self, wire_id: str) -> bool:
        """The request was submitted and has neither finished, nor been aborted, nor been lost."""
        return wire_id in self._registry

    @property
    def settled(self) -> bool:
        """Nothing is in flight and nothing is awaited, or the group is lost and nothing ever will be."""
        return self._fault is not None or (not self._registry and self._rule.settled)

    @property
    def clock(self) -> int | None:
        """The wave that the next START names; None for independent ranks."""
        return self._rule.clock

    @property
    def last_start(self) -> tuple[int, float] | None:
        """(wave, time) of the last START, None if there was none."""
        return self._last_start

    def awaits(self, rank: int, wire_id: str) -> bool:
        """The first sign of ``wire_id`` is still missing; ``Progress.first`` must name it when it comes.

        True also for aborted ids whose fence has not been answered. Always False for independent ranks.
        """
        return self._rule.awaits(rank, wire_id)

    def snapshot(self) -> GroupSnapshot:
        """The state as a frozen value."""
        return GroupSnapshot(
            phase=self._phase,
            lockstep=self.lockstep,
            clock=self._rule.clock,
            stepping=self.lockstep and self._rule.stepping,
            pause=self._pause,
            in_flight=len(self._registry),
            last_start=self._last_start,
            fault=self._fault,
            ranks=tuple(map(self._rank_snapshot, range(self.ranks))),
        )

    def _rank_snapshot(self, rank: int) -> RankSnapshot:
        return RankSnapshot(
            rank=rank,
            phase=self._phases[rank],
            in_flight=self._registry.count(rank),
            unproven=self._rule.unproven(rank),
            fence_pending=self._rule.fence_pending(rank),
            load=self._selector.load(rank),
        )

    # -- for explorers -------------------------------------------------------------------------------------------

    @property
    def history(self) -> History | None:
        """What it was told; None unless ``history_limit`` was given."""
        return self._history

    def copy(self) -> Self:
        """An independent copy without history. The cost is that of copying the tables of requests in flight."""
        twin = object.__new__(type(self))
        twin.ranks = self.ranks
        twin.lockstep = self.lockstep
        twin.max_in_flight = self.max_in_flight
        twin.outbox_limit = self.outbox_limit
        twin.stall_timeout = self.stall_timeout
        twin.probes = self.probes
        twin._rule = self._rule.copy()
        twin._registry = self._registry.copy()
        twin._selector = self._selector.copy()
        twin._phases = list(self._phases)
        twin._rank_faults = dict(self._rank_faults)
        twin._phase = self._phase
        twin._pause = self._pause
        twin._quiet = self._quiet
        twin._heard_from = self._heard_from
        twin._fault = self._fault
        twin._last_start = self._last_start
        twin._working_since = list(self._working_since)
        twin._watches = [watch.copy() for watch in self._watches]
        twin._history = None
        return twin

    def canonical(self, base: int = 0) -> Hashable:
        """A value that is equal for states that behave alike from here on.

        Args:
            base: The wave from which wave numbers are counted: the lowest in sight of whoever compares, so that
                states one wave apart fall together. Times and history are left out.
        """
        return (
            self._phase,
            self._pause,
            tuple(self._phases),
            self._registry.canonical(),
            self._selector.canonical(),
            self._rule.canonical(base),
            tuple(watch.canonical() for watch in self._watches),
            self._fault,
        )
