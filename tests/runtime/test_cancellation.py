"""Every public coroutine, cancelled at its 1st, 2nd, 3rd ... checkpoint, and at every step of anybody else meanwhile.

Each scenario is run again and again, cancelled one step later each time, until it is through before its turn to be
cancelled comes. Afterwards the engines run freely, everything settles, and nothing may be left on either side.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest
import trio
import trio.testing

from lockstep_trio.engines.vllm import VllmProtocol
from lockstep_trio.errors import GroupClosed
from lockstep_trio.runtime import open_group
from lockstep_trio.testing.simulated import SimulatedGroup
from runtime.kit import (
    NOT_STEP_1,
    CancelAt,
    Outcome,
    Rig,
    Stream,
    aborts_of,
    ask,
    assert_parked,
    follow,
    read,
    rest,
    rig,
    seeded,
    tokens,
    waves_of,
)

Scenario: TypeAlias = Callable[[CancelAt], Awaitable[None]]

both_ways = pytest.mark.parametrize("everybody", [False, True], ids=["own steps", "all steps"])
groups = pytest.mark.parametrize("lockstep", [True, False], ids=["lockstep", "independent"])


def sweep(scenario: Scenario, *, everybody: bool) -> int:
    """Run a scenario cancelled at every step. Returns how many there were."""
    for step in itertools.count(1):
        cancel = CancelAt(step, everybody=everybody)
        clock = trio.testing.MockClock(autojump_threshold=0)
        try:
            with seeded(step):
                trio.run(scenario, cancel, clock=clock, instruments=[cancel])
        except BaseException as error:
            error.add_note(f"cancelled after step {step}{' of all tasks' if everybody else ''}")
            raise
        if not cancel.fired:
            return step - 1
    raise AssertionError


@asynccontextmanager
async def settling_rig(**options: Any) -> AsyncIterator[tuple[Rig, trio.Nursery]]:
    """A group that must be clean at the end of the block already, not only once it is closed."""
    before = trio.lowlevel.current_statistics().tasks_living
    async with trio.open_nursery() as nursery:
        async with rig(**options) as r:
            yield r, nursery
            r.run(nursery)
            await rest()
            r.assert_nothing_left()
            assert waves_of(r.sim, 0) == sorted(set(waves_of(r.sim, 0)))
            begun = trio.current_time()
        assert trio.current_time() == begun, "a clean group needs no grace"
        nursery.cancel_scope.cancel()
    assert trio.lowlevel.current_statistics().tasks_living == before


@both_ways
@groups
@pytest.mark.parametrize("running", [False, True], ids=["silent", "running"])
def test_a_cancelled_submit_to_a_parked_group_leaves_nothing(everybody: bool, lockstep: bool, running: bool) -> None:
    async def scenario(cancel: CancelAt) -> None:
        async with settling_rig(lockstep=lockstep) as (r, nursery):
            if running:
                r.run(nursery)
                await rest()
            streams: list[Stream] = []
            with cancel.target() as scope:
                streams.append(await r.group.submit(ask(40)))
            assert bool(streams) != scope.cancelled_caught
            for stream in streams:
                await stream.aclose()
            await rest()
            r.sent(0), r.sent(1)
            assert list(aborts_of(r.sim).values()) == [1] * len(streams)

    # Independent ranks are never woken, so nobody has to take a turn before the submit is through.
    assert sweep(scenario, everybody=everybody) >= (2 if lockstep else 1)


@both_ways
def test_a_cancelled_submit_to_a_stepping_group_leaves_nothing(everybody: bool) -> None:
    async def scenario(cancel: CancelAt) -> None:
        async with settling_rig(sync=NOT_STEP_1) as (r, nursery):
            others = Outcome()
            nursery.start_soon(follow, await r.group.submit(ask(60)), others)
            r.run(nursery)
            for _ in range(20):
                await trio.lowlevel.checkpoint()
            assert r.group.statistics().state.stepping
            with cancel.target() as scope:
                stream = await r.group.submit(ask(40))
                await stream.aclose()
            await rest()
            assert others.tokens == tokens(60)
            admitted = aborts_of(r.sim)
            assert len(admitted) in ((1, 2) if scope.cancelled_caught else (2,))
            assert sorted(admitted.values()) == [0, 1][: len(admitted)]

    assert sweep(scenario, everybody=everybody) >= 2


@both_ways
def test_a_cancelled_submit_to_a_full_link_leaves_nothing(everybody: bool) -> None:
    async def scenario(cancel: CancelAt) -> None:
        async with settling_rig(capacity=1) as (r, nursery):
            first = await r.group.submit(ask(40, rank=0))
            assert r.group.statistics().ranks[0].outbox_bytes
            streams: list[Stream] = []
            with cancel.target():
                streams.append(await r.group.submit(ask(40, rank=0)))
            for stream in (first, *streams):
                await stream.aclose()
            r.run(nursery)
            await rest()
            assert list(aborts_of(r.sim).values()) == [1] * (1 + len(streams))

    assert sweep(scenario, everybody=everybody) >= 1


@both_ways
@groups
def test_a_cancelled_reader_aborts_its_request_once_and_a_finished_one_never(everybody: bool, lockstep: bool) -> None:
    async def scenario(cancel: CancelAt) -> None:
        async with settling_rig(lockstep=lockstep) as (r, nursery):
            r.run(nursery)
            outcome = Outcome()
            with cancel.target():
                async with await r.group.submit(ask(4)) as stream:
                    await follow(stream, outcome)
            await rest()
            for aborts in aborts_of(r.sim).values():
                assert aborts == 0 if outcome.finished else aborts <= 1

    assert sweep(scenario, everybody=everybody) >= 6


@both_ways
def test_a_cancelled_receive_loses_nothing(everybody: bool) -> None:
    async def scenario(cancel: CancelAt) -> None:
        async with settling_rig() as (r, nursery):
            stream = await r.group.submit(ask(8))
            outcome = Outcome()
            r.run(nursery)
            with cancel.target():
                await follow(stream, outcome)
            if not outcome.finished:
                await follow(stream, outcome)
            assert outcome.tokens == tokens(8)
            await stream.aclose()
            await rest()
            assert list(aborts_of(r.sim).values()) == [0]

    assert sweep(scenario, everybody=everybody) >= 8


@both_ways
@groups
@pytest.mark.parametrize("finished", [False, True], ids=["early", "finished"])
def test_a_cancelled_aclose_still_closes(everybody: bool, lockstep: bool, finished: bool) -> None:
    async def scenario(cancel: CancelAt) -> None:
        async with settling_rig(lockstep=lockstep) as (r, _):
            stream = await r.group.submit(ask(3))
            if finished:
                await r.settle()
            with cancel.target():
                await stream.aclose()
            await rest()
            with pytest.raises(trio.ClosedResourceError):
                await stream.receive()
            await r.settle()
            assert list(aborts_of(r.sim).values()) == [0 if finished else 1]

    assert sweep(scenario, everybody=everybody) >= 1


@both_ways
def test_a_cancelled_call_leaves_no_entry(everybody: bool) -> None:
    async def scenario(cancel: CancelAt) -> None:
        async with settling_rig() as (r, nursery):
            r.run(nursery)
            await rest()
            results: dict[int, object] = {}
            with cancel.target() as scope:
                results.update(await r.group.call_utility("is_sleeping", timeout=None))
            assert bool(results) != scope.cancelled_caught
            assert not any(driver._calls for driver in r.coordinator.drivers)

    assert sweep(scenario, everybody=everybody) >= 2


@both_ways
def test_cancelling_wait_failed_changes_nothing(everybody: bool) -> None:
    async def scenario(cancel: CancelAt) -> None:
        async with rig() as r:
            waited: list[int] = []
            with cancel.target() as scope:
                trio.lowlevel.spawn_system_task(kill, r.sim)
                waited.append((await r.group.wait_failed()).rank)
            assert bool(waited) != scope.cancelled_caught
            assert (await r.group.wait_failed()).rank == 1

    assert sweep(scenario, everybody=everybody) >= 1


async def kill(sim: SimulatedGroup) -> None:
    sim.kill(1)


async def use(stream: Stream, outcome: Outcome) -> None:
    async with stream:
        await follow(stream, outcome)


async def come_up_slowly(sim: SimulatedGroup) -> None:
    """Each stage of the handshake in a turn of its own."""
    inits = [trio.Event() for _ in sim.ranks]
    sim.link.on_answer = lambda identity, frames: inits[identity[0]].set()
    try:
        for engine in sim.ranks:
            await several_turns()
            sim.link.say(engine.identity, engine.hello())
        for engine in sim.ranks:
            await inits[engine.index].wait()
            sim.ports[engine.index].register(engine.registration())
            await several_turns()
        for engine in reversed(sim.ranks):
            sim.link.say(engine.identity, engine.ready())
            await several_turns()
    except trio.BrokenResourceError:
        pass  # the other side has hung up


async def several_turns() -> None:
    for _ in range(4):
        await trio.lowlevel.checkpoint()


@both_ways
@groups
def test_cancelling_open_group_at_any_stage_leaves_nothing(everybody: bool, lockstep: bool) -> None:
    async def scenario(cancel: CancelAt) -> None:
        sim = SimulatedGroup(2, lockstep=lockstep)
        outcomes = [Outcome(), Outcome()]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sim.run)
            await rest()
            before = trio.lowlevel.current_statistics().tasks_living
            begun = trio.current_time()
            nursery.start_soon(come_up_slowly, sim)
            with cancel.target() as scope:
                async with open_group(sim.link, ranks=2, protocol=VllmProtocol()) as group:
                    async with trio.open_nursery() as readers:
                        for outcome, steps in zip(outcomes, (3, 400), strict=True):
                            readers.start_soon(use, await group.submit(ask(steps)), outcome)
                        while not outcomes[0].finished:
                            await trio.lowlevel.checkpoint()
                        readers.cancel_scope.cancel()
            assert sim.link.closed
            assert scope.cancelled_caught or outcomes[0].tokens == tokens(3)
            assert trio.current_time() == begun, "the engines answer, so the grace is not needed"
            await rest()
            assert trio.lowlevel.current_statistics().tasks_living <= before + 1  # a rank that waits for its INIT
            assert_parked(sim)
            aborts = aborts_of(sim)
            assert len(aborts) <= 2
            assert set(aborts.values()) <= {0, 1}
            nursery.cancel_scope.cancel()

    # open_group, its timeout, submits, readers, and the end
    assert sweep(scenario, everybody=everybody) >= 10


@both_ways
def test_cancelling_the_end_of_the_block_leaves_nothing(everybody: bool) -> None:
    async def scenario(cancel: CancelAt) -> None:
        sim = SimulatedGroup(2)
        sim.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sim.run)
            with cancel.target(armed=False):
                async with open_group(sim.link, ranks=2, protocol=VllmProtocol()) as group:
                    streams = [await group.submit(ask(400, rank=rank)) for rank in (0, 0, 1)]
                    streams[0].close()
                    cancel.arm()
            assert sim.link.closed
            assert group._coordinator.settled.is_set()
            await rest()
            assert_parked(sim)
            assert list(aborts_of(sim).values()) == [1, 1, 1]
            for stream in streams:
                stream.close()
            nursery.cancel_scope.cancel()

    assert sweep(scenario, everybody=everybody) >= 2


@both_ways
@groups
def test_a_cancelled_drain_aborts_nothing_and_still_takes_nothing_new(everybody: bool, lockstep: bool) -> None:
    async def scenario(cancel: CancelAt) -> None:
        async with settling_rig(lockstep=lockstep) as (r, nursery):
            stream = await r.group.submit(ask(5))
            r.run(nursery)
            with cancel.target() as scope:
                await r.group.drain()
            with pytest.raises(GroupClosed):
                await r.group.submit(ask(1))
            assert scope.cancelled_caught or not r.group.statistics().state.in_flight
            assert await read(stream) == tokens(5)
            assert set(aborts_of(r.sim).values()) == {0}

    assert sweep(scenario, everybody=everybody) >= 2
