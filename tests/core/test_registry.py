"""Accounting by id: every end releases exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.core.registry import Registry


def test_an_id_is_in_flight_on_its_rank_until_removed() -> None:
    registry = Registry.of(2)
    registry.add(1, "a")
    assert "a" in registry
    assert registry.rank_of("a") == 1
    assert (registry.count(0), registry.count(1), len(registry)) == (0, 1, 1)
    registry.remove("a")
    assert "a" not in registry
    assert registry.rank_of("a") is None
    assert (registry.count(1), len(registry)) == (0, 0)


def test_a_second_release_is_a_bug_that_shows() -> None:
    registry = Registry.of(1)
    registry.add(0, "a")
    registry.remove("a")
    with pytest.raises(KeyError):
        registry.remove("a")


def test_taking_a_rank_empties_it_and_leaves_the_others() -> None:
    registry = Registry.of(2)
    for rank, wire_id in ((0, "a"), (1, "b"), (0, "c")):
        registry.add(rank, wire_id)
    assert registry.take(0) == ("a", "c")
    assert registry.ids(0) == ()
    assert registry.ids(1) == ("b",)


def test_a_copy_is_independent() -> None:
    registry = Registry.of(1)
    registry.add(0, "a")
    twin = registry.copy()
    assert twin.canonical() == registry.canonical()
    twin.remove("a")
    assert "a" in registry
    assert twin.canonical() != registry.canonical()


@given(st.lists(st.tuples(st.sampled_from("+-"), st.integers(0, 2), st.integers(0, 9)), max_size=60))
def test_counts_equal_a_plain_model_after_every_event(events: list[tuple[str, int, int]]) -> None:
    registry = Registry.of(3)
    model: dict[str, int] = {}
    for sign, rank, number in events:
        wire_id = str(number)
        if sign == "+" and wire_id not in model:
            model[wire_id] = rank
            registry.add(rank, wire_id)
        elif sign == "-" and wire_id in model:
            del model[wire_id]
            registry.remove(wire_id)
        assert [registry.count(each) for each in range(3)] == [list(model.values()).count(each) for each in range(3)]
        assert len(registry) == len(model)
