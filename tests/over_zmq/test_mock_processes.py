"""A group whose ranks are processes of their own: nothing is arranged, so this finds what nobody thought of."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import trio

from lockstep_trio import FaultKind, GroupClosed, GroupFailed, RankFailed, VllmProtocol, open_group
from lockstep_trio.testing.mock_ranks import open_mock_ranks
from lockstep_trio.testing.rank_model import Sync
from over_zmq.driven import Requests, Stream, ask, bind, collect, serve, until

pytestmark = pytest.mark.trio

Figure = Callable[[str, float, str], None]

EARLY = Sync(first=False, every=32)
"""When vLLM up to 0.29 agrees on a drain."""


async def nothing_left(group: Requests) -> None:
    """Both sides let go of everything within seconds, and every rank answers."""
    await until(lambda: at_rest(group))
    told = await group.call_utility("mock_state", timeout=10)
    state = group.statistics().state
    assert len(told) == len(state.ranks)
    for rank, each in told.items():
        assert isinstance(each, dict)
        assert (rank, each["held"], each["running"]) == (rank, (), False)
        if state.lockstep:
            assert each["wave"] == state.clock


def at_rest(group: Requests) -> bool:
    state = group.statistics().state
    awaited = any(each.unproven or each.fence_pending for each in state.ranks)
    return not (state.in_flight or state.stepping or awaited)


def starts_per_rank(group: Requests) -> int:
    [starts] = {each.counts.starts for each in group.statistics().ranks}
    return starts


def waves_within_the_rule(group: Requests) -> bool:
    """At most one START per number, and every number was used or is the next."""
    starts, clock = starts_per_rank(group), group.statistics().state.clock
    return clock is not None and starts == clock


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_two_ranks_in_lockstep_give_equal_tokens_whichever_of_them_holds_the_request(transport: str) -> None:
    with trio.fail_after(60):
        async with serve(2, transport=transport) as (group, _):
            assert group.lockstep
            for prompt in (1, 99, 200):
                streams = [await group.submit(ask(40, rank, prompt)) for rank in (0, 1)]
                tokens = [await collect(stream) for stream in streams]
                assert len(tokens[0]) == 40
                assert tokens[0] == tokens[1]
            await nothing_left(group)


@pytest.mark.parametrize("sync", [Sync(), EARLY], ids=["from 0.30", "before 0.30"])
async def test_three_hundred_one_token_requests_one_at_a_time_all_finish(sync: Sync, figure: Figure) -> None:
    with trio.fail_after(60):
        async with serve(2, sync=sync) as (group, _):
            began = time.perf_counter()
            for number in range(300):
                with trio.fail_after(10):
                    assert len(await collect(await group.submit(ask(1, number % 2)))) == 1
            took = time.perf_counter() - began
            await nothing_left(group)
            assert waves_within_the_rule(group)
            figure(f"one-token requests one at a time, sync {sync.every}", 300 / took, "requests/s")
            figure(f"STARTs per one-token request, sync {sync.every}", starts_per_rank(group) * 2 / 300, "")


async def burst(group: Requests, draw: random.Random, size: int) -> None:
    """Requests all at once; about a third is left again, at whatever moment."""

    async def one(leaves_after: int | None, tokens: int, delay: float) -> None:
        await trio.sleep(delay)
        stream: Stream = await group.submit(ask(tokens))
        if leaves_after is None:
            assert len(await collect(stream)) == tokens
            return
        async with stream:
            for _ in range(leaves_after):
                await stream.receive()

    async with trio.open_nursery() as nursery:
        for _ in range(size):
            tokens = draw.choice([1, 2, 5, 20])
            leaves_after = draw.choice([0, 0, 1]) if draw.random() < 1 / 3 else None
            nursery.start_soon(one, leaves_after, tokens, draw.choice([0.0, draw.random() * 0.02]))


@pytest.mark.parametrize("sync", [Sync(), EARLY], ids=["from 0.30", "before 0.30"])
@pytest.mark.parametrize("ranks", [2, 3])
async def test_of_random_bursts_with_a_third_aborted_nothing_is_stranded(
    ranks: int, sync: Sync, figure: Figure
) -> None:
    draw = random.Random(ranks)
    with trio.fail_after(90):
        async with serve(ranks, sync=sync) as (group, _):
            requests = 0
            for _ in range(60):
                size = draw.randrange(1, 8)
                requests += size
                with trio.fail_after(10):
                    await burst(group, draw, size)
                await trio.sleep(draw.choice([0.0, 0.0, draw.random() * 0.01]))
            await nothing_left(group)
            assert waves_within_the_rule(group)
            counts = [each.counts for each in group.statistics().ranks]
            assert sum(each.adds for each in counts) == requests
            assert requests / 6 < sum(each.aborts for each in counts) < requests / 2
            figure(
                f"STARTs per request in bursts, {ranks} ranks, sync {sync.every}",
                starts_per_rank(group) * ranks / requests,
                "",
            )


async def test_independent_ranks_are_sent_their_adds_and_aborts_and_nothing_else() -> None:
    with trio.fail_after(60):
        async with serve(2, lockstep=False) as (group, _):
            assert not group.lockstep
            for _ in range(20):
                await burst(group, random.Random(5), 4)
            log = await group.call_utility("mock_log")
            for rank, counts in ((each.rank, each.counts) for each in group.statistics().ranks):
                entries = log[rank]
                assert isinstance(entries, list | tuple)
                heard = [entry[0] for entry in entries]
                assert heard.pop() == "Call"  # this very question
                assert sorted(heard) == ["Add"] * counts.adds + ["Drop"] * counts.aborts
                assert counts.starts == counts.fences == counts.dones == 0
            await nothing_left(group)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_rank_fails_every_stream_of_its_lockstep_group_and_later_submits_at_once(
    victim: int, transport: str, figure: Figure
) -> None:
    with trio.fail_after(60):
        async with serve(2, transport=transport, step_time=0.002) as (group, mocks):
            streams = [await group.submit(ask(4000, rank)) for rank in [0, 1] * 5]
            for stream in streams:
                await stream.receive()
            failures: list[GroupFailed] = []

            async def read(stream: Stream) -> None:
                with pytest.raises(GroupFailed) as caught:
                    await collect(stream)
                failures.append(caught.value)

            killed = time.perf_counter()
            mocks.kill(victim)
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    for stream in streams:
                        nursery.start_soon(read, stream)
            figure(f"all streams told that rank {victim} was killed, {transport}", time.perf_counter() - killed, "s")
            assert [(each.rank, each.fault.kind) for each in failures] == [(victim, FaultKind.DISCONNECTED)] * 10
            assert (await group.wait_failed()).rank == victim
            with trio.fail_after(0.5), pytest.raises(GroupFailed, match=f"rank {victim} "):
                await group.submit(ask(1, 1 - victim))
            with trio.fail_after(0.5), pytest.raises(GroupFailed, match=f"rank {victim} "):
                await group.call_utility("is_sleeping")


async def test_a_killed_independent_rank_fails_its_own_streams_and_the_other_goes_on() -> None:
    with trio.fail_after(60):
        async with serve(2, lockstep=False, step_time=0.002) as (group, mocks):
            lost = await group.submit(ask(4000, 0))
            kept = await group.submit(ask(100, 1))
            await lost.receive()
            mocks.kill(0)
            with trio.fail_after(10), pytest.raises(RankFailed, match="rank 0 disconnected"):
                await collect(lost)
            assert len(await collect(kept)) == 100
            with pytest.raises(RankFailed):
                await group.submit(ask(1, 0))
            for _ in range(5):
                stream = await group.submit(ask(2))
                assert stream.rank == 1
                assert len(await collect(stream)) == 2
            mocks.kill(1)
            assert (await group.wait_failed()).rank == 1
            with pytest.raises(GroupFailed):
                await group.submit(ask(1))


async def test_closing_with_twenty_streams_open_is_quick_and_tells_them(figure: Figure) -> None:
    with trio.fail_after(60):
        async with serve(2, step_time=0.002) as (group, _):
            streams = [await group.submit(ask(4000)) for _ in range(20)]
            for stream in streams:
                await stream.receive()
            left = time.perf_counter()
        took = time.perf_counter() - left
        figure("closing with twenty streams open, mock ranks ended with it", took, "s")
        assert took < 5  # the grace is 10
        assert not group.statistics().state.stepping
        assert sum(each.counts.aborts for each in group.statistics().ranks) == 2  # one message per rank names ten each
        for stream in streams:
            with pytest.raises(GroupClosed):
                await collect(stream)


def children() -> set[int]:
    """Every process below this one, dead ones that nobody waited for included."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = status.read_text()
        except OSError:
            continue  # gone meanwhile
        parents[int(status.parent.name)] = int(text.rpartition(")")[2].split()[1])
    found, grown = {os.getpid()}, True
    while grown:
        grown = bool(more := {pid for pid, parent in parents.items() if parent in found} - found)
        found |= more
    return found - {os.getpid()}


def exist(pids: Iterable[int]) -> bool:
    """Any of them, be it only because nobody waited for it."""
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_a_group_whose_engines_are_gone_leaves_no_process_behind() -> None:
    before = children()
    with trio.fail_after(60):
        async with serve(2) as (group, mocks):
            assert set(mocks.pids) < children()
            for rank in (0, 1):
                mocks.kill(rank)
            assert (await group.wait_failed()).rank in (0, 1)
        assert not exist(mocks.pids)
        async with serve(2) as (group, mocks):
            assert len(await collect(await group.submit(ask(3)))) == 3
        assert not exist(mocks.pids)
    assert children() == before


@pytest.fixture
def private_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place of its own for temporary files, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def descriptors() -> dict[str, str]:
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            found[link.name] = str(link.readlink())
        except OSError:
            continue  # the one that lists the directory
    return found


@pytest.mark.slow
async def test_128_ranks_connect_serve_a_thousand_requests_and_close_without_a_trace(
    private_tmp: Path, figure: Figure
) -> None:
    async with serve(1):
        pass  # what Trio and ZeroMQ open once in a process is open now
    tasks = trio.lowlevel.current_statistics().tasks_living
    before, processes = descriptors(), children()
    with trio.fail_after(120):
        link = bind(128)
        async with open_mock_ranks(link.handshake_endpoint, ranks=128) as _:
            began = time.perf_counter()
            async with open_group(link, ranks=128, protocol=VllmProtocol()) as group:
                figure("128 mock ranks connect", time.perf_counter() - began, "s")
                assert files(private_tmp)
                began = time.perf_counter()

                async def work(tokens: int) -> None:
                    assert len(await collect(await group.submit(ask(tokens)))) == tokens

                for _ in range(10):
                    async with trio.open_nursery() as nursery:
                        for number in range(100):
                            nursery.start_soon(work, 1 + number % 8)
                    await until(lambda: at_rest(group))
                figure(
                    "1,000 requests in ten bursts on 128 mock ranks", 1000 / (time.perf_counter() - began), "requests/s"
                )
                adds = [each.counts.adds for each in group.statistics().ranks]
                assert sum(adds) == 1000
                assert min(adds) > 0
                assert starts_per_rank(group) >= 10
                assert waves_within_the_rule(group)
                figure("STARTs per request on 128 mock ranks", 128 * starts_per_rank(group) / 1000, "")
                await nothing_left(group)
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert files(private_tmp) == set()
    assert children() == processes
    await until(lambda: len(descriptors()) <= len(before))  # libzmq closes some from threads of its own
