"""Which vLLM it is, and what of the wire depends on that.

``vllm_version`` is in the registration from 0.23 on, ``dtype`` from 0.22 on (``EngineCoreReadyResponse``); 0.20
and 0.21 tell neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, TypeAlias

from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.errors import HandshakeError

Version: TypeAlias = tuple[int, int]

OLDEST: Final[Version] = (0, 20)
NEWEST: Final[Version] = (0, 33)
SUPPORTED: Final = "0.20 to 0.33"

_PRIORITY_BEFORE_0_21: Final = 12
_PRIORITY: Final = 13
"""0.21 put ``prompt_is_token_ids`` before it."""


def parse_version(text: str) -> Version | None:
    """Major and minor number at the start of a version, whatever follows; None if there are none."""
    found = re.match(r"v?(\d{1,6})\.(\d{1,6})(?![0-9])", text)
    return (int(found[1]), int(found[2])) if found else None


def is_supported(version: Version | None) -> bool:
    """Whether this package knows the wire of that version."""
    return version is not None and OLDEST <= version <= NEWEST


def settle_version(infos: Sequence[RankInfo], override: str | None) -> Version | None:
    """The version to speak; None for 0.20 to 0.22, which do not tell.

    Args:
        infos: Ranks that agree about their version.
        override: What the caller said it is, a supported version; it wins.

    Raises:
        HandshakeError: The version that was told is not supported.
    """
    if override is not None:
        return parse_version(override)
    told = infos[0].version
    if told is None:
        return None
    version = parse_version(told)
    if not is_supported(version):
        # A newer one may well work, but a wrong layout kills the engine without a message: the caller decides.
        raise HandshakeError(
            f"vLLM {told!r} is not supported: {SUPPORTED} are. To speak to it as to one of these, "
            "name that one: VllmProtocol(version='0.33')"
        )
    return version


def priority_position(version: Version | None, infos: Sequence[RankInfo]) -> int | None:
    """Index of ``priority`` in the ``EngineCoreRequest`` array; None if it cannot be told."""
    if version is not None:
        return _PRIORITY if version >= (0, 21) else _PRIORITY_BEFORE_0_21
    return _PRIORITY if "dtype" in infos[0].raw else None
