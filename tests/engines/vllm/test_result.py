from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.engines.vllm.packing import unpack
from lockstep_trio.engines.vllm.result import FinishReason, RequestOutput, merge
from lockstep_trio.errors import WireError

Raw = tuple[object, ...]


def raw(tokens: tuple[object, ...], finish: object = None, stop: object = None, *tail: object) -> Raw:
    return ("wire-id", tokens, None, None, None, finish, stop, None, None, *tail)


def test_one_output_is_seen_with_its_names() -> None:
    one = raw((1, 2), 0, 50256)
    assert merge("mine", 3, [one]) == RequestOutput("mine", 3, (1, 2), FinishReason.STOP, 50256, None, (one,))


def test_several_outputs_are_one_with_the_tokens_in_order() -> None:
    parts = [raw((1,)), raw(()), raw((2, 3)), raw((4,), 1)]
    merged = merge("mine", 0, parts)
    assert merged.token_ids == (1, 2, 3, 4)
    assert merged.finish_reason is FinishReason.LENGTH
    assert merged.finished
    assert merged.raw == tuple(parts)


def test_an_output_may_stop_after_its_tokens() -> None:
    assert merge("mine", 0, [("wire-id", (1,))]) == RequestOutput("mine", 0, (1,), raw=(("wire-id", (1,)),))


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (None, None),
        (0, FinishReason.STOP),
        (1, FinishReason.LENGTH),
        (2, FinishReason.ABORT),
        (3, FinishReason.ERROR),
        (4, FinishReason.REPETITION),
        (5, FinishReason.ERROR),
        (-1, FinishReason.ERROR),
        (True, FinishReason.ERROR),
        ("stop", FinishReason.ERROR),
        ((), FinishReason.ERROR),
        ({}, FinishReason.ERROR),
    ],
)
def test_a_finish_reason_that_is_not_known_is_an_error(number: object, reason: FinishReason | None) -> None:
    assert merge("mine", 0, [raw((), number)]).finish_reason is reason


@pytest.mark.parametrize(
    ("stop", "seen"), [(None, None), (7, 7), ("repetition_detected", "repetition_detected"), (True, None), ((), None)]
)
def test_a_stop_reason_is_a_number_or_a_word(stop: object, seen: object) -> None:
    assert merge("mine", 0, [raw((), 0, stop)]).stop_reason == seen


PREFILL = {"num_prompt_tokens": 9, "num_computed_tokens": 5, "num_cached_tokens": 4}
# From item 9 on; the layouts of vllm/v1/engine/__init__.py, EngineCoreOutput
TAILS: dict[str, tuple[object, ...]] = {
    "0.20 to 0.25": (None, PREFILL, None, 0),
    "0.20 to 0.25 with trace headers": ({"traceparent": "x"}, PREFILL, None, 0),
    "0.26 to 0.27": (None, None, PREFILL, None, 0),
    "0.26 to 0.27 with trace headers": (None, {"traceparent": "x"}, PREFILL, None, 0),
    "0.26 with transfer parameters": ({"num_cached_tokens": 99}, None, PREFILL, None, 0),
    "0.33": (None, None, PREFILL, None, 0, None, None, None, None, None),
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_cached_tokens_are_found_in_every_layout(tail: tuple[object, ...]) -> None:
    assert merge("mine", 0, [raw((1,), None, None, *tail)]).cached_tokens == 4


def test_cached_tokens_are_the_first_that_were_told() -> None:
    first = raw((1,), None, None, None, None, {"num_cached_tokens": 0}, None)
    second = raw((2,), None, None, None, None, {"num_cached_tokens": 8}, None)
    assert merge("mine", 0, [raw((0,)), first, second]).cached_tokens == 0


@pytest.mark.parametrize("stats", [None, 5, [], {}, {"num_cached_tokens": None}, {"num_cached_tokens": True}])
def test_without_them_there_are_none(stats: object) -> None:
    assert merge("mine", 0, [raw((1,), None, None, None, None, stats)]).cached_tokens is None


@pytest.mark.parametrize("token", [None, 1.0, "1", True, (1,)])
def test_tokens_that_are_no_integers_are_an_error(token: object) -> None:
    with pytest.raises(WireError, match="new_token_ids"):
        merge("mine", 0, [raw((1,)), raw((2, token))])


def test_an_output_is_frozen_and_has_no_dict() -> None:
    output = RequestOutput("mine", 0, ())
    assert not output.finished
    assert not hasattr(output, "__dict__")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        output.rank = 1  # type: ignore[misc]


@given(st.lists(st.lists(st.integers(0, 99)).map(tuple), min_size=1))
def test_merging_loses_and_reorders_nothing(parts: list[tuple[int, ...]]) -> None:
    raws = [raw(tokens) for tokens in parts]
    assert merge("mine", 0, raws).token_ids == tuple(token for tokens in parts for token in tokens)


def test_a_token_that_is_nested_too_deep_for_repr_is_a_wire_error_like_any_other() -> None:
    deep = unpack("part", b"\x91" * 1010 + b"\xc0")
    with pytest.raises(WireError, match="not all integers"):
        merge("a", 0, [("a", (deep,))])
