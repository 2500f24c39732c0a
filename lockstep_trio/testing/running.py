"""Carries schedules out: the real client over a link in memory, with ranks that do what they are told.

When the last action is done, everything that was held back is let go and the simulated group runs by itself. Then
everything must come to its end, every stream once, and nothing may be left on either side.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias, cast, final

import attrs
import trio
import trio.testing

from lockstep_trio.core import (
    Effect,
    Event,
    GroupMachine,
    PausePhase,
    Progress,
    SendAbort,
    SendAdd,
    SendStart,
    WaveRule,
)
from lockstep_trio.core import Submit as SubmitEvent
from lockstep_trio.engines.protocol import PauseMode
from lockstep_trio.engines.vllm import EngineCoreRequest, RequestOutput, SamplingParams, VllmProtocol
from lockstep_trio.errors import GroupClosed, GroupFailed, LockstepError, Overloaded, RankFailed, StreamOverflow
from lockstep_trio.runtime import Group, RequestStream, open_group
from lockstep_trio.runtime.opening import MACHINE

from .arranging import cancelling, seeded
from .engine_rank import DEAD, tokens_of
from .memory_link import Pipe
from .rank_model import Add, Drop, StartWave, ToRank
from .schedules import (
    AbortInStep,
    Action,
    Advance,
    Call,
    CancelReceive,
    CloseGroup,
    Deliver,
    Forget,
    Hold,
    Kill,
    Leave,
    Let,
    Lose,
    PauseGroup,
    Poll,
    Receive,
    Release,
    Rest,
    ResumeGroup,
    Schedule,
    Step,
    Submit,
    Turns,
)
from .simulated import SimulatedGroup

PATIENCE = 3600.0
"""Virtual seconds after which whatever has not ended is stuck. None pass unless nothing else can happen."""
GRACE = 600.0
MOST_EVENTS = 5_000
"""A group that has more to tell than that does not come to rest: steps take no time, so the clock does not show it."""
PROMPT = 7

rest = trio.testing.wait_all_tasks_blocked
"""Until everybody waits: the client has done all that it can do by itself."""

Requests: TypeAlias = Group[EngineCoreRequest, RequestOutput]


class Wrong(AssertionError):
    """Something that must hold does not."""


@final
@attrs.frozen
class Report:
    """What became of a schedule."""

    schedule: Schedule
    problem: str | None
    """What must hold and does not, in words; None: all is well."""
    ends: tuple[str, ...]
    """Of each caller: "finished", "left", "forgotten", "cancelled" (while it submitted), or the error that ended it."""
    tokens: tuple[int, ...]
    """How many each caller received."""
    events: tuple[tuple[Event, tuple[Effect, ...]], ...]
    """All that the client's machine was told, in order, and what it wanted done."""
    arrived: tuple[tuple[ToRank, ...], ...]
    """Per rank, all that reached it, in order."""
    steps: tuple[int, ...]
    """Steps of each rank."""

    @property
    def starts(self) -> tuple[int, ...]:
        """The waves that were started, in order."""
        effects = (effect for _, wanted in self.events for effect in wanted)
        return tuple(effect.wave for effect in effects if isinstance(effect, SendStart))

    def require(self) -> None:
        """Raise ``Wrong``, with the schedule as a literal, unless all is well."""
        if self.problem is not None:
            raise Wrong(f"{self.problem}\nas a literal: {self.schedule!r}\nas JSON: {self.schedule.to_json()}")


# -- what is watched ---------------------------------------------------------------------------------------------


@final
class Witness:
    """Stands in for the machine: notes what it is told and wants, and what it must not want."""

    def __init__(self, machine: GroupMachine, flooded: Callable[[], None]) -> None:
        self.machine = machine
        self._flooded = flooded
        self.wrong: list[str] = []
        self.events: list[tuple[Event, tuple[Effect, ...]]] = []
        self.queued: list[list[Add | Drop | StartWave | str]] = [[] for _ in range(machine.ranks)]
        """Per rank, what must have arrived there in the end; ADDs by their wire ids."""
        self._added: set[str] = set()
        self._finished: set[str] = set()
        self._aborted: set[str] = set()
        self._last_wave = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        was_stepping = self.machine.snapshot().stepping
        effects = self.machine.handle(event, now)
        self.events.append((event, effects))
        if len(self.events) == MOST_EVENTS:
            self._flooded()
        if isinstance(event, Progress):
            self._finished.update(event.finished)
        for place, effect in enumerate(effects):
            match effect:
                case SendAdd(rank, wire_id):
                    self._added.add(wire_id)
                    self.queued[rank].append(wire_id)
                case SendAbort(rank, wire_ids):
                    self._check_abort(wire_ids)
                    self.queued[rank].append(Drop(wire_ids))
                case SendStart(wave, exclude):
                    if isinstance(event, SubmitEvent) and (was_stepping or place != 1):
                        self.wrong.append(f"{event} woke a stepping group, or before its ADD")
                    self._check_wave(wave)
                    for rank, queued in enumerate(self.queued):
                        if rank != exclude:
                            queued.append(StartWave(wave, exclude))
                case _:
                    pass
        return effects

    def _check_abort(self, wire_ids: tuple[str, ...]) -> None:
        for wire_id in wire_ids:
            if wire_id not in self._added:
                self.wrong.append(f"{wire_id} was aborted without an ADD")
            if wire_id in self._finished:
                self.wrong.append(f"{wire_id} was aborted after its final output had been handled")
            if wire_id in self._aborted:
                self.wrong.append(f"{wire_id} was aborted twice")
            self._aborted.add(wire_id)

    def _check_wave(self, wave: int) -> None:
        if not self.machine.lockstep:
            self.wrong.append("independent ranks were woken")
        if wave <= self._last_wave:
            self.wrong.append(f"START({wave}) after START({self._last_wave})")
        self._last_wave = wave


@final
class Caller:
    """One caller: its request, its stream, its orders and its end."""

    def __init__(self, number: int, submit: Submit) -> None:
        self.number = number
        self.submit = submit
        self.tokens: list[int] = []
        self.end: str | Exception | None = None
        """"finished", "left", "forgotten" or "cancelled" (while it submitted), or the error that ended it."""
        self.stream: RequestStream[RequestOutput] | None = None
        self.receiving: trio.CancelScope | None = None
        self.orders, self._orders = trio.open_memory_channel[str](math.inf)
        self._final = False

    @property
    def name(self) -> str:
        return f"caller-{self.number}"

    async def run(self, group: Requests) -> None:
        sampling = SamplingParams(max_tokens=self.submit.steps)
        request = EngineCoreRequest([PROMPT], sampling, request_id=self.name, data_parallel_rank=self.submit.pin)
        try:
            after = self.submit.cancel_after
            with nullcontext(trio.CancelScope()) if after is None else cancelling(after) as scope:
                self.stream = await group.submit(request)
        except LockstepError as error:
            self.end = error
            return
        if scope.cancelled_caught:
            self.end = "cancelled"
        else:
            await self._obey()

    async def _obey(self) -> None:
        async for order in self._orders:
            if order == "forget":
                self.end = "forgotten"
                self.stream = None
                return
            with trio.CancelScope() as self.receiving:
                await self._receive_once()
            if self.end is not None:
                break
        while self.end is None:
            await self._receive_once()
        await self._look_again()

    async def _receive_once(self) -> None:
        assert self.stream is not None
        try:
            output = await self.stream.receive()
        except trio.EndOfChannel:
            self.end = "finished" if self._final else "a clean end without a final output"
        except trio.ClosedResourceError:
            self.end = "left"
        except LockstepError as error:
            self.end = error
        else:
            self.tokens += output.token_ids
            self._final = output.finished

    async def _look_again(self) -> None:
        """An end is an end: whoever asks again hears the same."""
        end, count = self.end, len(self.tokens)
        self.end = None
        await self._receive_once()
        closed_meanwhile = self.end == "left"
        if (repr(self.end) != repr(end) and not closed_meanwhile) or len(self.tokens) != count:
            end = f"first {end!r}, then {self.end!r}"
        self.end = end
        assert self.stream is not None
        self.stream.close()


@final
class _Run:
    """One schedule, carried out."""

    def __init__(self, schedule: Schedule, rule: Callable[[int], WaveRule] | None) -> None:
        self.schedule = schedule
        self.sim = SimulatedGroup(
            schedule.ranks, lockstep=schedule.lockstep, sync=schedule.sync, capacity=schedule.capacity
        )
        self.callers: list[Caller] = []
        self.calls: list[object] = []
        """Results of utility calls, or the errors that ended them."""
        self.pauses: list[object] = []
        """Likewise of pauses and resumes."""
        self.asked = 0
        """How many of these there are to be."""
        self.witness: Witness
        self.killed: set[int] = set()
        self.lost = False
        self.left_early = False
        self.problems: list[str] = []
        self._rule = rule
        self._group: Requests
        self._people: trio.Nursery
        self._running = trio.CancelScope()
        self._leave = trio.Event()
        self._left = trio.Event()

    def must(self, holds: object, words: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.problems.append(words)

    async def main(self) -> Report:
        """Carry it out."""
        self.sim.start()
        async with trio.open_nursery() as nursery:
            await nursery.start(self._hold_open)
            await rest()
            async with trio.open_nursery() as self._people:
                for action in self.schedule.actions:
                    await self._do(action)
                self._let_go(nursery)
                await self._until_all_have_ended()
            await rest()
            if not (self.killed or self.left_early or self.problems):
                self._check_nothing_left()
            begun = trio.current_time()
            self._leave.set()
            await self._left.wait()
            self.must(self.problems or trio.current_time() == begun, "closing took the whole grace")
            await rest()
            self.problems += self.witness.wrong
            if not self.problems:
                Judge(self).check()
            nursery.cancel_scope.cancel()
        return self._report()

    async def _hold_open(self, task_status: trio.TaskStatus[None]) -> None:
        token = MACHINE.set(self._machine)
        try:
            async with open_group(
                self.sim.link,
                ranks=self.schedule.ranks,
                protocol=VllmProtocol(vocab_size=2**31),
                close_grace=GRACE,
                send_timeout=math.inf,
                stall_timeout=None,  # the watch for silence would wake a group that the rule has stranded
                unread_limit=self.schedule.unread_limit,
                max_in_flight=self.schedule.max_in_flight,
            ) as self._group:
                task_status.started()
                await self._leave.wait()
        finally:
            MACHINE.reset(token)
        self._left.set()

    def _machine(self, ranks: int, *, lockstep: bool, **options: Any) -> GroupMachine:
        rule = self._rule(ranks) if self._rule is not None and lockstep else None
        self.witness = Witness(GroupMachine(ranks, lockstep=lockstep, rule=rule, **options), self._stop)
        return cast(GroupMachine, self.witness)

    def _let_go(self, nursery: trio.Nursery) -> None:
        for rank, port in enumerate(self.sim.ports):
            port.inbound.release()
            port.outbound.release()
            if rank in self.killed:
                self.sim.kill(rank)
        nursery.start_soon(self._run_by_itself)
        self._people.start_soon(self._resume_in_the_end)
        for caller in self.callers:
            caller.orders.close()

    async def _run_by_itself(self) -> None:
        with self._running:
            await self.sim.run()

    def _stop(self) -> None:
        self.must(False, f"never at rest: {MOST_EVENTS} events")
        self._running.cancel()
        self._people.cancel_scope.cancel()

    async def _resume_in_the_end(self) -> None:
        """A group that was left paused would keep everybody waiting."""
        while self.asked != len(self.pauses) or self.witness.machine.pause is not PausePhase.WORKING:
            if self.left_early or self._group.fault is not None:
                return
            if self.witness.machine.pause is PausePhase.PAUSED:
                self.asked += 1
                await self._pause_or_resume(None)
            else:
                await trio.sleep(1)

    async def _until_all_have_ended(self) -> None:
        with trio.move_on_after(PATIENCE) as patience:
            while self._people.child_tasks:  # noqa: ASYNC110  # a nursery does not say when it is empty
                await trio.sleep(1)
        if patience.cancelled_caught and not self.problems:
            stuck = [caller.name for caller in self.callers if caller.end is None]
            self.must(False, f"stuck: {', '.join(stuck) or 'a call'}; {self._where()}")
            self._people.cancel_scope.cancel()

    def _where(self) -> str:
        places = ((rank.index, rank.model) for rank in self.sim.ranks)
        return ", ".join(
            f"rank {index} {'waits for the others' if model.waits else 'works' if model.has_work else 'is parked'}"
            for index, model in places
        )

    def _check_nothing_left(self) -> None:
        """Once all have ended nobody waits for anybody, and every table is empty on both sides."""
        if any(rank.model.waits for rank in self.sim.ranks):
            self.must(False, f"stuck: nobody; {self._where()}")
        state = self._group.statistics().state
        self.must((state.in_flight, state.stepping) == (0, False), f"left over: {state}")
        for rank in state.ranks:
            self.must((rank.in_flight, rank.unproven, rank.fence_pending) == (0, 0, False), f"left over: {rank}")
        for traffic in self._group.statistics().ranks:
            self.must(traffic.outbox_messages == 0, f"left over in an outbox: {traffic}")

    def _report(self) -> Report:
        return Report(
            self.schedule,
            "; ".join(self.problems) or None,
            tuple(caller.end if isinstance(caller.end, str) else repr(caller.end) for caller in self.callers),
            tuple(len(caller.tokens) for caller in self.callers),
            tuple(self.witness.events),
            tuple(tuple(rank.log) for rank in self.sim.ranks),
            tuple(rank.steps for rank in self.sim.ranks),
        )

    # -- actions -------------------------------------------------------------------------------------------------

    def _rank(self, number: int) -> int:
        return number % self.schedule.ranks

    def _pipe(self, rank: int, *, to_rank: bool) -> Pipe:
        port = self.sim.ports[self._rank(rank)]
        return port.inbound if to_rank else port.outbound

    async def _do(self, action: Action) -> None:
        match action:
            case Submit():
                pin = None if action.pin is None else self._rank(action.pin)
                caller = Caller(len(self.callers), attrs.evolve(action, pin=pin))
                self.callers.append(caller)
                self._people.start_soon(caller.run, self._group)
            case Turns(count):
                for _ in range(count):
                    await trio.lowlevel.checkpoint()
            case Rest():
                await rest()
            case Receive(number) | CancelReceive(number) | Leave(number) | Forget(number):
                if self.callers:
                    self._order(action, self.callers[number % len(self.callers)])
            case Call():
                self._people.start_soon(self._call)
            case PauseGroup(mode):
                self.asked += 1
                self._people.start_soon(self._pause_or_resume, mode)
            case ResumeGroup():
                self.asked += 1
                self._people.start_soon(self._pause_or_resume, None)
            case CloseGroup():
                self.left_early = True
                self._leave.set()
            case _:
                self._on_the_engines_side(action)

    @staticmethod
    def _order(action: Action, caller: Caller) -> None:
        match action:
            case Receive() if caller.end is None:
                caller.orders.send_nowait("receive")
            case CancelReceive() if caller.receiving is not None:
                caller.receiving.cancel()
            case Leave() if caller.stream is not None:
                caller.stream.close()
            case Forget() if caller.end is None:
                caller.orders.send_nowait("forget")
            case _:
                pass

    def _on_the_engines_side(self, action: Action) -> None:
        match action:
            case Hold(rank, to_rank):
                self._pipe(rank, to_rank=to_rank).hold()
            case Let(rank, to_rank, count):
                self._pipe(rank, to_rank=to_rank).let_if_held(count)
            case Release(rank, to_rank):
                self._pipe(rank, to_rank=to_rank).release()
            case Lose(rank):
                self.lost = self._pipe(rank, to_rank=False).drop() or self.lost
            case Deliver(rank, count):
                self.sim.deliver(self._rank(rank), count)
            case Poll(rank, count):
                self._poll(self._rank(rank), count)
            case AbortInStep(rank, caller):
                self._abort_in_step(self._rank(rank), caller)
            case Step(rank):
                self._step(self._rank(rank))
            case Advance(times):
                for _ in range(times):
                    self.sim.advance()
            case Kill(rank, how):
                self._kill(self._rank(rank), how)
            case _:
                raise AssertionError(action)

    def _step(self, rank: int) -> None:
        if not self.schedule.lockstep:
            if self.sim.alive[rank] and self.sim.ranks[rank].model.at_barrier:
                self.sim.step_alone(rank)
        elif self.sim.can_step():
            self.sim.step()
        elif self.sim.can_resume():
            self.sim.resume()

    def _poll(self, rank: int, count: int | None) -> None:
        engine = self.sim.ranks[rank]
        if self.sim.alive[rank] and not engine.model.waits:
            self.sim.poll(rank, None if count is None else min(count, len(engine.arrived)))

    def _abort_in_step(self, rank: int, caller: int) -> None:
        engine = self.sim.ranks[rank]
        self.sim.deliver(rank)
        if engine.model.at_barrier:
            dropped = (each for message in engine.arrived if isinstance(message, Drop) for each in message.wire_ids)
            engine.model.drop([each for each in dropped if each.startswith(f"caller-{caller}#")])

    def _kill(self, rank: int, how: str) -> None:
        self.killed.add(rank)
        if how == "dead":
            self.sim.ports[rank].send((DEAD,))
        self.sim.alive[rank] = False
        self.sim.ports[rank].connected = False
        if how == "disconnect":
            self.sim.kill(rank)

    async def _call(self) -> None:
        try:
            self.calls.append(await self._group.call_utility("is_sleeping", timeout=None))
        except LockstepError as error:
            self.calls.append(error)

    async def _pause_or_resume(self, mode: str | None) -> None:
        try:
            if mode is None:
                await self._group.resume(timeout=None)
            else:
                await self._group.pause(cast(PauseMode, mode))
        except LockstepError as error:
            self.pauses.append(error)
        else:
            self.pauses.append(None)


@final
class Judge:
    """What must hold when a schedule is through, whatever it was."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._schedule = run.schedule

    def check(self) -> None:
        """Look at everything."""
        run = self._run
        run.must(run.sim.link.closed, "the link is still open")
        aborts = self._aborts()
        for caller in run.callers:
            self._check_end(caller)
            if not (run.killed or run.lost):
                self._check_aborts(caller, aborts.get(caller.name, []))
        for rank, engine in enumerate(run.sim.ranks):
            if rank not in run.killed:
                self._check_rank(rank)
                waves = [message.wave for message in engine.log if isinstance(message, StartWave)]
                run.must(engine.model.wave >= max(waves, default=0), f"a START was ahead of rank {rank}'s wave")
        if not run.killed:
            self._check_parked()
        for end in run.calls:
            answered = end in [dict.fromkeys(range(self._schedule.ranks), sleeps) for sleeps in (False, True)]
            excused = isinstance(end, self._excuses())
            run.must(answered or excused or run.pauses, f"a call came to {end!r}")

    def _aborts(self) -> dict[str, list[int]]:
        """Caller -> ABORTs that ranks were sent, for each of its requests."""
        counted: dict[str, int] = {}
        for engine in self._run.sim.ranks:
            added: set[str] = set()
            for message in engine.log:
                if isinstance(message, Add):
                    self._run.must(message.wire_id not in counted, f"{message.wire_id} has two ADDs")
                    added.add(message.wire_id)
                    counted[message.wire_id] = 0
                elif isinstance(message, Drop):
                    for wire_id in message.wire_ids:
                        self._run.must(wire_id in added, f"{wire_id} aborted on rank {engine.index} before its ADD")
                        counted[wire_id] = counted.get(wire_id, 0) + 1
        by_name: dict[str, list[int]] = {}
        for wire_id, count in counted.items():
            by_name.setdefault(wire_id.partition("#")[0], []).append(count)
        return by_name

    def _check_parked(self) -> None:
        for engine in self._run.sim.ranks:
            rests = not (engine.arrived or engine.model.has_work or engine.model.waits or engine.model.held)
            self._run.must(rests, f"rank {engine.index} is not parked: {engine.model}")

    def _excuses(self) -> tuple[type[Exception], ...]:
        """Errors that are to be expected of this schedule."""
        excuses: list[type[Exception]] = []
        if self._run.killed:
            excuses += [GroupFailed] if self._schedule.lockstep else [RankFailed, GroupFailed]
        if self._run.left_early:
            excuses.append(GroupClosed)
        if not self._schedule.lockstep and len(self._run.killed) == self._schedule.ranks:
            excuses.append(GroupClosed)  # "every rank is lost", between the last loss and the news of it
        return tuple(excuses)

    def _check_end(self, caller: Caller) -> None:
        expected = tokens_of(PROMPT, caller.submit.steps)
        must = self._run.must
        must(self._run.lost or caller.tokens == expected[: len(caller.tokens)], f"{caller.name} received other tokens")
        match caller.end:
            case "finished":
                whole = caller.tokens == expected or self._aborted_by_pause()
                must(whole or self._run.lost, f"{caller.name} finished without all of its tokens")
            case "left" | "forgotten":
                pass
            case "cancelled":
                must(caller.submit.cancel_after is not None, f"{caller.name} was cancelled by nobody")
            case StreamOverflow():
                must(self._schedule.unread_limit < caller.submit.steps, f"{caller.name} overflowed too soon")
            case Overloaded():
                must(len(self._run.callers) > self._schedule.max_in_flight, f"{caller.name} was refused too soon")
            case LockstepError():
                must(isinstance(caller.end, self._excuses()), f"{caller.name} came to {caller.end!r}")
                if isinstance(caller.end, GroupFailed | RankFailed):
                    must(caller.end.rank in self._run.killed, f"{caller.name} blames rank {caller.end.rank}")
            case _:
                must(False, f"{caller.name} came to {caller.end!r}")

    def _aborted_by_pause(self) -> bool:
        return any(isinstance(each, PauseGroup) and each.mode == "abort" for each in self._schedule.actions)

    def _check_aborts(self, caller: Caller, counts: list[int]) -> None:
        match caller.end:
            case "finished":  # a final output may cross the owner's leave on the last few yards
                fine = counts == [0] or (counts == [1] and self._run.left_early)
            case "left" | "forgotten" | StreamOverflow():
                fine = counts in ([0], [1])  # 0: the engine was faster; it holds nothing, as is checked
            case "cancelled" | GroupClosed():
                fine = counts in ([], [0], [1])
            case _:
                fine = counts == []
        self._run.must(fine, f"{caller.name} {caller.end}: ABORTs {counts}")

    def _check_rank(self, rank: int) -> None:
        arrived = [
            message.wire_id if isinstance(message, Add) else message
            for message in self._run.sim.ranks[rank].log
            if isinstance(message, Add | Drop | StartWave)
        ]
        queued = self._run.witness.queued[rank]
        self._run.must(arrived == queued, f"rank {rank}: {arrived} arrived of {queued}")


def run_schedule(schedule: Schedule, rule: Callable[[int], WaveRule] | None = None) -> Report:
    """Carry out a schedule, and look at all that must hold. Blocks; takes no time, for the clock jumps.

    The same schedule gives the same report each time, as far as Trio lets itself be seeded (0.26 to 0.33 do).

    Args:
        schedule: What happens.
        rule: Makes another wake rule than ours, for so many ranks.

    Returns:
        What became of it. ``report.require()`` raises if something is wrong.
    """
    clock = trio.testing.MockClock(autojump_threshold=0)
    with seeded(schedule.seed), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # streams are dropped on purpose
        try:
            return trio.run(_Run(schedule, rule).main, clock=clock)
        except BaseException as error:
            error.add_note(f"as a literal: {schedule!r}")
            raise
