"""Which rank gets the next request."""

from __future__ import annotations

import pytest

from lockstep_trio.core import Load, score
from lockstep_trio.core.selection import Selector


def spread(selector: Selector, own: list[int], times: int) -> list[int]:
    """Select ``times`` times, each selection counting on its rank. Returns how many each rank got."""
    got = [0] * len(own)
    for _ in range(times):
        rank = selector.select(enumerate(held + new for held, new in zip(own, got, strict=True)))
        assert rank is not None
        got[rank] += 1
    return got


@pytest.mark.parametrize(
    ("own", "load", "expected"),
    [
        (0, Load(), 0.0),
        (3, Load(), 3.0),
        (3, Load(waiting=1, running=4, kv_usage=0.2), 5.0),
        (7, Load(waiting=1, running=4, kv_usage=0.5), 7.0),
        (0, Load(waiting=2, running=0, kv_usage=0.75), 2 + 2 * 6 * 0.25),
        (0, Load(waiting=2, running=0, kv_usage=1.0), 2 + 2 * 3),
    ],
)
def test_the_score_is_the_larger_count_plus_the_weighted_queue(own: int, load: Load, expected: float) -> None:
    assert score(own, load) == expected


def test_unknown_kv_use_is_not_zero_use() -> None:
    assert score(0, Load(waiting=2, kv_usage=None)) == score(0, Load(waiting=2, kv_usage=1.0))


def test_before_any_report_the_spread_is_even() -> None:
    assert spread(Selector.of(4), [0] * 4, 40) == [10] * 4


def test_a_stale_report_of_zeros_does_not_erase_our_own_reservations() -> None:
    selector = Selector.of(4)
    first = spread(selector, [0] * 4, 20)
    for rank in range(4):
        selector.report(rank, Load())
    assert spread(selector, first, 20) == [5] * 4


def test_waiting_requests_on_a_full_cache_weigh_more_than_many_running_ones() -> None:
    selector = Selector.of(2)
    selector.report(0, Load(waiting=10, running=0, kv_usage=0.95))
    selector.report(1, Load(waiting=0, running=30, kv_usage=0.4))
    # own reservations of rank 1 stay below its reported 30, so its score does not move
    assert spread(selector, [0, 0], 15) == [0, 15]


def test_load_that_is_not_ours_counts() -> None:
    selector = Selector.of(2)
    selector.report(0, Load(running=50, kv_usage=0.1))
    assert spread(selector, [0, 0], 10) == [0, 10]


def test_a_rank_that_we_emptied_can_win_again() -> None:
    selector = Selector.of(2)
    selector.report(1, Load(waiting=5, running=20, kv_usage=0.3))
    selector.emptied(1)
    assert selector.load(1) == Load(0, 0, 0.3)
    assert spread(selector, [0, 0], 10) == [5, 5]


def test_equals_take_turns() -> None:
    selector = Selector.of(3)
    assert [selector.select([(0, 0), (1, 0), (2, 0)]) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_only_the_given_ranks_can_win() -> None:
    selector = Selector.of(3)
    assert [selector.select([(2, 9)]) for _ in range(2)] == [2, 2]


def test_with_nobody_to_choose_from_nobody_is_chosen_and_the_turn_stays() -> None:
    selector = Selector.of(2)
    before = selector.canonical()
    assert selector.select([]) is None
    assert selector.canonical() == before


def test_a_copy_is_independent() -> None:
    selector = Selector.of(2)
    twin = selector.copy()
    twin.report(0, Load(running=3))
    twin.select([(0, 0)])
    assert selector.load(0) == Load()
    assert twin.canonical() != selector.canonical()
