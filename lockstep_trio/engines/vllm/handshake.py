"""The startup conversation with the ranks of a vLLM group, sans-IO.

Per rank, on two sockets whose order relative to each other is not known (``vllm/v1/engine/core.py``:
``startup_handshake``, ``_perform_handshake``, ``process_input_sockets``)::

    rank -> handshake socket   HELLO   {status, local, headless}
    we   -> rank               INIT    {addresses: {inputs, outputs}, parallel_config}
    rank -> handshake socket   READY   {status, ..., parallel_config_hash?}      when the model is loaded
    rank -> its input socket   EngineCoreReadyResponse as a map, empty to 0.19   before READY or after it
    we   -> its input socket   what it has not told, as utility calls            behind both, see ``asking``
    rank -> its output socket  the answers

The identity on both sockets is the rank's index as two bytes, little endian. INIT names one input and one output
endpoint per rank, which are that rank's own. It offers no coordinator and leaves ``parallel_config`` empty: the
engine has all that from its own command line, and a size sent to a rank of a dense model would break it.

The conversation itself is that of ``lockstep_trio.engines.common.handshake``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import final

from lockstep_trio.engines.common.handshake import TABLE, Event, Stage, StatusHandshake, identity_of
from lockstep_trio.engines.common.packing import quoted
from lockstep_trio.engines.protocol import RankEndpoints, RankInfo
from lockstep_trio.engines.vllm.asking import Questions, methods_to_ask

__all__ = ["TABLE", "Event", "Stage", "VllmHandshake", "identity_of"]


@final
class VllmHandshake(StatusHandshake):
    """The conversation with all ranks of one group. ``Handshake`` of ``lockstep_trio.engines.protocol``.

    Args:
        endpoints: Where the ranks shall connect to, by rank.
        pinned: The caller said which version they are, so they are not asked for it.
    """

    def __init__(self, endpoints: Sequence[RankEndpoints], *, pinned: bool = False) -> None:
        super().__init__(endpoints)
        self._pinned = pinned

    def _questions(self, told: Mapping[str, object]) -> Questions | None:
        methods = methods_to_ask(told, pinned=self._pinned)
        return Questions(methods) if methods else None

    def _registration(self, rank: int, frames: Sequence[bytes]) -> Mapping[str, object]:
        if len(frames) != 1:
            raise self._error(f"rank {rank} registered with {len(frames)} frames, one was expected")
        if not frames[0]:
            return {}  # 0.19 or older
        registration = self._map(rank, "EngineCoreReadyResponse", frames[0])
        if (index := registration.get("data_parallel_rank", rank)) != rank:  # told from 0.27 on
            raise self._error(f"rank {quoted(index)} registered on the input socket of rank {rank}")
        return registration

    def _info(self, rank: int, told: Mapping[str, object]) -> RankInfo:
        return RankInfo(
            rank,
            version=self._told(rank, told, "vllm_version", str),
            data_parallel_size=self._told(rank, told, "data_parallel_size", int),
            config_hash=self._told(rank, told, "parallel_config_hash", str),
            max_model_len=self._told(rank, told, "max_model_len", int),
            raw=MappingProxyType(told),
        )
