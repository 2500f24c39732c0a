"""A real group of its own, of which one rank is frozen: for a while, and then for good."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import trio

from interop.group import VllmGroup
from interop.host import GroupHost, OpenGroup, answers, parked, tokens_of
from lockstep_trio import EngineCoreRequest, Fault, FaultKind, GroupFailed, SamplingParams

pytestmark = pytest.mark.vllm

Figure = Callable[[str, float, str], None]

STALL_TIMEOUT = 3.0
PROBE_TIMEOUT = 6.0
NAP = 4.0
"""Seconds: long enough to be suspected and probed, and well below what it takes to be given up."""
GUARD = 10.0
VICTIM = 1
LENGTH = 500
LONG = EngineCoreRequest(
    [1, 2, 3, 4], SamplingParams(temperature=0.0, max_tokens=LENGTH), data_parallel_rank=VICTIM
)  # on the victim alone, so that there is no doubt who is to be named: the other rank waits for it and is as silent


@pytest.fixture(scope="module")
def host(engine: VllmGroup) -> Iterator[GroupHost]:
    with GroupHost(engine, stall_timeout=STALL_TIMEOUT, probe_timeout=PROBE_TIMEOUT) as host:
        yield host


def probes(caplog: pytest.LogCaptureFixture) -> int:
    """How often ranks were probed. The group runs in another thread, whose records come here too."""
    return sum("probing" in record.getMessage() for record in caplog.records)


def test_a_step_that_takes_longer_than_the_patience_with_silence_is_not_taken_for_a_stall(
    host: GroupHost, figure: Figure, caplog: pytest.LogCaptureFixture
) -> None:
    victim = host.engine.engine_pids()[VICTIM]

    async def use(group: OpenGroup) -> float:
        tokens = 0
        async with await group.submit(LONG) as stream:
            tokens += len((await stream.receive()).token_ids)
            os.kill(victim, signal.SIGSTOP)
            frozen = trio.current_time()
            try:
                # What the rank had said before can still come; then nothing does.
                with trio.move_on_after(NAP):
                    async for output in stream:
                        tokens += len(output.token_ids)
            finally:
                os.kill(victim, signal.SIGCONT)
            assert tokens < LENGTH, "it had ended before it was frozen"
            async for output in stream:
                tokens += len(output.token_ids)
        assert tokens == LENGTH
        ended = trio.current_time()
        await parked(group)
        assert await answers(group) == {0: False, 1: False}
        return ended - frozen

    with caplog.at_level(logging.WARNING, "lockstep_trio"):
        figure("vllm: a stream of 500 tokens whose rank is frozen for 4 s", host.run(use), "s")
    assert probes(caplog) >= 1
    assert host.group.fault is None


def test_a_rank_that_is_frozen_for_good_fails_the_group_as_stalled_and_is_named(
    host: GroupHost, figure: Figure, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[BaseException | None] = []
    victim = host.engine.engine_pids()[VICTIM]

    async def read(group: OpenGroup, started: trio.abc.SendChannel[None]) -> None:
        error: BaseException | None = None
        async with await group.submit(LONG) as stream:
            try:
                await stream.receive()
                await started.send(None)
                async for _ in stream:
                    pass
            except GroupFailed as failed:
                error = failed
        errors.append(error)

    async def use(group: OpenGroup) -> tuple[float, Fault]:
        send, receive = trio.open_memory_channel[None](0)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read, group, send)
            for _ in range(3):
                await receive.receive()
            os.kill(victim, signal.SIGSTOP)
            frozen = trio.current_time()
            with trio.move_on_after(STALL_TIMEOUT + PROBE_TIMEOUT + GUARD):
                await group.wait_failed()
            fault = group.fault
            assert fault is not None, f"{len(errors)} streams have ended; {host.engine.states()}\n{group.dump()}"
            took = trio.current_time() - frozen
            nursery.cancel_scope.deadline = trio.current_time() + GUARD
        with pytest.raises(GroupFailed):
            await tokens_of(group, LONG)
        return took, fault

    with caplog.at_level(logging.WARNING, "lockstep_trio"):
        took, fault = host.run(use)
    print(f"\nthe fault: {fault}")
    figure("vllm: from SIGSTOP of rank 1 to the end of the group", took, "s")
    assert (fault.rank, fault.kind) == (VICTIM, FaultKind.STALLED)
    assert "was silent for" in fault.detail
    assert "silent like it: ranks 0" in fault.detail
    assert probes(caplog) >= 1
    assert took > PROBE_TIMEOUT
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, GroupFailed)
        assert error.fault == fault
    seconds = host.close()
    figure("vllm: closing the group with a frozen rank", seconds, "s")
    assert seconds < 1.0
