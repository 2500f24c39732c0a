"""Walk every interleaving of the real ``GroupMachine`` with a group of model ranks.

The walk is breadth first, so the first bad state found is reached by a shortest schedule. What may happen in a state
is decided by nobody: callers submit and abort whenever they like, frames take arbitrarily long in either direction,
ranks take any part of what has arrived, and an ABORT may be applied inside a step. A state is bad if it is

*stuck*
    nothing can move, yet a rank waits at the barrier or holds a request, or the client still waits for something;
*livelocked*
    it can move, but no state in which everything is settled can be reached from it;
*in breach*
    an invariant of the rule under test does not hold.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Self, TypeAlias, final

import attrs

from lockstep_trio.core import (
    Abort,
    Close,
    EndRequests,
    Event,
    FenceAnswered,
    GroupMachine,
    GroupPhase,
    Nudge,
    Paused,
    PausePhase,
    Pausing,
    Progress,
    Request,
    Resumed,
    SendAbort,
    SendAdd,
    SendFence,
    SendStart,
    Settled,
    Submit,
    WaveDone,
    WaveRule,
)

from .rank_model import (
    Add,
    Answer,
    Call,
    Done,
    Drop,
    FromRank,
    Out,
    Pause,
    RankModel,
    Resume,
    StartWave,
    Sync,
    ToRank,
    resume_group,
    step_group,
)

PAUSE_CALL, RESUME_CALL = 1, 2
"""Call ids; a fence has 0."""


@final
@attrs.frozen
class Move:
    """One thing that happens. Which fields matter depends on ``kind``; ``str`` gives it as a sentence."""

    kind: str
    """submit, abort, pause, resume, close, deliver, lose, poll, abort inside step, finish, start again, nudge, step, or
    resume together."""
    rank: int = -1
    request: int = -1
    count: int = 0
    """poll: how many of the arrived messages the rank takes."""

    def __str__(self) -> str:
        match self.kind:
            case "submit" | "abort":
                return f"the caller {self.kind}s request {self.request}"
            case "deliver":
                return f"the client hears the next frame of rank {self.rank}"
            case "poll":
                return f"rank {self.rank} takes {self.count} message(s)"
            case "abort inside step":
                return f"rank {self.rank} drops request {self.request} inside the step"
            case "finish":
                return f"rank {self.rank} ends request {self.request} by itself"
            case "start again":
                return "the last START is sent once more"
            case "nudge":
                return "the client suspects a split and starts the current wave again"
            case "close":
                return "the owner closes the group"
            case "pause" | "resume":
                return f"the owner tells all ranks to {self.kind}"
            case "resume together":
                return "all ranks resume together"
            case "lose":
                return f"the network loses the next frame of rank {self.rank}"
            case _:
                return "all ranks step"


SHORT_WAVES = Sync(first=True, every=2)
"""Drain agreed on at every second step: what can go wrong in 16 steps can go wrong in two, with far fewer states."""


@final
@attrs.frozen
class Case:
    """What is explored."""

    ranks: int
    requests: tuple[tuple[int, int], ...]
    """(rank, steps) of each request."""
    aborts: bool = True
    """Any request may be aborted at any time."""
    sync: Sync = SHORT_WAVES
    early_aborts: bool = True
    """An ABORT that has arrived may be applied inside a step, ahead of its place."""
    engine_finishes: bool = False
    """The engine may end a held request by itself at any poll."""
    repeats: int = 0
    """How many times the last START may be sent again for no reason, to show that it is harmless."""
    nudges: int = 0
    """How many times the client may start the current wave for no reason, as it does when it suspects a split."""
    pauses: int = 0
    """How many times the owner may pause the group at any time, and resume it at any time after it has paused."""
    pause_mode: str = "keep"
    closes: bool = False
    """The owner may close the group at any time: nothing is submitted after that, and all must settle."""
    lost_done: bool = False
    """The network loses exactly one DONE, whichever; for showing that this is not survivable."""


@final
@attrs.frozen
class Found:
    """A bad state and a shortest way to it."""

    problem: str
    schedule: tuple[Move, ...]
    state: str
    """The bad state, for people."""

    def __str__(self) -> str:
        lines = [f"{number:3}. {move}" for number, move in enumerate(self.schedule, 1)]
        return "\n".join([*lines, f"=> {self.problem}", self.state])


@final
@attrs.frozen
class Result:
    """What a walk found."""

    states: int
    """Different states visited."""
    transitions: int
    complete: bool
    """All reachable states were visited; False if the limit was reached or something was found."""
    found: Found | None


Invariant: TypeAlias = Callable[["World"], str | None]
"""Looks at a state and returns what is wrong with it, None if nothing is."""


@final
@attrs.define
class World:
    """The client's machine, the ranks, and everything under way between them."""

    case: Case
    machine: GroupMachine
    ranks: list[RankModel]
    inboxes: list[tuple[ToRank, ...]]
    """Per rank: frames sent to it and not taken yet, oldest first."""
    outboxes: list[tuple[FromRank, ...]]
    """Per rank: frames it sent and the client has not heard yet, oldest first."""
    submitted: int = 0
    """Bit set of requests."""
    repeats_left: int = 0
    nudges_left: int = 0
    may_lose: bool = False
    pauses_left: int = 0
    answers: int = 0
    """Ranks that have answered the call under way that pauses or resumes."""
    resuming: bool = False
    """That call is the one that resumes."""
    breach: str | None = None
    """What the last move did that no rule may do."""

    @classmethod
    def start(cls, case: Case, rule: WaveRule) -> Self:
        machine = GroupMachine(case.ranks, lockstep=True, rule=rule)
        ranks = [RankModel(index, case.sync, pausable=bool(case.pauses)) for index in range(case.ranks)]
        empty: tuple[()] = ()
        return cls(
            case,
            machine,
            ranks,
            [empty] * case.ranks,
            [empty] * case.ranks,
            repeats_left=case.repeats,
            nudges_left=case.nudges,
            may_lose=case.lost_done,
            pauses_left=case.pauses,
        )

    def copy(self) -> Self:
        return type(self)(
            self.case,
            self.machine,
            list(self.ranks),
            list(self.inboxes),
            list(self.outboxes),
            self.submitted,
            self.repeats_left,
            self.nudges_left,
            self.may_lose,
            self.pauses_left,
            self.answers,
            self.resuming,
        )

    # -- which moves there are -----------------------------------------------------------------------------------

    def moves(self) -> Iterator[Move]:
        yield from self._caller_moves()
        for rank in range(self.case.ranks):
            yield from self._rank_moves(rank)
        if all(rank.at_barrier for rank in self.ranks):
            yield Move("step")
        if all(rank.resuming is not None for rank in self.ranks):
            yield Move("resume together")
        if self.repeats_left and self.machine.last_start is not None:
            yield Move("start again")
        if self.nudges_left and self.machine.phase in (GroupPhase.OPEN, GroupPhase.CLOSING):
            yield Move("nudge")

    def _caller_moves(self) -> Iterator[Move]:
        if self.closed:
            return
        if self.case.closes:
            yield Move("close")
        if self.machine.pause is PausePhase.PAUSED and not self.resuming:
            yield Move("resume")
        if self.pauses_left and self.machine.pause is PausePhase.WORKING:
            yield Move("pause")
        offered: set[tuple[int, int]] = set()
        for index, request in enumerate(self.case.requests):
            if not self.submitted >> index & 1:
                if self.machine.pause is not PausePhase.WORKING:
                    continue  # it waits
                # Of requests that are alike only the first is offered: the others differ by name alone.
                if request not in offered:
                    offered.add(request)
                    yield Move("submit", request=index)
            elif self.case.aborts and self.machine.is_in_flight(str(index)):
                yield Move("abort", request=index)

    def _rank_moves(self, index: int) -> Iterator[Move]:
        rank, inbox, outbox = self.ranks[index], self.inboxes[index], self.outboxes[index]
        if outbox:
            yield Move("deliver", index)
            if self.may_lose and isinstance(outbox[0], Done):
                yield Move("lose", index)
        if rank.waits:
            if self.case.early_aborts and rank.at_barrier:
                yield from (Move("abort inside step", index, request=int(each)) for each in self._early_aborts(index))
            return
        most = next((at for at, each in enumerate(inbox, 1) if isinstance(each, Resume)), len(inbox))
        for count in range(0 if rank.has_work else 1, most + 1):
            yield Move("poll", index, count=count)
        if self.case.engine_finishes:
            yield from (Move("finish", index, request=int(wire_id)) for wire_id in rank.held)

    def _early_aborts(self, index: int) -> Iterator[str]:
        held = self.ranks[index].held
        if held:
            for message in self.inboxes[index]:
                if isinstance(message, Drop):
                    yield from (wire_id for wire_id in message.wire_ids if wire_id in held)

    # -- what a move does ----------------------------------------------------------------------------------------

    def after(self, move: Move) -> Self:
        """The state after a move. This state stays as it is."""
        world = self.copy()
        world.apply(move)
        return world

    def apply(self, move: Move) -> None:
        """Make a move in this very state."""
        match move.kind:
            case "submit":
                self._submit(move.request)
            case "abort":
                self._tell(Abort((str(move.request),)))
            case "close":
                self._tell(Close())
            case "pause":
                self.pauses_left -= 1
                self.answers = 0
                self._tell(Pausing())
                self._send_all(Pause(PAUSE_CALL, self.case.pause_mode))
            case "resume":
                self.answers = 0
                self.resuming = True
                self._send_all(Resume(RESUME_CALL))
            case "resume together":
                self.ranks = [rank.copy() for rank in self.ranks]
                for rank, emitted in enumerate(resume_group(self.ranks)):
                    self._emit(rank, emitted)
            case "deliver":
                self._hear(move.rank)
            case "poll":
                self._poll(move.rank, move.count)
            case "abort inside step":
                self._own(move.rank).drop((str(move.request),))
            case "finish":
                self._emit(move.rank, [self._own(move.rank).finish(str(move.request))])
            case "step":
                self._step()
            case "start again":
                self._start_again()
            case "nudge":
                self.nudges_left -= 1
                self._tell(Nudge())
            case "lose":
                self.may_lose = False
                self.outboxes[move.rank] = self.outboxes[move.rank][1:]
            case _:
                raise AssertionError(move)

    def _own(self, rank: int) -> RankModel:
        self.ranks[rank] = own = self.ranks[rank].copy()
        return own

    def _submit(self, index: int) -> None:
        self.submitted |= 1 << index
        self._tell(Submit(Request(str(index), pin=self.case.requests[index][0])))

    def _poll(self, rank: int, count: int) -> None:
        taken, self.inboxes[rank] = self.inboxes[rank][:count], self.inboxes[rank][count:]
        self._emit(rank, self._own(rank).poll(taken))

    def _step(self) -> None:
        self.ranks = [rank.copy() for rank in self.ranks]
        for rank, emitted in enumerate(step_group(self.ranks)):
            self._emit(rank, emitted)

    def _start_again(self) -> None:
        self.repeats_left -= 1
        last = self.machine.last_start
        assert last is not None
        self._send_all(StartWave(last[0]))

    def _emit(self, rank: int, messages: Sequence[FromRank]) -> None:
        if messages:
            self.outboxes[rank] = (*self.outboxes[rank], *messages)

    def _hear(self, rank: int) -> None:
        message, *rest = self.outboxes[rank]
        self.outboxes[rank] = tuple(rest)
        match message:
            case Out(wire_id, final, _):
                first = (wire_id,) if self.machine.awaits(rank, wire_id) else ()
                if first or final:
                    self._tell(Progress(rank, first, (wire_id,) if final else ()))
            case Done(wave):
                self._tell(WaveDone(rank, wave))
            case Answer(call_id, refused):
                self._answered(rank, call_id, refused=refused)

    def _answered(self, rank: int, call_id: int, *, refused: bool) -> None:
        if refused:
            self.breach = f"rank {rank} was told to resume while a pause was in flight"
        if not call_id:
            self._tell(FenceAnswered(rank))
            return
        self.answers += 1
        if self.answers == self.case.ranks:
            self.resuming = False
            self._tell(Paused() if call_id == PAUSE_CALL else Resumed())

    def _tell(self, event: Event) -> None:
        """Let the client's machine handle an event and put what it sends on the way."""
        self.machine = self.machine.copy()
        before = self.machine.last_start
        for effect in self.machine.handle(event, 0.0):
            match effect:
                case SendAdd(rank, wire_id):
                    self._send(rank, Add(wire_id, self.case.requests[int(wire_id)][1]))
                case SendAbort(rank, wire_ids):
                    self._send(rank, Drop(wire_ids))
                case SendFence(rank):
                    self._send(rank, Call())
                case SendStart(wave, exclude):
                    if before is not None and wave < before[0] + (not isinstance(event, Nudge)):
                        self.breach = f"START({wave}) after START({before[0]})"
                    self._send_all(StartWave(wave, exclude))
                case EndRequests() | Settled():
                    pass
                case _:
                    raise AssertionError(effect)

    def _send(self, rank: int, message: ToRank) -> None:
        self.inboxes[rank] = (*self.inboxes[rank], message)

    def _send_all(self, message: ToRank) -> None:
        for rank in range(self.case.ranks):
            self._send(rank, message)

    # -- what a state is -----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """The owner has closed the group."""
        return self.machine.phase is not GroupPhase.OPEN

    @property
    def settled(self) -> bool:
        """All is done: nothing under way, every rank parked with nothing, the client waits for nothing."""
        return (
            (self.closed or self.submitted == (1 << len(self.case.requests)) - 1)
            and self.machine.settled
            and not any(self.inboxes)
            and not any(self.outboxes)
            and not any(rank.has_work or rank.waits for rank in self.ranks)
            and (self.closed or self.machine.pause is PausePhase.WORKING)
        )

    def base(self) -> int:
        """The lowest wave number in sight, from which all others are counted."""
        waves = [rank.wave for rank in self.ranks]
        waves += [message.wave for box in self.inboxes for message in box if isinstance(message, StartWave)]
        waves += [message.wave for box in self.outboxes for message in box if isinstance(message, Done)]
        clock = self.machine.clock
        return min(waves) if clock is None else min(clock, *waves)

    def parts(self) -> Iterator[Hashable]:
        """What distinguishes this state, piece by piece."""
        base = self.base()
        yield self.machine.canonical(base)
        yield (self.submitted, self.repeats_left, self.nudges_left, self.may_lose)
        yield (self.pauses_left, self.answers, self.resuming)
        for rank in self.ranks:
            yield rank.canonical(base)
        for box in (*self.inboxes, *self.outboxes):
            yield tuple(
                (each.wave - base, each.exclude)
                if isinstance(each, StartWave)
                else each.wave - base
                if isinstance(each, Done)
                else each
                for each in box
            )

    def describe(self) -> str:
        snapshot = self.machine.snapshot()
        lines = [f"client: clock {snapshot.clock}, stepping {snapshot.stepping}, in flight {snapshot.in_flight}"]
        for rank, view in zip(self.ranks, snapshot.ranks, strict=True):
            place = "at the barrier" if rank.waits else "at its poll" if rank.has_work else "parked"
            lines.append(
                f"rank {rank.index}: wave {rank.wave}, {place}, holds {sorted(rank.held)}, "
                f"to read {list(self.inboxes[rank.index])}, unheard {list(self.outboxes[rank.index])}; "
                f"unproven {view.unproven}, fence {view.fence_pending}"
            )
        return "\n".join(lines)


def clock_never_ahead(world: World) -> str | None:
    """No START may raise a rank's wave number: the clock is at or below every rank's own."""
    clock = world.machine.clock
    lowest = min(rank.wave for rank in world.ranks)
    return f"clock {clock} is above a rank's wave {lowest}" if clock is not None and clock > lowest else None


def one_start_per_wave(world: World) -> str | None:
    """At most one START is broadcast per value of the clock, and never an older one."""
    return world.breach


EXACT_INVARIANTS: tuple[Invariant, ...] = (clock_never_ahead, one_start_per_wave)
"""What the exact rule promises in every state."""


def explore(
    case: Case,
    rule: Callable[[], WaveRule],
    *,
    invariants: Sequence[Invariant] = (),
    limit: int = 1_000_000,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Visit every state that the case allows under a rule, breadth first, and stop at the first bad one.

    Args:
        case: Ranks, requests and what may happen to them.
        rule: Makes a fresh rule for ``case.ranks`` ranks.
        invariants: Looked at in every state.
        limit: States to visit at most; beyond it the result is not ``complete``.
        progress: Called every 10,000 states with (states visited, states waiting).
    """
    return _Walk(case, rule(), tuple(invariants), limit, progress).run()


@final
class _Walk:
    """One breadth-first walk: numbered states, how each was reached first, and all edges for the way back."""

    def __init__(
        self,
        case: Case,
        rule: WaveRule,
        invariants: tuple[Invariant, ...],
        limit: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._invariants = invariants
        self._limit = limit
        self._progress = progress
        self._start = World.start(case, rule)
        # Each distinct part of a state gets a small number, so that a state is a short tuple of them: exact, unlike
        # a digest, and an order of magnitude smaller than the state itself.
        self._part_numbers: dict[Hashable, int] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._reached_by: list[tuple[int, Move] | None] = []
        self._sources = array("L")
        self._targets = array("L")
        self._settled: list[int] = []
        self._queue: deque[tuple[int, World]] = deque()

    def run(self) -> Result:
        self._visit(self._start, None)
        while self._queue:
            number, world = self._queue.popleft()
            found = self._expand(number, world)
            if found is not None or len(self._numbers) > self._limit:
                return self._result(found, complete=False)
        found = self._livelock()
        return self._result(found, complete=found is None)

    def _expand(self, number: int, world: World) -> Found | None:
        moved = False
        for move in world.moves():
            moved = True
            after = world.after(move)
            target, new = self._visit(after, (number, move))
            self._sources.append(number)
            self._targets.append(target)
            if new:
                problem = self._breach(after)
                if problem:
                    return self._found(problem, target, after)
        if moved:
            return None
        if not world.settled:
            return self._found("stuck: nothing can move", number, world)
        self._settled.append(number)
        return None

    def _breach(self, world: World) -> str | None:
        return next((problem for check in self._invariants if (problem := check(world))), None)

    def _visit(self, world: World, reached_by: tuple[int, Move] | None) -> tuple[int, bool]:
        parts = self._part_numbers
        key = tuple([parts.setdefault(part, len(parts)) for part in world.parts()])
        number = self._numbers.setdefault(key, len(self._numbers))
        new = number == len(self._reached_by)
        if new:
            self._reached_by.append(reached_by)
            self._queue.append((number, world))
            if self._progress is not None and number % 10_000 == 0:
                self._progress(number, len(self._queue))
        return number, new

    def _livelock(self) -> Found | None:
        """A state from which none of the settled ones can be reached, the earliest found."""
        into: list[list[int]] = [[] for _ in self._reached_by]
        for source, target in zip(self._sources, self._targets, strict=True):
            into[target].append(source)
        can_settle = bytearray(len(into))
        waiting = list(self._settled)
        while waiting:
            number = waiting.pop()
            if not can_settle[number]:
                can_settle[number] = 1
                waiting += into[number]
        lost = can_settle.find(0)
        return None if lost < 0 else self._found("livelock: nothing settled can be reached", lost, None)

    def _found(self, problem: str, number: int, world: World | None) -> Found:
        schedule: list[Move] = []
        step = self._reached_by[number]
        while step is not None:
            number, move = step
            schedule.append(move)
            step = self._reached_by[number]
        schedule.reverse()
        if world is None:
            world = replay(self._start, schedule)
        return Found(problem, tuple(schedule), world.describe())

    def _result(self, found: Found | None, *, complete: bool) -> Result:
        return Result(len(self._numbers), len(self._sources), complete, found)


def replay(start: World, schedule: Sequence[Move]) -> World:
    """The state that a schedule leads to."""
    world = start
    for move in schedule:
        world = world.after(move)
    return world
