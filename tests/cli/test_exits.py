"""Which error ends a command with which code, and what it says."""

from __future__ import annotations

import pytest

import lockstep_trio
from lockstep_trio import Fault, FaultKind
from lockstep_trio.cli.exits import Exit, failure_of, name_ranks

FAULT = Fault(3, FaultKind.DIED)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (lockstep_trio.RequestRejected("n", 2, "1"), Exit.REJECTED),
        (lockstep_trio.HandshakeError("no"), Exit.NOT_UP),
        (lockstep_trio.GroupFailed(FAULT), Exit.ENGINE_LOST),
        (lockstep_trio.RankFailed(FAULT), Exit.ENGINE_LOST),
        (lockstep_trio.Overloaded("max_in_flight", 1), Exit.FAILED),
        (lockstep_trio.StreamOverflow("a", 1), Exit.FAILED),
    ],
)
def test_the_class_of_an_error_decides_the_code(error: lockstep_trio.LockstepError, code: Exit) -> None:
    failure = failure_of(error)
    assert failure.code is code
    assert str(error).splitlines()[0] in str(failure)


def test_the_stages_of_many_ranks_stay_one_line() -> None:
    stages = {rank: "up" if rank < 60 else "loading" for rank in range(62)}
    failure = failure_of(lockstep_trio.HandshakeError("too late", stages))
    assert str(failure) == "the group did not come up: too late; ranks 0 to 59: up; ranks 60 and 61: loading"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([4], "rank 4"), ([0, 1], "ranks 0 and 1"), ([0, 1, 2], "ranks 0 to 2"), ([0, 2, 3], "ranks 0, 2 and 3")],
)
def test_ranks_are_named_as_people_would(ranks: list[int], words: str) -> None:
    assert name_ranks(ranks) == words
