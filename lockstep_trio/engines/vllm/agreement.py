"""Whether the ranks belong together, and whether they step in lockstep.

Ranks of a mixture-of-experts model step in lockstep (``DPEngineCoreProc``), and up to 0.13 those of a dense one too;
from 0.14 on these are engines of their own and report a data-parallel size of 1
(``reconfigure_for_independent_dp_rank``). The size is in the registration from 0.24 on. From 0.11.1 on READY has
``parallel_config_hash`` if and only if the engine's own size is above one (``vllm/v1/engine/core.py``). Before that an
engine is asked for a method that only ranks in lockstep have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from lockstep_trio.engines.common.agreement import compare
from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.engines.vllm.asking import IS_COORDINATED
from lockstep_trio.errors import HandshakeError

COMPARED: Final[Mapping[str, Callable[[RankInfo], object]]] = MappingProxyType(
    {
        "version": lambda info: info.version,
        "data_parallel_size": lambda info: info.data_parallel_size,
        "parallel_config_hash": lambda info: info.config_hash,
        "max_model_len": lambda info: info.max_model_len,
        "methods": lambda info: tuple(sorted(info.answers.items())),
    }
)
"""What ranks of one group have in common, by the name under which a difference is reported."""


def check_agreement(infos: Sequence[RankInfo]) -> None:
    """Compare what the ranks told.

    Raises:
        HandshakeError: They differ; its table has a row per rank with what differs.
    """
    compare(infos, COMPARED)


def settle_lockstep(infos: Sequence[RankInfo], override: bool | None) -> bool:
    """Whether the group steps in lockstep.

    Args:
        infos: Ranks that agree.
        override: What the caller said, which wins over what the ranks told; None to go by that.

    Raises:
        HandshakeError: The ranks are part of a larger lockstep group, or cannot be one. A wake that reaches only
            some of a group cannot work, so the override does not help.
    """
    size = infos[0].data_parallel_size
    coordinated = infos[0].config_hash is not None or infos[0].answers.get(IS_COORDINATED, False)
    told = size > 1 if size is not None else coordinated
    lockstep = told if override is None else override
    if size is not None and (lockstep or told) and size != len(infos):
        sizes = ", ".join(str(info.data_parallel_size) for info in infos)
        raise HandshakeError(f"the ranks report data-parallel sizes {sizes}, but {len(infos)} of them are here")
    return lockstep
