from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lockstep_trio.engines.vllm.parts import (
    KNOWN,
    EngineEvent,
    ErrorReport,
    EventKind,
    PrefillStats,
    SpecDecodeMetrics,
    count_of,
    error_of,
    events_of,
    headers_of,
    map_of,
    part_of,
    places,
    prefill_of,
    spec_decode_of,
    words_of,
)
from lockstep_trio.errors import WireError

HEAD: tuple[Any, ...] = ("wire-id", (1,), *[None] * 7)
# Items from 9 on; the layouts of vllm/v1/engine/__init__.py, EngineCoreOutput
TAILS: dict[str, tuple[tuple[Any, ...], dict[str, int]]] = {
    "0.10.0": ((4,), {"num_cached_tokens": 9}),
    "0.10.2": ((None, 4), {"trace_headers": 9, "num_cached_tokens": 10}),
    "0.11.1": ((None, 4, 0), {"num_cached_tokens": 10, "num_nans_in_logits": 11}),
    "0.14": ((None, 4, None, 0), {"num_cached_tokens": 10, "routed_experts": 11, "num_nans_in_logits": 12}),
    "0.16": (
        (None, 4, 0, None, 0),
        {"num_external_computed_tokens": 11, "routed_experts": 12, "num_nans_in_logits": 13},
    ),
    "0.20": ((None, None, None, 0), {"trace_headers": 9, "prefill_stats": 10, "routed_experts": 11}),
    "0.20 with stats": ((None, {}, None, 0), {"trace_headers": 9, "prefill_stats": 10, "num_nans_in_logits": 12}),
    "0.26": ((None, None, None, None, 0), {"ec_transfer_params": 9, "trace_headers": 10, "prefill_stats": 11}),
    "0.26 with a trace": ((None, {}, None, None, 0), {"ec_transfer_params": 9, "trace_headers": 10}),
    "0.33": ((None, None, None, None, 0, *[None] * 5), {"new_sampling_mask": 15, "error": 18}),
}


@pytest.mark.parametrize(("tail", "told"), TAILS.values(), ids=TAILS)
def test_an_array_tells_its_layout_by_its_length_and_item_10(tail: tuple[Any, ...], told: dict[str, int]) -> None:
    found = places((*HEAD, *tail))
    assert {name: found[name] for name in told} == told


def test_a_part_that_a_release_does_not_have_or_that_is_cut_off_is_none() -> None:
    assert part_of((*HEAD, 4), "error") is None
    assert part_of(HEAD, "num_cached_tokens") is None
    assert part_of((*HEAD, *[None] * 5), "error") is None


def test_what_is_appended_later_moves_nothing() -> None:
    later = (*HEAD, *[None] * (KNOWN - len(HEAD)), "new", "newer")
    assert places(later)["error"] == KNOWN - 1


@pytest.mark.parametrize(
    ("value", "count"), [(0, 0), (7, 7), (-1, None), (True, None), (1.0, None), ("1", None), (None, None)]
)
def test_a_count_is_a_number_of_things(value: object, count: int | None) -> None:
    assert count_of(value) == count


def test_events_have_kinds_and_times() -> None:
    told = ({"type": 1, "timestamp": 1.5}, {"type": 3, "timestamp": 2, "more": None}, {"type": 99, "timestamp": 3.0})
    assert events_of("part", told) == (
        EngineEvent(EventKind.QUEUED, 1.5),
        EngineEvent(EventKind.PREEMPTED, 2),
        EngineEvent(EventKind.OTHER, 3.0),
    )


def test_stats_and_metrics_take_what_is_there() -> None:
    assert prefill_of("part", {"num_prompt_tokens": 9, "num_cached_tokens": -1}) == PrefillStats(
        9, None, None, None, None, None
    )
    assert spec_decode_of("part", {"num_spec_tokens": 3}) == SpecDecodeMetrics(3, None, (), (), ())


def test_an_error_is_retryable_only_if_it_says_so() -> None:
    assert error_of("part", {"code": "a", "message": "b"}) == ErrorReport("a", "b", False)
    assert error_of("part", {"code": "a", "message": "b", "retryable": True, "new": 1}) == ErrorReport("a", "b", True)
    assert error_of("part", {"code": "a", "message": "b", "retryable": 1}).retryable is False


def test_a_map_cannot_be_written_to() -> None:
    with pytest.raises(TypeError):
        map_of("part", {"a": 1})["a"] = 2  # type: ignore[index]


BROKEN: list[tuple[Callable[[str, Any], object], Any]] = [
    *[(map_of, value) for value in (5, "text", (), (("a", 1),), {5: 1}, {"a": 1, None: 2}, b"x")],
    *[(headers_of, value) for value in (5, {"a": 1}, {"a": None}, {b"a": "b"})],
    *[(words_of, value) for value in (5, "text", (1,), ("a", b"b"), {"a": 1})],
    *[(events_of, value) for value in (5, {}, (5,), ({},), ({"type": 1},), ({"type": "1", "timestamp": 1.0},))],
    *[(events_of, value) for value in (({"type": 1, "timestamp": "x"},), ({"timestamp": 1.0},), (None,))],
    *[(events_of, value) for value in (({"type": True, "timestamp": 1.0},), ({"type": 1, "timestamp": True},))],
    *[(prefill_of, value) for value in (5, (), {5: 1})],
    *[(spec_decode_of, value) for value in (5, {"histogram": 5}, {"histogram": (1, "2")}, {"per_step_drafted": None})],
    *[(error_of, value) for value in (5, {}, {"code": "a"}, {"message": "b"}, {"code": 1, "message": "b"}, ("a", "b"))],
]


@pytest.mark.parametrize(("read", "value"), BROKEN, ids=lambda each: getattr(each, "__name__", repr(each)))
def test_anything_else_is_a_wire_error_that_names_the_part(read: Callable[[str, Any], object], value: Any) -> None:
    with pytest.raises(WireError, match="expected") as caught:
        read("its part", value)
    assert caught.value.part.startswith("its part")
    assert len(str(caught.value)) < 250
