"""Which adapters requests may use: those that every rank has loaded, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from lockstep_trio import EngineCoreRequest, RequestRejected, UtilityFailed, VllmProtocol
from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.engines.vllm import Adapters, LoRA
from lockstep_trio.engines.vllm.admission import admit
from lockstep_trio.engines.vllm.checks import Limits

SQL = LoRA("sql", 1, "/sql")


class Ranks:
    """Two ranks, each of whose answers is let go by hand."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.failure: BaseException | None = None
        self.gate = trio.Event()
        self.gate.set()

    async def call_utility(
        self,
        method: str,
        *args: object,
        ranks: Sequence[int] | None = None,
        timeout: float | None = 60.0,  # noqa: ASYNC109
    ) -> dict[int, object]:
        self.asked.append((method, *args))
        await self.gate.wait()
        await trio.lowlevel.checkpoint()
        if self.failure is not None:
            raise self.failure
        return {0: True, 1: False}


def lora_of(request: EngineCoreRequest, adapters: Adapters) -> object:
    return admit(request, Limits(adapters=adapters)).fields["lora_request"]


def refused(lora: object, adapters: Adapters | None) -> bool:
    with pytest.raises(RequestRejected) as caught:
        admit(EngineCoreRequest([1], lora=lora), Limits(adapters=adapters))  # type: ignore[arg-type]
    return caught.value.field == "lora"


async def test_an_adapter_may_be_used_between_add_and_remove() -> None:
    ranks, adapters = Ranks(), Adapters()
    assert refused(SQL, adapters)
    await adapters.add(ranks, SQL)
    assert lora_of(EngineCoreRequest([1], lora=SQL), adapters) == ["sql", 1, "/sql"]
    assert adapters.loaded == (SQL,)
    ranks.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(adapters.remove, ranks, SQL)
        await trio.testing.wait_all_tasks_blocked()
        assert refused(SQL, adapters), "as soon as it was asked for"
        ranks.gate.set()
    assert ranks.asked == [("add_lora", ["sql", 1, "/sql"]), ("remove_lora", 1)]


@pytest.mark.parametrize("changes", [{"name": "other"}, {"number": 2}, {"path": "/other"}])
async def test_only_the_very_adapter_may_be_used(changes: dict[str, Any]) -> None:
    adapters = Adapters()
    await adapters.add(Ranks(), SQL)
    assert refused(attrs.evolve(SQL, **changes), adapters)


async def test_without_a_keeper_none_may_be_used() -> None:
    assert refused(SQL, None)
    assert refused("sql", Adapters())


async def test_an_adapter_that_a_rank_cannot_load_may_not_be_used() -> None:
    ranks, adapters = Ranks(), Adapters()
    ranks.failure = UtilityFailed("add_lora", {1: "no such file"})
    with pytest.raises(UtilityFailed, match="no such file"):
        await adapters.add(ranks, SQL)
    assert refused(SQL, adapters)
    ranks.failure = None
    await adapters.add(ranks, attrs.evolve(SQL, path="/elsewhere"))  # its number and name are free again


async def test_a_cancelled_add_lets_nothing_through() -> None:
    ranks, adapters = Ranks(), Adapters()
    with trio.CancelScope() as scope:
        scope.cancel()
        await adapters.add(ranks, SQL)
    assert refused(SQL, adapters)


@pytest.mark.parametrize(
    "other", [LoRA("sql", 2, "/sql"), LoRA("other", 1, "/sql"), LoRA("sql", 1, "/other")], ids=repr
)
async def test_another_adapter_of_the_same_number_or_name_is_refused_before_anything_is_sent(other: LoRA) -> None:
    ranks, adapters = Ranks(), Adapters()
    await adapters.add(ranks, SQL)
    await adapters.add(ranks, LoRA("chat", 9, "/chat"))
    with pytest.raises(RequestRejected) as caught:
        await adapters.add(ranks, other)
    assert caught.value.field == "lora"
    assert len(ranks.asked) == 2
    ranks.gate = trio.Event()
    async with trio.open_nursery() as nursery:  # also while it is being loaded
        nursery.start_soon(adapters.add, ranks, LoRA("new", 5, "/new"))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RequestRejected):
            await adapters.add(ranks, LoRA("new", 6, "/new"))
        ranks.gate.set()


async def test_of_two_that_load_the_same_one_may_be_cancelled() -> None:
    ranks, adapters = Ranks(), Adapters()
    ranks.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(adapters.add, ranks, SQL)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0):
            await adapters.add(ranks, SQL)
        with pytest.raises(RequestRejected):
            await adapters.add(ranks, LoRA("sql", 2, "/sql"))
        ranks.gate.set()
    assert SQL in adapters


async def test_what_is_removed_while_it_loads_may_not_be_used() -> None:
    ranks, adapters = Ranks(), Adapters()
    ranks.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(adapters.add, ranks, SQL)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(adapters.remove, ranks, SQL)
        await trio.testing.wait_all_tasks_blocked()
        ranks.gate.set()
    assert refused(SQL, adapters)
    assert [method for method, *_ in ranks.asked] == ["add_lora", "remove_lora"]


@pytest.mark.parametrize("lora", [LoRA("", 1, "/p"), LoRA("a", 0, "/p"), LoRA("a", 1, "")], ids=repr)
async def test_an_adapter_that_no_engine_would_take_is_refused(lora: LoRA) -> None:
    ranks = Ranks()
    with pytest.raises(RequestRejected, match=r"lora\."):
        await Adapters().add(ranks, lora)
    assert not ranks.asked


def test_the_protocol_hands_its_keeper_to_admission() -> None:
    adapters = Adapters()
    session = VllmProtocol(adapters=adapters, version="0.32.0").session([RankInfo(0, data_parallel_size=1)])
    assert session.limits.adapters is adapters
