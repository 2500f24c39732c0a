"""Typed utility calls: what is sent, and what is made of the answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from lockstep_trio.engines.vllm import LoRA, VllmCalls
from lockstep_trio.errors import RequestRejected, WireError


class Recorder:
    """Takes a call down and answers it with the same for each rank."""

    def __init__(self, answer: object = None) -> None:
        self.answer = answer
        self.called: tuple[str, tuple[object, ...]] | None = None
        self.ranks: Sequence[int] | None = None
        self.timeout: float | None = None

    async def call_utility(
        self,
        method: str,
        *args: object,
        ranks: Sequence[int] | None = None,
        timeout: float | None = 60.0,  # noqa: ASYNC109
    ) -> dict[int, object]:
        self.called, self.ranks, self.timeout = (method, args), ranks, timeout
        return {0: self.answer, 1: self.answer}


Call = Callable[[VllmCalls], Awaitable[Any]]

CALLS: dict[str, tuple[Call, tuple[str, tuple[object, ...]], object, object]] = {
    "is_sleeping": (lambda c: c.is_sleeping(), ("is_sleeping", ()), False, False),
    "supported_tasks": (lambda c: c.supported_tasks(), ("get_supported_tasks", ()), ["generate"], ("generate",)),
    "reset_prefix_cache": (lambda c: c.reset_prefix_cache(), ("reset_prefix_cache", ()), True, True),
    "of an old engine": (lambda c: c.reset_prefix_cache(), ("reset_prefix_cache", ()), None, True),
    "running": (lambda c: c.reset_prefix_cache(running=True), ("reset_prefix_cache", (True,)), False, False),
    "connector": (lambda c: c.reset_prefix_cache(connector=True), ("reset_prefix_cache", (False, True)), True, True),
    "add_lora": (lambda c: c.add_lora(LoRA("a", 1, "/p")), ("add_lora", (["a", 1, "/p"],)), True, True),
    "remove_lora": (lambda c: c.remove_lora(1), ("remove_lora", (1,)), True, True),
    "pin_lora": (lambda c: c.pin_lora(1), ("pin_lora", (1,)), True, True),
    "list_loras": (lambda c: c.list_loras(), ("list_loras", ()), [1, 2], frozenset({1, 2})),
    "collective_rpc": (
        lambda c: c.collective_rpc("m", 1, "x", kwargs={"k": 2}),
        ("collective_rpc", ("m", None, [1, "x"], {"k": 2})),
        [None, 5],
        (None, 5),
    ),
}

SILENT: dict[str, tuple[Call, tuple[str, tuple[object, ...]]]] = {
    "reset_mm_cache": (lambda c: c.reset_mm_cache(), ("reset_mm_cache", ())),
    "reset_encoder_cache": (lambda c: c.reset_encoder_cache(), ("reset_encoder_cache", ())),
    "start_profile": (lambda c: c.start_profile(), ("profile", (True,))),
    "start_profile, named": (lambda c: c.start_profile("p"), ("profile", (True, "p"))),
    "stop_profile": (lambda c: c.stop_profile(), ("profile", (False,))),
}


@pytest.mark.parametrize(("call", "sent", "answer", "result"), CALLS.values(), ids=CALLS)
async def test_a_call_sends_no_more_than_is_given_and_its_answers_have_types(
    call: Call, sent: tuple[str, tuple[object, ...]], answer: object, result: object
) -> None:
    group = Recorder(answer)
    assert await call(VllmCalls(group)) == {0: result, 1: result}
    assert group.called == sent


@pytest.mark.parametrize(("call", "sent"), SILENT.values(), ids=SILENT)
async def test_a_call_that_returns_nothing_returns_none(call: Call, sent: tuple[str, tuple[object, ...]]) -> None:
    group = Recorder()
    assert await call(VllmCalls(group)) is None
    assert group.called == sent


async def test_ranks_and_time_are_those_that_were_given() -> None:
    group = Recorder(True)
    await VllmCalls(group, ranks=[1], timeout=5).is_sleeping()
    assert (group.ranks, group.timeout) == ([1], 5)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda c: c.is_sleeping(), 0),
        (lambda c: c.supported_tasks(), "generate"),
        (lambda c: c.supported_tasks(), [1]),
        (lambda c: c.list_loras(), [True]),
        (lambda c: c.collective_rpc("m"), None),
    ],
)
async def test_an_answer_of_another_type_is_a_wire_error_that_names_method_and_rank(call: Call, answer: object) -> None:
    with pytest.raises(WireError, match="of rank 0"):
        await call(VllmCalls(Recorder(answer)))


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda c: c.reset_prefix_cache(running=1), "running"),
        (lambda c: c.add_lora(LoRA("", 1, "/p")), "lora.name"),
        (lambda c: c.add_lora(LoRA("a", 0, "/p")), "lora.number"),
        (lambda c: c.add_lora(LoRA("a", 1, None)), "lora.path"),
        (lambda c: c.remove_lora("1"), "number"),
        (lambda c: c.start_profile(""), "prefix"),
    ],
)
async def test_what_is_out_of_range_is_refused_before_anything_is_asked(call: Call, field: str) -> None:
    group = Recorder(True)
    with pytest.raises(RequestRejected) as caught:
        await call(VllmCalls(group))
    assert caught.value.field == field
    assert group.called is None
