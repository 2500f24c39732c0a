"""Whether ranks belong together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.errors import HandshakeError


def compare(infos: Sequence[RankInfo], compared: Mapping[str, Callable[[RankInfo], object]]) -> None:
    """Compare what the ranks told.

    Args:
        infos: What each of them told.
        compared: What ranks of one group have in common, by the name under which a difference is reported.

    Raises:
        HandshakeError: They differ; its table has a row per rank with what differs.
    """
    differing = {name: told for name, told in compared.items() if len({told(info) for info in infos}) > 1}
    if differing:
        table = {info.rank: ", ".join(f"{name} {told(info)}" for name, told in differing.items()) for info in infos}
        raise HandshakeError(f"the ranks do not belong together, they differ in {', '.join(differing)}", table)
