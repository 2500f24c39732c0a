"""Which vLLM it is: told, found out, or said by the caller.

``vllm_version`` is in the registration from 0.23 on, ``dtype`` from 0.22 on (``EngineCoreReadyResponse``); up to 0.19
the registration is empty. What is left open is asked, see ``asking``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Self, TypeAlias, final

import attrs

from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.errors import HandshakeError

Version: TypeAlias = tuple[int, int, int]

OLDEST: Final[Version] = (0, 10, 0)
NEWEST: Final = (0, 33)
"""Every release of that series."""
SUPPORTED: Final = "0.10 to 0.33"

_ANY: Final = 10**6
"""Above every third number that a release has."""


@final
@attrs.frozen
class Versions:
    """The releases that an engine may be: a range, both ends included. Mostly it is one."""

    oldest: Version
    newest: Version

    @classmethod
    def between(cls, first: tuple[int, int], last: tuple[int, int]) -> Self:
        """Every release of these series and those between."""
        return cls((*first, 0), (*last, _ANY))

    @property
    def supported(self) -> bool:
        """Whether this package knows the wire of all of them."""
        return self.oldest >= OLDEST and self.newest[:2] <= NEWEST

    def all_from(self, version: Version) -> bool:
        """Whether it is that release or a later one, for certain."""
        return self.oldest >= version

    def none_from(self, version: Version) -> bool:
        """Whether it is an earlier release, for certain."""
        return self.newest < version

    def __str__(self) -> str:
        first, last = _text(self.oldest), _text(self.newest)
        return first if first == last else f"{first} to {last}"


NEWEST_VERSIONS: Final = Versions.between(NEWEST, NEWEST)


def _text(version: Version) -> str:
    return ".".join(str(number) for number in version if number != _ANY)


def parse_version(text: str) -> Versions | None:
    """The numbers at the start of a version, whatever follows: two, meaning all of that series, or three; else None."""
    found = re.match(r"v?(\d{1,5})\.(\d{1,5})(?![0-9])(?:\.(\d{1,5})(?![0-9]))?", text)
    if not found:
        return None
    series = (int(found[1]), int(found[2]))
    return Versions.between(series, series) if found[3] is None else Versions(*[(*series, int(found[3]))] * 2)


def settle_version(infos: Sequence[RankInfo], pinned: str | None) -> Versions:
    """Which version to speak.

    Args:
        infos: Ranks that agree about what they told and answered.
        pinned: What the caller said it is, a supported version; it wins.

    Raises:
        HandshakeError: The version that was told is not supported.
    """
    told = infos[0].version if pinned is None else pinned
    if told is None:
        return _found_out(infos[0])
    versions = parse_version(told)
    if versions is None or not (versions.supported or pinned):
        # A newer one may well work, but a wrong layout kills the engine without a message: the caller decides.
        raise HandshakeError(
            f"vLLM {told!r} is not supported: {SUPPORTED} are. To speak to it as to one of these, "
            "name that one: VllmProtocol(version='0.33')"
        )
    return versions


def _found_out(info: RankInfo) -> Versions:
    """From what is in the registration, and from which methods it has."""
    has: Mapping[str, bool] = info.answers
    asked = "dtype" in info.raw or has
    if not asked:
        raise HandshakeError("the engines do not tell their version, and were not asked: VllmProtocol(version=...)")
    if "max_model_len" in info.raw:
        if "dtype" in info.raw:
            return Versions.between((0, 22), (0, 22))
        minor = 21 if has["_pause_complete"] else 20
        return Versions.between((0, minor), (0, minor))
    if has["is_scheduler_paused"]:
        return Versions.between((0, 17), (0, 19))
    if has["post_step"]:
        # READY has the hash from 0.11.1 on, in groups.
        oldest = (0, 10, 2) if info.config_hash is None else (0, 11, 1)
        return Versions(oldest, (0, 16, _ANY))
    version = (0, 10, 1 if has["get_supported_tasks"] else 0)
    return Versions(version, version)
