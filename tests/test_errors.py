"""The errors carry their data, say it in words, and survive pickling."""

from __future__ import annotations

import copy
import inspect
import pickle

import attrs
import pytest

from lockstep_trio import errors
from lockstep_trio.errors import (
    EngineLost,
    Fault,
    FaultKind,
    GroupClosed,
    GroupFailed,
    HandshakeError,
    LockstepError,
    Overloaded,
    RankFailed,
    RequestRejected,
    StreamOverflow,
    UtilityFailed,
    WireError,
)

FAULT = Fault(3, FaultKind.STALLED, "silent for 60 s")

# (error, its attributes, its words): one row per class at least.
CASES: list[tuple[LockstepError, dict[str, object], str]] = [
    (
        RequestRejected("sampling.temperature", -1.0, "0 or more"),
        {"field": "sampling.temperature", "value": -1.0, "limit": "0 or more"},
        "sampling.temperature is -1.0; it must be 0 or more",
    ),
    (
        Overloaded("max_in_flight", 512),
        {"limit_name": "max_in_flight", "limit": 512, "rank": None},
        "max_in_flight=512 is reached",
    ),
    (
        Overloaded("outbox_limit", 1024, rank=2),
        {"limit_name": "outbox_limit", "limit": 1024, "rank": 2},
        "outbox_limit=1024 is reached on rank 2",
    ),
    (GroupClosed(), {}, "the block of open_group has been left"),
    (GroupClosed("the group is closing"), {}, "the group is closing"),
    (
        HandshakeError("2 ranks of 4 in 600 s"),
        {"reason": "2 ranks of 4 in 600 s", "stages": {}},
        "2 ranks of 4 in 600 s",
    ),
    (
        HandshakeError("not all ready", {1: "hello", 0: "registered"}),
        {"reason": "not all ready", "stages": {0: "registered", 1: "hello"}},
        "not all ready\n  rank 0: registered\n  rank 1: hello",
    ),
    (EngineLost(FAULT), {"fault": FAULT, "rank": 3}, str(FAULT)),
    (RankFailed(FAULT), {"fault": FAULT, "rank": 3}, "rank 3 stalled: silent for 60 s"),
    (GroupFailed(FAULT), {"fault": FAULT, "rank": 3}, "the group failed: rank 3 stalled: silent for 60 s"),
    (
        StreamOverflow("request-7", 4096),
        {"request_id": "request-7", "limit": 4096},
        "request 'request-7' had more than unread_limit=4096 outputs unread",
    ),
    (
        UtilityFailed("reset_prefix_cache", {1: "busy", 0: "no cache"}),
        {"method": "reset_prefix_cache", "failures": {0: "no cache", 1: "busy"}},
        "utility call 'reset_prefix_cache' failed: rank 0: no cache; rank 1: busy",
    ),
    (
        WireError("EngineCoreOutputs[6] wave_complete", "a string"),
        {"part": "EngineCoreOutputs[6] wave_complete", "problem": "a string"},
        "EngineCoreOutputs[6] wave_complete: a string",
    ),
]


def label(case: object) -> str | None:
    return type(case).__name__ if isinstance(case, LockstepError) else ""


every_case = pytest.mark.parametrize(("error", "data", "words"), CASES, ids=label)


def test_no_class_of_the_tree_is_left_out_of_the_cases() -> None:
    tree = {value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, LockstepError)} - {
        LockstepError
    }
    assert {type(error) for error, _, _ in CASES} == tree


@every_case
def test_an_error_carries_its_data(error: LockstepError, data: dict[str, object], words: str) -> None:
    assert {name: getattr(error, name) for name in data} == data


@every_case
def test_an_error_says_its_data_in_words(error: LockstepError, data: dict[str, object], words: str) -> None:
    assert str(error) == words


@every_case
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling(error: LockstepError, data: dict[str, object], words: str, protocol: int) -> None:
    twin = pickle.loads(pickle.dumps(error, protocol))
    assert type(twin) is type(error)
    assert {name: getattr(twin, name) for name in data} == data
    assert str(twin) == words


@every_case
def test_an_error_can_be_copied(error: LockstepError, data: dict[str, object], words: str) -> None:
    twin = copy.copy(error)
    assert type(twin) is type(error)
    assert str(twin) == words


def test_a_rejected_request_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="prompt is"):
        raise RequestRejected("prompt", [], "a token or more")


def test_a_long_value_is_cut_short() -> None:
    error = RequestRejected("prompt", list(range(10_000)), "at most 4096 tokens")
    assert len(str(error)) < 150
    assert "..." in str(error)
    assert error.value == list(range(10_000))


@pytest.mark.parametrize("lost", [RankFailed, GroupFailed])
def test_both_kinds_of_loss_are_caught_as_one(lost: type[EngineLost]) -> None:
    with pytest.raises(EngineLost) as caught:
        raise lost(FAULT)
    assert caught.value.rank == 3


@pytest.mark.parametrize("kind", FaultKind)
def test_a_fault_names_its_rank_and_kind_with_or_without_detail(kind: FaultKind) -> None:
    assert str(Fault(0, kind)) == f"rank 0 {kind.value}"
    assert str(Fault(0, kind, "why")) == f"rank 0 {kind.value}: why"


def test_a_fault_is_a_value() -> None:
    assert Fault(1, FaultKind.DIED) == Fault(1, FaultKind.DIED)
    assert len({Fault(1, FaultKind.DIED), Fault(1, FaultKind.DIED)}) == 1
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        FAULT.rank = 4  # type: ignore[misc]


def test_an_error_keeps_its_own_copy_of_a_table_it_was_given() -> None:
    stages = {0: "hello"}
    error = HandshakeError("late", stages)
    stages[0] = "ready"
    assert error.stages == {0: "hello"}
