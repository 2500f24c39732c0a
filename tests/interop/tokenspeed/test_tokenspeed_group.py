"""A whole group whose other side is TokenSpeed's own code: its handshake, its sockets, its validation, as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from interop.tokenspeed.environment import SIDE, VERSION, TokenSpeedEnvironment
from lockstep_trio import (
    FaultKind,
    FinishReason,
    Group,
    RankFailed,
    TokenSpeedOutput,
    TokenSpeedProtocol,
    TokenSpeedRequest,
    TokenSpeedSampling,
    open_group,
    open_zmq_link,
)

pytestmark = pytest.mark.tokenspeed

VOCABULARY, CONTEXT, DEADLY = 256, 512, 13
"""As in ``peer.py``, which cannot be imported here."""
RANKS = 2
GUARD = 60.0
PROTOCOL = TokenSpeedProtocol(vocab_size=VOCABULARY, output_logprobs=True)

Peers = Group[TokenSpeedRequest, TokenSpeedOutput]


@attrs.frozen
class Rig:
    group: Peers
    pids: tuple[int, ...]


@asynccontextmanager
async def opened(tokenspeed: TokenSpeedEnvironment, transport: str = "ipc", **options: Any) -> AsyncIterator[Rig]:
    link = open_zmq_link(
        "tcp://127.0.0.1:0",
        identities=[PROTOCOL.identity(rank) for rank in range(RANKS)],
        transport=transport,  # type: ignore[arg-type]
    )
    variables = tokenspeed.variables(Path(tempfile.gettempdir()))
    with trio.fail_after(GUARD):
        processes = [
            await trio.lowlevel.open_process(
                [tokenspeed.python, SIDE / "peer.py", link.handshake_endpoint, str(rank), str(RANKS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=variables,
            )
            for rank in range(RANKS)
        ]
        try:
            async with open_group(link, ranks=RANKS, protocol=PROTOCOL, **options) as group:
                yield Rig(group, tuple(process.pid for process in processes))
        finally:
            with trio.CancelScope(shield=True):
                for process in processes:
                    process.kill()
                    await process.wait()
                    assert process.stdin is not None
                    await process.stdin.aclose()


def ask(tokens: int | None, rank: int | None = None, **fields: Any) -> TokenSpeedRequest:
    return TokenSpeedRequest([3, 7], TokenSpeedSampling(max_new_tokens=tokens), data_parallel_rank=rank, **fields)


async def read(stream: Any) -> list[TokenSpeedOutput]:
    return [output async for output in stream]


def tokens_of(outputs: list[TokenSpeedOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_the_engines_own_code_comes_up_streams_aborts_and_is_never_woken(
    tokenspeed: TokenSpeedEnvironment, transport: str
) -> None:
    async with opened(tokenspeed, transport) as rig:
        group = rig.group
        assert [(info.version, info.data_parallel_size, info.max_model_len) for info in group.infos] == [
            (VERSION, RANKS, CONTEXT)
        ] * RANKS
        assert not group.lockstep
        for rank in range(RANKS):
            async with await group.submit(ask(5, rank)) as stream:
                outputs = await read(stream)
            assert tokens_of(outputs) == [8, 9, 10, 11, 12]
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert (outputs[-1].prompt_tokens, outputs[-1].completion_tokens) == (2, 5)
        async with await group.submit(ask(None, 0, request_id="left")) as stream:
            await stream.receive()
        async with await group.submit(ask(2, 0, request_id="left")) as stream:  # the id is in the engine's memory
            assert tokens_of(await read(stream)) == [8, 9]
        state = group.statistics().state
        assert (state.clock, state.in_flight) == (None, 0)
        assert [rank.damaged for rank in group.statistics().ranks] == [0] * RANKS


async def test_the_engine_ends_at_a_stop_token_and_brings_logprobs(tokenspeed: TokenSpeedEnvironment) -> None:
    async with opened(tokenspeed) as rig:
        sampling = TokenSpeedSampling(stop_token_ids=[10], temperature=0.0, logit_bias={5: 1.0})
        async with await rig.group.submit(TokenSpeedRequest([7], sampling, return_logprob=True)) as stream:
            outputs = await read(stream)
        assert tokens_of(outputs) == [8, 9, 10]
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert [each for output in outputs for each in output.logprobs] == [-0.5] * 3


async def test_many_requests_at_once_are_all_answered_whoever_leaves(
    tokenspeed: TokenSpeedEnvironment, figure: Callable[[str, float, str], None]
) -> None:
    finished: list[list[int]] = []

    async def call(group: Peers, number: int) -> None:
        async with await group.submit(ask(14 + number % 20)) as stream:
            if number % 5 == 0:
                await stream.receive()
                return
            finished.append(tokens_of(await read(stream)))
            assert len(finished[-1]) == 14 + number % 20

    async with opened(tokenspeed) as rig:
        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(call, rig.group, number)
        figure("200 requests to TokenSpeed's own wire code", trio.current_time() - begun, "s")
        statistics = rig.group.statistics()
        assert sorted(rank.counts.adds for rank in statistics.ranks) == [100, 100]
        assert [rank.load.running for rank in statistics.state.ranks] == [0, 0]
    assert len(finished) == 160


async def test_an_engine_that_fails_says_so_and_the_other_goes_on(
    tokenspeed: TokenSpeedEnvironment, figure: Callable[[str, float, str], None]
) -> None:
    async with opened(tokenspeed) as rig:
        begun = trio.current_time()
        async with await rig.group.submit(ask(DEADLY, 1)) as stream:
            with pytest.raises(RankFailed) as caught:
                await read(stream)
        figure("the end of TokenSpeed's own wire code noticed", trio.current_time() - begun, "s")
        assert (caught.value.rank, caught.value.fault.kind) == (1, FaultKind.DIED)
        async with await rig.group.submit(ask(3)) as stream:
            assert stream.rank == 0
            assert tokens_of(await read(stream)) == [8, 9, 10]


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGKILL, FaultKind.DISCONNECTED), (signal.SIGSTOP, FaultKind.STALLED)]
)
async def test_a_killed_and_a_frozen_engine_are_found_out(
    tokenspeed: TokenSpeedEnvironment, number: signal.Signals, kind: FaultKind
) -> None:
    async with opened(tokenspeed, stall_timeout=0.5, probe_timeout=0.5) as rig:
        async with await rig.group.submit(ask(None, 0)) as stream:
            await stream.receive()
            os.kill(rig.pids[0], number)
            with pytest.raises(RankFailed) as caught:
                await read(stream)
        assert (caught.value.rank, caught.value.fault.kind) == (0, kind)
