"""Calls that pause and resume, and which releases take them.

From 0.21 on the ranks of a lockstep group agree on a pause and on its end (``DPEngineCoreProc._pause_complete``,
``resume_scheduler``, ``v1/engine/core.py``); before that, one that was paused left the others waiting in a collective.
A mode can be given from 0.17 on.
"""

from __future__ import annotations

from typing import Final, get_args

from lockstep_trio.engines.common.checks import flag, reject, text, whole
from lockstep_trio.engines.protocol import AskPaused, Pause, PauseCall, PauseMode, Resume, Sleep
from lockstep_trio.engines.vllm.version import Version, Versions

PAUSE_METHODS: Final = frozenset({"pause_scheduler", "resume_scheduler", "sleep", "wake_up"})

WITH_MODE: Final[Version] = (0, 17, 0)
IN_LOCKSTEP: Final[Version] = (0, 21, 0)
TELLS_IF_AWAKE: Final[Version] = (0, 32, 0)
"""``wake_up`` returns whether all memory is back."""


def encode_pause(call: PauseCall, versions: Versions, *, lockstep: bool) -> tuple[str, tuple[object, ...]]:
    """Method and arguments.

    Raises:
        RequestRejected: The engines cannot, or may not be able to; or something is out of range.
    """
    method, args = _method(call, versions)
    since = IN_LOCKSTEP if lockstep else WITH_MODE
    if not versions.all_from(since):
        number = ".".join(map(str, since))
        where = "of a lockstep group " if lockstep else ""
        raise reject("method", method, f"left alone: engines {where}can from vLLM {number} on, these are {versions}")
    return method, args


def _method(call: PauseCall, versions: Versions) -> tuple[str, tuple[object, ...]]:
    match call:
        case Pause(mode, clear_cache):
            return "pause_scheduler", (_mode(mode), flag("clear_cache", clear_cache))
        case Resume():
            return "resume_scheduler", ()
        case AskPaused():
            return "is_scheduler_paused", ()
        case Sleep(level, mode):
            return "sleep", (whole("level", level, 0, 2, "0, 1 or 2"), _mode(mode))
        case _:
            return "wake_up", () if call.tags is None else (_tags(call.tags, versions),)


def _mode(mode: PauseMode) -> str:
    modes = get_args(PauseMode)
    if mode not in modes:
        raise reject("mode", mode, f"one of {', '.join(modes)}")
    return mode


def _tags(tags: tuple[str, ...], versions: Versions) -> list[object]:
    if not versions.all_from(TELLS_IF_AWAKE):
        raise reject("tags", tags, "None: before 0.32 the engines do not tell whether they are fully awake then")
    if not tags:
        raise reject("tags", tags, "at least one tag, or None for all")
    return [text(f"tags[{at}]", tag, 64) for at, tag in enumerate(tags)]
