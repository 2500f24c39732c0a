"""What is asked of groups of more than one release."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import attrs
import trio

from interop.group import MAX_MODEL_LEN, MAX_NUM_SEQS
from interop.host import OpenGroup, answers, parked, tokens_of
from lockstep_trio import EngineCoreRequest, RequestOutput, SamplingParams
from lockstep_trio.core import Load
from lockstep_trio.engines.protocol import LoadReport, PauseMode
from lockstep_trio.engines.vllm import Logprobs

PROMPT = [1, 2, 3, 4]
LONGEST = MAX_MODEL_LEN - len(PROMPT)
AWAKE = {0: False, 1: False}
ASLEEP = {0: True, 1: True}


def asking(prompt: Sequence[int], tokens: int, rank: int | None = None, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        prompt, SamplingParams(temperature=0.0, max_tokens=tokens, **params), data_parallel_rank=rank
    )


def request(tokens: int, rank: int | None = None) -> EngineCoreRequest:
    return asking(PROMPT, tokens, rank)


async def outputs_of(group: OpenGroup, asked: EngineCoreRequest) -> list[RequestOutput]:
    async with await group.submit(asked) as stream:
        return [output async for output in stream]


async def good_requests_work(group: OpenGroup) -> None:
    for rank in (0, 1):
        assert len(await tokens_of(group, request(2, rank))) == 2


def check_rows(logprobs: Logprobs | None, tokens: Sequence[int], count: int, *, greedy: bool) -> None:
    """One row per token, the likeliest in falling order, and probabilities that are some."""
    assert logprobs is not None
    rows = list(logprobs)
    assert [row.token_id for row in rows] == list(tokens)
    for row in rows:
        top = row.top(count)
        assert len(top) == count
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True)
        assert 0.0 < sum(map(math.exp, values)) <= 1.0001
        assert row.logprob <= values[0]
        assert row.rank != 1 or row.logprob == values[0]
        # Not rank 1: the engine counts every token that is at least as likely, and these weights give ties.
        assert row.logprob == values[0] or not greedy


def check_arrays(logprobs: Logprobs | None, rows: int, count: int) -> None:
    """Of each step an array of tokens, logprobs and ranks: a row per token, a column for itself and one per rival."""
    assert logprobs is not None
    assert logprobs.chunks
    for chunk in logprobs.chunks:
        assert chunk.token_ids.shape == chunk.logprobs.shape == (rows, 1 + count)
        assert chunk.ranks.shape == (rows,)
        assert (chunk.token_ids.dtype, chunk.logprobs.dtype) == ("int32", "float32")


def check_scores(outputs: Sequence[RequestOutput], prompt: Sequence[int], of_prompt: int, count: int) -> None:
    """The prompt's rows, without its first token, come with the first output, and those of new tokens with these."""
    first, *rest = outputs
    check_arrays(first.prompt_logprobs, len(prompt) - 1, of_prompt)
    check_rows(first.prompt_logprobs, prompt[1:], of_prompt, greedy=False)
    assert all(output.prompt_logprobs is None for output in rest)
    for output in outputs:
        if output.token_ids:
            check_arrays(output.logprobs, 1, count)
            check_rows(output.logprobs, output.token_ids, count, greedy=True)


@attrs.define
class PausedUnderLoad:
    """Six tasks that ask for one request after the other, while the group pauses and resumes."""

    group: OpenGroup
    mode: PauseMode
    ends: list[tuple[int, int]] = attrs.field(factory=list[tuple[int, int]])
    """Of each request that ended: tokens that were asked for, tokens that came."""
    longest: float = 0.0
    """Seconds that a pause took at most."""

    async def run(self, pauses: int = 5) -> None:
        expected = await tokens_of(self.group, request(40))
        async with trio.open_nursery() as nursery:
            for seed in range(6):
                nursery.start_soon(self._ask_on, random.Random(seed), expected)
            for _ in range(pauses):
                await self._pause_once()
            nursery.cancel_scope.cancel()
        await parked(self.group)
        await good_requests_work(self.group)

    async def _ask_on(self, draw: random.Random, expected: Sequence[int]) -> None:
        for _ in itertools.count():
            wanted = draw.randrange(1, len(expected))
            tokens = await tokens_of(self.group, request(wanted, draw.choice((None, 0, 1))))
            assert tokens == list(expected[: len(tokens)])
            self.ends.append((wanted, len(tokens)))

    async def _pause_once(self) -> None:
        before = len(self.ends)
        while len(self.ends) < before + 6:
            await trio.sleep(0.005)  # nobody announces it
        begun = trio.current_time()
        await self.group.pause(self.mode, timeout=30.0)
        self.longest = max(self.longest, trio.current_time() - begun)
        assert await answers(self.group) == ASLEEP
        await self.group.resume(timeout=30.0)
        assert await answers(self.group) == AWAKE


@attrs.define
class StreamsLeft:
    """Streams that are left, more than rank 0 can serve at once: does it let go of them?"""

    group: OpenGroup
    to_one: float = 0.0
    """Seconds from leaving all but one until the engine reports that."""
    to_none: float = 0.0
    """Seconds from leaving the last one until its blocks are free."""

    async def run(self) -> None:
        group = self.group
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(await group.submit(request(LONGEST, rank=0)))
                for _ in range(MAX_NUM_SEQS + 2)
            ]
            await self._until_reported(waiting=2, running=MAX_NUM_SEQS)
            assert await self._cache_is_free() is False
            for stream in streams[1:]:
                await stream.aclose()
            self.to_one = await self._until_reported(waiting=0, running=1)
            assert await self._cache_is_free() is False
            assert group.statistics().state.in_flight == 1
        begun = trio.current_time()
        while not await self._cache_is_free():
            assert trio.current_time() - begun < 10.0, "somebody still holds blocks"
        self.to_none = trio.current_time() - begun
        await parked(group)
        assert group._coordinator.drivers[0].load == LoadReport(waiting=0, running=0, kv_usage=0.0)

    async def _reported(self) -> Load:
        """What rank 0 says of its queues: the machine takes reports in when it places a request, here on rank 1."""
        await tokens_of(self.group, request(1, rank=1))
        return self.group.statistics().state.ranks[0].load

    async def _until_reported(self, waiting: int, running: int) -> float:
        begun = trio.current_time()
        while ((load := await self._reported()).waiting, load.running) != (waiting, running):
            assert trio.current_time() - begun < 10.0, f"rank 0 still reports {load}"
        return trio.current_time() - begun

    async def _cache_is_free(self) -> object:
        """The engine drops its prefix cache only while no request holds a block of it."""
        return (await self.group.call_utility("reset_prefix_cache", ranks=[0]))[0]
