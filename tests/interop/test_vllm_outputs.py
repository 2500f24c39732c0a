"""Everything that an output can carry, written by vLLM's own classes and read by ours. No engine runs for this."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interop.environment import DEFAULT_VERSION
from interop.judge import Judge
from lockstep_trio import RequestOutput, VllmProtocol
from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.engines.vllm import VllmSession
from lockstep_trio.engines.vllm.logprobs import Logprobs
from lockstep_trio.engines.vllm.parts import EngineEvent, PrefillStats, SpecDecodeMetrics
from lockstep_trio.engines.vllm.tensors import Tensor

pytestmark = pytest.mark.vllm

SESSION: VllmSession = VllmProtocol(vocab_size=256).session([RankInfo(0, DEFAULT_VERSION, data_parallel_size=1)])

CODES = {"int8": "b", "int32": "i", "int64": "q", "float32": "f", "float64": "d"}
SHORT = {"int8": "|i1", "int32": "<i4", "int64": "<i8", "float32": "<f4", "float64": "<f8"}
Made = tuple[Any, Any]
"""What the judge is told, and what must be read."""


def array(form: str, dtype: str, shape: Sequence[int], items: Sequence[float]) -> dict[str, Any]:
    """An array for the judge."""
    data = struct.pack(f"<{len(items)}{CODES[dtype]}", *items)
    return {form: SHORT[dtype] if form == "ndarray" else dtype, "shape": list(shape), "data": data.hex()}


def arrays(form: str) -> st.SearchStrategy[Made]:
    """Of some type and shape, some of them long enough for a frame of their own."""

    def of(dtype: str, shape: tuple[int, ...]) -> st.SearchStrategy[Made]:
        items = st.floats(-8, 8, width=32) if dtype.startswith("float") else st.integers(-128, 127)
        size = math.prod(shape)
        repeated = st.lists(items, min_size=min(size, 5), max_size=min(size, 5)).map(
            lambda few: [few[at % len(few)] for at in range(size)]
        )
        return repeated.map(lambda found: (array(form, dtype, shape, found), (dtype, shape, found)))

    shapes = st.lists(st.sampled_from([0, 1, 2, 3, 70]), max_size=3).map(tuple)
    return st.tuples(st.sampled_from(sorted(CODES)), shapes).flatmap(lambda drawn: of(*drawn))


@st.composite
def tables(draw: st.DrawFn, form: str, more: int) -> Made:
    """Token ids, logprobs and ranks, and rows of them."""
    rows, columns = draw(st.integers(0, 4)), draw(st.sampled_from([1, 2, 6, 21, 100]))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=columns, max_size=columns))
    values = draw(st.lists(st.floats(-64, 0, width=32), min_size=columns, max_size=columns))
    ranks = draw(st.lists(st.integers(1, 2**31 - 1), min_size=rows, max_size=rows))
    told = [
        array(form, "int32", (rows, columns), ids * rows),
        array(form, "float32", (rows, columns), values * rows),
        array(form, "int32", (rows,), ranks),
    ]
    return told + [None] * draw(st.integers(0, more)), [(ids, values, rank) for rank in ranks]


@st.composite
def masks(draw: st.DrawFn) -> Made:
    rows = draw(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=80), min_size=1, max_size=4))
    flat = [each for row in rows for each in row]
    ids = array("ndarray", "int32", (len(flat),), flat)
    if len(rows) == 1 and draw(st.booleans()):
        return [ids, None, None], rows
    offsets = [sum(map(len, rows[:at])) for at in range(len(rows) + 1)]
    return [ids, array("ndarray", "int64", (len(offsets),), offsets)], rows


counts = st.integers(0, 2**31)
texts = st.text(max_size=5)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def read_back(value: Any) -> Any:
    """Lists are read as tuples."""
    if isinstance(value, list):
        return tuple(map(read_back, value))
    return {key: read_back(each) for key, each in value.items()} if isinstance(value, dict) else value


def same(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Made]:
    return strategy.map(lambda value: (value, read_back(value)))


PREFILL = [
    f"num_{name}_tokens"
    for name in ("prompt", "computed", "cached", "local_cached", "external_cached", "cache_creation")
]
some_counts = st.lists(counts, max_size=3)
SPECULATION = {
    "num_spec_tokens": counts,
    "num_draft_tokens": counts,
    "histogram": some_counts,
    "per_step_accepted": some_counts,
    "per_step_drafted": some_counts,
}
"""Whole, like those that an engine makes: the judge's way to make one would leave defaults out of it."""
FIELDS: dict[str, st.SearchStrategy[Made]] = {
    "new_logprobs": tables("ndarray", 1),
    "new_prompt_logprobs_tensors": tables("tensor", 2),
    "pooling_output": arrays("tensor"),
    "stop_reason": same(st.integers(0, 2**31) | texts),
    "events": st.lists(st.tuples(st.integers(1, 3), st.floats(0, 1e9))).map(
        lambda found: ([{"type": kind, "timestamp": when} for kind, when in found], found)
    ),
    "kv_transfer_params": same(st.dictionaries(texts, plain, max_size=3)),
    "ec_transfer_params": same(st.dictionaries(texts, plain, max_size=3)),
    "trace_headers": same(st.dictionaries(texts, texts, max_size=3)),
    "prefill_stats": st.fixed_dictionaries(dict.fromkeys(PREFILL, counts)).map(
        lambda told: (told, PrefillStats(*(told[name] for name in PREFILL)))
    ),
    "routed_experts": arrays("ndarray"),
    "num_nans_in_logits": same(counts),
    "mm_cache_miss_hashes": same(st.lists(texts, max_size=3)),
    "new_sampling_mask": masks(),
    "spec_decode_metrics": st.fixed_dictionaries(SPECULATION).map(
        lambda told: (told, SpecDecodeMetrics(*(read_back(told[name]) for name in SPECULATION)))
    ),
    "prompt_token_id_logprobs": arrays("tensor"),
}
"""Every field of the engine's ``EngineCoreOutput`` but those that every output has."""


def rows_of(found: Logprobs | None) -> list[tuple[list[int], list[float], int]] | None:
    return None if found is None else [(list(row.token_ids), list(row.logprobs), row.rank) for row in found]


def numbers(found: Tensor | None) -> tuple[str, tuple[int, ...], list[float]] | None:
    return None if found is None else (found.dtype, found.shape, found.flat.tolist())


def events(found: Sequence[EngineEvent]) -> list[tuple[int, float]]:
    return [(each.kind.value, each.timestamp) for each in found]


SEEN: dict[str, Callable[[RequestOutput], Any]] = {
    "new_logprobs": lambda output: rows_of(output.logprobs),
    "new_prompt_logprobs_tensors": lambda output: rows_of(output.prompt_logprobs),
    "pooling_output": lambda output: numbers(output.pooling_output),
    "stop_reason": lambda output: output.stop_reason,
    "events": lambda output: events(output.events),
    "kv_transfer_params": lambda output: output.kv_transfer_params,
    "ec_transfer_params": lambda output: output.ec_transfer_params,
    "trace_headers": lambda output: output.trace_headers,
    "prefill_stats": lambda output: output.prefill_stats,
    "routed_experts": lambda output: numbers(output.routed_experts[0]) if output.routed_experts else None,
    "num_nans_in_logits": lambda output: output.nans_in_logits,
    "mm_cache_miss_hashes": lambda output: output.missing_mm_hashes,
    "new_sampling_mask": lambda output: (
        None if output.sampling_masks is None else [list(row) for row in output.sampling_masks]
    ),
    "spec_decode_metrics": lambda output: output.spec_decode_metrics,
    "prompt_token_id_logprobs": lambda output: numbers(output.prompt_token_id_logprobs),
}
ABSENT = {"events": [], "num_nans_in_logits": 0, "mm_cache_miss_hashes": ()}
"""How it is seen that there is none; of all others it is None."""


@st.composite
def outputs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """An output with some fields, as the judge is told it and as it must be read."""
    told: dict[str, Any] = {"new_token_ids": draw(st.lists(st.integers(0, 2**31 - 1), max_size=3))}
    expected = {name: ABSENT.get(name) for name in SEEN}
    names = draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=5))
    if "stop_reason" in names:
        told["finish_reason"] = 0  # it is looked at with the end alone
    for name in sorted(names):
        told[name], expected[name] = draw(FIELDS[name])
    return told, {**expected, "new_token_ids": tuple(told["new_token_ids"])}


def test_every_field_of_the_engines_class_is_among_those_that_are_drawn(judge: Judge) -> None:
    [whole] = judge.decode("outputs", judge.encode("outputs", {"outputs": [{"request_id": "a", "new_token_ids": []}]}))[
        "outputs"
    ]
    assert set(whole) == {*FIELDS, "request_id", "new_token_ids", "finish_reason"}


@given(st.lists(outputs(), min_size=1, max_size=3), st.none() | st.text(min_size=1, max_size=5))
@settings(max_examples=400)
def test_what_the_engine_writes_is_read_field_by_field(
    judge: Judge, drawn: list[tuple[dict[str, Any], dict[str, Any]]], weights: str | None
) -> None:
    told = [{"request_id": f"wire-{at}", **fields} for at, (fields, _) in enumerate(drawn)]
    batch = SESSION.decode(judge.encode("outputs", {"outputs": told, "weight_version": weights}))
    assert batch.damage == ()
    assert [wire_id for wire_id, _, _ in batch.outputs] == [each["request_id"] for each in told]
    for (_, _, raw), (_, expected) in zip(batch.outputs, drawn, strict=True):
        output = SESSION.merge("mine", 0, [raw])
        seen = {"new_token_ids": output.token_ids, **{name: see(output) for name, see in SEEN.items()}}
        assert {name: pair for name in expected if (pair := (seen[name], expected[name]))[0] != pair[1]} == {}
        assert output.weight_versions == (None if weights == "default" else weights,)
        assert output.unknown == ((),)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "bool", "uint8", "complex64"])
@pytest.mark.parametrize("size", [16, 512])
def test_types_that_python_has_no_numbers_of_arrive_as_the_bytes_they_are(judge: Judge, dtype: str, size: int) -> None:
    data = bytes(at % 2 for at in range(size))
    told = {"tensor": dtype, "shape": [2, -1], "data": data.hex()}
    output = {"request_id": "a", "new_token_ids": [], "pooling_output": told}
    ((_, _, raw),) = SESSION.decode(judge.encode("outputs", {"outputs": [output]})).outputs
    pooled = SESSION.merge("mine", 0, [raw]).pooling_output
    assert pooled is not None
    assert (pooled.dtype, pooled.shape[0], bytes(pooled.data)) == (dtype, 2, data)
