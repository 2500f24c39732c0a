"""Inputs for the decoders: valid messages, and what is done to them.

Everything is built from a `Source` of small numbers, which Hypothesis draws (`test_decoders.py`) and libFuzzer's bytes
spell out (`guided.py`), so a crasher of either is an input of both.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgpack

DATA = Path(__file__).parents[1] / "data" / "wire" / "vllm"
GOLDEN = [
    bytes.fromhex(frames[0])
    for path in sorted(DATA.glob("*/golden.json"))
    for frames in json.loads(path.read_text())["frames"].values()
]
"""What a real engine's classes wrote, first frames."""
LAID_OUT = [
    bytes.fromhex(json.loads((DATA / release / "outputs.json").read_text())["frames"]["everything, in line"][0])
    for release in ("0.10.2", "0.16.0", "0.20.0", "0.33.0")
]
"""Outputs with everything in them, as some releases lay them out."""

# The class that msgpack's compiled part goes by: under coverage `msgpack.ExtType` can be another one.
ExtType = type(msgpack.unpackb(b"\xd4\x28x"))

WIRE_IDS = ("a#1", "b#2", "c#3")
"""Of the first three requests of a group, if they are called a, b and c."""
CALL_ID = 4
"""Of the call after them."""

TOUCHED = Path(tempfile.gettempdir()) / f"lockstep-trio-unpickled-{os.getpid()}"
"""Exists once somebody has unpickled `PICKLED`."""
PICKLED = b"cos\nopen\n(S'%s'\nI65\ntR." % os.fsencode(TOUCHED)
"""As pickle's protocol 0: `os.open(TOUCHED, O_WRONLY | O_CREAT)`."""


def outputs(
    *each: list[Any], stats: Any = None, call: Any = None, done: Any = None, ask: Any = None, weights: Any = None
) -> list[Any]:
    return [0, list(each), stats, 12.5, call, None, done, ask, weights]


def output(wire_id: str, token_ids: Sequence[int], finish: int | None = None, **parts: Any) -> list[Any]:
    names = ("logprobs", "prompt_logprobs", "pooling", "finish", "stop", "events", "kv", "trace", "prefill")
    found = {"finish": finish, **parts}
    return [wire_id, list(token_ids), *[found.get(name) for name in names], None, None]


STATS = {"num_running_reqs": 3, "num_waiting_reqs": 2, "kv_cache_usage": 0.25, "prefix_cache_stats": {"hits": 0}}
LOGPROBS = [["<i8", [1, 2], ExtType(3, b"\1\0\0\0\0\0\0\0" * 2)], ["<f4", [1, 2], 1], [0]]
A, B, C = WIRE_IDS

AUX = [b"\1\0\0\0\0\0\0\0", b"\2\0\0\0\3\0\0\0\4\0\0\0"]
"""What stands in frames of its own: two numbers of 4 bytes, or one of 8; and three of 4."""
_INT8 = ["|i1", [8], ExtType(3, bytes(range(8)))]
PARTS: dict[str, Any] = {
    "new_logprobs": [
        ["<i8", [1, 1], 1],
        ["<f4", [1, 1], ExtType(3, b"\0\0\x80\xbf")],
        ["<i4", [1], ExtType(3, b"\1\0\0\0")],
    ],
    "new_logprobs as lists": [[[5, 6]], [[-0.5, -1.0]], [1]],
    "new_prompt_logprobs_tensors": [["int32", [3, 1], 2], ["float32", [3, 1], 2], ["int32", [3], 2], None, None],
    "pooling_output": ["bfloat16", [2, 2], 1],
    "finish_reason": None,
    "stop_reason": "x",
    "events": [{"type": 1, "timestamp": 1.5}],
    "kv_transfer_params": {"a": [1, {"b": _INT8}]},
    "ec_transfer_params": {"a": ["int32", [2], 1]},
    "trace_headers": {"traceparent": "x"},
    "prefill_stats": {"num_prompt_tokens": 9, "num_cached_tokens": 4},
    "routed_experts": ["<i4", [1, 3, 1], 2],
    "num_nans_in_logits": 1,
    "mm_cache_miss_hashes": ["x"],
    "new_sampling_mask": [["<i4", [2], 1], ["<i8", [1], 1], None],
    "spec_decode_metrics": {"num_spec_tokens": 1, "histogram": [1, 0]},
    "prompt_token_id_logprobs": ["float32", [2, 1], 1],
    "error": {"code": "x", "message": "y", "retryable": True},
}
"""What an output of 0.33 can carry, by name, in order, with arrays that belong to `AUX`."""


def whole_output(wire_id: str, **changes: Any) -> list[Any]:
    """An output with everything in it."""
    named = {name: value for name, value in PARTS.items() if name != "new_logprobs as lists"}
    return [wire_id, [5], *{**named, **changes}.values()]


STEPS: list[list[Any]] = [
    outputs(output(A, [5], prefill={"num_cached_tokens": 4}), output(B, [7, 8]), stats=STATS),
    outputs(output(A, [6], 1), output(B, [9], 0, stop=9), output(C, [], 2)),
    outputs(output(A, [6], logprobs=LOGPROBS, prompt_logprobs=LOGPROBS), stats=STATS, done=0),
    outputs(stats=STATS),
    outputs(whole_output(A), whole_output(B, new_logprobs=PARTS["new_logprobs as lists"]), weights="step-7"),
    outputs(done=0),
    outputs(done=5),
    outputs(ask=1),
    outputs(call=[CALL_ID, None, [None, False]]),
    outputs(call=[CALL_ID, None, [None, {"a": [1, "b", b"c"], 5: ExtType(3, b"abc")}]]),
    outputs(call=[CALL_ID, "no such method", None]),
    outputs(call=[CALL_ID, "Server shutting down", None]),
    outputs(call=[CALL_ID, None, [None, [["int8", [8], 1]]]]),
    *[msgpack.unpackb(frame, strict_map_key=False) for frame in GOLDEN if frame != b"ENGINE_CORE_DEAD"],
    *[msgpack.unpackb(frame, strict_map_key=False) for frame in LAID_OUT],
]
"""`EngineCoreOutputs`, as lists."""

HELLO: dict[str, Any] = {"status": "HELLO", "local": False, "headless": True}
READY: dict[str, Any] = {"status": "READY", "local": False, "headless": True, "parallel_config_hash": "abc"}
OLD: dict[str, Any] = {"max_model_len": 4096, "num_gpu_blocks": 8192, "dp_stats_address": None}
NEW: dict[str, Any] = {**OLD, "vllm_version": "0.32.0", "dtype": "float32", "data_parallel_size": 2}
WORDS: list[Any] = [HELLO, READY, NEW, {**READY, "status": "OTHER"}, {"status": "READY"}, OLD, {}]
"""What a rank says while it starts."""

VALUES: list[Any] = [
    *[None, True, False, 0, 1, 7, -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)],
    *[0.25, 1.0, -0.0, float("nan"), float("inf"), 1e308],
    *["", *WIRE_IDS, "\0", "x" * 300, "0.32.0", "v1.2", "HELLO", "READY"],
    *[b"", b"a#1", b"x" * 300],
    *[[], [[]], [A], [A, []], [A, [1]], [[A, [1], None, None, None, 0]], [CALL_ID], [CALL_ID, None], [0, 1, 2, 3]],
    *[{}, {"": {}}, {5: 6}, {None: 1, True: 2, 1.5: 3, b"k": 4}, {(1, 2): 3}, {(): {(): ()}}],
    *[{"num_running_reqs": -1}, {"kv_cache_usage": 2}, {"num_cached_tokens": 2**63}, {0: A, 1: [], 5: None}],
    *[ExtType(1, PICKLED), ExtType(2, PICKLED), [ExtType(1, PICKLED)], {"a": ExtType(2, PICKLED)}],
    *[ExtType(3, b""), ExtType(40, b"x"), ExtType(127, b""), ExtType(3, b"x" * 300)],
    *[["int8", [8], 1], ["float16", [4], 1], ["int8", [2**40, 0], ExtType(3, b"")], ["int8", [2**63, 2**63], 1]],
    *[
        ["int8", [-1], 1],
        ["int8", [2**40], ExtType(3, b"x")],
        ["float64", [], 1],
        ["int64", [1] * 40, 1],
        ["O", [1], 1],
    ],
    *[["int8", [8], 99], ["int8", [8], {"name": "x"}], [["int64", [1, 1], 1]] * 3, [[], [], []]],
]

RAW: list[bytes] = [
    b"",  # so the message is cut off, or one item short
    b"\x91" * 1000 + b"\xc0",  # nested as deep as msgpack goes, and deeper than Python's repr
    b"\x81\xa1k" * 900 + b"\xc0",
    b"\x81" * 600 + b"\xc0" * 601,
    b"\x91" * 1100,
    *[b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x01\x00\x00", b"\xdc\xff\xff", b"\xdc\xff\xff" * 400],
    *[b"\xdf\xff\xff\xff\xff", b"\xde\xff\xff", b"\xde\xff\xff" * 400],
    *[b"\xdb\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xd9\x04\xff\xfe\xfd\xfc"],
    *[b"\xc1", b"\xd6\xff\0\0\0\0", b"\xd7\xff" + b"\xff" * 8, b"\xc7\x03\xff\0\0\0", b"\xc7\x0c\xff" + b"\xff" * 12],
]
"""What no packer writes: it takes the place of an item."""
_PLACES = [ExtType(99, b"<%d>" % at) for at in range(len(RAW))]
ANY = [*VALUES, *_PLACES]
_ENCODED_PLACES = [msgpack.packb(place) for place in _PLACES]

Edit: TypeAlias = Callable[[Any], Any]


class Source(Protocol):
    """Where the choices come from. Zero is the simplest one."""

    def below(self, limit: int) -> int: ...

    def raw(self, limit: int) -> bytes:
        """At most so many bytes."""
        ...


class Spelled:
    """A source that reads its choices from bytes; after their end all are zero."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, limit: int) -> int:
        width = 1 if limit <= 256 else 2
        chunk = self._data[self._at : self._at + width]
        self._at += width
        return int.from_bytes(chunk, "little") % limit

    def raw(self, limit: int) -> bytes:
        size = self.below(limit + 1)
        chunk = self._data[self._at : self._at + size]
        self._at += size
        return chunk


def value(source: Source, depth: int = 3) -> Any:
    kind = source.below(8)
    if kind < 4 or not depth:
        return VALUES[source.below(len(VALUES))]
    if kind == 4:
        return [value(source, depth - 1) for _ in range(source.below(5))]
    if kind == 5:
        return {source.raw(3): value(source, depth - 1) for _ in range(source.below(4))}
    if kind == 6:
        return int.from_bytes(source.raw(8), "little")
    return _PLACES[source.below(len(_PLACES))]


def edited(source: Source, whole: Any, depth: int = 4) -> Any:
    """With one thing changed somewhere in it: replaced, inserted, removed, repeated, or swapped with a neighbour."""
    if not depth or not isinstance(whole, (list, dict)) or not whole or source.below(4) == 3:
        return value(source)
    places = range(len(whole)) if isinstance(whole, list) else list(whole)
    at = places[source.below(len(places))]
    copy = whole.copy()
    change = source.below(8)
    if change < 4:
        copy[at] = edited(source, whole[at], depth - 1)
    elif change == 4:
        del copy[at]
    elif change == 5:
        copy[at] = copy[places[source.below(len(places))]]
    elif isinstance(copy, dict):
        copy[source.raw(4)] = value(source)
    else:
        copy[at:at] = [value(source)] if change == 6 else copy[at : at + 1] * (1 + source.below(40))
    return copy


def everywhere(whole: Any, values: Sequence[Any], depth: int) -> Iterator[Any]:
    """With each of some values in the place of each item, down to a depth."""
    yield from values
    if not depth or not isinstance(whole, (list, dict)):
        return
    for at in range(len(whole)) if isinstance(whole, list) else list(whole):
        for each in everywhere(whole[at], values, depth - 1):
            copy = whole.copy()
            copy[at] = each
            yield copy


def packed(whole: Any) -> bytes:
    frame: bytes = msgpack.packb(whole)
    if b"<" in frame:
        for place, raw in zip(_ENCODED_PLACES, RAW, strict=True):
            frame = frame.replace(place, raw)
    return frame


def damaged(source: Source, frame: bytes) -> bytes:
    """With some bytes replaced, inserted, removed or cut off."""
    for _ in range(source.below(4)):
        at = source.below(min(len(frame), 65_000) + 1)
        match source.below(4):
            case 0:
                junk = source.raw(4)
                frame = frame[:at] + junk + frame[at + len(junk) :]
            case 1:
                frame = frame[:at] + source.raw(8) + frame[at:]
            case 2:
                frame = frame[:at] + frame[at + 1 + source.below(8) :]
            case _:
                frame = frame[:at]
    return frame


def frame_of(source: Source, wholes: Sequence[Any]) -> bytes:
    """One of some messages, more or less as it should be."""
    whole = wholes[source.below(len(wholes))]
    for _ in range(source.below(4)):
        whole = edited(source, whole)
    frame = packed(whole)
    return damaged(source, frame) if source.below(3) == 2 else frame


def message_of(source: Source) -> list[bytes]:
    """What a rank sends while it runs."""
    kind = source.below(16)
    if kind == 15:
        return [source.raw(20) for _ in range(source.below(3))]
    if kind == 14:
        return [b"ENGINE_CORE_DEAD", *[b""] * source.below(2)]
    more = AUX if kind > 5 else [source.raw(9) for _ in range(source.below(2))]
    return [frame_of(source, STEPS), *more]
