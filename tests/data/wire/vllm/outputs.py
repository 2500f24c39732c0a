"""Write ``<release>/outputs.json``: outputs as each release lays them out. ``python outputs.py`` writes them all.

No engine wrote these frames. The layouts are those of ``vllm/v1/engine/__init__.py``, ``vllm/v1/outputs.py`` and
``vllm/v1/metrics/stats.py`` in the releases from 0.10.0 to 0.33.0, as their sources have them; arrays are encoded as
``vllm/v1/serial_utils.py`` does it, in all of them alike. ``tests/engines/vllm/test_golden_outputs.py`` checks that for
0.32.0 the same script gives the very bytes that the engine's own classes wrote (``0.32.0/golden.json``).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

HERE = Path(__file__).parent
RAW_VIEW = 3
THRESHOLD = 256
"""``VLLM_MSGPACK_ZERO_COPY_THRESHOLD``: arrays of fewer bytes stand in line."""

HEAD = "request_id new_token_ids new_logprobs new_prompt_logprobs_tensors pooling_output finish_reason stop_reason"
TO_0_25 = "trace_headers prefill_stats routed_experts num_nans_in_logits"
TO_0_27 = f"ec_transfer_params {TO_0_25}"
TO_0_28 = f"{TO_0_27} mm_cache_miss_hashes new_sampling_mask"
TO_0_30 = f"{TO_0_28} spec_decode_metrics"
TO_0_32 = f"{TO_0_30} prompt_token_id_logprobs"

LAYOUTS: dict[str, tuple[str, str]] = {
    "0.10.0": ("0.10.1.1", "num_cached_tokens"),
    "0.10.2": ("0.11.0", "trace_headers num_cached_tokens"),
    "0.11.1": ("0.13.0", "trace_headers num_cached_tokens num_nans_in_logits"),
    "0.14.0": ("0.15.1", "trace_headers num_cached_tokens routed_experts num_nans_in_logits"),
    "0.16.0": (
        "0.19.1",
        "trace_headers num_cached_tokens num_external_computed_tokens routed_experts num_nans_in_logits",
    ),
    "0.20.0": ("0.25.1", TO_0_25),
    "0.26.0": ("0.27.1", TO_0_27),
    "0.28.0": ("0.28.0", TO_0_28),
    "0.29.0": ("0.30.0", TO_0_30),
    "0.31.0": ("0.31.0", TO_0_32),
    "0.32.0": ("0.32.0", TO_0_32),
    "0.33.0": ("0.33.0", f"{TO_0_32} error"),
}
"""First release with a layout -> the last one, and the names behind ``kv_transfer_params``."""

NUMBERS = ("num_cached_tokens", "num_external_computed_tokens", "num_nans_in_logits")
"""Fields whose default is 0; that of all others is nil."""


def number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def names(release: str) -> list[str]:
    """The fields of ``EngineCoreOutput``, in order."""
    return f"{HEAD} events kv_transfer_params {LAYOUTS[release][1]}".split()


class Array:
    """What an engine has as an ndarray (numpy's short name for the type) or a tensor (torch's name)."""

    def __init__(self, dtype: str, shape: Sequence[int], items: Sequence[float]) -> None:
        assert math.prod(shape) == len(items)
        self.dtype, self.shape = dtype, shape
        code = {"i4": "i", "i8": "q", "f4": "f", "int32": "i", "int64": "q", "float32": "f"}[dtype.lstrip("<")]
        self.data = struct.pack(f"<{len(items)}{code}", *items)


def message(outputs: list[Any], release: str, **fields: Any) -> list[bytes]:
    """The frames of an ``EngineCoreOutputs``."""
    frames: list[bytes] = [b""]

    def plain(value: Any) -> Any:
        if isinstance(value, Array):
            if len(value.data) < THRESHOLD:
                return [value.dtype, list(value.shape), msgpack.ExtType(RAW_VIEW, value.data)]
            frames.append(value.data)
            return [value.dtype, list(value.shape), len(frames) - 1]
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    order = ["engine_index", "outputs", "scheduler_stats", "timestamp", "utility_output", "finished_requests"]
    order += ["wave_complete", "start_wave", *(["weight_version"] if number(release) >= (0, 32) else [])]
    whole = {"engine_index": 0, "outputs": outputs, "timestamp": 12.5, **fields}
    frames[0] = msgpack.packb([plain(whole.get(name)) for name in order])
    return frames


def output(release: str, **fields: Any) -> list[Any]:
    """An ``EngineCoreOutput``: always whole, defaults included."""
    return [fields.get(name, 0 if name in NUMBERS else None) for name in names(release)]


def table(dtypes: tuple[str, str], rows: int, columns: int, *, lists: bool = False) -> list[Any]:
    """Token ids, logprobs and ranks of some tokens."""
    ids = list(range(10, 10 + rows * columns))
    values, ranks = [-each / 8 for each in ids], list(range(1, rows + 1))
    if lists:
        cut = range(0, rows * columns, columns)
        return [[ids[at : at + columns] for at in cut], [values[at : at + columns] for at in cut], ranks]
    whole, real = dtypes
    return [Array(whole, (rows, columns), ids), Array(real, (rows, columns), values), Array(whole, (rows,), ranks)]


def logprobs(release: str, rows: int, columns: int) -> list[Any]:
    """``LogprobsLists``."""
    if number(release) < (0, 11, 1):
        return table(("", ""), rows, columns, lists=True)
    return [*table(("<i4", "<f4"), rows, columns), None]


def prompt_logprobs(release: str, rows: int, columns: int) -> list[Any]:
    """``LogprobsTensors``."""
    more = 0 if number(release) < (0, 16) else 1 if number(release) < (0, 29) else 2
    return [*table(("int32", "float32"), rows, columns), *[None] * more]


def sampling_mask(_: str) -> list[Any]:
    """``SamplingMaskLists``."""
    return [Array("<i4", (3,), (11, 12, 13)), Array("<i8", (3,), (0, 1, 3)), None]


def prefill(release: str) -> dict[str, int]:
    """``PrefillStats``: a map, because it is a dataclass."""
    counts = {"prompt": 9, "computed": 5, "cached": 4, "local_cached": 3, "external_cached": 1}
    if number(release) >= (0, 26):
        counts["cache_creation"] = 2
    return {f"num_{name}_tokens": count for name, count in counts.items()}


def everything(release: str, columns: int) -> dict[str, Any]:
    """A value for each field that the release has; what is told of a whole prompt is longer than a few numbers."""
    values = {
        "request_id": "wire-1",
        "new_token_ids": [10, 10 + columns],
        "new_logprobs": logprobs(release, 2, columns),
        "new_prompt_logprobs_tensors": prompt_logprobs(release, 3, columns),
        "pooling_output": Array("float32", (4,), (0.5, -0.5, 2.0, 0.0)),
        "finish_reason": 0,
        "stop_reason": 7,
        "events": [{"type": 1, "timestamp": 1.5}, {"type": 2, "timestamp": 2.5}],
        "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1, 2]},
        "ec_transfer_params": {"some": "thing"},
        "trace_headers": {"traceparent": "00-1"},
        "num_cached_tokens": 4,
        "num_external_computed_tokens": 1,
        "prefill_stats": prefill(release),
        "routed_experts": Array("<i4", (2, 1, 2), (0, 1, 1, 0)),
        "num_nans_in_logits": 6,
        "mm_cache_miss_hashes": ["a hash"],
        "new_sampling_mask": sampling_mask(release),
        "spec_decode_metrics": {
            "num_spec_tokens": 2,
            "histogram": [1, 0, 1],
            "num_draft_tokens": 4,
            "per_step_accepted": [0, 2],
            "per_step_drafted": [2, 2],
        },
        "prompt_token_id_logprobs": Array("float32", (2, 1), (-1.0, -2.0)),
        "error": {"code": "engine_paused", "message": "it is paused", "retryable": True},
    }
    return {name: values[name] for name in names(release)}


def messages(release: str) -> dict[str, list[bytes]]:
    """The frames of a release, by name."""
    weights = {"weight_version": "step-7"} if number(release) >= (0, 32) else {}
    token = output(release, request_id="wire-2", new_token_ids=[3])
    return {
        "a token": message([token], release),
        "everything, in line": message([output(release, **everything(release, 3)), token], release, **weights),
        "everything, in frames of its own": message([token, output(release, **everything(release, 100))], release),
    }


def document(release: str) -> dict[str, Any]:
    last, _ = LAYOUTS[release]
    how = "composed by tests/data/wire/vllm/outputs.py from the class definitions of these releases"
    frames = {name: [frame.hex() for frame in found] for name, found in messages(release).items()}
    return {"vllm": f"{release} to {last}", "how": how, "frames": frames}


def main() -> None:
    for release in LAYOUTS:
        path = HERE / release / "outputs.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(document(release), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
