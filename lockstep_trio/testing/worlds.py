"""States of a whole group, client and ranks and all that is under way, and the moves from one to the next.

A ``World`` is the client and one lane per rank. These parts never change, and there is one object per value; each
remembers what every move made of it, so that hardly a move is worked out twice: a walk meets millions of states, and
thousands of parts.

Nobody decides what happens: callers submit and abort whenever they like, frames take arbitrarily long in either
direction, ranks take any part of what has arrived, and an ABORT may be applied inside a step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeAlias, final

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

NO_WAVE = 1 << 62
"""Above every wave number."""

PAUSE_CALL, RESUME_CALL = 1, 2
"""Call ids; a fence has 0."""


@final
@attrs.frozen(cache_hash=True)
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
@attrs.frozen(cache_hash=True)
class Heard:
    """The client hears a frame of a rank."""

    rank: int
    message: FromRank


Fact: TypeAlias = Move | Heard
"""What the client takes in."""


# -- the client --------------------------------------------------------------------------------------------------------


@final
@attrs.frozen(cache_hash=True)
class Account:
    """What has been done and what may still be done, apart from the machine."""

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


class Reaction(NamedTuple):
    """What the client does about a fact."""

    client: Client
    """What it is then."""
    sent: tuple[tuple[ToRank, ...], ...]
    """By rank."""
    batches: tuple[tuple[int, int], ...]
    """The same as pairs of a rank and the number of what is sent to it, without those to which nothing is."""
    breach: str | None
    """What it did that no rule may do."""


@final
@attrs.define(eq=False)
class Client:
    """The client's side of a state. It never changes, and there is one object per value: they are made by ``Parts``."""

    parts: Parts
    machine: GroupMachine
    account: Account
    origin: tuple[Client, Fact] | None
    """How it first came about; None for the one of the start."""
    low: int
    """The lowest wave number in it, for a rule without waves one above all others."""
    _reactions: dict[Fact, Reaction] = attrs.field(factory=dict)
    _answers: dict[int, Reaction] = attrs.field(factory=dict)
    _own: list[tuple[Move, Reaction]] | None = None
    images: dict[int, Client] = attrs.field(factory=dict)
    """For ``Orbits``: what it is under each renaming."""
    keys: dict[int, tuple[int, ...]] = attrs.field(factory=dict)
    """For ``Orbits``, by base."""

    @property
    def closed(self) -> bool:
        """The owner has closed the group."""
        return self.machine.phase is not GroupPhase.OPEN

    def moves(self) -> Iterator[Move]:
        account = self.account
        if not self.closed:
            yield from self._caller_moves()
        if account.repeats_left and self.machine.last_start is not None:
            yield Move("start again")
        if account.nudges_left and self.machine.phase in (GroupPhase.OPEN, GroupPhase.CLOSING):
            yield Move("nudge")

    def _caller_moves(self) -> Iterator[Move]:
        if self.parts.case.closes:
            yield Move("close")
        if self.machine.pause is PausePhase.PAUSED and not self.account.resuming:
            yield Move("resume")
        if self.account.pauses_left and self.machine.pause is PausePhase.WORKING:
            yield Move("pause")
        offered: set[tuple[int, int]] = set()
        for index, request in enumerate(self.parts.case.requests):
            if not self.account.submitted >> index & 1:
                if self.machine.pause is not PausePhase.WORKING:
                    continue  # it waits
                # Of requests that are alike only the first is offered: the others differ by name alone.
                if request not in offered:
                    offered.add(request)
                    yield Move("submit", request=index)
            elif self.parts.case.aborts and self.machine.is_in_flight(str(index)):
                yield Move("abort", request=index)

    def react(self, fact: Fact) -> Reaction:
        """What it does about a fact, whether or not that can happen now."""
        reaction = self._reactions.get(fact)
        if reaction is None:
            turn = _Turn(self.parts.case, self.machine.copy(), self.account)
            turn.take(fact)
            client = self.parts.client(turn.machine, turn.account, (self, fact))
            sent = tuple(map(tuple, turn.sent))
            reaction = Reaction(client, sent, self.parts.batches(sent), turn.breach)
            self._reactions[fact] = reaction
        return reaction

    def own_steps(self) -> list[tuple[Move, Reaction]]:
        """What it may do by itself, and what comes of it."""
        if self._own is None:
            self._own = [(move, self.take(move)) for move in self.moves()]
        return self._own

    def answer(self, frame: int) -> Reaction:
        """The reaction to a frame, which is given by its number because that is quicker."""
        reaction = self._answers.get(frame)
        if reaction is None:
            reaction = self._answers[frame] = self.take(self.parts.frames[frame])
        return reaction

    def take(self, fact: Fact) -> Reaction:
        """The same, on a walk: it is checked."""
        reaction = self.react(fact)
        if self.parts.check is not None:
            self.parts.check(self, fact, reaction)
        return reaction

    def form(self, base: int) -> Hashable:
        """What distinguishes it, with wave numbers counted from ``base``."""
        last = self.machine.last_start
        # The machine leaves the last START out, but a needless one repeats it, and a breach is told by it.
        return (self.machine.canonical(base), None if last is None else last[0] - base, self.account)


@final
@attrs.define
class _Turn:
    """The client while it takes in one fact."""

    case: Case
    machine: GroupMachine
    account: Account
    sent: list[list[ToRank]] = attrs.field(init=False)
    breach: str | None = None

    def __attrs_post_init__(self) -> None:
        self.sent = [[] for _ in range(self.case.ranks)]

    def take(self, fact: Fact) -> None:
        if isinstance(fact, Heard):
            self._hear(fact.rank, fact.message)
        else:
            self._move(fact)

    def _move(self, move: Move) -> None:
        match move.kind:
            case "submit":
                self._note(submitted=self.account.submitted | 1 << move.request)
                self._tell(Submit(Request(str(move.request), pin=self.case.requests[move.request][0])))
            case "abort":
                self._tell(Abort((str(move.request),)))
            case "close":
                self._tell(Close())
            case "pause":
                self._note(pauses_left=self.account.pauses_left - 1, answers=0)
                self._tell(Pausing())
                self._send_all(Pause(PAUSE_CALL, self.case.pause_mode))
            case "resume":
                self._note(answers=0, resuming=True)
                self._send_all(Resume(RESUME_CALL))
            case "start again":
                self._note(repeats_left=self.account.repeats_left - 1)
                last = self.machine.last_start
                assert last is not None
                self._send_all(StartWave(last[0]))
            case "nudge":
                self._note(nudges_left=self.account.nudges_left - 1)
                self._tell(Nudge())
            case "lose":
                self._note(may_lose=False)
            case _:
                raise AssertionError(move)

    def _note(self, **changes: Any) -> None:
        self.account = attrs.evolve(self.account, **changes)

    def _hear(self, rank: int, message: FromRank) -> None:
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
        self._note(answers=self.account.answers + 1)
        if self.account.answers == self.case.ranks:
            self._note(resuming=False)
            self._tell(Paused() if call_id == PAUSE_CALL else Resumed())

    def _tell(self, event: Event) -> None:
        """Let the machine handle an event and put what it sends on the way."""
        before = self.machine.last_start
        for effect in self.machine.handle(event, 0.0):
            match effect:
                case SendAdd(rank, wire_id):
                    self.sent[rank].append(Add(wire_id, self.case.requests[int(wire_id)][1]))
                case SendAbort(rank, wire_ids):
                    # Sorted: to a rank the order means nothing, and the machine's own tells apart what is alike.
                    self.sent[rank].append(Drop(tuple(sorted(wire_ids))))
                case SendFence(rank):
                    self.sent[rank].append(Call())
                case SendStart(wave, exclude):
                    if before is not None and wave < before[0] + (not isinstance(event, Nudge)):
                        self.breach = f"START({wave}) after START({before[0]})"
                    self._send_all(StartWave(wave, exclude))
                case EndRequests() | Settled():
                    pass
                case _:
                    raise AssertionError(effect)

    def _send_all(self, message: ToRank) -> None:
        for box in self.sent:
            box.append(message)


# -- the ranks ---------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a rank is, and what it emitted, after something that all ranks did together."""

    rank: RankModel
    emitted: tuple[FromRank, ...]


@final
@attrs.define(eq=False)
class Lane:
    """One rank and all that is under way between it and the client. As ``Client`` it never changes."""

    parts: Parts
    rank: RankModel
    number: int
    """The same for lanes of the same rank in the same state, whatever is under way."""
    inbox: tuple[ToRank, ...]
    """Frames sent to it and not taken yet, oldest first."""
    outbox: tuple[FromRank, ...]
    """Frames it sent and the client has not heard yet, oldest first."""
    low: int
    """The lowest wave number in it."""
    frame: int
    """The number of the frame that is heard next; -1 if there is none."""
    _own: list[tuple[Move, Lane]] | None = None
    _heard: Lane | None = None
    _received: dict[int, Lane] = attrs.field(factory=dict)
    _joined: dict[int, Lane] = attrs.field(factory=dict)
    keys: dict[int, tuple[int, ...]] = attrs.field(factory=dict)
    """For ``Orbits``, by base."""

    def moves(self) -> Iterator[Move]:
        """What the rank may do by itself."""
        rank, index = self.rank, self.rank.index
        if rank.waits:
            if self.parts.case.early_aborts and rank.at_barrier:
                yield from (Move("abort inside step", index, request=int(each)) for each in self._early_aborts())
            return
        most = next((at for at, each in enumerate(self.inbox, 1) if isinstance(each, Resume)), len(self.inbox))
        for taken in range(0 if rank.has_work else 1, most + 1):
            yield Move("poll", index, count=taken)
        if self.parts.case.engine_finishes:
            yield from (Move("finish", index, request=int(wire_id)) for wire_id in rank.held)

    def _early_aborts(self) -> Iterator[str]:
        held = self.rank.held
        if held:
            for message in self.inbox:
                if isinstance(message, Drop):
                    yield from (wire_id for wire_id in message.wire_ids if wire_id in held)

    def after(self, move: Move) -> Lane:
        rank, inbox = self.rank.copy(), self.inbox
        emitted: Sequence[FromRank] = ()
        match move.kind:
            case "poll":
                emitted = rank.poll(inbox[: move.count])
                inbox = inbox[move.count :]
            case "abort inside step":
                rank.drop((str(move.request),))
            case "finish":
                emitted = (rank.finish(str(move.request)),)
            case _:
                raise AssertionError(move)
        return self.parts.lane(rank, inbox, (*self.outbox, *emitted))

    def own_steps(self) -> list[tuple[Move, Lane]]:
        """What the rank may do by itself, and what comes of it."""
        if self._own is None:
            self._own = [(move, self.after(move)) for move in self.moves()]
        return self._own

    def heard(self) -> Lane:
        """What it is when its first frame has been heard."""
        if self._heard is None:
            self._heard = self.parts.lane(self.rank, self.inbox, self.outbox[1:])
        return self._heard

    def received(self, batch: int) -> Lane:
        """What it is when something has been sent to it."""
        lane = self._received.get(batch)
        if lane is None:
            inbox = (*self.inbox, *self.parts.sendings[batch])
            lane = self._received[batch] = self.parts.lane(self.rank, inbox, self.outbox)
        return lane

    def joined(self, number: int) -> Lane:
        """What it is after something that all ranks did together."""
        lane = self._joined.get(number)
        if lane is None:
            rank, emitted = self.parts.outcomes[number]
            lane = self._joined[number] = self.parts.lane(rank, self.inbox, (*self.outbox, *emitted))
        return lane

    def form(self, base: int) -> Hashable:
        """What distinguishes it, with wave numbers counted from ``base``."""
        return form_of(self.rank, self.inbox, self.outbox, base)


def form_of(rank: RankModel, inbox: Iterable[ToRank], outbox: Iterable[FromRank], base: int) -> Hashable:
    """What distinguishes a lane of these, with wave numbers counted from ``base``."""
    # The model leaves out in which order requests are held, but that is the order of their outputs.
    return (
        rank.canonical(base),
        tuple(rank.held),
        tuple((each.wave - base, each.exclude) if isinstance(each, StartWave) else each for each in inbox),
        tuple(each.wave - base if isinstance(each, Done) else each for each in outbox),
    )


@final
class Parts:
    """Every part of every state of one case, once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.check: Callable[[Client, Fact, Reaction], None] | None = None
        """Told of each thing that a client does on a walk, once."""
        self.deliveries = [Move("deliver", rank) for rank in range(case.ranks)]
        # What has a number has it because that is hashed sooner than the thing itself.
        self.frames: list[Heard] = []
        self.sendings: list[tuple[ToRank, ...]] = []
        """What is sent to a rank at once."""
        self.outcomes: list[Outcome] = []
        self._clients: dict[Hashable, Client] = {}
        self._lanes: dict[Hashable, Lane] = {}
        self._rank_numbers: dict[Hashable, int] = {}
        self._frame_numbers: dict[Heard, int] = {}
        self._batch_numbers: dict[tuple[ToRank, ...], int] = {}
        self._together: dict[tuple[int, ...], tuple[int, ...]] = {}

    def client(self, machine: GroupMachine, account: Account, origin: tuple[Client, Fact] | None) -> Client:
        clock = machine.clock
        client = Client(self, machine, account, origin, NO_WAVE if clock is None else clock)
        return self._clients.setdefault(client.form(0), client)

    def lane(self, rank: RankModel, inbox: tuple[ToRank, ...], outbox: tuple[FromRank, ...]) -> Lane:
        number = self._rank_number(rank)
        key = (number, inbox, outbox)
        lane = self._lanes.get(key)
        if lane is None:
            waves = [each.wave for each in (*inbox, *outbox) if isinstance(each, StartWave | Done)]
            frame = self._frame_number(Heard(rank.index, outbox[0])) if outbox else -1
            lane = Lane(self, rank, number, inbox, outbox, min(rank.wave, *waves) if waves else rank.wave, frame)
            self._lanes[key] = lane
        return lane

    def _rank_number(self, rank: RankModel) -> int:
        key = (rank.index, rank.canonical(0), tuple(rank.held), rank.step_count)
        return self._rank_numbers.setdefault(key, len(self._rank_numbers))

    def _frame_number(self, frame: Heard) -> int:
        number = self._frame_numbers.setdefault(frame, len(self.frames))
        if number == len(self.frames):
            self.frames.append(frame)
        return number

    def batches(self, sent: Iterable[tuple[ToRank, ...]]) -> tuple[tuple[int, int], ...]:
        return tuple((rank, self._batch_number(messages)) for rank, messages in enumerate(sent) if messages)

    def _batch_number(self, messages: tuple[ToRank, ...]) -> int:
        number = self._batch_numbers.setdefault(messages, len(self.sendings))
        if number == len(self.sendings):
            self.sendings.append(messages)
        return number

    def together(self, lanes: Sequence[Lane]) -> tuple[int, ...]:
        """Let all ranks step, or resume, together: the numbers of the outcomes, by rank."""
        key = tuple(lane.number for lane in lanes)
        numbers = self._together.get(key)
        if numbers is None:
            ranks = [lane.rank.copy() for lane in lanes]
            emitted = step_group(ranks) if ranks[0].at_barrier else resume_group(ranks)
            start = len(self.outcomes)
            self.outcomes += [Outcome(rank, tuple(each)) for rank, each in zip(ranks, emitted, strict=True)]
            numbers = self._together[key] = tuple(range(start, len(self.outcomes)))
        return numbers


# -- states ------------------------------------------------------------------------------------------------------------


Step: TypeAlias = tuple[Move, Client, tuple[Lane, ...], str | None]
"""A move, what it leads to, and what it did that no rule may do. Bare, because there are millions of them."""


@final
@attrs.define
class World:
    """The client's machine, the ranks, and everything under way between them."""

    client: Client
    lanes: tuple[Lane, ...]
    breach: str | None = None
    """What the last move did that no rule may do."""

    @classmethod
    def start(cls, case: Case, rule: WaveRule) -> Self:
        parts = Parts(case)
        account = Account(
            repeats_left=case.repeats,
            nudges_left=case.nudges,
            may_lose=case.lost_done,
            pauses_left=case.pauses,
        )
        client = parts.client(GroupMachine(case.ranks, lockstep=True, rule=rule), account, None)
        ranks = [RankModel(index, case.sync, pausable=bool(case.pauses)) for index in range(case.ranks)]
        return cls(client, tuple(parts.lane(rank, (), ()) for rank in ranks))

    @property
    def case(self) -> Case:
        return self.client.parts.case

    @property
    def machine(self) -> GroupMachine:
        """Not to be told anything: it is part of other states too. The same goes for the ranks."""
        return self.client.machine

    @property
    def ranks(self) -> list[RankModel]:
        return [lane.rank for lane in self.lanes]

    @property
    def inboxes(self) -> list[tuple[ToRank, ...]]:
        """Per rank: frames sent to it and not taken yet, oldest first."""
        return [lane.inbox for lane in self.lanes]

    @property
    def outboxes(self) -> list[tuple[FromRank, ...]]:
        """Per rank: frames it sent and the client has not heard yet, oldest first."""
        return [lane.outbox for lane in self.lanes]

    # -- which moves there are, and what they do -----------------------------------------------------------------

    def moves(self) -> Iterator[Move]:
        return (move for move, *_ in self.steps())

    def steps(self) -> Iterator[Step]:
        """Every move that can be made."""
        client, lanes = self.client, self.lanes
        for move, reaction in client.own_steps():
            yield self._reacted(move, reaction, lanes)
        for index, lane in enumerate(lanes):
            if lane.frame >= 0:
                yield self._delivered(index)
                if client.account.may_lose and isinstance(lane.outbox[0], Done):
                    yield self._lost(index)
            for move, after in lane.own_steps():
                yield move, client, (*lanes[:index], after, *lanes[index + 1 :]), None
        if all(lane.rank.at_barrier for lane in lanes):
            yield self._together("step")
        if all(lane.rank.resuming is not None for lane in lanes):
            yield self._together("resume together")

    def after(self, move: Move) -> Self:
        """The state after a move. This state stays as it is."""
        _, client, lanes, breach = self._step(move)
        return type(self)(client, lanes, breach)

    def apply(self, move: Move) -> None:
        """Make a move in this very state."""
        _, self.client, self.lanes, self.breach = self._step(move)

    def _step(self, move: Move) -> Step:
        match move.kind:
            case "deliver":
                return self._delivered(move.rank)
            case "lose":
                return self._lost(move.rank)
            case "poll" | "abort inside step" | "finish":
                after = self.lanes[move.rank].after(move)
                return move, self.client, self._with(move.rank, after), None
            case "step" | "resume together":
                return self._together(move.kind)
            case _:
                return self._reacted(move, self.client.take(move), self.lanes)

    def _with(self, index: int, lane: Lane) -> tuple[Lane, ...]:
        return (*self.lanes[:index], lane, *self.lanes[index + 1 :])

    def _reacted(self, move: Move, reaction: Reaction, lanes: tuple[Lane, ...]) -> Step:
        client, _, batches, breach = reaction
        if batches:
            after = list(lanes)
            for rank, batch in batches:
                after[rank] = after[rank].received(batch)
            lanes = tuple(after)
        return move, client, lanes, breach

    def _delivered(self, index: int) -> Step:
        lane = self.lanes[index]
        lanes = self._with(index, lane.heard())
        return self._reacted(self.client.parts.deliveries[index], self.client.answer(lane.frame), lanes)

    def _lost(self, index: int) -> Step:
        move = Move("lose", index)
        return self._reacted(move, self.client.take(move), self._with(index, self.lanes[index].heard()))

    def _together(self, kind: str) -> Step:
        numbers = self.client.parts.together(self.lanes)
        lanes = tuple([lane.joined(number) for lane, number in zip(self.lanes, numbers, strict=True)])
        return Move(kind), self.client, lanes, None

    # -- what a state is -----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """The owner has closed the group."""
        return self.client.closed

    @property
    def settled(self) -> bool:
        """All is done: nothing under way, every rank parked with nothing, the client waits for nothing."""
        return (
            (self.closed or self.client.account.submitted == (1 << len(self.case.requests)) - 1)
            and self.machine.settled
            and not any(lane.inbox or lane.outbox for lane in self.lanes)
            and not any(rank.has_work or rank.waits for rank in self.ranks)
            and (self.closed or self.machine.pause is PausePhase.WORKING)
        )

    def form(self) -> Hashable:
        """Equal for states that behave alike: waves are counted from the lowest in sight."""
        base = min(self.client.low, *(lane.low for lane in self.lanes))
        return (self.client.form(base), *(lane.form(base) for lane in self.lanes))

    def describe(self) -> str:
        snapshot = self.machine.snapshot()
        lines = [f"client: clock {snapshot.clock}, stepping {snapshot.stepping}, in flight {snapshot.in_flight}"]
        for lane, view in zip(self.lanes, snapshot.ranks, strict=True):
            rank = lane.rank
            place = "at the barrier" if rank.waits else "at its poll" if rank.has_work else "parked"
            lines.append(
                f"rank {rank.index}: wave {rank.wave}, {place}, holds {sorted(rank.held)}, "
                f"to read {list(lane.inbox)}, unheard {list(lane.outbox)}; "
                f"unproven {view.unproven}, fence {view.fence_pending}"
            )
        return "\n".join(lines)


def replay(start: World, schedule: Sequence[Move]) -> World:
    """The state that a schedule leads to."""
    world = start
    for move in schedule:
        world = world.after(move)
    return world
