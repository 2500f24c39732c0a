"""Outputs as each release lays them out (tests/data/wire/vllm/README.md), and everything that is read from them."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep_trio.engines.vllm.logprobs import Logprobs
from lockstep_trio.engines.vllm.outputs import decode
from lockstep_trio.engines.vllm.parts import EngineEvent, ErrorReport, EventKind, PrefillStats, SpecDecodeMetrics
from lockstep_trio.engines.vllm.result import FinishReason, RequestOutput, merge
from lockstep_trio.engines.vllm.tensors import Tensor

DATA = Path(__file__).parents[2] / "data" / "wire" / "vllm"
GOLDEN: dict[str, dict[str, Any]] = {
    path.parent.name: json.loads(path.read_text()) for path in DATA.glob("*/outputs.json")
}
SCRIPT: dict[str, Any] = runpy.run_path(str(DATA / "outputs.py"))


def number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


@pytest.fixture(params=sorted(GOLDEN, key=number))
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def outputs(release: str, name: str) -> list[RequestOutput]:
    batch = decode([bytes.fromhex(frame) for frame in GOLDEN[release]["frames"][name]])
    assert batch.damage == ()
    return [merge(wire_id, 0, [raw]) for wire_id, _, raw in batch.outputs]  # type: ignore[list-item]


def seen(logprobs: Logprobs | None) -> list[tuple[list[int], list[float], int]] | None:
    return None if logprobs is None else [(list(each.token_ids), list(each.logprobs), each.rank) for each in logprobs]


def table(rows: int, columns: int) -> list[tuple[list[int], list[float], int]]:
    """The logprobs that the script makes up."""
    ids = [list(range(10 + at * columns, 10 + (at + 1) * columns)) for at in range(rows)]
    return [(row, [-each / 8 for each in row], at) for at, row in enumerate(ids, 1)]


def numbers(tensor: Tensor | None) -> tuple[str, tuple[int, ...], list[float]] | None:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.flat.tolist())


def everything(output: RequestOutput) -> dict[str, Any]:
    return {
        "prefill": output.prefill_stats,
        "cached": (output.cached_tokens, output.external_cached_tokens),
        "pooling": numbers(output.pooling_output),
        "events": output.events,
        "transfers": (output.kv_transfer_params, output.ec_transfer_params),
        "trace": output.trace_headers,
        "experts": [numbers(each) for each in output.routed_experts],
        "nans": output.nans_in_logits,
        "missing": output.missing_mm_hashes,
        "masks": None if output.sampling_masks is None else [list(each) for each in output.sampling_masks],
        "speculation": output.spec_decode_metrics,
        "chosen": numbers(output.prompt_token_id_logprobs),
        "error": output.error,
        "unknown": output.unknown,
    }


NOTHING: Mapping[str, Any] = {
    "prefill": None,
    "cached": (None, None),
    "pooling": None,
    "events": (),
    "transfers": (None, None),
    "trace": None,
    "experts": [],
    "nans": 0,
    "missing": (),
    "masks": None,
    "speculation": None,
    "chosen": None,
    "error": None,
    "unknown": ((),),
}

SINCE: Sequence[tuple[tuple[int, ...], Mapping[str, Any]]] = (
    (
        (0, 10, 0),
        {
            "cached": (4, None),
            "pooling": ("float32", (4,), [0.5, -0.5, 2.0, 0.0]),
            "events": (EngineEvent(EventKind.QUEUED, 1.5), EngineEvent(EventKind.SCHEDULED, 2.5)),
            "transfers": ({"do_remote_prefill": True, "remote_block_ids": (1, 2)}, None),
        },
    ),
    ((0, 10, 2), {"trace": {"traceparent": "00-1"}}),
    ((0, 11, 1), {"nans": 6}),
    ((0, 14, 0), {"experts": [("int32", (2, 1, 2), [0, 1, 1, 0])]}),
    ((0, 16, 0), {"cached": (4, 1)}),
    ((0, 20, 0), {"prefill": PrefillStats(9, 5, 4, 3, 1, None)}),
    (
        (0, 26, 0),
        {
            "prefill": PrefillStats(9, 5, 4, 3, 1, 2),
            "transfers": ({"do_remote_prefill": True, "remote_block_ids": (1, 2)}, {"some": "thing"}),
        },
    ),
    ((0, 28, 0), {"missing": ("a hash",), "masks": [[11], [12, 13]]}),
    ((0, 29, 0), {"speculation": SpecDecodeMetrics(2, 4, (1, 0, 1), (0, 2), (2, 2))}),
    ((0, 31, 0), {"chosen": ("float32", (2, 1), [-1.0, -2.0])}),
    ((0, 33, 0), {"error": ErrorReport("engine_paused", "it is paused", True)}),
)
"""From which release on what is told."""


def expected(release: str) -> dict[str, Any]:
    found = dict(NOTHING)
    for since, told in SINCE:
        if number(release) >= since:
            found |= told
    return found


def test_there_are_frames_of_every_layout() -> None:
    assert set(GOLDEN) == set(SCRIPT["LAYOUTS"])


def test_the_files_are_what_the_script_writes(release: str) -> None:
    assert GOLDEN[release] == SCRIPT["document"](release)


@pytest.mark.parametrize(
    ("name", "columns"), [("few logprobs, in line", 3), ("many logprobs, in frames of their own", 100)]
)
def test_the_script_writes_the_bytes_that_the_engines_own_classes_wrote(name: str, columns: int) -> None:
    golden = json.loads((DATA / "0.32.0" / "golden.json").read_text())["frames"][name]
    array = SCRIPT["Array"]
    ids = range(columns)
    logprobs = [
        array("<i4", (1, columns), ids),
        array("<f4", (1, columns), [-float(each) for each in ids]),
        array("<i4", (1,), [0]),
        None,
    ]
    output = SCRIPT["output"]("0.32.0", request_id="w", new_token_ids=[3], new_logprobs=logprobs)
    assert [frame.hex() for frame in SCRIPT["message"]([output], "0.32.0")] == golden


def test_a_token_is_a_token_and_nothing_else(release: str) -> None:
    (output,) = outputs(release, "a token")
    old = number(release) < (0, 20)  # then the counts come with every output
    cached = (0 if old else None, 0 if old and number(release) >= (0, 16) else None)
    assert everything(output) == {**NOTHING, "cached": cached}
    assert (output.token_ids, output.finish_reason, output.logprobs, output.prompt_logprobs) == ((3,), None, None, None)
    assert output.weight_versions == (None,)


@pytest.mark.parametrize(
    ("name", "place", "columns"), [("everything, in line", 0, 3), ("everything, in frames of its own", 1, 100)]
)
def test_everything_that_a_release_can_tell_is_read(release: str, name: str, place: int, columns: int) -> None:
    output = outputs(release, name)[place]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ((10, 10 + columns), FinishReason.STOP, 7)
    assert everything(output) == expected(release)
    assert seen(output.logprobs) == table(2, columns)
    assert seen(output.prompt_logprobs) == table(3, columns)


def test_what_is_told_of_one_output_is_not_told_of_its_neighbour(release: str) -> None:
    for name, place in (("everything, in line", 1), ("everything, in frames of its own", 0)):
        neighbour = outputs(release, name)[place]
        assert (neighbour.token_ids, neighbour.logprobs, neighbour.prompt_logprobs) == ((3,), None, None)


def test_the_name_of_the_weights_is_told_since_0_32(release: str) -> None:
    names = {output.weight_versions for output in outputs(release, "everything, in line")}
    assert names == {("step-7",) if number(release) >= (0, 32) else (None,)}
