"""A real group of its own that tells of its steps, and of which one rank is killed in the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import attrs
import pytest
import trio

from interop import steps
from interop.host import GroupHost, OpenGroup
from lockstep_trio import EngineCoreRequest, Fault, FaultKind, GroupFailed, SamplingParams

pytestmark = pytest.mark.vllm

GUARD = 10.0
VICTIM = 1
LONG = EngineCoreRequest([1, 2, 3, 4], SamplingParams(temperature=0.0, max_tokens=500))


@attrs.define
class Ends:
    """How the streams ended, and when."""

    errors: list[BaseException | None] = attrs.field(factory=list)
    times: list[float] = attrs.field(factory=list)


@pytest.fixture(scope="module")
def engine_arguments() -> tuple[str, ...]:
    return steps.TOLD


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (2, 16), (16, 16), (17, 32)])
def test_a_wave_with_a_request_takes_so_many_steps(
    host: GroupHost, tokens: int, expected: int, figure: Callable[[str, float, str], None]
) -> None:
    wave = host.run(lambda group: steps.wave_of_a_request(group, tokens))
    figure(f"vllm: steps of a wave with one request of {tokens}", wave.steps[0], "")
    figure("vllm: from its last output to its end", wave.drain or 0.0, "s")
    assert wave.steps == (expected, expected)


def test_a_wave_without_a_request_takes_a_single_step(host: GroupHost) -> None:
    for _ in range(2):
        assert host.run(steps.wave_of_a_pause).steps == (1, 1)


def test_killing_one_rank_fails_every_stream_and_names_the_rank(
    host: GroupHost, figure: Callable[[str, float, str], None]
) -> None:
    ends = Ends()
    [victim] = [pid for rank, pid in host.engine.engine_pids().items() if rank == VICTIM]

    async def read(group: OpenGroup, rank: int, started: trio.abc.SendChannel[None]) -> None:
        error: BaseException | None = None
        async with await group.submit(attrs.evolve(LONG, data_parallel_rank=rank)) as stream:
            try:
                await stream.receive()
                await started.send(None)
                async for _ in stream:
                    pass
            except GroupFailed as failed:
                error = failed
        ends.errors.append(error)
        ends.times.append(trio.current_time())

    async def use(group: OpenGroup) -> tuple[float, Fault]:
        send, receive = trio.open_memory_channel[None](0)
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(read, group, number % 2, send)
            for _ in range(6):
                await receive.receive()
            killed = trio.current_time()
            os.kill(victim, signal.SIGKILL)
            with trio.fail_after(GUARD):
                fault = await group.wait_failed()
            nursery.cancel_scope.deadline = killed + GUARD
        assert len(ends.errors) == 6, f"only {len(ends.errors)} of 6 streams ended within {GUARD} s"
        return killed, fault

    async def use_afterwards(group: OpenGroup) -> float:
        begun = trio.current_time()
        for rank in (None, 0, 1):
            with pytest.raises(GroupFailed) as raised:
                await group.submit(attrs.evolve(LONG, data_parallel_rank=rank))
            assert raised.value.fault == fault
        with pytest.raises(GroupFailed):
            await group.call_utility("is_sleeping")
        return trio.current_time() - begun

    killed, fault = host.run(use)
    figure("vllm: from SIGKILL of rank 1 to the end of the first stream", min(ends.times) - killed, "s")
    figure("vllm: from SIGKILL of rank 1 to the end of the last stream", max(ends.times) - killed, "s")
    print(f"\nthe fault: {fault}")
    assert (fault.rank, fault.kind) == (VICTIM, FaultKind.DISCONNECTED)
    for error in ends.errors:
        assert isinstance(error, GroupFailed)
        assert error.fault == fault
        assert f"rank {VICTIM}" in str(error)
    assert host.run(use_afterwards) < 0.1
    time.sleep(2.0)  # the other rank notices by itself within a second or so, and says so
    assert host.group.fault == fault
    seconds = host.close()
    figure("vllm: closing the failed group", seconds, "s")
    assert seconds < 1.0
