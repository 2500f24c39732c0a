"""The startup conversation with TokenSpeed's ranks, sans-IO: see ``lockstep_trio.engines.common.handshake``.

The engine says READY before it connects to anything else, and its registration is a map
(``tokenspeed/runtime/engine/zmq_msgpack.py: connect_msgpack_engine``). It does all that once in its life.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, final

from lockstep_trio.engines.common.handshake import StatusHandshake
from lockstep_trio.engines.common.packing import quoted
from lockstep_trio.engines.protocol import RankInfo

BRAND: Final = "tokenspeed-"
"""What ``vllm_version`` begins with, since the registration is modelled on vLLM's."""


@final
class TokenSpeedHandshake(StatusHandshake):
    """The conversation with all ranks of one group. ``Handshake`` of ``lockstep_trio.engines.protocol``."""

    def _registration(self, rank: int, frames: Sequence[bytes]) -> Mapping[str, object]:
        # The data-parallel rank in it is not compared with ours: servers that were started one by one are rank 0 each
        # and told apart by their ``--zmq-engine-index``, which is what the identity is made of.
        if len(frames) != 1:
            raise self._error(f"rank {rank} registered with {len(frames)} frames, one was expected")
        return self._map(rank, "WireEngineCoreReadyResponse", frames[0])

    def _info(self, rank: int, told: Mapping[str, object]) -> RankInfo:
        return RankInfo(
            rank,
            version=self._version(rank, told),
            data_parallel_size=self._told(rank, told, "data_parallel_size", int),
            max_model_len=self._told(rank, told, "max_model_len", int) or None,  # 0 is its word for "not told"
            # Renamed once; both names have been seen on the wire.
            block_size=self._told(rank, told, "prefix_granularity", int)
            or self._told(rank, told, "block_size", int)
            or None,
            raw=MappingProxyType(told),
        )

    def _version(self, rank: int, told: Mapping[str, object]) -> str | None:
        version = self._told(rank, told, "vllm_version", str)
        if not version:
            return None
        if not version.startswith(BRAND):
            raise self._error(f"rank {rank} is no TokenSpeed engine: it says that its version is {quoted(version)}")
        return version.removeprefix(BRAND)
