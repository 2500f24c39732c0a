from __future__ import annotations

import array
import enum
import fractions
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.engines.vllm.checks import Limits, flag, real, sequence, text, token_ids, whole
from lockstep_trio.errors import RequestRejected


class Index:
    """Stands for a numpy integer: no int, but has ``__index__``."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Array:
    """Stands for a numpy array: no sequence by type, but indexed and with ``tolist``."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: int) -> Any:
        return self.items[at]

    def __iter__(self) -> Any:
        return iter(self.items)

    def tolist(self) -> list[Any]:
        return list(self.items)


class Number(enum.IntEnum):
    THREE = 3


@pytest.mark.parametrize("value", [3, Index(3), Number.THREE])
def test_whatever_can_index_is_a_whole_number(value: object) -> None:
    number = whole("f", value, 0, 3, "words")
    assert number == 3
    assert type(number) is int


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, b"1", [1], -1, 4, Index(4)])
def test_nothing_else_and_nothing_out_of_range_is(value: object) -> None:
    with pytest.raises(RequestRejected, match=r"f is .*; it must be words") as caught:
        whole("f", value, 0, 3, "words")
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("f", value, "words")


@pytest.mark.parametrize("value", [1, 1.0, fractions.Fraction(1)])
def test_whatever_converts_to_float_is_a_real_number(value: object) -> None:
    assert type(real("f", value, 0, 2, "words")) is float


@pytest.mark.parametrize(
    "value", [True, "1", None, float("nan"), float("inf"), -float("inf"), 10**400, -0.1, 2.1, 1j, [1.0]]
)
def test_no_text_no_bool_no_nan_and_nothing_out_of_range_is_a_real_number(value: object) -> None:
    with pytest.raises(RequestRejected):
        real("f", value, 0, 2, "words")


def test_the_lower_end_of_a_range_may_be_excluded() -> None:
    assert real("f", 0, 0, 1, "words") == 0
    with pytest.raises(RequestRejected):
        real("f", 0, 0, 1, "words", above=True)


def test_infinity_is_out_of_an_unbounded_range() -> None:
    with pytest.raises(RequestRejected):
        real("f", float("inf"), 0, float("inf"), "words")


@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_only_a_bool_is_a_flag(value: object) -> None:
    assert flag("f", True) is True
    with pytest.raises(RequestRejected):
        flag("f", value)


@pytest.mark.parametrize("value", ["", 5, b"x", "\ud800", "x" * 5])
def test_text_is_short_not_empty_and_fit_for_utf8(value: object) -> None:
    assert text("f", None, 4) is None
    assert text("f", "äöü", 4) == "äöü"
    with pytest.raises(RequestRejected):
        text("f", value, 4)


def test_text_of_a_subclass_is_taken_by_its_characters() -> None:
    class Name(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "something else"

    taken = text("f", Name("one"), None)
    assert taken == "one"
    assert type(taken) is str


def test_a_list_or_tuple_of_ints_is_taken_as_it_is() -> None:
    for ids in ([1, 2], (1, 2)):
        assert token_ids("f", ids, 3) is ids


@pytest.mark.parametrize(
    "value", [range(1, 3), array.array("i", [1, 2]), Array(1, 2), Array(Index(1), Index(2)), [1, Index(2)]], ids=repr
)
def test_other_sequences_and_arrays_become_lists_of_ints(value: object) -> None:
    ids = token_ids("f", value, 3)
    assert ids == [1, 2]
    assert set(map(type, ids)) == {int}


@pytest.mark.parametrize(
    ("value", "field", "worst"),
    [
        ([0, 5, 1], "f[1]", 5),
        ([0, 1, -1], "f[2]", -1),
        ([0, True], "f[1]", True),
        ([0, 1.0], "f[1]", 1.0),
        ([0, "1"], "f[1]", "1"),
        ([None], "f[0]", None),
        ([[1]], "f[0]", [1]),
    ],
)
def test_the_first_id_that_is_none_is_named_with_its_index(value: list[Any], field: str, worst: object) -> None:
    with pytest.raises(RequestRejected) as caught:
        token_ids("f", value, 3)
    assert (caught.value.field, caught.value.value) == (field, worst)
    assert caught.value.limit == "a token id from 0 to 2"


@pytest.mark.parametrize("value", ["12", b"12", bytearray(b"1"), memoryview(b"1"), {1: 2}, {1, 2}, 5, None, iter([1])])
def test_what_is_no_sequence_is_refused_whole(value: object) -> None:
    with pytest.raises(RequestRejected) as caught:
        token_ids("f", value, 3)
    assert caught.value.field == "f"


def test_an_array_whose_list_is_no_list_is_refused() -> None:
    class Scalar(Array):
        def tolist(self) -> Any:
            return 5

    with pytest.raises(RequestRejected):
        sequence("f", Scalar(1), "words")


def test_without_a_vocabulary_ids_only_have_to_fit_an_int32() -> None:
    assert Limits().token_bound == 2**31
    assert Limits(vocab_size=10).token_bound == 10


@given(st.lists(st.integers() | st.booleans() | st.floats() | st.none()), st.integers(1, 2**31))
def test_what_passes_is_in_range_and_of_the_exact_type(value: list[Any], bound: int) -> None:
    try:
        ids = token_ids("f", value, bound)
    except RequestRejected:
        assert any(type(each) is not int or not 0 <= each < bound for each in value)
    else:
        assert list(ids) == value
        assert all(type(each) is int and 0 <= each < bound for each in ids)
