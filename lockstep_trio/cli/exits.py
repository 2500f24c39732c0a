"""Exit codes, and the one kind of error that ends a command on purpose."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import final

import lockstep_trio


@final
class Exit(enum.IntEnum):
    """What the exit code of a command means. A signal gives 128 plus its number, as in a shell."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_UP = 3
    ENGINE_LOST = 4
    REJECTED = 5
    FOUND = 6
    UNDECIDED = 7


@final
class Failure(Exception):
    """Ends the command with one line on standard error. click's own errors have their exit code by class."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


def failure_of(error: lockstep_trio.LockstepError) -> Failure:
    """How a command ends that met this error and cannot go on."""
    match error:
        case lockstep_trio.RequestRejected():
            return Failure(Exit.REJECTED, f"the request was rejected: {error}")
        case lockstep_trio.HandshakeError():
            # The limit has a name in Python; on the command line it is one that its user has given, or can give.
            reason = error.reason.replace(f"{error.limit_name}=", "") if error.limit_name else error.reason
            return Failure(Exit.NOT_UP, f"the group did not come up: {reason}{_stages(error.stages)}")
        case lockstep_trio.EngineLost():
            return Failure(Exit.ENGINE_LOST, str(error))
        case _:
            return Failure(Exit.FAILED, str(error))


def _stages(stages: Mapping[int, str]) -> str:
    """The ranks by stage, in one line, however many they are."""
    by_stage: dict[str, list[int]] = {}
    for rank, stage in sorted(stages.items()):
        by_stage.setdefault(stage, []).append(rank)
    return "".join(f"; {name_ranks(ranks)}: {stage}" for stage, ranks in by_stage.items())


def name_ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0 and 2`` or ``ranks 0 to 63``, of ascending indices."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
