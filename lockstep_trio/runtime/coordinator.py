"""The coordinator: the one place where the machine is told things and where its effects are carried out.

Rank tasks and callers put what happens into an inbox; one task takes it out, in order. Between an event and the
last of its effects there is no checkpoint, so a submit is an ADD plus its wake or nothing at all, whoever is
cancelled meanwhile.

One short cut: a submit that makes no wave transition, because the group is stepping or has no waves, is handled in
the caller's own task, by the same function. It can overtake what still lies in the inbox. A DONE that it overtakes
finds the new request unproven and wakes again; a loss or a close that it overtakes ends the new request like any other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, assert_never, final

import attrs
import trio

from lockstep_trio.core import (
    Abort,
    Close,
    Drain,
    Effect,
    EndRequests,
    Event,
    FenceAnswered,
    GroupMachine,
    GroupPhase,
    Ignored,
    LoadReported,
    Look,
    LoseGroup,
    LoseRank,
    Paused,
    PausePhase,
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
from lockstep_trio.engines.protocol import AskPaused, Batch, Frame, LoadReport, Pause, Resume, Session, Sleep, WakeUp
from lockstep_trio.errors import (
    EngineLost,
    Fault,
    FaultKind,
    GroupClosed,
    GroupFailed,
    LockstepError,
    Overloaded,
    RankFailed,
    RequestRejected,
    StreamOverflow,
    UtilityFailed,
    WireError,
)

from .diagnosis import describe
from .pausing import Concerted
from .rank import RankDriver
from .stream import StreamBuffer
from .waiting import Slot

logger = logging.getLogger("lockstep_trio")

BURST = 256
"""Items that the coordinator takes from its inbox before other tasks get a turn."""


@final
@attrs.define
class RankCounts:
    """What has been sent to and heard from one rank since the group came up, in messages unless it says otherwise."""

    adds: int = 0
    aborts: int = 0
    starts: int = 0
    fences: int = 0
    dones: int = 0
    outputs: int = 0
    """Outputs of single requests; a message carries many."""
    strays: int = 0
    """Outputs nobody waited for: of aborted requests, mostly."""
    last_done: int | None = None
    """The last wave that this rank reported complete, None before the first."""


@final
@attrs.define
class Submission:
    """A request on its way in."""

    buffer: StreamBuffer
    add: Sequence[Frame]
    pin: int | None
    size: int
    slot: Slot[None] = attrs.field(factory=Slot[None])


@final
@attrs.frozen
class Glance:
    """Have the machine look for silent ranks. When each was last heard of is found out when this is its turn."""

    done: trio.Event


@final
@attrs.frozen
class Inquiry:
    """Ask a rank for a word, because it has refused a request."""

    rank: int


@final
@attrs.frozen
class Answered:
    """Every rank has answered a concerted call, or is lost."""

    concerted: Concerted


Item: TypeAlias = Event | Submission | Glance | Inquiry | Concerted | Answered


@final
class Coordinator:
    """The machine, the rank drivers and the streams of one group. Lives in one Trio task tree."""

    def __init__(
        self,
        machine: GroupMachine,
        session: Session[Any, Any],
        drivers: Sequence[RankDriver],
        *,
        unread_limit: int,
    ) -> None:
        self.machine = machine
        self.session = session
        self.drivers = drivers
        self.counts = [RankCounts() for _ in drivers]
        self.settled = trio.Event()
        self.failed = trio.Event()
        """The group is lost, or over."""
        self._unread_limit = unread_limit
        self._inbox, self._outlet = trio.open_memory_channel[Item](float("inf"))
        self._buffers: dict[str, StreamBuffer] = {}
        """Wire id -> stream of a request that is in flight and whose caller is still there."""
        self._callers: set[str] = set()
        """The callers' ids of these."""
        self._unreported: dict[int, LoadReport] = {}
        """Latest load per rank that the machine has not been told yet."""
        self._losses: list[Fault] = []
        """Losses noticed while effects are being carried out; told to the machine right after."""
        self._busy = False
        self._parked: trio.Event | None = None
        """Set, and gone, when the machine is next settled; there only while somebody waits for that."""
        self._work_came: trio.Event | None = None
        """Set when something is sent that wants an answer; there only while ``watch`` has nothing to look for."""
        self._held_back: deque[Submission] = deque()
        """Submissions that came while the ranks were paused, oldest first."""
        self._concerted: deque[Concerted] = deque()
        """Calls that pause or resume, the first of which is under way."""
        self._asleep = False
        """Memory was let go of: only a wake-up may resume."""
        self._inquiries: set[int] = set()
        """Ranks about which an inquiry is in the inbox."""
        self.post_mortem: str | None = None
        """What ``describe`` said just before the group, or the latest rank of it, was lost."""
        self._sequence = 0
        self._over = False
        for driver in drivers:
            driver.listener = self

    # -- callers -------------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """A number that was never used in this group: for wire ids and call ids."""
        self._sequence += 1
        return self._sequence

    def unused_id(self, number: int) -> str:
        """An id for a request whose caller gave none; never that of a request in flight."""
        made = f"request-{number}"
        while made in self._callers:
            number = self.next_number()
            made = f"request-{number}"
        return made

    async def submit(self, submission: Submission) -> None:
        """Admit a request: its ADD and the wake it is owed are queued, or an error is raised and nothing is.

        Cancellation: either it has not been admitted and never will be, or it has been and this returns.
        """
        await trio.lowlevel.checkpoint()
        if self._over:
            raise GroupClosed
        # At the bound too: what still lies in the inbox may be the very abort or final output that makes room.
        in_turn = self.machine.submit_wakes or self.machine.in_flight >= self.machine.max_in_flight
        if in_turn or self._held_back or self.machine.pause is not PausePhase.WORKING:
            self._inbox.send_nowait(submission)
            await submission.slot.wait()
        else:
            self._admit(submission)

    def drain(self) -> None:
        """Take nothing new. To be called in the run's own thread."""
        self.tell(Drain())
        self._let_go()

    def leave(self, buffer: StreamBuffer) -> None:
        """The caller has no more interest. Never blocks; to be called in the run's own thread."""
        self._give_up(buffer, lambda: GroupClosed("the stream was left"))

    def _give_up(self, buffer: StreamBuffer, error: Callable[[], LockstepError]) -> None:
        """Abort a request on the engine and end its stream with an error."""
        if not buffer.over:
            buffer.fail(error)
            self._forget(buffer.wire_id)
            self.post(Abort((buffer.wire_id,)))

    @property
    def over(self) -> bool:
        """The group is closed: nothing more will be sent."""
        return self._over or self.settled.is_set()

    def post(self, event: Event | Answered) -> None:
        """Put an event into the inbox. Dropped once the group is over."""
        if not self._over:
            self._inbox.send_nowait(event)

    # -- the one task --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take events and submissions out of the inbox, one after the other."""
        while True:
            self._take(await self._outlet.receive())
            # One turn for all that has gathered, up to a bound: a turn each would lag behind a large group.
            for _ in range(BURST):
                try:
                    item = self._outlet.receive_nowait()
                except trio.WouldBlock:
                    break
                self._take(item)

    def _take(self, item: Item) -> None:
        if isinstance(item, Submission):
            if not item.slot.abandoned:
                self._receive(item)
        elif isinstance(item, Concerted):
            self._concerted.append(item)
            if len(self._concerted) == 1:
                self._begin_concerted()
        elif isinstance(item, Answered):
            self._conclude(item.concerted)
        elif isinstance(item, Glance):
            self.tell(Look(self._seen()))
            item.done.set()
        elif isinstance(item, Inquiry):
            self._inquiries.discard(item.rank)
            self._probe((item.rank,))
        else:
            self.tell(item)
        self._let_go()

    async def watch(self) -> None:
        """Have the machine look for silent ranks whenever there may be one. Sleeps while no rank has work."""
        while True:
            when = self.machine.next_look(self._seen())
            if when is None:
                self._work_came = trio.Event()
                await self._work_came.wait()
                continue
            # Another rank may get work meanwhile, and its time would be up this much later at the earliest.
            assert self.machine.stall_timeout is not None
            await trio.sleep_until(min(when, trio.current_time() + self.machine.stall_timeout))
            # Not looked at here: if somebody blocked this thread for long, the ranks' tasks shall read first.
            glance = Glance(trio.Event())
            self._inbox.send_nowait(glance)
            await glance.done.wait()

    def _alert(self) -> None:
        """Something is awaited from now on."""
        if self._work_came is not None:
            self._work_came.set()
            self._work_came = None

    def _seen(self) -> tuple[float, ...]:
        return tuple(driver.last_seen for driver in self.drivers)

    # -- pauses --------------------------------------------------------------------------------------------------

    def concert(self, concerted: Concerted) -> None:
        """Have a call sent to all ranks at once, when its turn has come."""
        self._inbox.send_nowait(concerted)

    def _receive(self, submission: Submission) -> None:
        """Admit a submission, or hold it back until the ranks work again."""
        if not self._holds_back:
            self._answer(submission)
            return
        room = self.machine.max_in_flight - self.machine.in_flight
        if len(self._held_back) >= room:  # those that were cancelled while they waited hold no place
            self._held_back = deque(each for each in self._held_back if not each.slot.abandoned)
        if len(self._held_back) >= room:
            submission.slot.fail(partial(Overloaded, "max_in_flight", self.machine.max_in_flight))
        else:
            self._held_back.append(submission)

    @property
    def _holds_back(self) -> bool:
        # Once nothing is taken any more, they shall hear of that.
        return self.machine.pause is not PausePhase.WORKING and self.machine.phase is GroupPhase.OPEN

    def _let_go(self) -> None:
        while self._held_back and not self._holds_back:
            submission = self._held_back.popleft()
            if not submission.slot.abandoned:
                self._answer(submission)

    def _begin_concerted(self) -> None:
        """Start the first call that has something to do and whose caller is still there."""
        while self._concerted:
            first = self._concerted[0]
            refusal = self._refusal(first)
            if refusal is None and not first.slot.abandoned and not self._needless(first):
                self._send_concerted(first)
                return
            self._concerted.popleft()
            if refusal is None:
                first.slot.deliver({})
            else:
                first.slot.fail(refusal)

    def _needless(self, concerted: Concerted) -> bool:
        phase = self.machine.pause
        match concerted.call:
            case Pause():
                return phase is PausePhase.PAUSED
            case Sleep():
                return self._asleep
            case _:
                # Among ranks that are not paused a resume is a barrier that one of them may miss.
                return phase is PausePhase.WORKING

    def _refusal(self, concerted: Concerted) -> Callable[[], LockstepError] | None:
        if self.machine.fault is not None:
            return partial(GroupFailed, self.machine.fault)
        if self.machine.phase not in (GroupPhase.OPEN, GroupPhase.DRAINING):
            return GroupClosed
        if self._asleep and isinstance(concerted.call, Resume):
            return partial(RequestRejected, "method", concerted.method, "a wake-up: the ranks sleep, without memory")
        return None

    def _send_concerted(self, concerted: Concerted) -> None:
        if isinstance(concerted.call, Pause | Sleep):
            # To let go of memory takes as long as it takes.
            self.tell(Pausing(quiet=isinstance(concerted.call, Sleep) and concerted.call.level > 0))
            self._alert()
        ranks = [driver.rank for driver in self.drivers if driver.fault is None]
        concerted.begin(ranks, lambda: self.post(Answered(concerted)))
        self._call_concerted(concerted, ranks, concerted.method, concerted.args)

    def _call_concerted(self, concerted: Concerted, ranks: Sequence[int], method: str, args: Sequence[object]) -> None:
        for rank in ranks:
            call_id = self.next_number()
            self.drivers[rank].expect(call_id, concerted.holder(rank))
            self.drivers[rank].queue(self.session.encode_utility(call_id, method, args))

    def _conclude(self, concerted: Concerted) -> None:
        if not self._concerted:
            return  # the group was lost meanwhile, and its caller was told
        if concerted.failures and concerted.paused is None:
            # A rank may have paused before it failed at something else, or its answer could not be read.
            ranks = list(concerted.failures)
            concerted.ask(ranks, lambda: self.post(Answered(concerted)))
            self._call_concerted(concerted, ranks, *self.session.encode_pause(AskPaused()))
            return
        for rank, words in self._disagreeing(concerted).items():
            self.drivers[rank].lose(FaultKind.DISAGREED, f"{concerted.method} failed here and not elsewhere: {words}")
            fault = self.drivers[rank].fault
            assert fault is not None
            self.tell(RankLost(fault))  # at once: nothing may be sent on the strength of what the others have done
        if self.machine.fault is not None:
            return
        self._follow(concerted)
        if concerted.failures and not concerted.results:
            concerted.slot.fail(partial(UtilityFailed, concerted.method, concerted.failures))
        else:
            concerted.slot.deliver(concerted.results)
        self._concerted.popleft()
        self._begin_concerted()

    @staticmethod
    def _disagreeing(concerted: Concerted) -> dict[int, str]:
        """Ranks that are not in the state in which the others are, or of which it cannot be known."""
        said = concerted.paused or {}
        wanted = isinstance(concerted.call, Pause | Sleep)
        if not concerted.results and len(set(said.values())) == 1:
            wanted = next(iter(said.values()))  # none has said that it did it, and they are all in one state
        return {rank: words for rank, words in concerted.failures.items() if said.get(rank) is not wanted}

    def _follow(self, concerted: Concerted) -> None:
        """The ranks have done what they were told; or none has said so, and what they said of their state counts."""
        call, said = concerted.call, concerted.paused or {}
        pauses = isinstance(call, Pause | Sleep)
        paused = pauses if concerted.results or not said else any(said.values())
        if isinstance(call, WakeUp) and False in concerted.results.values():
            paused = True  # memory is still missing
        if isinstance(call, Sleep) and call.level > 0 and paused:
            self._asleep = True
        if not paused:
            self._resumed()
        elif self.machine.pause is PausePhase.PAUSING:
            self.tell(Paused())

    def _resumed(self) -> None:
        self._asleep = False
        self._alert()
        self.tell(Resumed())

    def _end_concerted(self, error: Callable[[], LockstepError]) -> None:
        while self._concerted:
            self._concerted.popleft().slot.fail(error)

    def _answer(self, submission: Submission) -> None:
        try:
            self._admit(submission)
        except LockstepError as error:
            refusal = error
            submission.slot.fail(lambda: refusal)
        else:
            if submission.slot.abandoned:  # in this very moment, by a finalizer that cancelled
                self.leave(submission.buffer)
            submission.slot.deliver(None)

    @trio.lowlevel.enable_ki_protection  # it may run in the caller's task: a Ctrl-C must not part the ADD from its wake
    def _admit(self, submission: Submission) -> None:
        buffer = submission.buffer
        if buffer.request_id in self._callers:
            raise RequestRejected("request_id", buffer.request_id, "an id of no request in flight")
        self.report_loads()
        backlog = {driver.rank: driver.outbox_bytes for driver in self.drivers if driver.outbox_bytes}
        event = Submit(Request(buffer.wire_id, submission.pin, submission.size), backlog)
        effects = self.machine.handle(event, trio.current_time())
        self._buffers[buffer.wire_id] = buffer
        self._callers.add(buffer.request_id)
        self._alert()
        try:
            self._carry_out(effects, submission.add)
        except BaseException:  # a bug, and maybe in the caller's own task: its request must not stay behind
            self.leave(buffer)
            raise
        if buffer.error is not None:  # the ADD or its wake could not be sent: the request was taken back
            raise buffer.error()

    def tell(self, event: Event) -> None:
        """Let the machine handle an event, and carry out what it wants, all in one go."""
        before = ""
        if isinstance(event, RankLost | Look) and self.machine.fault is None:  # the machine forgets what a rank held
            before = self.dump(
                [event.fault.rank] if isinstance(event, RankLost) and not self.machine.lockstep else None
            )
        self._carry_out(self.machine.handle(event, trio.current_time()), before=before)

    def dump(self, ranks: Sequence[int] | None = None) -> str:
        """The state of the group and of some ranks, for people; None: of all."""
        return describe(self.machine, self.drivers, self.counts, trio.current_time(), ranks)

    def _carry_out(self, effects: Sequence[Effect], add: Sequence[Frame] = (), before: str = "") -> None:
        was_busy, self._busy = self._busy, True
        try:
            for effect in effects:
                self._do(effect, add, before)
        finally:
            self._busy = was_busy
        while self._losses:
            self.tell(RankLost(self._losses.pop(0)))
        if self._parked is not None and self.machine.settled:
            self._parked.set()
            self._parked = None

    def _do(self, effect: Effect, add: Sequence[Frame], before: str) -> None:
        match effect:
            case SendAdd(rank, wire_id):
                self._buffers[wire_id].rank = rank
                self.counts[rank].adds += 1
                self.drivers[rank].queue(add)
            case SendAbort(rank, wire_ids):
                self.counts[rank].aborts += 1
                self.drivers[rank].queue(self.session.encode_abort(wire_ids))
            case SendStart(wave, exclude):
                self._start(wave, exclude)
            case SendFence(rank):
                call_id = self.next_number()
                self.counts[rank].fences += 1
                self.drivers[rank].expect_fence(call_id)
                self.drivers[rank].queue(self._harmless(call_id))
            case SendProbe(ranks):
                self._probe(ranks)
            case EndRequests(wire_ids, fault):
                self._end(wire_ids, fault)
            case LoseRank(fault):
                self.post_mortem = before
                logger.error("%s; just before:\n%s", fault, before)
                self.drivers[fault.rank].give_up(fault)
                self.drivers[fault.rank].fail_calls(partial(self.loss, fault))
                if self._concerted:
                    self._concerted[0].lost(fault.rank)
            case LoseGroup(fault):
                self._lose_group(fault)
            case Settled():
                self.settled.set()
            case Suspected(silent):
                doing = "probing" if self.machine.probes else "they cannot be asked for one"
                logger.warning("no sign of life from ranks %s, which have work: %s", list(silent), doing)
            case Split(silent, answered):
                text = "ranks %s answer a probe, %s do not: the wave is started again\n%s"
                logger.error(text, list(answered), list(silent), before)
            case Ignored(rank, what):
                logger.warning("rank %d: ignored %s", rank, what)
            case _:
                assert_never(effect)

    def _probe(self, ranks: Sequence[int]) -> None:
        """Ask for a sign of life. Nobody waits for the reply itself."""
        for rank in ranks:
            self.drivers[rank].queue(self._harmless(self.next_number()))

    def _harmless(self, call_id: int) -> Sequence[Frame]:
        method = self.session.fence_method
        assert method is not None, "a utility call where there are none"
        return self.session.encode_utility(call_id, method, ())

    def _start(self, wave: int, exclude: int | None) -> None:
        self._alert()
        frames = self.session.encode_start(wave, exclude)
        for driver in self.drivers:
            if driver.rank != exclude:
                self.counts[driver.rank].starts += 1
                driver.queue(frames)

    def _end(self, wire_ids: Sequence[str], fault: Fault | None) -> None:
        error: Callable[[], LockstepError] = GroupClosed if fault is None else partial(self.loss, fault)
        for wire_id in wire_ids:
            buffer = self._forget(wire_id)
            if buffer is not None:
                buffer.fail(error)

    def _lose_group(self, fault: Fault) -> None:
        self.failed.set()
        for driver in self.drivers:
            driver.fail_calls(partial(GroupFailed, fault))
        self._end_concerted(partial(GroupFailed, fault))

    def loss(self, fault: Fault) -> EngineLost:
        """The error that tells of a fault: lockstep groups are lost as a whole."""
        return GroupFailed(fault) if self.machine.lockstep else RankFailed(fault)

    def _forget(self, wire_id: str) -> StreamBuffer | None:
        buffer = self._buffers.pop(wire_id, None)
        if buffer is not None:
            self._callers.discard(buffer.request_id)
        return buffer

    # -- ranks (RankListener) ------------------------------------------------------------------------------------

    def batch_came(self, rank: int, batch: Batch) -> None:
        """Outputs go straight to their streams; the machine hears of firsts and lasts, then of the rest, in order."""
        if batch.load is not None and (batch.load != self.drivers[rank].load or not batch.load.while_idle):
            # The same again is news where the machine has ceased to believe the last one.
            self.drivers[rank].load = self._unreported[rank] = batch.load
        for wire_id, problem in batch.unreadable:  # first: an output behind one that is missing may be the last
            self._spoil(rank, wire_id, problem)
        if batch.outputs:
            self._outputs_came(rank, batch.outputs)
        if batch.utility is not None:
            self.drivers[rank].reply_came(batch.utility)
            if batch.utility.draining:
                self.post(RankDraining(rank))
        if batch.wave_done is not None:
            self.counts[rank].dones += 1
            self.counts[rank].last_done = batch.wave_done
            self.post(WaveDone(rank, batch.wave_done))
        if batch.wave_asked is not None:
            self.post(WaveAsked(rank, batch.wave_asked))

    def _outputs_came(self, rank: int, outputs: Sequence[tuple[str, bool, object]]) -> None:
        self.counts[rank].outputs += len(outputs)
        first: list[str] = []
        finished: list[str] = []
        for wire_id, last, raw in outputs:
            buffer = self._buffers.get(wire_id)
            if buffer is None or buffer.rank != rank:
                self.counts[rank].strays += 1
                if self.machine.awaits(rank, wire_id):
                    first.append(wire_id)
                continue
            if not buffer.started:
                first.append(wire_id)
                if last and self.session.is_refusal(raw):
                    self._inquire(rank)
            buffer.push(raw, final=last)
            if last:
                finished.append(wire_id)
                self._forget(wire_id)
            elif len(buffer.unread) > self._unread_limit:
                self._overflow(buffer)
        if first or finished:
            if finished:
                # The machine forgets a rank's queue once we hold nothing on it, so it must know the older report first.
                self._post_load(rank)
            self.post(Progress(rank, tuple(first), tuple(finished)))

    def _inquire(self, rank: int) -> None:
        """Ask, later, why it refused a request: a rank that shuts down refuses a call too, and in words.

        Not here: while something is sent to it more of its messages may be heard, and would overtake this one's rest.
        """
        if rank not in self._inquiries and not self._over and self.machine.probes:
            self._inquiries.add(rank)
            self._inbox.send_nowait(Inquiry(rank))

    def _overflow(self, buffer: StreamBuffer) -> None:
        self._give_up(buffer, partial(StreamOverflow, buffer.request_id, self._unread_limit))

    def _spoil(self, rank: int, wire_id: str, problem: str) -> None:
        """An output cannot be read: its stream would miss tokens without knowing."""
        buffer = self._buffers.get(wire_id)
        if buffer is None or buffer.rank != rank:
            self.counts[rank].strays += 1
        else:
            self._give_up(buffer, self._unreadable(buffer, problem))

    def outputs_lost(self, rank: int, problem: str) -> None:
        """Whose outputs they were cannot be told: a clean end might be a lie, and an end might never come."""
        for buffer in [each for each in self._buffers.values() if each.rank == rank]:
            self._give_up(buffer, self._unreadable(buffer, problem))

    def _unreadable(self, buffer: StreamBuffer, problem: str) -> Callable[[], LockstepError]:
        part = f"outputs of rank {buffer.rank}, maybe of request {buffer.request_id!r}"
        return partial(WireError, part, f"{problem} ({self.session.versions})")

    def has_work(self, rank: int) -> bool:
        """Whether something of ours is in the rank's hands."""
        return self.machine.has_work(rank)

    def fence_answered(self, rank: int) -> None:
        self.post(FenceAnswered(rank))

    def rank_lost(self, fault: Fault) -> None:
        """Told at once where effects are being carried out, so that a submit can be refused; else in its turn."""
        if self._busy:
            self._losses.append(fault)
        else:
            self.post(RankLost(fault))

    # -- load ----------------------------------------------------------------------------------------------------

    def report_loads(self) -> None:
        """Let the machine know the latest load of every rank. No wave depends on it, so any task may."""
        for rank in tuple(self._unreported):
            self.tell(self._load_event(rank))

    def _post_load(self, rank: int) -> None:
        if rank in self._unreported and not self._busy:  # busy: the rank is just being lost
            self.tell(self._load_event(rank))

    def _load_event(self, rank: int) -> LoadReported:
        load = self._unreported.pop(rank)
        return LoadReported(rank, load.waiting, load.running, load.kv_usage, while_idle=load.while_idle)

    async def wait_parked(self) -> None:
        """Until the machine is settled: nothing in flight, nothing awaited; or the group lost."""
        await trio.lowlevel.checkpoint()
        while not self.machine.settled:
            if self._over:
                raise GroupClosed
            if self._parked is None:
                self._parked = trio.Event()
            await self._parked.wait()

    # -- the end -------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Abort everything and wait until nothing is awaited and every frame has been handed to the link."""
        self.post(Close())
        await self.settled.wait()
        for driver in self.drivers:
            await driver.wait_flushed()

    @trio.lowlevel.enable_ki_protection  # it runs in the owner's task; half of it would leave others waiting
    def finish(self) -> None:
        """The group is over, settled or not: whatever still waits is told so.

        The coordinator may not have come to the close, with little grace or because it is gone; what can leave shall.
        """
        bug: Exception | None = None
        left = self._clear_inbox()
        for event in (*left, *map(self._load_event, tuple(self._unreported)), Close()):
            try:
                self.tell(event)
            except Exception as error:  # noqa: BLE001  # raised below, after everybody was told
                bug = bug or error
        self._let_go()
        while self._held_back:  # only if the machine could not be told
            self._held_back.popleft().slot.fail(GroupClosed)
        self._over = True
        self._end(tuple(self._buffers), self.machine.fault)
        self._end_concerted(GroupClosed)
        for driver in self.drivers:
            driver.fail_calls(GroupClosed)
        self.failed.set()
        if self._parked is not None:
            self._parked.set()
        if bug is not None:
            raise bug

    def _clear_inbox(self) -> list[Event]:
        """Refuse the submissions that nobody has come to, and return the events."""
        left: list[Event] = []
        while True:
            try:
                item = self._outlet.receive_nowait()
            except trio.WouldBlock:
                return left
            if isinstance(item, Submission | Concerted):
                item.slot.fail(GroupClosed)
            elif not isinstance(item, Glance | Inquiry | Answered):
                left.append(item)
