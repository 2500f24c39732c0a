"""A real group of 0.28.0: its ranks agree on a drain every 32 steps; those of 0.32 do so at the first one, too."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest

from interop import steps
from interop.bursts import Bursts
from interop.host import GroupHost, OpenGroup, answers, moved, parked, tokens_of
from interop.scenarios import (
    AWAKE,
    PROMPT,
    PausedUnderLoad,
    StreamsLeft,
    asking,
    check_scores,
    good_requests_work,
    outputs_of,
    request,
)
from lockstep_trio import UtilityFailed
from lockstep_trio.engines.protocol import PauseMode
from lockstep_trio.engines.vllm import VllmCalls

pytestmark = pytest.mark.vllm

Figure = Callable[[str, float, str], None]

BURST_SECONDS = float(os.environ.get("LOCKSTEP_BURST_SECONDS", "20"))
BURST_SEED = 20_028


@pytest.fixture(scope="module")
def engine_version() -> str:
    return "0.28.0"


@pytest.fixture(scope="module")
def engine_arguments() -> tuple[str, ...]:
    return steps.TOLD


def test_two_ranks_come_up_tell_their_release_and_are_found_to_step_in_lockstep(
    host: GroupHost, figure: Figure
) -> None:
    figure("vllm 0.28: from the start of the engine to a group that is up", host.startup_seconds, "s")
    assert host.group.lockstep
    assert [info.version for info in host.group.infos] == ["0.28.0", "0.28.0"]
    assert [info.data_parallel_size for info in host.group.infos] == [2, 2]


def test_greedy_tokens_are_the_same_on_both_ranks(host: GroupHost, figure: Figure) -> None:
    async def use(group: OpenGroup) -> list[list[int]]:
        return [await tokens_of(group, request(64, rank)) for rank in (0, 1)]

    begun = time.monotonic()
    first, second = host.run(use)
    figure("vllm 0.28: time per step of a single request", (time.monotonic() - begun) / 128, "s")
    assert first == second
    assert len(first) == 64


@pytest.mark.parametrize(("tokens", "expected"), [(1, 32), (2, 32), (32, 32), (33, 64)])
def test_a_wave_with_a_request_takes_so_many_steps(host: GroupHost, tokens: int, expected: int, figure: Figure) -> None:
    wave = host.run(lambda group: steps.wave_of_a_request(group, tokens))
    figure(f"vllm 0.28: steps of a wave with one request of {tokens}", wave.steps[0], "")
    figure("vllm 0.28: from its last output to its end", wave.drain or 0.0, "s")
    assert wave.steps == (expected, expected)


def test_a_wave_without_a_request_takes_as_long_as_one_with_a_short_request(host: GroupHost) -> None:
    for _ in range(2):
        assert host.run(steps.wave_of_a_pause).steps == (32, 32)


@pytest.mark.parametrize("rank", [0, 1])
def test_logprobs_come_with_their_tokens_and_those_of_the_prompt_with_the_first(host: GroupHost, rank: int) -> None:
    asked = asking(PROMPT, 12, rank, logprobs=5, prompt_logprobs=3)
    outputs = host.run(lambda group: outputs_of(group, asked))
    assert sum(len(output.token_ids) for output in outputs) == 12
    check_scores(outputs, PROMPT, 3, 5)


def test_leaving_a_stream_frees_its_slot_on_the_engine(host: GroupHost, figure: Figure) -> None:
    left = StreamsLeft(host.group)
    host.run(lambda _: left.run())
    figure("vllm 0.28: leaving 9 streams until the engine reports it", left.to_one, "s")
    figure("vllm 0.28: leaving the last one until its blocks are free", left.to_none, "s")


def test_one_token_requests_one_after_the_other_make_a_wave_and_take_a_start_each(
    host: GroupHost, figure: Figure
) -> None:
    async def use(group: OpenGroup) -> tuple[int, int]:
        before = await parked(group)
        for number in range(20):
            assert len(await tokens_of(group, request(1, number % 2))) == 1
            await group.wait_parked()
        counts = moved(before, await parked(group))
        assert await answers(group) == AWAKE
        return counts

    begun = time.monotonic()
    starts, waves = host.run(use, limit=120.0)
    figure("vllm 0.28: 20 one-token requests, each after the wave of the one before", time.monotonic() - begun, "s")
    assert (starts, waves) == (20, 20)


def test_random_bursts_with_a_third_left_early_strand_nothing(host: GroupHost, figure: Figure) -> None:
    async def use(group: OpenGroup) -> dict[int, object] | None:
        tally = await bursts.run(BURST_SECONDS)
        return None if tally.stranded else await answers(group)

    bursts = Bursts(host.group, random.Random(BURST_SEED))
    awake = host.run(use, limit=BURST_SECONDS + 90.0)
    for name, value, unit in bursts.tally.figures():
        figure(f"vllm 0.28 bursts: {name}", value, unit)
    bursts.tally.check()
    assert bursts.tally.left > 0
    assert awake == AWAKE


def test_calls_are_answered_by_ranks_that_are_parked_and_one_of_no_method_does_no_harm(host: GroupHost) -> None:
    async def use(group: OpenGroup) -> None:
        await parked(group)
        calls = VllmCalls(group)
        assert await calls.is_sleeping() == AWAKE
        assert await calls.supported_tasks() == {0: ("generate",), 1: ("generate",)}
        assert await calls.reset_prefix_cache() == {0: True, 1: True}
        with pytest.raises(UtilityFailed, match="rank 0"):
            await group.call_utility("no_such_method")
        await good_requests_work(group)

    host.run(use)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_requests_that_run_and_arrive_while_the_group_pauses_and_resumes_are_all_served(
    host: GroupHost, mode: PauseMode, figure: Figure
) -> None:
    load = PausedUnderLoad(host.group, mode)
    host.run(lambda _: load.run(pauses=2), limit=120.0)
    figure(f"vllm 0.28: a pause of mode {mode} under load, at most", load.longest, "s")
    if mode != "abort":
        assert all(wanted == got for wanted, got in load.ends)
