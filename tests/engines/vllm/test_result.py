from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.engines.common.finish import FinishReason
from lockstep_trio.engines.vllm.packing import unpack
from lockstep_trio.engines.vllm.parts import KNOWN, EngineEvent, EventKind, PrefillStats
from lockstep_trio.engines.vllm.result import NamedWeights, RequestOutput, is_bare_abort, merge
from lockstep_trio.errors import WireError

Raw = tuple[object, ...]


def raw(tokens: tuple[object, ...], finish: object = None, stop: object = None, *tail: object) -> Raw:
    return ("wire-id", tokens, None, None, None, finish, stop, None, None, *tail)


def test_one_output_is_seen_with_its_names() -> None:
    one = raw((1, 2), 0, 50256)
    assert merge("mine", 3, [one]) == RequestOutput("mine", 3, (1, 2), FinishReason.STOP, 50256, (one,))


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


PREFILL = {"num_prompt_tokens": 9, "num_computed_tokens": 5, "num_cached_tokens": 4, "num_external_cached_tokens": 1}
# From item 9 on; the layouts of vllm/v1/engine/__init__.py, EngineCoreOutput
TAILS: dict[str, tuple[object, ...]] = {
    "0.10.0": (4,),
    "0.10.2": (None, 4),
    "0.10.2 with trace headers": ({"traceparent": "x"}, 4),
    "0.11.1": (None, 4, 0),
    "0.14 to 0.15": (None, 4, None, 0),
    "0.16 to 0.19": (None, 4, 1, None, 0),
    "0.20 to 0.25": (None, PREFILL, None, 0),
    "0.20 to 0.25 with trace headers": ({"traceparent": "x"}, PREFILL, None, 0),
    "0.26 to 0.27": (None, None, PREFILL, None, 0),
    "0.26 to 0.27 with trace headers": (None, {"traceparent": "x"}, PREFILL, None, 0),
    "0.26 with transfer parameters": ({"num_cached_tokens": 99}, None, PREFILL, None, 0),
    "0.33": (None, None, PREFILL, None, 0, None, None, None, None, None),
    "later": (None, None, PREFILL, None, 0, None, None, None, None, None, 7, {"num_cached_tokens": 99}),
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_cached_tokens_are_found_in_every_layout(tail: tuple[object, ...]) -> None:
    assert merge("mine", 0, [raw((1,), None, None, *tail)]).cached_tokens == 4


@pytest.mark.parametrize("name", ["0.16 to 0.19", "0.20 to 0.25", "0.26 to 0.27", "0.33"])
def test_those_that_a_connector_brought_are_found_where_there_are_any(name: str) -> None:
    assert merge("mine", 0, [raw((1,), None, None, *TAILS[name])]).external_cached_tokens == 1
    assert merge("mine", 0, [raw((1,), None, None, *TAILS["0.14 to 0.15"])]).external_cached_tokens is None


def test_cached_tokens_are_the_first_that_were_told() -> None:
    first = raw((1,), None, None, None, {"num_cached_tokens": 0}, None, 0)
    second = raw((2,), None, None, None, {"num_cached_tokens": 8}, None, 0)
    assert merge("mine", 0, [raw((0,)), first, second]).cached_tokens == 0


@pytest.mark.parametrize("count", [-1, True, 1.0])
def test_an_old_engine_that_does_not_know_yet_is_passed_over(count: object) -> None:
    assert merge("mine", 0, [raw((1,), None, None, count), raw((1,), None, None, 3)]).cached_tokens == 3


@pytest.mark.parametrize("stats", [None, [], {}, {"num_cached_tokens": None}, {"num_cached_tokens": True}])
def test_without_them_there_are_none(stats: object) -> None:
    assert merge("mine", 0, [raw((1,), None, None, None, stats, None, 0)]).cached_tokens is None


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


def logprobs(*tokens: int) -> tuple[object, ...]:
    """As 0.11.0 sends them."""
    return (tuple((token, 99) for token in tokens), tuple((-0.5, -1.0) for _ in tokens), tuple(1 for _ in tokens))


def told(tokens: tuple[int, ...] = (), **parts: object) -> Raw:
    """An output of 0.33 with some of its parts."""
    names = [
        "id",
        "tokens",
        "logprobs",
        "prompt",
        "pooling",
        "finish",
        "stop",
        "events",
        "kv",
        "ec",
        "trace",
        "prefill",
    ]
    names += ["experts", "nans", "hashes", "mask", "speculation", "chosen", "error"]
    return tuple({"id": "wire-id", "tokens": tokens, "nans": 0, **parts}.get(name) for name in names)


def test_the_logprobs_of_several_outputs_are_one_sequence_of_rows_over_chunks_that_stay_as_they_came() -> None:
    parts = [told((1,), logprobs=logprobs(1)), told((2, 3), logprobs=logprobs(2, 3)), told((), finish=2)]
    merged = merge("mine", 0, parts)
    assert merged.logprobs is not None
    assert [row.token_id for row in merged.logprobs] == [1, 2, 3] == list(merged.token_ids)
    assert [len(chunk) for chunk in merged.logprobs.chunks] == [1, 2]


def test_arrays_of_several_outputs_are_the_very_bytes_of_each() -> None:
    arrays = [bytes([at] * 300) for at in range(3)]
    merged = merge("mine", 0, [told(experts=("int8", (300,), each)) for each in arrays])
    assert [each.data for each in merged.routed_experts] == arrays
    assert all(each.data is array for each, array in zip(merged.routed_experts, arrays, strict=True))


def test_what_is_told_once_is_found_wherever_among_several_outputs_it_was_told() -> None:
    first = told((1,), prompt=logprobs(8), prefill=PREFILL, events=({"type": 1, "timestamp": 1.5},), trace={"a": "b"})
    last = told(
        (2,), finish=1, kv={"to": 1}, pooling=("int8", (1,), b"x"), events=({"type": 2, "timestamp": 2.5},), nans=3
    )
    merged = merge("mine", 0, [first, told((5,)), last])
    assert merged.prompt_logprobs is not None
    assert [row.token_id for row in merged.prompt_logprobs] == [8]
    assert merged.prefill_stats == PrefillStats(9, 5, 4, None, 1, None)
    assert merged.events == (EngineEvent(EventKind.QUEUED, 1.5), EngineEvent(EventKind.SCHEDULED, 2.5))
    assert (merged.kv_transfer_params, merged.trace_headers, merged.nans_in_logits) == ({"to": 1}, {"a": "b"}, 3)
    assert merged.pooling_output is not None


def test_of_what_is_told_repeatedly_the_newest_counts() -> None:
    merged = merge("mine", 0, [told(kv={"a": 1}), told(kv={"a": 2}), told()])
    assert merged.kv_transfer_params == {"a": 2}


PARTS = {
    "logprobs": "logprobs",
    "prompt": "prompt_logprobs",
    "pooling": "pooling_output",
    "events": "events",
    "kv": "kv_transfer_params",
    "ec": "ec_transfer_params",
    "trace": "trace_headers",
    "prefill": "prefill_stats",
    "experts": "routed_experts",
    "hashes": "missing_mm_hashes",
    "mask": "sampling_masks",
    "speculation": "spec_decode_metrics",
    "chosen": "prompt_token_id_logprobs",
    "error": "error",
}


@pytest.mark.parametrize(("part", "name"), PARTS.items())
@pytest.mark.parametrize("value", [5, "text", ("int8", (2**40,), b""), ("int8", (1,), 3), b"x"], ids=repr)
def test_a_part_that_cannot_be_read_costs_nothing_but_itself(part: str, name: str, value: object) -> None:
    output = merge("mine", 0, [told((1, 2), finish=0, **{part: value})])
    with pytest.raises(WireError, match=r"^EngineCoreOutput\[\d+\] "):
        getattr(output, name)
    assert (output.token_ids, output.finish_reason) == ((1, 2), FinishReason.STOP)
    for other in set(PARTS.values()) - {name}:
        assert getattr(output, other) in (None, ())


def test_what_a_later_release_appends_is_kept_as_it_came() -> None:
    later = (*told((1,)), "new", {"more": 1})
    assert len(told()) == KNOWN
    assert merge("mine", 0, [told((1,)), later]).unknown == ((), ("new", {"more": 1}))


def test_weights_have_a_name_once_somebody_gave_them_one() -> None:
    named = NamedWeights.of(told((2,)), "step-7")
    merged = merge("mine", 0, [told((1,)), named])
    assert merged.weight_versions == (None, "step-7")
    assert merged.raw == (told((1,)), told((2,)))
    assert merged.token_ids == (1, 2)


@pytest.mark.parametrize(
    ("one", "refused"),
    [
        (told((), finish=2), True),
        (told((1,), finish=2), False),
        (told((), finish=1), False),
        (told((), finish="abort"), False),
        (told(()), False),
        (("wire-id", ()), False),
        (NamedWeights.of(told((), finish=2), "step-7"), True),
    ],
)
def test_an_abort_without_a_token_may_be_a_refusal(one: Raw, refused: bool) -> None:
    assert is_bare_abort(one) is refused
