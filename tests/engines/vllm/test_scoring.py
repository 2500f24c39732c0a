from __future__ import annotations

import array
import sys
from typing import Any

import msgpack
import pytest

from lockstep_trio.engines.vllm.checks import INT32, Limits
from lockstep_trio.engines.vllm.scoring import check_rows, check_scored, most_logprobs
from lockstep_trio.errors import RequestRejected

LIMITS = Limits(vocab_size=256, max_logprobs=3)
INT = "<i4" if sys.byteorder == "little" else ">i4"


class Table:
    """As an array of two dimensions, of numpy or torch."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Any:
        return self.rows[at]

    def __iter__(self) -> Any:
        return iter(self.rows)

    def tolist(self) -> Any:
        return self.rows


def table(*shape: int, items: list[int]) -> list[object]:
    return [INT, list(shape), msgpack.ExtType(3, array.array("i", items).tobytes())]


def test_each_id_to_score_counts_once() -> None:
    assert check_scored("it", (5, 3, 5), LIMITS) == [5, 3]
    assert check_scored("it", array.array("i", [0, 255]), LIMITS) == [0, 255]


@pytest.mark.parametrize("value", [[], [256], [-1], [1.0], "a", range(129)], ids=repr)
def test_a_list_that_is_no_such_list_is_refused(value: Any) -> None:
    with pytest.raises(RequestRejected):
        check_scored("it", value, Limits(vocab_size=256))
    check_scored("it", range(128), Limits(vocab_size=256))


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ([[1, 255], [0, 2]], table(2, 2, items=[1, 255, 0, 2])),
        (([1], (2, 3), []), table(3, 2, items=[1, -1, 2, 3, -1, -1])),
        ([[7, -1, 7]], table(1, 3, items=[7, -1, 7])),
        (Table([[4], [5]]), table(2, 1, items=[4, 5])),
        ([array.array("i", [4]), [6]], table(2, 1, items=[4, 6])),
    ],
)
def test_a_table_is_an_array_with_its_short_rows_filled_up(value: Any, sent: list[object]) -> None:
    assert check_rows("it", value, LIMITS) == sent


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([], "it"),
        ([[], []], "it"),
        ([[1], [1, 2, 3, 4]], "it"),
        (5, "it"),
        ("ab", "it"),
        ([1, 2], "it[0]"),
        ([[1], "a"], "it[1]"),
        ([[1], [2, 256]], "it[1][1]"),
        ([[1], [-2]], "it[1][0]"),
        ([[1], [2, True]], "it[1][1]"),
        ([[1.0]], "it[0][0]"),
        ([[2**31]], "it[0][0]"),
    ],
)
def test_a_table_that_is_none_is_refused_with_the_place(value: Any, field: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        check_rows("it", value, LIMITS)
    assert caught.value.field == field


def test_anything_that_offers_to_be_an_integer_is_one() -> None:
    class Index:
        def __index__(self) -> int:
            return 9

    assert check_rows("it", [[Index(), 1]], LIMITS) == table(1, 2, items=[9, 1])


@pytest.mark.parametrize(
    ("limits", "most"),
    [(Limits(256, 20), 20), (Limits(10, 20), 10), (Limits(10, -1), 10), (Limits(None, -1), INT32), (Limits(), 20)],
)
def test_there_are_as_many_as_the_engine_and_the_vocabulary_allow(limits: Limits, most: int) -> None:
    assert most_logprobs(limits) == most
