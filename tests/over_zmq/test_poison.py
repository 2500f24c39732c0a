"""The catalogue of poisons over real ZeroMQ: each is refused by name, and not a byte of it leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from lockstep_trio import EngineCoreRequest, RequestRejected, SamplingParams, VllmProtocol, open_group
from lockstep_trio.testing.engine_rank import EngineRank
from lockstep_trio.testing.rank_model import Add, StartWave
from lockstep_trio.testing.zmq_ranks import ZmqRanks
from over_zmq.driven import GUARD, Driven, ask, bind, collect
from poison.catalogue import LOOK_WRONG, MAX_LOGPROBS, MAX_MODEL_LEN, PARTS, POISONS, RANKS, VOCABULARY, Harmless

PROTOCOL = VllmProtocol(vocab_size=VOCABULARY, max_logprobs=MAX_LOGPROBS)


@asynccontextmanager
async def drive_small() -> AsyncIterator[Driven]:
    """A lockstep group, driven by hand, of the size that the catalogue is written for."""
    with trio.fail_after(GUARD):
        link = bind(RANKS)
        with ZmqRanks(link.handshake_endpoint, RANKS) as ranks:
            ranks.ranks = [EngineRank(index, size=RANKS, max_model_len=MAX_MODEL_LEN) for index in range(RANKS)]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ranks.come_up)
                # A test that fails leaves ranks behind that nobody moves: then the grace is all that ends it.
                async with open_group(link, ranks=RANKS, protocol=PROTOCOL, close_grace=1.0) as group:
                    yield Driven(group, ranks, link)
                nursery.cancel_scope.cancel()


async def only_good_requests_arrive(driven: Driven) -> None:
    """A good request on each rank works, and these are all that ever came: nothing overtakes on the way to a rank."""
    streams = [await driven.group.submit(ask(1, rank)) for rank in range(RANKS)]
    add, start = await driven.ranks.arrive(0, 2)
    start_too, add_too = await driven.ranks.arrive(1, 2)
    assert start == start_too == StartWave(0, None)
    for stream, came in zip(streams, (add, add_too), strict=True):
        assert isinstance(came, Add)
        assert came.wire_id.startswith(stream.request_id)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driven.ranks.run)
        assert [len(await collect(stream)) for stream in streams] == [1, 1]
        await driven.group.wait_parked()
        nursery.cancel_scope.cancel()
    assert [each.counts.adds for each in driven.group.statistics().ranks] == [1, 1]
    assert [rank.counts["Add"] for rank in driven.ranks.ranks] == [1, 1]


@pytest.mark.parametrize("part", PARTS)
async def test_a_poison_is_refused_by_field_value_and_limit_and_nothing_of_it_is_sent(part: str) -> None:
    async with drive_small() as driven:
        for poison in POISONS:
            if poison.part != part:
                continue
            with pytest.raises(RequestRejected) as caught:
                await driven.group.submit(poison.request)
            refused = caught.value
            assert refused.field == poison.field, poison.name
            # Not the same thing only where it is no object that can be told apart; NaN is unlike itself.
            assert refused.value is poison.value or refused.value == poison.value, poison.name
            assert refused.limit, poison.name
            assert refused.field in str(refused)
            assert refused.limit in str(refused)
            assert driven.group.statistics().state.in_flight == 0
        await only_good_requests_arrive(driven)


def test_every_field_of_a_request_is_in_the_catalogue_once_per_value() -> None:
    sampling = {f"sampling.{field.name}" for field in attrs.fields(SamplingParams)}
    fields = {field.name for field in attrs.fields(EngineCoreRequest)}
    parts = {".".join(part.split(".")[:2]) for part in PARTS}  # what is inside a field is that field's
    assert parts == sampling | fields | {"request"}
    assert [name for name, count in Counter(poison.name for poison in POISONS).items() if count > 1] == []


async def test_the_id_of_a_request_in_flight_is_refused_and_may_be_used_again_afterwards() -> None:
    named = attrs.evolve(ask(1, 0), request_id="mine")
    async with drive_small() as driven:
        first = await driven.group.submit(named)
        for rank in (None, 0, 1):
            with pytest.raises(RequestRejected) as caught:
                await driven.group.submit(attrs.evolve(named, data_parallel_rank=rank))
            assert (caught.value.field, caught.value.value) == ("request_id", "mine")
        assert driven.group.statistics().state.in_flight == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(driven.ranks.run)
            assert len(await collect(first)) == 1
            assert len(await collect(await driven.group.submit(named))) == 1
            await driven.group.wait_parked()
            nursery.cancel_scope.cancel()
        assert [rank.counts["Add"] for rank in driven.ranks.ranks] == [2, 0]
        wire_ids = [message.wire_id for message in driven.ranks.ranks[0].log if isinstance(message, Add)]
        assert len(set(wire_ids)) == 2


@pytest.mark.parametrize("row", LOOK_WRONG, ids=lambda row: row.name)
async def test_what_only_looks_wrong_is_sent(row: Harmless) -> None:
    async with drive_small() as driven:
        stream = await driven.group.submit(attrs.evolve(row.request, data_parallel_rank=0))
        add, _ = await driven.ranks.arrive(0, 2)
        assert isinstance(add, Add)
        await stream.aclose()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(driven.ranks.run)
            await driven.group.wait_parked()
            nursery.cancel_scope.cancel()
