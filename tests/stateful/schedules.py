"""Plans: schedules of what callers, frames and ranks do, as values that print as they are written; and their runner.

A plan runs with the real client over the in-memory link. When it is through, everything that was held back is
released and the simulated group runs by itself. Then everything must come to its end, and nothing may be left.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias, final

import attrs
import trio
import trio.testing

from lockstep_trio.core import (
    Effect,
    Event,
    GroupMachine,
    Progress,
    SendAbort,
    SendAdd,
    SendStart,
    WaveRule,
)
from lockstep_trio.core import (
    Submit as SubmitEvent,
)
from lockstep_trio.engines.vllm import EngineCoreRequest, RequestOutput, VllmProtocol
from lockstep_trio.errors import (
    GroupClosed,
    GroupFailed,
    LockstepError,
    Overloaded,
    RankFailed,
    StreamOverflow,
)
from lockstep_trio.runtime import Group, RequestStream, open_group
from lockstep_trio.testing.engine_rank import DEAD
from lockstep_trio.testing.memory_link import Pipe
from lockstep_trio.testing.rank_model import Add, Drop, StartWave, Sync
from lockstep_trio.testing.simulated import SimulatedGroup
from runtime.kit import Rig, aborts_of, ask, assert_parked, cancelling, rest, seeded, tokens, waves_of

PATIENCE = 3600.0
"""Virtual seconds after which whatever has not ended is stuck. None pass unless nothing else can happen."""
GRACE = 600.0


# -- what a plan is made of --------------------------------------------------------------------------------------


@final
@attrs.frozen
class Submit:
    """A new caller submits a request of so many steps."""

    steps: int
    pin: int | None = None
    cancel_after: int | None = None
    """Cancelled while it sits in its n-th checkpoint; None: never."""


@final
@attrs.frozen
class Receive:
    """The n-th caller receives once, as soon as it has done what it was told before."""

    caller: int


@final
@attrs.frozen
class CancelReceive:
    """Whatever the n-th caller is receiving is cancelled; it goes on with the next order."""

    caller: int


@final
@attrs.frozen
class Leave:
    """The n-th caller's stream is closed, also under the hands of its reader."""

    caller: int


@final
@attrs.frozen
class Forget:
    """The n-th caller drops its stream without closing it."""

    caller: int


@final
@attrs.frozen
class Call:
    """Somebody calls a utility method on all ranks."""


@final
@attrs.frozen
class Turns:
    """The client's tasks get so many turns. Without this, nothing runs between two actions."""

    count: int


@final
@attrs.frozen
class Rest:
    """The client does all that it can do."""


@final
@attrs.frozen
class Hold:
    """From now on no frame arrives at the rank, or else from it."""

    rank: int
    to_rank: bool


@final
@attrs.frozen
class Let:
    """So many frames more arrive."""

    rank: int
    to_rank: bool
    count: int


@final
@attrs.frozen
class Release:
    """Frames arrive freely again."""

    rank: int
    to_rank: bool


@final
@attrs.frozen
class Deliver:
    """Some frames reach the rank's queue; None: all that may."""

    rank: int
    count: int | None = None


@final
@attrs.frozen
class Poll:
    """The rank takes some of its queue, unless it is at the barrier; None: all of it."""

    rank: int
    count: int | None = None


@final
@attrs.frozen
class Step:
    """The lockstep group steps if all are at the barrier; of independent ranks this one does."""

    rank: int = 0


@final
@attrs.frozen
class Advance:
    """Everything that can happen on the engines' side happens, so many times over."""

    times: int = 1


@final
@attrs.frozen
class Kill:
    """The rank is gone. ``how``: "disconnect", "dead" (it says so) or "silent" (found out by the next send only)."""

    rank: int
    how: str = "disconnect"


@final
@attrs.frozen
class CloseGroup:
    """The owner leaves the block."""


Action: TypeAlias = (
    Submit
    | Receive
    | CancelReceive
    | Leave
    | Forget
    | Call
    | Turns
    | Rest
    | Hold
    | Let
    | Release
    | Deliver
    | Poll
    | Step
    | Advance
    | Kill
    | CloseGroup
)


@final
@attrs.frozen
class Plan:
    """A group, and what happens to it."""

    actions: tuple[Action, ...]
    ranks: int = 2
    lockstep: bool = True
    sync: Sync = Sync()  # noqa: RUF009  # frozen
    capacity: int | None = None
    unread_limit: int = 8_192
    max_in_flight: int = 65_536
    seed: int = 0
    """Of the order in which Trio runs tasks."""


# -- what is watched ---------------------------------------------------------------------------------------------


class Recorder:
    """Stands in for the machine: notes what it wanted, and what it must not want."""

    def __init__(self, machine: GroupMachine) -> None:
        self.machine = machine
        self.wrong: list[str] = []
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

    async def run(self, group: Group[EngineCoreRequest, RequestOutput]) -> None:
        request = ask(self.submit.steps, rank=self.submit.pin, name=self.name)
        try:
            with nullcontext() if self.submit.cancel_after is None else cancelling(self.submit.cancel_after):
                self.stream = await group.submit(request)
        except LockstepError as error:
            self.end = error
            return
        if self.stream is None:
            self.end = "cancelled"
            return
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


# -- the runner --------------------------------------------------------------------------------------------------


class Run:
    """One plan, carried out."""

    def __init__(self, plan: Plan, rule: Callable[[int], WaveRule] | None) -> None:
        self.plan = plan
        self.rule = rule
        self.sim = SimulatedGroup(plan.ranks, lockstep=plan.lockstep, sync=plan.sync, capacity=plan.capacity)
        self.callers: list[Caller] = []
        self.calls: list[object] = []
        self.group: Group[EngineCoreRequest, RequestOutput]
        self.recorder: Recorder
        self.killed: set[int] = set()
        self.leave = trio.Event()
        self.left = trio.Event()
        self.left_early = False

    async def main(self) -> None:
        self.sim.start()
        async with trio.open_nursery() as nursery:
            await nursery.start(self._hold_open)
            await rest()
            async with trio.open_nursery() as people:
                self.people = people
                for action in self.plan.actions:
                    await self._do(action)
                self._let_go(nursery)
                with trio.move_on_after(PATIENCE) as patience:
                    while people.child_tasks:
                        await trio.sleep(1)
                if patience.cancelled_caught:
                    people.cancel_scope.cancel()
            stuck = [caller.name for caller in self.callers if caller.end is None]
            assert not stuck, f"stuck: {stuck}"
            assert not patience.cancelled_caught, "a call is stuck"
            await rest()
            clean = not (self.killed or self.left_early)
            if clean:
                Rig(self.sim, self.group).assert_nothing_left()
            begun = trio.current_time()
            self.leave.set()
            await self.left.wait()
            assert trio.current_time() == begun, "closing took the whole grace"
            await rest()
            self._check()
            nursery.cancel_scope.cancel()

    async def _hold_open(self, task_status: trio.TaskStatus[None]) -> None:
        async with open_group(
            self.sim.link,
            ranks=self.plan.ranks,
            protocol=VllmProtocol(),
            close_grace=GRACE,
            send_timeout=math.inf,
            unread_limit=self.plan.unread_limit,
            max_in_flight=self.plan.max_in_flight,
        ) as self.group:
            coordinator = self.group._coordinator
            if self.rule is not None:
                coordinator.machine._rule = self.rule(self.plan.ranks)
            self.recorder = Recorder(coordinator.machine)
            coordinator.machine = self.recorder  # type: ignore[assignment]
            task_status.started()
            await self.leave.wait()
        self.left.set()

    def _let_go(self, nursery: trio.Nursery) -> None:
        for rank, port in enumerate(self.sim.ports):
            port.inbound.release()
            port.outbound.release()
            if rank in self.killed:
                self.sim.kill(rank)
        nursery.start_soon(self.sim.run)
        for caller in self.callers:
            caller.orders.close()

    def _rank(self, number: int) -> int:
        return number % self.plan.ranks

    def _pipe(self, rank: int, *, to_rank: bool) -> Pipe:
        port = self.sim.ports[self._rank(rank)]
        return port.inbound if to_rank else port.outbound

    async def _do(self, action: Action) -> None:
        match action:
            case Submit():
                pin = None if action.pin is None else self._rank(action.pin)
                caller = Caller(len(self.callers), attrs.evolve(action, pin=pin))
                self.callers.append(caller)
                self.people.start_soon(caller.run, self.group)
            case Turns(count):
                for _ in range(count):
                    await trio.lowlevel.checkpoint()
            case Rest():
                await rest()
            case Receive(number) | CancelReceive(number) | Leave(number) | Forget(number):
                if self.callers:
                    self._order(action, self.callers[number % len(self.callers)])
            case Call():
                self.people.start_soon(self._call)
            case CloseGroup():
                self.left_early = True
                self.leave.set()
            case _:
                self._engine_side(action)

    @staticmethod
    def _order(action: Action, caller: Caller) -> None:
        match action:
            case Receive():
                if caller.end is None:
                    caller.orders.send_nowait("receive")
            case CancelReceive():
                if caller.receiving is not None:
                    caller.receiving.cancel()
            case Leave():
                if caller.stream is not None:
                    caller.stream.close()
            case Forget():
                if caller.end is None:
                    caller.orders.send_nowait("forget")
            case _:
                raise AssertionError(action)

    def _engine_side(self, action: Action) -> None:
        match action:
            case Hold(rank, to_rank):
                self._pipe(rank, to_rank=to_rank).hold()
            case Let(rank, to_rank, count):
                pipe = self._pipe(rank, to_rank=to_rank)
                if pipe._let_through is not None:
                    pipe.let(count)
            case Release(rank, to_rank):
                self._pipe(rank, to_rank=to_rank).release()
            case Deliver(rank, count):
                self.sim.deliver(self._rank(rank), count)
            case Poll(rank, count):
                self._poll(self._rank(rank), count)
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
        if self.plan.lockstep:
            if self.sim.can_step():
                self.sim.step()
        elif self.sim.alive[rank] and self.sim.ranks[rank].model.at_barrier:
            self.sim.step_alone(rank)

    def _poll(self, rank: int, count: int | None) -> None:
        engine = self.sim.ranks[rank]
        if self.sim.alive[rank] and not engine.model.at_barrier:
            self.sim.poll(rank, None if count is None else min(count, len(engine.arrived)))

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
            self.calls.append(await self.group.call_utility("is_sleeping", timeout=None))
        except LockstepError as error:
            self.calls.append(error)

    # -- what must hold ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        assert not self.recorder.wrong, self.recorder.wrong
        assert self.sim.link.closed
        aborts = aborts_of(self.sim)
        by_name: dict[str, list[int]] = {}
        for wire_id, count in aborts.items():
            by_name.setdefault(wire_id.partition("#")[0], []).append(count)
        for caller in self.callers:
            self._check_end(caller)
            if not self.killed:
                self._check_aborts(caller, by_name.get(caller.name, []))
        for rank, engine in enumerate(self.sim.ranks):
            if rank not in self.killed:
                self._check_log(rank)
            assert engine.model.wave >= (waves_of(self.sim, rank) or [0])[-1] or rank in self.killed
        if not self.killed:
            assert_parked(self.sim)
        for end in self.calls:
            assert end == dict.fromkeys(range(self.plan.ranks), False) or isinstance(end, self._excuses()), end

    def _excuses(self) -> tuple[type[Exception], ...]:
        """Errors that are to be expected of this plan."""
        excuses: list[type[Exception]] = []
        if self.killed:
            excuses += [GroupFailed] if self.plan.lockstep else [RankFailed, GroupFailed]
        if self.left_early:
            excuses.append(GroupClosed)
        if not self.plan.lockstep and len(self.killed) == self.plan.ranks:
            excuses.append(GroupClosed)  # "every rank is lost", between the last loss and the news of it
        return tuple(excuses)

    def _check_end(self, caller: Caller) -> None:
        expected = tokens(caller.submit.steps)
        assert caller.tokens == expected[: len(caller.tokens)], caller.name
        match caller.end:
            case "finished":
                assert caller.tokens == expected, caller.name
            case "left" | "forgotten":
                pass
            case "cancelled":
                assert caller.submit.cancel_after is not None
            case StreamOverflow():
                assert self.plan.unread_limit < caller.submit.steps
            case Overloaded():
                assert len(self.callers) > self.plan.max_in_flight
            case LockstepError():
                assert isinstance(caller.end, self._excuses()), f"{caller.name}: {caller.end!r}"
                if isinstance(caller.end, GroupFailed | RankFailed):
                    assert caller.end.rank in self.killed
            case _:
                raise AssertionError(f"{caller.name}: {caller.end!r}")

    def _check_aborts(self, caller: Caller, counts: list[int]) -> None:
        match caller.end:
            case "finished":  # a final output may cross the owner's leave on the last few yards
                assert counts == [0] or (counts == [1] and self.left_early), caller.name
            case "left" | "forgotten" | StreamOverflow():
                assert counts in ([0], [1]), caller.name  # 0: the engine was faster; it holds nothing, as is checked
            case "cancelled" | GroupClosed():
                assert counts in ([], [0], [1]), caller.name
            case _:
                assert counts == [], caller.name

    def _check_log(self, rank: int) -> None:
        arrived = [
            message.wire_id if isinstance(message, Add) else message
            for message in self.sim.ranks[rank].log
            if isinstance(message, Add | Drop | StartWave)
        ]
        queued = self.recorder.queued[rank]
        assert arrived == queued, f"rank {rank}: {arrived} arrived of {queued}"


def run(plan: Plan, rule: Callable[[int], WaveRule] | None = None) -> Run:
    """Carry out a plan and check all that must hold. ``rule``: with another wake rule than ours."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    with seeded(plan.seed), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # streams are dropped on purpose

        async def main() -> Run:
            carried_out = Run(plan, rule)
            await carried_out.main()
            return carried_out

        try:
            return trio.run(main, clock=clock)
        except BaseException as error:
            error.add_note(f"as a regression test: {plan!r}")
            raise
