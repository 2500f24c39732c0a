"""A model rank that speaks TokenSpeed's wire, written from the engine's sources and not from the client's protocol.

Layouts as in ``tokenspeed`` 0.1.1, ``tokenspeed/runtime/engine/io_struct.py`` and ``zmq_wire.py``. It is as particular
as the engine, but says so: what the engine would drop without a word raises here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import msgpack

from .independent_rank import IndependentRank
from .rank_model import Add, Drop

DEAD: Final = b"ENGINE_CORE_DEAD"
"""The one-frame message by which an engine tells of its own death. It carries no rank."""

FOR_EVER: Final = 1_000_000
"""Steps of a request that sets no limit."""


@final
class TokenSpeedRank(IndependentRank):
    """One rank.

    Args:
        index: Its index in the group.
        size: The data-parallel size that it reports. It steps by itself whatever that is.
        version: Engine version that it claims.
        max_model_len: Context length that it claims.
        elements: Length of its output arrays: 9 and 10 are older engines, without the load.
        pages: Pages of its KV cache; 0: it has not looked at its load yet.
    """

    def __init__(
        self,
        index: int,
        *,
        size: int = 1,
        version: str = "0.1.1",
        max_model_len: int = 4096,
        elements: int = 14,
        pages: int = 256,
    ) -> None:
        super().__init__(index)
        self.size = size
        self.stray_aborts: list[str] = []
        """Ids that were aborted when it did not hold them: it would kill later requests under these ids."""
        self.streamed: set[str] = set()
        """Ids of requests that asked for each token as it comes."""
        self.queued = 0
        """How many of the requests that it holds it says are still waiting."""
        self._version = version
        self._max_model_len = max_model_len
        self._elements = elements
        self._pages = pages
        self._known: set[str] = set()
        self._prompts: dict[str, int] = {}
        self._completed: dict[str, int] = {}

    # -- startup -------------------------------------------------------------------------------------------------

    def hello(self) -> bytes:
        return self._status("HELLO")

    def ready(self) -> bytes:
        return self._status("READY")

    @staticmethod
    def _status(status: str) -> bytes:
        return _pack({"status": status, "local": True, "headless": True, "parallel_config_hash": None})

    def registration(self) -> bytes:
        return _pack(
            {
                "max_model_len": self._max_model_len,
                "num_gpu_blocks": self._pages,
                "prefix_granularity": 64,
                "dp_stats_address": None,
                "dtype": "bfloat16",
                "vllm_version": f"tokenspeed-{self._version}",
                "world_size": 1,
                "data_parallel_size": self.size,
                "data_parallel_rank": self.index,
                "kv_cache_size_tokens": None,
            }
        )

    def endpoints(self, init: bytes) -> tuple[str, str]:
        addresses = msgpack.unpackb(init)["addresses"]
        return addresses["inputs"][0], addresses["outputs"][0]

    def death(self) -> tuple[bytes, ...]:
        return (DEAD,)

    # -- in ------------------------------------------------------------------------------------------------------

    def _decode(self, frames: Sequence[bytes]) -> tuple[Add, int] | Drop:
        kind, payload, *_ = frames
        value: Any = msgpack.unpackb(payload)
        if kind == b"\x01" and isinstance(value, list):
            return self._abort(value)
        if kind == b"\x00" and value[0] == "TokenizedGenerateReqInput":
            return self._request(*value[1:])
        raise ValueError(f"the engine would log and drop {frames!r:.200}")

    def _request(
        self,
        rid: str,
        worker: None,
        text: None,
        prompt: list[int],
        sampling: list[Any],
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs: int = 0,
        token_ids_logprob: None = None,
        stream: bool = False,
    ) -> tuple[Add, int]:
        unused = (worker, text, token_ids_logprob, return_logprob, logprob_start_len, top_logprobs)
        if unused != (None, None, None, False, -1, 0) or not prompt:
            raise ValueError(f"the engine would abort this, or die of it: {unused}, {prompt!r:.80}")
        if rid in self._known:
            raise ValueError(f"the engine may kill {rid!r} without a word: the id was used before")
        self._known.add(rid)
        self._prompts[rid] = len(prompt)
        if stream:
            self.streamed.add(rid)
        limit = sampling[0] if sampling else None
        return Add(rid, FOR_EVER if limit is None else limit), prompt[-1]

    def _abort(self, rids: list[str]) -> Drop:
        held = {*self.model.held, *(each.wire_id for each in self.arrived if isinstance(each, Add))}
        self.stray_aborts += [rid for rid in rids if rid not in held]
        return Drop(tuple(rids))

    # -- out -----------------------------------------------------------------------------------------------------

    def _encode(self, outputs: Sequence[tuple[str, Sequence[int], bool]]) -> tuple[bytes, ...]:
        for rid, tokens, _ in outputs:
            self._completed[rid] = self._completed.get(rid, 0) + len(tokens)
        return self.message([(rid, tokens, "length" if last else "") for rid, tokens, last in outputs])

    def message(self, rows: Sequence[tuple[str, Sequence[int], str]]) -> tuple[bytes, ...]:
        """One ``BatchTokenIDOutSlim`` of (id, new tokens, reason), also for sending what a good rank would not."""
        rids = [rid for rid, _, _ in rows]
        # Its snapshot is of before the step: what ends now is still counted, and so is what waits.
        held = len(self.model.held) + sum(bool(reason) for _, _, reason in rows)
        array: list[Any] = [
            "BatchTokenIDOutSlim",
            rids,
            [list(tokens) for _, tokens, _ in rows],
            [reason for _, _, reason in rows],
            [self._prompts.get(rid, 0) for rid in rids],
            [self._completed.get(rid, 0) for rid in rids],
            [0 for _ in rids],
            [[] for _ in rids],
            [[] for _ in rids],
            self.index,
            *(held, min(held, self.queued), min(held, self._pages), self._pages),
        ]
        return (_pack(array[: self._elements]),)


def _pack(value: Any) -> bytes:
    packed = msgpack.packb(value)
    assert isinstance(packed, bytes)
    return packed
