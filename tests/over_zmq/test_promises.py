"""The promises, each over real ZeroMQ, with every message of the ranks arranged by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import trio

from lockstep_trio import (
    EngineLost,
    FaultKind,
    FinishReason,
    GroupClosed,
    GroupFailed,
    HandshakeError,
    RankFailed,
    VllmProtocol,
    open_group,
)
from lockstep_trio.link import zmq_link
from lockstep_trio.link.interface import RankLink, Unreachable
from lockstep_trio.testing.engine_rank import DEAD
from lockstep_trio.testing.rank_model import Add, Call, Drop, StartWave, ToRank
from lockstep_trio.testing.zmq_ranks import ZmqRanks
from over_zmq.driven import SILENCE, Driven, ask, bind, clock, collect, drive, until

pytestmark = pytest.mark.trio


def kinds(messages: list[ToRank]) -> list[type]:
    return [type(message) for message in messages]


async def drained_wave(driven: Driven, rank: int = 0) -> None:
    """One request of one token on a rank, from the parked group to the parked group."""
    before = clock(driven.group)
    assert before is not None
    stream = await driven.group.submit(ask(1, rank))
    for each in range(len(driven.ranks.ranks)):
        await driven.ranks.arrive(each, 2 if each == rank else 1)
        driven.ranks.poll(each)
    driven.ranks.step_on()
    assert len(await collect(stream)) == 1
    await driven.heard_dones(len(driven.ranks.ranks) * (before + 1))
    assert clock(driven.group) == before + 1
    assert driven.at_rest()


# -- waking ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("holder", [0, 1])
async def test_a_first_submit_wakes_every_rank_of_the_parked_group_once_and_the_add_comes_before_the_wake(
    holder: int, transport: str
) -> None:
    async with drive(2, transport=transport) as driven:
        ranks = driven.ranks
        stream = await driven.group.submit(ask(1, holder))
        add, start = await ranks.arrive(holder, 2)
        assert isinstance(add, Add)
        assert add.wire_id.startswith(stream.request_id)
        assert start == StartWave(0, None)
        assert await ranks.arrive(1 - holder, 1) == [StartWave(0, None)]
        assert await ranks.hear(SILENCE) == []
        assert driven.starts() == [1, 1]
        ranks.poll(0)
        ranks.poll(1)
        ranks.step()
        output = await stream.receive()
        assert output.finish_reason is FinishReason.LENGTH
        assert output.rank == holder


async def test_a_drained_wave_rearms_the_wake_with_the_next_number() -> None:
    async with drive(2) as driven:
        for wave in range(3):
            await drained_wave(driven, rank=wave % 2)
            assert driven.ranks.ranks[0].log[-1] == driven.ranks.ranks[1].log[-1] == StartWave(wave, None)
        assert await driven.ranks.hear(SILENCE) == []
        assert driven.starts() == [3, 3]
        assert [engine.model.wave for engine in driven.ranks.ranks] == [3, 3]


async def test_while_the_group_steps_submits_carry_no_wake() -> None:
    async with drive(2) as driven:
        ranks = driven.ranks
        streams = [await driven.group.submit(ask(20, 0))]
        await ranks.arrive(0, 2)
        await ranks.arrive(1, 1)
        for _ in range(5):
            ranks.poll(0)
            ranks.poll(1)
            ranks.step()
        streams += [await driven.group.submit(ask(3, rank)) for rank in (0, 1, 1)]
        assert kinds(await ranks.arrive(0, 1)) == [Add]
        assert kinds(await ranks.arrive(1, 2)) == [Add, Add]
        assert await ranks.hear(SILENCE) == []
        ranks.poll(0)
        ranks.poll(1)
        ranks.step_on()
        assert [len(await collect(stream)) for stream in streams] == [20, 3, 3, 3]
        assert driven.starts() == [1, 1]


async def test_independent_ranks_receive_nothing_but_their_own_adds_and_the_group_keeps_no_waves() -> None:
    async with drive(3, lockstep=False) as driven:
        ranks, group = driven.ranks, driven.group
        streams = [await group.submit(ask(2, rank)) for rank in (0, 1, 1)]
        assert kinds(await ranks.arrive(0, 1)) == [Add]
        assert kinds(await ranks.arrive(1, 2)) == [Add, Add]
        assert await ranks.hear(SILENCE) == []
        for rank in (0, 1):
            for _ in range(2):
                ranks.poll(rank)
                ranks.step_alone(rank)
        assert [len(await collect(stream)) for stream in streams] == [2, 2, 2]
        # Parked again: the next request, like the first, comes alone; leaving one takes an ABORT and no fence.
        leaver = await group.submit(ask(2, 2))
        await leaver.aclose()
        assert kinds(await ranks.arrive(2, 2)) == [Add, Drop]
        assert await ranks.hear(SILENCE) == []
        ranks.poll(2)
        state = group.statistics().state
        assert not state.lockstep
        assert state.clock is None
        assert not state.stepping
        assert state.last_start is None
        assert [(each.unproven, each.fence_pending) for each in state.ranks] == [(0, False)] * 3


# -- a wake that fails -------------------------------------------------------------------------------------------------


def unreachable(link: RankLink) -> Callable[[], bool]:
    """That ZeroMQ has noticed the end of the rank's input connection. The probes before that go nowhere."""

    def probe() -> bool:
        try:
            link.send_nowait([b"\x01", b"\x90"])
        except Unreachable:
            return True
        return False

    return probe


@pytest.mark.parametrize("holder", [0, 1, 2])
async def test_a_wake_that_fails_on_one_rank_is_attempted_on_all_others_then_the_request_is_taken_back(
    holder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The link tells of a lost connection by itself, after a moment. Here the wake shall be what finds out.
    monkeypatch.setattr(zmq_link, "LAST_WORDS", 60.0)
    async with drive(3, dies=True) as driven:
        ranks, group = driven.ranks, driven.group
        ranks.disconnect(1, outputs=False)
        await until(unreachable(driven.link.ranks[1]))
        assert group.fault is None
        with pytest.raises(GroupFailed, match="rank 1 unreachable") as caught:
            await group.submit(ask(5, holder))
        assert caught.value.rank == 1
        assert caught.value.fault.kind is FaultKind.UNREACHABLE
        for rank in (0, 2):
            arrived = await ranks.arrive(rank, 3 if rank == holder else 1)
            if rank == holder:
                add, start, drop = arrived
                assert isinstance(add, Add)
                assert start == StartWave(0, None)
                assert drop == Drop((add.wire_id,))
            else:
                assert arrived == [StartWave(0, None)]
        assert await ranks.hear(SILENCE, 0, 2) == []
        assert group.statistics().state.in_flight == 0
        assert not group._coordinator._buffers
        assert not group._coordinator._callers
        with pytest.raises(GroupFailed, match="rank 1 unreachable"):
            await group.submit(ask())


# -- what ranks say of waves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("waves_before", "asked", "resolved"), [(0, 0, 0), (0, 3, 3), (2, 0, 2), (2, 2, 2), (2, 5, 5)])
async def test_a_start_wave_from_a_rank_is_answered_with_the_resolved_number_to_everybody_once(
    waves_before: int, asked: int, resolved: int
) -> None:
    async with drive(3) as driven:
        ranks = driven.ranks
        for _ in range(waves_before):
            await drained_wave(driven)
        for rank in (2, 0):
            ranks.send(rank, ranks.ranks[rank].message(wave_asked=asked))
        for rank in range(3):
            assert await ranks.arrive(rank, 1) == [StartWave(resolved, None)]
        assert await ranks.hear(SILENCE) == []
        for rank in range(3):
            ranks.poll(rank)
        assert ranks.step_on() == 1
        await until(lambda: clock(driven.group) == resolved + 1)


async def test_a_wave_message_of_an_independent_rank_is_ignored_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lockstep_trio"):
        async with drive(2, lockstep=False) as driven:
            caplog.clear()
            ranks, group = driven.ranks, driven.group
            ranks.send(1, ranks.ranks[1].message(wave_done=4))
            ranks.send(1, ranks.ranks[1].message(wave_asked=7))
            await until(lambda: len(caplog.records) >= 2)
            assert [record.getMessage() for record in caplog.records] == [
                "rank 1: ignored wave_complete 4 from an independent rank",
                "rank 1: ignored start_wave 7 from an independent rank",
            ]
            assert await ranks.hear(SILENCE) == []
            assert group.statistics().state.clock is None
            stream = await group.submit(ask(1, 1))
            assert kinds(await ranks.arrive(1, 1)) == [Add]
            ranks.poll(1)
            ranks.step_alone(1)
            assert len(await collect(stream)) == 1


async def refused(sizes: list[int]) -> HandshakeError:
    """What ``open_group`` says to ranks that report these data-parallel sizes."""
    caught: HandshakeError | None = None
    with trio.fail_after(30):
        link = bind(len(sizes))
        with ZmqRanks(link.handshake_endpoint, len(sizes)) as ranks:
            for engine, size in zip(ranks.ranks, sizes, strict=True):
                engine.size = size
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ranks.come_up)
                try:
                    async with open_group(link, ranks=len(sizes), protocol=VllmProtocol()):
                        pass
                except HandshakeError as error:
                    caught = error
    assert caught is not None
    return caught


@pytest.mark.parametrize("sizes", [[2, 3], [2, 1], [1, 2]])
async def test_data_parallel_sizes_that_disagree_are_reported_with_the_sizes(sizes: list[int]) -> None:
    error = await refused(sizes)
    assert "data_parallel_size" in str(error)
    for rank, size in enumerate(sizes):
        assert f"data_parallel_size {size}" in error.stages[rank]
        assert f"rank {rank}: " in str(error)


@pytest.mark.parametrize("size", [2, 4])
async def test_a_data_parallel_size_other_than_the_number_of_ranks_is_reported_with_both(size: int) -> None:
    error = await refused([size] * 3)
    assert str(error) == f"the ranks report data-parallel sizes {size}, {size}, {size}, but 3 of them are here"


# -- a group that goes away --------------------------------------------------------------------------------------------


async def test_a_stream_raises_with_the_rank_when_a_rank_is_killed() -> None:
    async with drive(2, dies=True) as driven:
        streams = [await driven.group.submit(ask(50, rank)) for rank in (0, 1)]
        await driven.ranks.arrive(0, 2)
        await driven.ranks.arrive(1, 2)
        for _ in range(3):
            driven.ranks.poll(0)
            driven.ranks.poll(1)
            driven.ranks.step()
        driven.ranks.disconnect(1)
        assert (await driven.group.wait_failed()).rank == 1
        for stream in streams:
            assert len((await stream.receive()).token_ids) == 3  # what had been sent before is read first
            with pytest.raises(GroupFailed, match="rank 1 disconnected"):
                await stream.receive()


async def test_a_stream_raises_with_the_rank_when_an_engine_says_that_it_dies() -> None:
    async with drive(2, dies=True) as driven:
        streams = [await driven.group.submit(ask(50, rank)) for rank in (0, 1)]
        driven.ranks.send(1, [DEAD])
        for stream in streams:
            with pytest.raises(GroupFailed, match="rank 1 died"):
                await stream.receive()


async def test_a_stream_raises_when_its_group_is_closed_around_it() -> None:
    async with drive(2) as driven:
        first = await driven.group.submit(ask(50, 0))
        second = await driven.group.submit(ask(50, 1))
    for stream in (first, second):
        with pytest.raises(GroupClosed):
            await collect(stream)


async def test_a_reader_that_waits_while_its_group_is_closed_is_told() -> None:
    told: list[BaseException] = []

    async def read(stream_of: Driven) -> None:
        stream = await stream_of.group.submit(ask(50, 0))
        try:
            await collect(stream)
        except GroupClosed as error:
            told.append(error)

    async with trio.open_nursery() as nursery, drive(2) as driven:
        nursery.start_soon(read, driven)
        await driven.ranks.arrive(0, 2)
    assert len(told) == 1


async def test_the_loss_of_an_independent_rank_ends_its_own_streams_only() -> None:
    async with drive(2, lockstep=False) as driven:
        ranks, group = driven.ranks, driven.group
        lost = await group.submit(ask(2, 0))
        kept = await group.submit(ask(2, 1))
        await ranks.arrive(1, 1)
        ranks.disconnect(0)
        with pytest.raises(RankFailed, match="rank 0 disconnected"):
            await collect(lost)
        with pytest.raises(RankFailed, match="rank 0 disconnected"):
            await group.submit(ask(2, 0))
        for _ in range(2):
            ranks.poll(1)
            ranks.step_alone(1)
        assert len(await collect(kept)) == 2
        async with await group.submit(ask(2)) as another:
            assert another.rank == 1


async def test_no_end_of_a_stream_without_a_finish_reason_is_a_clean_end() -> None:
    """However the group goes: only an output with a finish reason ends an iteration."""

    def kill(ranks: ZmqRanks) -> None:
        ranks.disconnect(0)

    def die(ranks: ZmqRanks) -> None:
        ranks.send(0, [DEAD])

    def babble(ranks: ZmqRanks) -> None:
        ranks.send(0, [b"\xc1"])

    for end in (kill, die, babble):
        async with drive(2, dies=True) as driven:
            stream = await driven.group.submit(ask(2, 1))
            await driven.ranks.arrive(0, 1)
            await driven.ranks.arrive(1, 2)
            driven.ranks.poll(0)
            driven.ranks.poll(1)
            driven.ranks.step()
            end(driven.ranks)
            with pytest.raises(EngineLost) as caught:
                await collect(stream)
            assert caught.value.rank == 0


# -- leaving -----------------------------------------------------------------------------------------------------------


async def test_closing_with_twenty_streams_open_aborts_each_of_them_once() -> None:
    async with drive(2) as driven:
        engines = driven.ranks.ranks
        streams = [await driven.group.submit(ask(500)) for _ in range(20)]
        assert {stream.rank for stream in streams} == {0, 1}
    for engine in engines:
        added = [message.wire_id for message in engine.log if isinstance(message, Add)]
        dropped = [wire_id for message in engine.log if isinstance(message, Drop) for wire_id in message.wire_ids]
        assert len(added) == 10
        assert sorted(dropped) == sorted(added)
        assert not engine.holds
        assert not engine.model.has_work  # parked, not waiting for a neighbour


# -- races -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("waves_before", [0, 2])
@pytest.mark.parametrize("add_is_taken_alone", [True, False])
@pytest.mark.parametrize("said_first", [0, 1])
async def test_i01_a_request_that_reached_its_rank_after_the_park_is_woken_when_its_rank_reports_the_park(
    said_first: int, add_is_taken_alone: bool, waves_before: int, transport: str
) -> None:
    """The submit was made while the group stepped, so it brought no wake; whichever DONE comes first."""
    async with drive(2, transport=transport) as driven:
        ranks, group = driven.ranks, driven.group
        for _ in range(waves_before):
            await drained_wave(driven)
        first = await group.submit(ask(2, 0))
        await ranks.arrive(0, 2)
        await ranks.arrive(1, 1)
        ranks.poll(0)
        ranks.poll(1)
        late = await group.submit(ask(3, 1))  # on its way to rank 1, which will not look before it parks
        for rank in (0, 1):
            ranks.hold(rank)
        ranks.step_on()
        assert not any(engine.model.has_work for engine in ranks.ranks)
        ranks.let(said_first)
        await driven.heard_dones(2 * waves_before + 1)
        ranks.let(1 - said_first)
        assert len(await collect(first)) == 2
        add, start = await ranks.arrive(1, 2)
        assert isinstance(add, Add)
        assert start == StartWave(waves_before + 1, None)
        assert await ranks.arrive(0, 1, within=1) == [StartWave(waves_before + 1, None)]
        ranks.poll(1, 1 if add_is_taken_alone else 2)
        assert not ranks.can_step()
        ranks.poll(0)  # accepts the START
        assert ranks.can_step()
        ranks.step_on()
        assert len(await collect(late)) == 3
        assert await ranks.hear(SILENCE) == []
        ranks.poll(1)  # a START it may have left lying is of a wave that is over
        assert not ranks.ranks[1].model.has_work


@pytest.mark.parametrize("said_first", [0, 1])
@pytest.mark.parametrize("waves_before", [0, 2])
async def test_i01_a_submit_between_the_two_reports_of_the_park_brings_its_own_wake_and_there_is_no_second(
    waves_before: int, said_first: int
) -> None:
    async with drive(2) as driven:
        ranks, group = driven.ranks, driven.group
        for _ in range(waves_before):
            await drained_wave(driven)
        first = await group.submit(ask(2, 0))
        await ranks.arrive(0, 2)
        await ranks.arrive(1, 1)
        ranks.poll(0)
        ranks.poll(1)
        for rank in (0, 1):
            ranks.hold(rank)
        ranks.step_on()
        ranks.let(said_first)
        await driven.heard_dones(2 * waves_before + 1)
        late = await group.submit(ask(3, 1))
        assert kinds(await ranks.arrive(1, 2)) == [Add, StartWave]
        assert await ranks.arrive(0, 1) == [StartWave(waves_before + 1, None)]
        ranks.let(1 - said_first)
        await driven.heard_dones(2 * waves_before + 2)
        assert await ranks.hear(SILENCE) == []
        ranks.poll(1)
        ranks.poll(0)
        ranks.step_on()
        assert len(await collect(first)) == 2
        assert len(await collect(late)) == 3


async def test_i02_a_start_that_a_rank_reads_after_the_park_leaves_it_parked() -> None:
    async with drive(2) as driven:
        ranks = driven.ranks
        stream = await driven.group.submit(ask(1, 0))
        assert kinds(await ranks.arrive(0, 2)) == [Add, StartWave]
        assert kinds(await ranks.arrive(1, 1)) == [StartWave]
        ranks.poll(0, 1)  # the ADD alone
        ranks.poll(1)
        ranks.step()
        assert len(await collect(stream)) == 1
        await driven.heard_dones(2)
        ranks.poll(0)  # its leftover START
        assert not ranks.ranks[0].model.has_work
        assert ranks.ranks[0].model.wave == 1
        assert await ranks.hear(SILENCE) == []
        await drained_wave(driven, rank=1)


@pytest.mark.parametrize("says_first", [0, 1])
async def test_i12_a_request_aborted_before_the_engine_looked_at_it_strands_nobody(says_first: int) -> None:
    async with drive(2) as driven:
        ranks, group = driven.ranks, driven.group
        first = await group.submit(ask(20, 0))
        await first.aclose()
        assert kinds(await ranks.arrive(0, 4)) == [Add, StartWave, Drop, Call]
        assert kinds(await ranks.arrive(1, 1)) == [StartWave]
        for rank in (0, 1):
            ranks.hold(rank)
            ranks.poll(rank)
        ranks.step_on()
        assert [len(ranks.held(rank)) for rank in (0, 1)] == [2, 1]  # the fence's reply and DONE; DONE
        late = await group.submit(ask(20, 1))
        await late.aclose()
        assert kinds(await ranks.arrive(1, 3)) == [Add, Drop, Call]  # the group was stepping for all we knew
        ranks.poll(1, 1)  # the ADD alone: rank 1 goes to the barrier, where nobody comes
        assert ranks.ranks[1].model.at_barrier
        ranks.let(says_first)
        await driven.heard_dones(1)
        ranks.let(1 - says_first)
        assert await ranks.arrive(0, 1) == [StartWave(1, None)]
        ranks.poll(0)
        assert ranks.can_step()
        ranks.step()
        ranks.poll(1)  # ABORT, fence, START
        ranks.step_on()
        await ranks.arrive(1, 1)
        ranks.poll(1)
        await until(driven.at_rest)
        assert await ranks.hear(SILENCE) == []
        assert driven.starts() == [2, 2]
        assert not group._coordinator._buffers
        assert group.statistics().state.clock == 2


@pytest.mark.parametrize("swapped", [False, True])
async def test_i60_no_wake_follows_when_the_output_comes_before_the_done_and_one_if_the_two_are_swapped(
    swapped: bool,
) -> None:
    async with drive(2) as driven:
        ranks = driven.ranks
        stream = await driven.group.submit(ask(1, 0))
        await ranks.arrive(0, 2)
        await ranks.arrive(1, 1)
        for rank in (0, 1):
            ranks.poll(rank)
            ranks.hold(rank)
        ranks.step()
        assert len(ranks.held(0)) == 2
        if swapped:
            ranks.held(0).reverse()
        ranks.let(0)
        assert len(await collect(stream)) == 1
        await driven.heard_dones(1)
        if swapped:
            for rank in (0, 1):
                assert await ranks.arrive(rank, 1) == [StartWave(1, None)]
        assert await ranks.hear(SILENCE) == []
        ranks.let(1)
        await driven.heard_dones(2)
        assert await ranks.hear(SILENCE) == []
        assert driven.starts() == [1 + swapped] * 2
