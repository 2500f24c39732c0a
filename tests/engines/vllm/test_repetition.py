from __future__ import annotations

from typing import Any

import attrs
import pytest

from lockstep_trio.engines.vllm import RepetitionDetection
from lockstep_trio.engines.vllm.checks import INT32, Limits
from lockstep_trio.engines.vllm.repetition import check_repetition
from lockstep_trio.errors import RequestRejected

GOOD = RepetitionDetection(max_pattern_size=4, min_pattern_size=2, min_count=3)


def test_all_three_numbers_are_sent() -> None:
    assert check_repetition("it", GOOD, Limits()) == {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}


@pytest.mark.parametrize(
    "changes", [{"min_pattern_size": 4}, {"min_pattern_size": 1}, {"max_pattern_size": INT32}, {"min_count": 2}]
)
def test_the_ends_of_every_range_are_accepted(changes: dict[str, Any]) -> None:
    given = attrs.evolve(GOOD, **changes)
    assert check_repetition("it", given, Limits()) == attrs.asdict(given)


WRONG: dict[str, list[Any]] = {
    "max_pattern_size": [0, -1, INT32 + 1, 2.0, None, True, "4"],
    "min_pattern_size": [0, -1, 5, 1.0, None, True],
    "min_count": [1, 0, -1, INT32 + 1, 2.0, None, True],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_number_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestRejected) as caught:
        check_repetition("it", attrs.evolve(GOOD, **{name: value}), Limits())
    assert (caught.value.field, caught.value.value) == (f"it.{name}", value)


def test_nothing_else_is_taken_for_it() -> None:
    with pytest.raises(RequestRejected, match="RepetitionDetection"):
        check_repetition("it", attrs.asdict(GOOD), Limits())


def test_it_is_given_by_name() -> None:
    with pytest.raises(TypeError):
        RepetitionDetection(4, 2, 3)  # type: ignore[misc]
