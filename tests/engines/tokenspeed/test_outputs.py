from __future__ import annotations

import contextlib
import itertools
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.engines.common.outputs import DEAD
from lockstep_trio.engines.protocol import Batch, LoadReport
from lockstep_trio.engines.tokenspeed.outputs import COLUMNS, TAG, decode
from lockstep_trio.errors import WireError


def row(wire_id: Any = "w", tokens: Any = (5,), finish: Any = "", *counts: Any) -> list[Any]:
    return [wire_id, list(tokens) if isinstance(tokens, tuple) else tokens, finish, *(counts or (3, 1, 0)), [], []]


def message(*rows: list[Any], tail: tuple[Any, ...] = (0,)) -> list[Any]:
    return [TAG, *(list(column) for column in zip(*rows, strict=True)), *tail]


def read(array: Any) -> Batch:
    return decode([msgpack.packb(array)])


def whole(running: Any = 3, waiting: Any = 1, active: Any = 20, total: Any = 80) -> tuple[Any, ...]:
    return (1, running, waiting, active, total)


@pytest.mark.parametrize("extra", range(9))
def test_every_length_from_nine_elements_on_is_read(extra: int) -> None:
    tail = (*whole(), "new", [1], {"more": None})[:extra]
    batch = read(message(row("a", (5, 6)), row("b", (), "stop", 3, 2, 1), tail=tail))
    assert [each[:2] for each in batch.outputs] == [("a", False), ("b", True)]
    assert batch.outputs[1][2] == ((), "stop", 3, 2, 1, (), ())
    assert (batch.load is not None) == (extra >= 5)
    assert (batch.damage, batch.unreadable, batch.nameless) == ((), (), 0)


@pytest.mark.parametrize("size", range(9))
def test_less_than_nine_elements_are_a_wire_error(size: int) -> None:
    with pytest.raises(WireError, match=r"at least 9|tag absent"):
        read(message(row())[:size])


@pytest.mark.parametrize("tag", ["BatchTokenIDOut", "", None, 7, b"BatchTokenIDOutSlim", ["BatchTokenIDOutSlim"]])
def test_another_tag_is_a_wire_error(tag: Any) -> None:
    with pytest.raises(WireError, match="tag"):
        read([tag, *message(row())[1:]])


@pytest.mark.parametrize("column", range(1, 9))
@pytest.mark.parametrize("change", ["longer", "shorter", "no array"])
def test_columns_that_do_not_belong_together_are_a_wire_error(column: int, change: str) -> None:
    array = message(row("a"), row("b"))
    array[column] = {"longer": [*array[column], 0], "shorter": array[column][:1], "no array": {}}[change]
    with pytest.raises(WireError, match="different lengths" if change != "no array" else COLUMNS[column - 1]):
        read(array)


@pytest.mark.parametrize("noise", [b"", b"\xc1", b"\x90", b"\x01", b"GET / HTTP/1.1", DEAD + b"!", b"\x81\x00\x00"])
def test_noise_is_a_wire_error(noise: bytes) -> None:
    with pytest.raises(WireError):
        decode([noise])


def test_a_message_without_frames_is_a_wire_error() -> None:
    with pytest.raises(WireError, match="without frames"):
        decode([])


def test_further_frames_are_not_looked_at() -> None:
    assert decode([msgpack.packb(message(row())), b"tensor"]) == read(message(row()))


def test_the_notice_of_death_is_one_frame_and_names_no_rank() -> None:
    assert decode([DEAD]) == Batch(dead=True)
    assert decode([memoryview(DEAD)]) == Batch(dead=True)


def test_a_step_without_outputs_may_still_tell_the_load() -> None:
    batch = read([TAG, *([] for _ in COLUMNS), *whole()])
    assert list(batch.outputs) == []
    assert batch.load == LoadReport(1, 2, 0.25, while_idle=False)


def test_a_reason_that_is_not_known_is_an_end_too() -> None:
    batch = read(message(row("a", (), "bored"), row("b", (), "")))
    assert [last for _, last, _ in batch.outputs] == [True, False]


@pytest.mark.parametrize(
    ("tail", "load"),
    [
        (whole(3, 1), LoadReport(1, 2, 0.25, while_idle=False)),
        (whole(5, 0), LoadReport(0, 5, 0.25, while_idle=False)),
        (whole(0, 0, 0), LoadReport(0, 0, 0.0, while_idle=False)),
        (whole(1, 2, 80), LoadReport(2, 0, 1.0, while_idle=False)),  # one came between the two counts
        (whole(3, 1, 0, 0), None),
        (whole(0, 0, 0, 0), None),
    ],
)
def test_running_includes_waiting_and_no_pages_are_no_report(tail: tuple[int, ...], load: LoadReport | None) -> None:
    batch = read(message(row(), tail=tail))
    assert batch.load == load
    assert batch.damage == ()


@pytest.mark.parametrize(
    "tail",
    [
        whole(-1),
        whole(3, -1),
        whole(3, 1, -1),
        whole(3, 1, 81),
        whole(True),
        whole(3, None),
        whole(3, 1, 0.5),
        whole("3"),
    ],
    ids=repr,
)
def test_a_load_that_cannot_be_costs_the_load_alone(tail: tuple[Any, ...]) -> None:
    batch = read(message(row("a"), tail=tail))
    assert [each[0] for each in batch.outputs] == ["a"]
    assert batch.load is None
    assert len(batch.damage) == 1


@pytest.mark.parametrize("bad", [row("bad", "tokens"), row("bad", None), row("bad", (5,), None), row("bad", (5,), 1)])
def test_an_output_that_cannot_be_read_costs_its_own_request(bad: list[Any]) -> None:
    batch = read(message(row("a"), bad, row("b", (), "stop")))
    assert [each[:2] for each in batch.outputs] == [("a", False), ("b", True)]
    assert [wire_id for wire_id, _ in batch.unreadable] == ["bad"]
    assert (batch.nameless, len(batch.damage)) == (0, 1)


@pytest.mark.parametrize("wire_id", [None, 7, b"w", ["w"]])
def test_an_output_without_an_id_is_counted(wire_id: Any) -> None:
    batch = read(message(row("a"), row(wire_id)))
    assert ([each[0] for each in batch.outputs], batch.nameless) == (["a"], 1)
    assert batch.unreadable == ()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(
    st.lists(st.one_of(st.just(TAG), PLAIN), max_size=16)
    | st.lists(st.lists(PLAIN, max_size=2), min_size=8, max_size=14).map(lambda columns: [TAG, *columns])
)
def test_whatever_comes_is_a_batch_of_the_promised_types_or_a_wire_error(array: list[Any]) -> None:
    with contextlib.suppress(WireError):
        batch = read(array)
        for wire_id, last, raw in batch.outputs:
            assert (type(wire_id), type(last), type(raw)) == (str, bool, tuple)
            assert type(raw[0]) is tuple  # type: ignore[index]
        rows = len(batch.outputs) + len(batch.unreadable) + batch.nameless
        assert rows == len(array[1])
        assert batch.load is None or type(batch.load.kv_usage) is float
        assert all(len(words) <= 300 for words in itertools.chain(batch.damage, (each[1] for each in batch.unreadable)))
