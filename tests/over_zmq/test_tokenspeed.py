"""A whole group of TokenSpeed ranks over real ZeroMQ: handshake, streams, aborts, deaths, load, silence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from lockstep_trio import (
    FaultKind,
    FinishReason,
    Group,
    GroupLink,
    HandshakeError,
    RankFailed,
    RequestRejected,
    TokenSpeedOutput,
    TokenSpeedProtocol,
    TokenSpeedRequest,
    TokenSpeedSampling,
    WireError,
    open_group,
)
from lockstep_trio.testing.engine_rank import tokens_of
from lockstep_trio.testing.rank_model import Add, Drop
from lockstep_trio.testing.tokenspeed_rank import DEAD, TokenSpeedRank
from lockstep_trio.testing.zmq_ranks import ZmqRanks
from over_zmq.driven import GUARD, SILENCE, bind, until

PROTOCOL = TokenSpeedProtocol(vocab_size=256)


def ask(tokens: int | None = 1, rank: int | None = None, **fields: Any) -> TokenSpeedRequest:
    return TokenSpeedRequest([7], TokenSpeedSampling(max_new_tokens=tokens), data_parallel_rank=rank, **fields)


async def read(stream: Any) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


@attrs.frozen
class Rig:
    """Nothing moves on the engines' side unless a test moves it."""

    group: Group[TokenSpeedRequest, TokenSpeedOutput]
    zmq: ZmqRanks
    ranks: list[TokenSpeedRank]

    async def takes(self, rank: int, messages: int) -> None:
        """So many messages arrive at a rank, and its loop takes them, unless it is in a step: then behind it."""
        await self.zmq.arrive(rank, messages)
        if not self.ranks[rank].model.at_barrier:
            self.zmq.poll(rank)

    async def run(self, rank: int, steps: int) -> None:
        for _ in range(steps):
            if not self.ranks[rank].model.at_barrier:
                self.zmq.poll(rank)
            self.zmq.step_alone(rank)

    def burden(self, rank: int, requests: int) -> None:
        """The rank holds so many more requests, whosever they are."""
        model = self.ranks[rank]
        job = next(iter(model._jobs.values()))
        for number in range(requests):
            model.model.held[f"another-{number}"] = 50
            model._jobs[f"another-{number}"] = job

    async def spread(self, requests: int) -> list[int]:
        """The ranks that get the next so many requests."""
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(await self.group.submit(ask(1))) for _ in range(requests)]
            return [stream.rank for stream in streams]

    def load(self, rank: int) -> tuple[int, int, float | None]:
        told = self.group.statistics().state.ranks[rank].load
        return told.waiting, told.running, told.kv_usage


def ranks_of(count: int, link: GroupLink, make: Callable[[int], TokenSpeedRank] | None) -> ZmqRanks:
    zmq = ZmqRanks(link.handshake_endpoint, count, lockstep=False)
    made = [TokenSpeedRank(rank, size=count) if make is None else make(rank) for rank in range(count)]
    zmq.ranks = made  # type: ignore[assignment]
    return zmq


@asynccontextmanager
async def drive(
    count: int = 2,
    *,
    transport: str = "ipc",
    make: Callable[[int], TokenSpeedRank] | None = None,
    listen: bool = False,
    **options: Any,
) -> AsyncIterator[Rig]:
    """``listen``: what the client sends while it closes arrives too."""
    with trio.fail_after(GUARD):
        link = bind(count, transport)
        with ranks_of(count, link, make) as zmq:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(zmq.come_up)
                async with open_group(link, ranks=count, **{"protocol": PROTOCOL, **options}) as group:
                    yield Rig(group, zmq, zmq.ranks)  # type: ignore[arg-type]
                if listen:
                    await zmq.hear(SILENCE)
                nursery.cancel_scope.cancel()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_ranks_come_up_and_stream_and_are_never_woken_though_they_report_a_group_of_two(transport: str) -> None:
    async with drive(2, transport=transport) as rig:
        assert [info.data_parallel_size for info in rig.group.infos] == [2, 2]
        assert [info.block_size for info in rig.group.infos] == [64, 64]
        assert not rig.group.lockstep
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.zmq.run)
            for rank in (0, 1):
                async with await rig.group.submit(ask(5, rank)) as stream:
                    assert await read(stream) == tokens_of(7, 5)
            nursery.cancel_scope.cancel()
        state = rig.group.statistics().state
        assert (state.clock, state.stepping, state.in_flight) == (None, False, 0)
    for rank in rig.ranks:  # anything else than an ADD or an ABORT would have raised there
        assert [type(each) for each in rank.log] == [Add]


async def test_an_output_tells_what_it_holds_and_why_it_ended() -> None:
    async with drive(1) as rig:
        async with await rig.group.submit(ask(3, stream=False, request_id="mine")) as stream:
            await rig.takes(0, 1)
            rig.zmq.hold(0)
            await rig.run(0, 3)
            rig.zmq.let(0)
            await until(lambda: rig.group.statistics().ranks[0].counts.outputs == 3)
            output = await stream.receive()
        assert output.token_ids == tuple(tokens_of(7, 3))
        assert (output.request_id, output.rank, output.finish_reason) == ("mine", 0, FinishReason.LENGTH)
        assert (output.prompt_tokens, output.completion_tokens, output.cached_tokens) == (1, 3, 0)
        assert rig.ranks[0].streamed == set()


async def test_a_reason_that_is_not_known_ends_the_stream_as_an_error() -> None:
    async with drive(1) as rig:
        stream = await rig.group.submit(ask(3))
        [add] = await rig.zmq.arrive(0, 1)
        assert isinstance(add, Add)
        rig.zmq.send(0, rig.ranks[0].message([(add.wire_id, [5], "bored")]))
        outputs = [output async for output in stream]
        assert [(output.token_ids, output.finish_reason) for output in outputs] == [((5,), FinishReason.ERROR)]


async def test_an_abort_is_not_waited_for_because_the_engine_says_nothing_to_it() -> None:
    async with drive(1, listen=True) as rig:
        stream = await rig.group.submit(ask(None))
        await rig.takes(0, 1)
        await rig.run(0, 2)
        await stream.receive()
        await stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert rig.group.statistics().state.in_flight == 0
        with trio.fail_after(5):
            await rig.group.drain()
        await rig.takes(0, 1)
        assert [type(each) for each in rig.ranks[0].log] == [Add, Drop]
        assert not rig.ranks[0].holds
    assert len(rig.ranks[0].log) == 2


async def test_no_abort_follows_a_final_output_however_the_stream_is_left() -> None:
    async with drive(1, listen=True) as rig:
        for leave_early in (False, True):
            stream = await rig.group.submit(ask(1))
            await rig.takes(0, 1)
            await rig.run(0, 1)
            await until(lambda: rig.group.statistics().state.in_flight == 0)
            if not leave_early:
                assert await read(stream) == tokens_of(7, 1)
            await stream.aclose()
    assert [type(each) for each in rig.ranks[0].log] == [Add, Add]
    assert rig.ranks[0].stray_aborts == []


async def test_an_abort_that_crosses_the_final_output_can_kill_no_later_request_because_ids_are_never_used_again() -> (
    None
):
    """The engine remembers the id that it does not hold any more, and would kill whatever came under it."""
    async with drive(1) as rig:
        stream = await rig.group.submit(ask(1, request_id="mine"))
        await rig.takes(0, 1)
        rig.zmq.hold(0)
        await rig.run(0, 1)
        await stream.aclose()
        await rig.takes(0, 1)
        assert len(rig.ranks[0].stray_aborts) == 1
        rig.zmq.let(0)
        async with await rig.group.submit(ask(2, request_id="mine")) as again:
            await rig.takes(0, 1)
            await rig.run(0, 2)
            assert await read(again) == tokens_of(7, 2)
        added = [each.wire_id for each in rig.ranks[0].log if isinstance(each, Add)]
        assert len(set(added)) == 2
        assert rig.ranks[0].stray_aborts[0] == added[0]


async def test_a_notice_of_death_names_no_rank_and_the_one_on_whose_socket_it_came_is_lost() -> None:
    async with drive(3) as rig:
        streams = [await rig.group.submit(ask(2, rank)) for rank in range(3)]
        rig.zmq.send(1, [DEAD])
        with pytest.raises(RankFailed) as caught:
            await read(streams[1])
        assert (caught.value.rank, caught.value.fault.kind) == (1, FaultKind.DIED)
        for rank in (0, 2):
            await rig.takes(rank, 1)
            await rig.run(rank, 2)
            assert await read(streams[rank]) == tokens_of(7, 2)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_rank_that_is_killed_fails_its_own_streams_and_gets_nothing_more(
    transport: str, figure: Callable[[str, float, str], None]
) -> None:
    async with drive(2, transport=transport) as rig:
        stream = await rig.group.submit(ask(None, 0))
        await rig.takes(0, 1)
        await rig.run(0, 1)
        begun = trio.current_time()
        rig.zmq.disconnect(0)
        with pytest.raises(RankFailed, match="rank 0 disconnected"):
            await read(stream)
        figure(f"death of a TokenSpeed rank noticed over {transport}", trio.current_time() - begun, "s")
        assert await rig.spread(4) == [1] * 4


async def test_requests_go_to_the_rank_that_has_less_to_do_as_the_ranks_tell_it() -> None:
    async with drive(2) as rig:
        async with await rig.group.submit(ask(None, 0)) as held:
            await rig.takes(0, 1)
            rig.burden(0, 9)
            rig.ranks[0].queued = 4
            await rig.run(0, 1)
            await held.receive()
            # It holds ten, and four of them wait: its own count of running ones includes these.
            assert rig.load(0) == (4, 6, pytest.approx(10 / 256))
            assert await rig.spread(9) == [1] * 9


async def test_an_idle_ranks_last_word_which_counts_what_has_ended_is_not_believed() -> None:
    async with drive(2) as rig:
        for rank in (0, 1):  # so that it is rank 0's turn again
            async with await rig.group.submit(ask(1, rank)) as stream:
                await rig.takes(rank, 1)
                rig.ranks[rank].queued = 1
                await rig.run(rank, 1)
                await read(stream)
        await until(lambda: rig.group.statistics().state.in_flight == 0)
        assert [rig.load(rank)[:2] for rank in (0, 1)] == [(0, 0), (0, 0)]


async def test_a_load_that_comes_after_everything_was_aborted_is_not_believed_either() -> None:
    async with drive(2) as rig:
        stream = await rig.group.submit(ask(None, 1))
        await rig.takes(1, 1)
        rig.burden(1, 9)
        rig.zmq.hold(1)
        await rig.run(1, 1)
        await stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        rig.zmq.let(1)
        await until(lambda: rig.group.statistics().ranks[1].counts.strays)
        assert rig.load(1)[:2] == (0, 0)
        assert sorted(await rig.spread(6)) == [0, 0, 0, 1, 1, 1]


async def test_a_load_that_was_told_before_the_rank_was_idle_is_believed_when_it_is_told_again() -> None:
    async with drive(2) as rig:
        for _ in range(2):
            async with await rig.group.submit(ask(None, 1)) as stream:
                await rig.takes(1, 1)
                rig.burden(1, 9)
                await rig.run(1, 1)
                await stream.receive()
                assert rig.load(1)[:2] == (0, 10)
            rig.ranks[1].model.held.clear()
            await rig.takes(1, 1)
            assert rig.load(1)[:2] == (0, 0)


@pytest.mark.parametrize("elements", [9, 10])
async def test_older_engines_tell_no_load_and_their_requests_are_spread_by_our_own_count(elements: int) -> None:
    async with drive(2, make=lambda rank: TokenSpeedRank(rank, elements=elements)) as rig:
        streams = [await rig.group.submit(ask(2)) for _ in range(4)]
        assert sorted(stream.rank for stream in streams) == [0, 0, 1, 1]
        for rank in (0, 1):
            await rig.takes(rank, 2)
            await rig.run(rank, 2)
        assert [await read(stream) for stream in streams] == [tokens_of(7, 2)] * 4
        assert rig.load(0) == (0, 0, None)


async def test_a_silent_rank_is_lost_after_both_times_and_was_asked_nothing() -> None:
    async with drive(2, stall_timeout=0.3, probe_timeout=0.3) as rig:
        stream = await rig.group.submit(ask(1, 1))
        with pytest.raises(RankFailed, match="cannot be asked") as caught:
            await read(stream)
        assert (caught.value.rank, caught.value.fault.kind) == (1, FaultKind.STALLED)
        heard = await rig.zmq.hear(SILENCE)
        assert [(rank, type(each)) for rank, each in heard] == [(1, Add), (1, Drop)]


async def test_a_message_that_cannot_be_read_costs_the_streams_of_its_rank_and_not_the_rank() -> None:
    async with drive(2) as rig:
        spoilt, kept = await rig.group.submit(ask(2, 0)), await rig.group.submit(ask(1, 1))
        await rig.takes(0, 1)
        rig.zmq.send(0, [b"\x9a" + rig.ranks[0].message([("x", [1], "")])[0][1:]])  # its header says less than it has
        with pytest.raises(WireError, match=r"TokenSpeed 0\.1\.1"):
            await read(spoilt)
        await rig.takes(1, 1)
        await rig.run(1, 1)
        assert await read(kept) == tokens_of(7, 1)
        async with await rig.group.submit(ask(1, 0)) as again:
            await rig.takes(0, 2)  # the ABORT of the spoilt one, and the ADD
            await rig.run(0, 2)  # a step with the spoilt one, and one without
            assert await read(again) == tokens_of(7, 1)


async def test_what_the_engine_would_drop_or_abort_or_die_of_never_leaves() -> None:
    async with drive(1, make=lambda rank: TokenSpeedRank(rank, max_model_len=16)) as rig:
        for request in (
            TokenSpeedRequest([]),
            TokenSpeedRequest(None),  # type: ignore[arg-type]
            TokenSpeedRequest([7] * 15),
            TokenSpeedRequest([256]),
            TokenSpeedRequest([7], return_logprob=True),
            TokenSpeedRequest([7], TokenSpeedSampling(n=2)),
            TokenSpeedRequest([7], TokenSpeedSampling(top_k=128)),
            TokenSpeedRequest([7], TokenSpeedSampling(stream_interval=0)),
            TokenSpeedRequest([7], TokenSpeedSampling(json_schema="{}", regex="a")),
        ):
            with pytest.raises(RequestRejected):
                await rig.group.submit(request)
        with pytest.raises(RequestRejected, match="no utility calls"):
            await rig.group.call_utility("is_sleeping")
        with pytest.raises(RequestRejected, match="no utility calls"):
            await rig.group.pause()
        async with await rig.group.submit(TokenSpeedRequest([7] * 14, TokenSpeedSampling(max_new_tokens=1))) as stream:
            await rig.takes(0, 1)
            await rig.run(0, 1)
            assert await read(stream) == tokens_of(7, 1)
    assert len(rig.ranks[0].log) == 1


@asynccontextmanager
async def coming_up(zmq: ZmqRanks) -> AsyncIterator[None]:
    with trio.fail_after(GUARD), zmq:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(zmq.come_up)
            yield


async def test_lockstep_cannot_be_asked_for() -> None:
    link = bind(2)
    async with coming_up(ranks_of(2, link, None)):
        with pytest.raises(HandshakeError, match="Leave lockstep out"):
            async with open_group(link, ranks=2, protocol=PROTOCOL, lockstep=True):
                pass


async def test_engines_say_hello_once_in_their_life_and_a_second_group_waits_for_them_in_vain() -> None:
    link = bind(1, "tcp")
    async with coming_up(ranks_of(1, link, None)):
        async with open_group(link, ranks=1, protocol=PROTOCOL):
            pass
        with pytest.raises(HandshakeError, match="hello_timeout"):
            async with open_group(link.handshake_endpoint, ranks=1, protocol=PROTOCOL, hello_timeout=0.3):
                pass


async def test_a_vllm_rank_that_dials_the_wrong_client_is_told_apart() -> None:
    link = bind(1)
    async with coming_up(ZmqRanks(link.handshake_endpoint, 1, lockstep=False)):
        with pytest.raises(HandshakeError, match="no TokenSpeed engine"):
            async with open_group(link, ranks=1, protocol=PROTOCOL):
                pass
