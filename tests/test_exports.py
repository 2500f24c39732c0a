"""What can be imported from where. A change here is a change for everybody who uses the package."""

from __future__ import annotations

import lockstep_trio
from lockstep_trio import core, errors

ERRORS = {
    "EngineLost",
    "Fault",
    "FaultKind",
    "GroupClosed",
    "GroupFailed",
    "HandshakeError",
    "LockstepError",
    "Overloaded",
    "RankFailed",
    "RequestRejected",
    "StreamOverflow",
    "UtilityFailed",
    "WireError",
}

CLIENT = {
    "EngineCoreRequest",
    "FinishReason",
    "Group",
    "GroupLink",
    "GroupStatistics",
    "RankCounts",
    "RankStatistics",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "TokenSpeedOutput",
    "TokenSpeedProtocol",
    "TokenSpeedRequest",
    "TokenSpeedSampling",
    "VllmProtocol",
    "open_group",
    "open_zmq_link",
}

CORE = {
    "Drain",
    "Look",
    "Nudge",
    "SendProbe",
    "Split",
    "Suspected",
    *("Submit", "Abort", "Close", "Progress", "LoadReported", "FenceAnswered", "WaveDone", "WaveAsked"),
    *("RankDraining", "RankLost", "Event", "Request"),
    *("SendAdd", "SendAbort", "SendStart", "SendFence", "EndRequests", "LoseRank", "LoseGroup", "Settled", "Ignored"),
    *("Effect", "WaveRule", "ExactWake", "Start", "Fence", "WaveAction"),
    *("Pausing", "Paused", "Resumed", "PausePhase"),
    *("GroupMachine", "GroupSnapshot", "RankSnapshot", "GroupPhase", "RankPhase", "History", "Load", "score"),
}


def test_errors_defines_these_names_and_no_other_public_ones() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == errors.__name__
    }
    assert defined == ERRORS


def test_the_package_exports_exactly_this() -> None:
    assert set(lockstep_trio.__all__) == ERRORS | CLIENT


def test_the_core_exports_exactly_this() -> None:
    assert set(core.__all__) == CORE
    assert [name for name in core.__all__ if not hasattr(core, name)] == []


def test_exports_are_sorted_unique_and_present() -> None:
    exported = lockstep_trio.__all__
    assert list(exported) == sorted(set(exported))
    assert [name for name in exported if not hasattr(lockstep_trio, name)] == []


def test_every_error_of_the_tree_is_reachable_from_the_package() -> None:
    for name in ERRORS:
        assert getattr(lockstep_trio, name) is getattr(errors, name)
