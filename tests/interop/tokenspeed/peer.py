"""A rank of which everything that touches the wire is TokenSpeed's own: run in the engine's environment.

It dials with the engine's ``connect_msgpack_engine``, reads with its receiving socket, which validates, and writes with
its sending socket. Only the model is missing: a request's next token is the number of the one before, plus one.

``python peer.py HANDSHAKE INDEX RANKS``; one line of JSON on standard output once it is up. It ends with its standard
input, or by a signal. A request for 13 tokens makes it die in the way an engine dies of an exception.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import stubs  # type: ignore[import-not-found, unused-ignore]

stubs.install()

import zmq  # noqa: E402
from tokenspeed.runtime.engine.io_struct import (  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
    AbortReq,
    BatchTokenIDOut,
)
from tokenspeed.runtime.engine.zmq_msgpack import (  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
    _tokenspeed_version,
    connect_msgpack_engine,
)
from tokenspeed.runtime.engine.zmq_wire import (  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
    WireEngineCoreReadyResponse,
)

VOCABULARY, CONTEXT, PAGES = 256, 512, 64
DEADLY = 13


class Rank:
    """The requests that it holds, and what it makes of them."""

    def __init__(self, context: zmq.Context[Any], handshake: str, index: int, ranks: int) -> None:
        told = WireEngineCoreReadyResponse(
            max_model_len=CONTEXT,
            num_gpu_blocks=PAGES,
            prefix_granularity=64,
            vllm_version=f"tokenspeed-{_tokenspeed_version()}",
            data_parallel_size=ranks,
            data_parallel_rank=index,
        )
        options = {"enable_output_logprobs": True, "supports_prompt_logprobs": True}
        self.receiving, self.sending = connect_msgpack_engine(context, handshake, index, told, VOCABULARY, **options)
        self.held: dict[str, Any] = {}
        self.made: dict[str, list[int]] = {}

    def take(self) -> None:
        """Everything that has come."""
        while True:
            try:
                message = self.receiving.recv_pyobj(zmq.NOBLOCK)
            except zmq.Again:
                return
            if isinstance(message, AbortReq):
                self.held.pop(message.rid, None)
            else:
                self.held[message.rid] = message
                self.made[message.rid] = []

    def step(self) -> None:
        """A token for each, as the engine's ``stream_output`` would have it out."""
        self.sending.set_load_snapshot(len(self.held), 0, len(self.held), PAGES)
        rows = [self._row(rid, request) for rid, request in list(self.held.items())]
        names = ("rids", "output_ids", "finished_reasons", "prompt_tokens", "completion_tokens", "cached_tokens")
        names += ("output_token_logprobs_val", "output_token_logprobs_idx")
        values: dict[str, Any] = {name: [] for name in BatchTokenIDOut.__struct_fields__}
        values |= dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        self.sending.send_pyobj(BatchTokenIDOut(**{**values, "generated_time": 0.0}))

    def _row(self, rid: str, request: Any) -> tuple[Any, ...]:
        made, prompt = self.made[rid], request.input_ids
        if request.validation_error:
            del self.held[rid]
            return rid, [], {"type": "abort", "message": request.validation_error}, len(prompt), 0, 0, [], []
        limit = request.sampling_params.max_new_tokens
        if limit == DEADLY:
            raise RuntimeError("a step that fails")
        new = [((made or prompt)[-1] + 1) % VOCABULARY]
        made += new
        reason = None
        if new[0] in (request.sampling_params.stop_token_ids or ()):
            reason = {"type": "stop", "matched": new[0]}
        elif limit is not None and len(made) >= limit:
            reason = {"type": "length", "length": limit}
        if reason is not None:
            del self.held[rid]
        logprobs = ([-0.5], new) if request.return_logprob else ([], [])
        return rid, new, reason, len(prompt), len(made), 0, *logprobs


def main(handshake: str, index: int, ranks: int) -> None:
    context: zmq.Context[Any] = zmq.Context()
    rank = Rank(context, handshake, index, ranks)
    print(json.dumps({"up": index}), flush=True)
    poller = zmq.Poller()
    poller.register(0, zmq.POLLIN)
    poller.register(rank.receiving._socket, zmq.POLLIN)
    try:
        while 0 not in dict(poller.poll(5 if rank.held else None)):
            rank.take()
            if rank.held:
                rank.step()
    except RuntimeError:
        rank.sending.send_engine_dead()  # as the engine's event loop does on its way out
    finally:
        rank.receiving.close()
        rank.sending.close()
        context.term()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
