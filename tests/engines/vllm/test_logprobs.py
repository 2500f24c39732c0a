from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.engines.vllm.logprobs import Logprobs, read_logprobs
from lockstep_trio.engines.vllm.tensors import Tensor
from lockstep_trio.errors import WireError

Array = tuple[str, tuple[int, ...], bytes]


def ints(shape: tuple[int, ...], *items: int, dtype: str = "<i4") -> Array:
    return (dtype, shape, struct.pack(f"<{len(items)}i", *items))


def floats(shape: tuple[int, ...], *items: float, dtype: str = "<f4") -> Array:
    return (dtype, shape, struct.pack(f"<{len(items)}f", *items))


IDS = ints((2, 3), 7, 1, 2, 9, 3, 4)
PROBS = floats((2, 3), -0.5, -1.0, -2.0, -4.0, -0.25, -0.5)
RANKS = ints((2,), 1, 12)
LISTS = (((7, 1, 2), (9, 3, 4)), ((-0.5, -1.0, -2.0), (-4.0, -0.25, -0.5)), (1, 12))
FORMS: dict[str, tuple[Any, ...]] = {
    "lists, up to 0.11.0": LISTS,
    "arrays, since 0.11.1": (IDS, PROBS, RANKS, None),
    "tensors, up to 0.15": (("int32", *IDS[1:]), ("float32", *PROBS[1:]), ("int32", *RANKS[1:])),
    "tensors, since 0.29": (("int32", *IDS[1:]), ("float32", *PROBS[1:]), ("int32", *RANKS[1:]), None, None),
    "both": (LISTS[0], PROBS, LISTS[2]),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_reads_the_same(form: tuple[Any, ...]) -> None:
    chunk = read_logprobs("part", form)
    assert len(chunk) == 2
    first, second = chunk
    assert (first.token_id, first.logprob, first.rank) == (7, -0.5, 1)
    assert first.top() == ((1, -1.0), (2, -2.0))
    assert (second.token_id, second.logprob, second.rank) == (9, -4.0, 12)
    assert (list(second.token_ids), list(second.logprobs)) == ([9, 3, 4], [-4.0, -0.25, -0.5])


@pytest.mark.parametrize("count", [0, 1, 2, 3, -1, None])
def test_the_likeliest_are_as_many_as_are_wanted_and_there(count: int | None) -> None:
    first, _ = read_logprobs("part", FORMS["arrays, since 0.11.1"])
    top = first.top(count)
    assert top == ((1, -1.0), (2, -2.0))[: 2 if count in (None, -1) else count]


def test_rows_are_views_of_the_bytes_that_came() -> None:
    chunk = read_logprobs("part", FORMS["arrays, since 0.11.1"])
    for row in chunk:
        assert isinstance(row.token_ids, memoryview)
        assert row.token_ids.obj is IDS[2]
        assert isinstance(row.logprobs, memoryview)
        assert row.logprobs.obj is PROBS[2]


def test_steps_of_different_width_are_one_sequence_of_rows() -> None:
    wide = read_logprobs("part", FORMS["arrays, since 0.11.1"])
    narrow = read_logprobs("part", (ints((1, 1), 5), floats((1, 1), -3.0), ints((1,), 40)))
    joined = Logprobs((narrow, wide, narrow))
    assert len(joined) == 4
    assert [(row.token_id, len(row.token_ids)) for row in joined] == [(5, 1), (7, 3), (9, 3), (5, 1)]
    assert [row.token_id for row in joined] == [5, 7, 9, 5]  # a second time too


@pytest.mark.parametrize(
    "nothing", [((), (), ()), (ints((0, 3)), floats((0, 3)), ints((0,))), (ints((0, 0)), floats((0, 0)), ints((0,)))]
)
def test_no_rows_are_no_rows(nothing: tuple[Any, ...]) -> None:
    chunk = read_logprobs("part", nothing)
    assert (len(chunk), list(chunk)) == (0, [])


@pytest.mark.parametrize(
    ("broken", "part"),
    [
        (None, ""),
        (5, ""),
        ((), ""),
        ((IDS, PROBS), ""),
        ({0: IDS}, ""),
        ((None, PROBS, RANKS), ".token_ids"),
        ((IDS, None, RANKS), ".logprobs"),
        ((IDS, PROBS, None), ".ranks"),
        ((PROBS, PROBS, RANKS), ".token_ids"),
        ((IDS, IDS, RANKS), ".logprobs"),
        ((IDS, PROBS, floats((2,), 1, 2)), ".ranks"),
        ((IDS, ("bfloat16", (2, 3), bytes(12)), RANKS), ".logprobs"),
        ((ints((6,), *range(6)), PROBS, RANKS), ".token_ids"),
        ((ints((2, 0)), floats((2, 0)), RANKS), ".token_ids"),
        ((ints((2**40, 0)), floats((2**40, 0)), RANKS), ".token_ids"),
        ((ints((1, 2, 3), *range(6)), PROBS, RANKS), ".token_ids"),
        ((IDS, floats((3, 2), *range(6)), RANKS), ".logprobs"),
        ((IDS, PROBS, ints((3,), 1, 2, 3)), ".ranks"),
        ((IDS, PROBS, ints((2, 1), 1, 2)), ".ranks"),
        ((IDS, PROBS, ("<i4", (2,), 1)), ".ranks"),
        ((IDS, PROBS, ("<i4", (2,), b"x")), ".ranks"),
        ((IDS, PROBS, (1, "x")), ".ranks"),
        (((1, 2), LISTS[1], LISTS[2]), ".token_ids"),
        ((((1, 2), (3,)), LISTS[1], LISTS[2]), ".token_ids"),
        ((((1, 2.0, 3), (4, 5, 6)), LISTS[1], LISTS[2]), ".token_ids"),
        ((LISTS[0], ((1, 2, "x"), (4, 5, 6)), LISTS[2]), ".logprobs"),
        ((LISTS[0], LISTS[1], (1, 2, 3)), ".ranks"),
        ((((), ()), ((), ()), (1, 2)), ".token_ids"),
    ],
    ids=repr,
)
def test_what_does_not_fit_together_is_a_wire_error_that_names_the_array(broken: Any, part: str) -> None:
    with pytest.raises(WireError) as caught:
        read_logprobs("new_logprobs", broken)
    assert caught.value.part == f"new_logprobs{part}"
    assert len(str(caught.value)) < 250


def test_a_float_among_the_lists_may_be_a_whole_number() -> None:
    (row,) = read_logprobs("part", (((1,),), ((0,),), (1,)))
    assert row.logprob == 0.0


rows_and_columns = st.tuples(st.integers(0, 5), st.integers(1, 4)).flatmap(
    lambda shape: st.lists(
        st.tuples(
            st.lists(st.integers(0, 2**31 - 1), min_size=shape[1], max_size=shape[1]),
            st.lists(st.floats(width=32, allow_nan=False), min_size=shape[1], max_size=shape[1]),
            st.integers(1, 2**31 - 1),
        ),
        min_size=shape[0],
        max_size=shape[0],
    ).map(lambda rows: (shape[1], rows))
)


@given(rows_and_columns)
def test_lists_and_arrays_of_the_same_numbers_are_the_same_rows(
    drawn: tuple[int, list[tuple[list[int], list[float], int]]],
) -> None:
    columns, rows = drawn
    shape = (len(rows), columns)
    as_arrays = (
        ints(shape, *(each for row in rows for each in row[0])),
        floats(shape, *(each for row in rows for each in row[1])),
        ints(shape[:1], *(row[2] for row in rows)),
    )
    as_lists = tuple(
        tuple(tuple(each) if isinstance(each, list) else each for each in part) for part in zip(*rows, strict=True)
    )
    for form in (as_arrays, as_lists or ((), (), ())):
        found = [(list(row.token_ids), list(row.logprobs), row.rank) for row in read_logprobs("part", form)]
        assert found == [tuple(row) for row in rows]


def test_a_chunk_is_a_value() -> None:
    one, same = (read_logprobs("part", FORMS["arrays, since 0.11.1"]) for _ in range(2))
    assert one == same
    assert one.ranks == Tensor("int32", (2,), RANKS[2])
