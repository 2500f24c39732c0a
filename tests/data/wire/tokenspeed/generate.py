"""Write golden frames: what TokenSpeed's own classes put on the wire.

Runs in the environment of ``tests/interop/tokenspeed``: ``python generate.py > 0.1.1/golden.json``. Outputs go through
the engine's own sending socket; everything else is encoded by its classes.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "interop" / "tokenspeed"))

import stubs  # type: ignore[import-not-found, unused-ignore]

stubs.install()

import msgspec  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from tokenspeed.runtime.engine import zmq_msgpack, zmq_wire  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from tokenspeed.runtime.engine.io_struct import (  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
    BatchTokenIDOut,
    MsgpackEncoder,
    TokenizedGenerateReqInput,
)
from tokenspeed.runtime.sampling.sampling_params import (  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
    SamplingParams,
)


class Mail:
    """A socket that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_multipart(self, frames: list[Any], *, copy: bool) -> None:
        self.sent = frames

    def send(self, frame: bytes, flags: int) -> None:
        self.sent = [frame]


def step(*rows: tuple[str, list[int], str | None, int, int, int], load: Any = None, logprobs: Any = None) -> list[Any]:
    """Rows of (rid, new ids, reason, prompt, completion and cached tokens) as rank 1 sends them."""
    mail = Mail()
    socket = zmq_msgpack.MsgpackSendSocket(mail, engine_index=1)
    if load is not None:
        socket.set_load_snapshot(*load)
    rids, ids, reasons, prompt, completion, cached = (list(column) for column in zip(*rows, strict=True))
    values: dict[str, Any] = {name: [] for name in BatchTokenIDOut.__struct_fields__}
    values |= {"rids": rids, "output_ids": ids, "prompt_tokens": prompt, "completion_tokens": completion}
    values |= {"cached_tokens": cached, "generated_time": 0.0}
    values["finished_reasons"] = [reason and {"type": reason} for reason in reasons]
    values["output_token_logprobs_val"] = [[] for _ in rids] if logprobs is None else logprobs
    values["output_token_logprobs_idx"] = [[] for _ in rids] if logprobs is None else ids
    socket.send_pyobj(BatchTokenIDOut(**values))
    return mail.sent


def dead() -> list[Any]:
    mail = Mail()
    zmq_msgpack.MsgpackSendSocket(mail).send_engine_dead()
    return mail.sent


def request(sampling: SamplingParams, **fields: Any) -> list[Any]:
    usual = {"rid": "wire-1", "input_ids": [1, 2, 3], "sampling_params": sampling}
    return list(MsgpackEncoder().encode(TokenizedGenerateReqInput(**{**usual, **fields})))


registration = zmq_wire.WireEngineCoreReadyResponse(
    max_model_len=512,
    num_gpu_blocks=8192,
    prefix_granularity=64,
    vllm_version=f"tokenspeed-{zmq_msgpack._tokenspeed_version()}",
    world_size=2,
    data_parallel_size=2,
    data_parallel_rank=1,
    max_num_seqs=8,
    instance_id="model",
    kv_cache_size_tokens=524_288,
)

FRAMES = {
    "a step with two outputs": step(
        ("wire-1", [24], None, 9, 1, 4), ("wire-2", [125, 7], "stop", 3, 5, 0), load=(3, 1, 20, 80)
    ),
    "the end by length": step(("w", [3], "length", 3, 1, 0)),
    "the end by abort": step(("w", [], "abort", 3, 0, 0)),
    "logprobs": step(("w", [10, 11], None, 3, 2, 1), logprobs=[[-0.5, -0.25]]),
    "before the load was looked at": step(("w", [3], None, 3, 1, 0), load=(0, 0, 0, 0)),
    "an idle rank's load": step(("w", [3], "stop", 3, 1, 0), load=(1, 0, 0, 80)),
    "the notice of death": dead(),
    "a HELLO": [zmq_wire.encode(zmq_wire.WireReadyMessage(status="HELLO", local=True, headless=True))],
    "a READY": [zmq_wire.encode(zmq_wire.WireReadyMessage(status="READY", local=True, headless=True))],
    "a registration": [zmq_wire.encode(registration)],
    "a registration of defaults": [zmq_wire.encode(zmq_wire.WireEngineCoreReadyResponse())],
    # Constructing SamplingParams applies the engine's rules; is_normalized shows them, on the wire and in the array.
    "an ADD with the defaults": request(SamplingParams(max_new_tokens=16), stream=True),
    "an ADD with the defaults, not streamed": request(SamplingParams(max_new_tokens=16)),
    "an ABORT": [msgspec.msgpack.encode(["wire-1", "wire-2"])],
}


def main() -> None:
    frames = {name: [bytes(frame).hex() for frame in value] for name, value in FRAMES.items()}
    told = {name: importlib.metadata.version(name) for name in ("tokenspeed", "msgspec")}
    json.dump({**told, "frames": frames}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
