from __future__ import annotations

import msgpack
import pytest

from lockstep_trio.testing.engine_rank import EngineRank
from lockstep_trio.testing.releases import release_of


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.32.0", (0, 32, 0)), ("0.10.1.1", (0, 10, 1)), ("v0.33.1rc1+cpu", (0, 33, 1)), ("0.20", (0, 20, 0))],
)
def test_a_release_is_the_numbers_at_the_start(version: str, release: tuple[int, ...]) -> None:
    assert release_of(version) == release


@pytest.mark.parametrize("version", ["", "new", "1"])
def test_what_has_no_numbers_is_no_release(version: str) -> None:
    with pytest.raises(ValueError, match="version is"):
        EngineRank(0, version=version)


def test_a_request_of_another_release_is_told_apart() -> None:
    array = ["a", [1], None, {"max_tokens": 1}, None, 0.0, None, None, None]
    EngineRank(0, version="0.17.0").receive([b"\x00", msgpack.packb(array)])
    with pytest.raises(ValueError, match="another release"):
        EngineRank(0, version="0.16.0").receive([b"\x00", msgpack.packb(array)])


def call(rank: EngineRank, method: str, *args: object) -> list[object]:
    rank.receive([b"\x03", msgpack.packb([0, 9, method, list(args)])])
    rank.poll()
    reply = msgpack.unpackb(rank.sent.pop()[0])[4]
    assert isinstance(reply, list)
    return reply


def test_an_old_rank_answers_with_the_bare_value_and_a_later_one_wraps_it() -> None:
    assert call(EngineRank(0, version="0.10.0"), "is_sleeping") == [9, None, False]
    assert call(EngineRank(0, version="0.10.1"), "is_sleeping") == [9, None, [None, False]]


@pytest.mark.parametrize(("size", "has"), [(1, False), (2, True)])
def test_only_a_rank_in_lockstep_has_what_only_those_have(size: int, has: bool) -> None:
    [_, failure, _] = call(EngineRank(0, size=size), "_has_global_unfinished_reqs", *[None] * 8)
    assert ("has no attribute" in str(failure)) is not has


def test_a_pause_of_a_rank_alone_is_answered_when_it_is_idle() -> None:
    rank = EngineRank(0)
    assert call(rank, "pause_scheduler", "keep", True) == [9, None, [None, None]]
    assert call(rank, "is_sleeping") == [9, None, [None, True]]
    assert call(rank, "resume_scheduler") == [9, None, [None, None]]
    assert call(rank, "is_sleeping") == [9, None, [None, False]]
