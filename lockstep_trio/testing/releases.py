"""How vLLM's releases differ on the wire, from the engine's side.

Written independently of ``lockstep_trio.engines.vllm``, so that each can catch the other's mistakes. Read from
``vllm/v1/engine/__init__.py`` and ``core.py`` of the releases.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

Release: TypeAlias = tuple[int, ...]

METHODS: Final[dict[str, Release]] = {
    "is_sleeping": (0, 10, 0),
    "get_supported_tasks": (0, 10, 1),
    "post_step": (0, 10, 2),
    "sleep": (0, 10, 0),
    "wake_up": (0, 10, 0),
    "add_lora": (0, 10, 0),
    "remove_lora": (0, 10, 0),
    "list_loras": (0, 10, 0),
    "is_scheduler_paused": (0, 17, 0),
    "pause_scheduler": (0, 17, 0),
    "resume_scheduler": (0, 17, 0),
    "_pause_complete": (0, 21, 0),
}
"""Method -> the first release that has it, of those that are the same on every rank."""
OF_COORDINATED_RANKS: Final = "_has_global_unfinished_reqs"


def release_of(version: str) -> Release:
    """``"0.32.0"`` as numbers; what follows them does not matter. Raises ``ValueError`` where there are none."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        raise ValueError(f"version is {version!r}; it must begin with two or three numbers")
    return tuple(int(part or 0) for part in found.groups())


def registration(release: Release, everything: dict[str, Any]) -> dict[str, Any] | None:
    """What a rank registers with; None: an empty frame."""
    if release < (0, 20, 0):
        return None
    since: dict[str, Release] = {
        "max_model_len": (0, 20, 0),
        "num_gpu_blocks": (0, 20, 0),
        "dp_stats_address": (0, 20, 0),
        "dtype": (0, 22, 0),
        "block_size": (0, 23, 0),
        "vllm_version": (0, 23, 0),
        "world_size": (0, 24, 0),
        "data_parallel_size": (0, 24, 0),
        "data_parallel_rank": (0, 27, 0),
    }
    return {key: value for key, value in everything.items() if since[key] <= release}


def tells_hash(release: Release) -> bool:
    """Whether READY of a coordinated rank has ``parallel_config_hash``."""
    return release >= (0, 11, 1)


def places(release: Release) -> tuple[int, int]:
    """Indexes of ``sampling_params`` and ``arrival_time`` in a request."""
    if release < (0, 10, 2):
        return 5, 8
    return (3, 6) if release < (0, 17, 0) else (3, 5)


def output_tail(release: Release) -> int:
    """How many items an output has behind its finish reason."""
    lengths: Sequence[tuple[Release, int]] = (
        ((0, 33, 0), 19),
        ((0, 31, 0), 18),
        ((0, 29, 0), 17),
        ((0, 28, 0), 16),
        ((0, 26, 0), 14),
        ((0, 20, 0), 13),
        ((0, 16, 0), 14),
        ((0, 14, 0), 13),
        ((0, 11, 1), 12),
        ((0, 10, 2), 11),
    )
    return next((length for since, length in lengths if release >= since), 10) - 6


def refusal(method: str, arguments: int, release: Release, *, coordinated: bool) -> str | None:
    """Why a call is refused before it is made: no such method, or more arguments than it takes; None if it is not."""
    has = coordinated if method == OF_COORDINATED_RANKS else METHODS.get(method, (10**6,)) <= release
    if not has:
        kind = "DPEngineCoreProc" if coordinated else "EngineCoreProc"
        return f"Call to {method} method failed: '{kind}' object has no attribute '{method}'"
    if arguments > 2:  # no method here takes more
        return f"Call to {method} method failed: "  # an AssertionError without a message
    return None
