"""What each release's own classes wrote for requests (tests/data/wire/vllm/README.md): we send that, and stop early."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import msgpack
import pytest

from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.engines.vllm import (
    Adapters,
    Batched,
    EngineCoreRequest,
    Flat,
    LoRA,
    MultiModalFeature,
    PoolingParams,
    SamplingParams,
    Tensor,
    VllmProtocol,
)

DATA = Path(__file__).parents[2] / "data" / "wire" / "vllm"
GOLDEN: dict[str, dict[str, list[str]]] = {
    path.parent.name: json.loads(path.read_text())["frames"] for path in DATA.glob("*/adds.json")
}
CASES = [(version, name) for version, frames in sorted(GOLDEN.items()) for name in frames]

EMBEDS = Tensor("float32", (8, 12), memoryview(array("f", range(96))).cast("B"))
IN_LINE = Tensor("int64", (1, 3), b"".join(at.to_bytes(8, "little") for at in (1, 2, 3)))
SQL = LoRA("sql", 7, "/sql")

PARAMS = SamplingParams(
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    seed=7,
    max_tokens=9,
    min_tokens=1,
    stop_token_ids=[4],
    presence_penalty=0.5,
    logprobs=2,
    logit_bias={3: -1.5},
    eos_token_id=2,
)
FEATURE = MultiModalFeature(
    modality="image",
    identifier="hash",
    offset=1,
    length=2,
    is_embed=Tensor("bool", (2,), b"\x01\x00"),
    data={"pixel_values": Flat(EMBEDS, slices=[[0, 8, None]]), "image_grid_thw": Batched(IN_LINE)},
)
REQUESTS = {
    "plain": EngineCoreRequest([1, 2, 3]),
    "sampled": EngineCoreRequest([1, 2, 3], PARAMS),
    "salted and sooner": EngineCoreRequest([1, 2, 3], cache_salt="salt", priority=-3, arrival_time=1.5),
    "with an adapter": EngineCoreRequest([1, 2, 3], lora=SQL),
    "pooled": EngineCoreRequest([1, 2, 3], pooling=PoolingParams("embed", dimensions=8)),
    "of embeddings": EngineCoreRequest(None, prompt_embeds=EMBEDS),
    "of both": EngineCoreRequest([3] * 8, prompt_embeds=EMBEDS, prompt_is_token_ids=[True, *[False] * 7]),
    "of a session": EngineCoreRequest([1, 2, 3], session_id="mine"),
    "with a feature": EngineCoreRequest([1, 2, 3], mm_features=[FEATURE]),
}


class Everything(Adapters):  # type: ignore[misc]
    def __contains__(self, lora: object) -> bool:
        return True


def ours(version: str, name: str) -> list[bytes]:
    tasks = ["embed" if name == "pooled" else "generate"]
    protocol = VllmProtocol(
        version=version, vocab_size=256, adapters=Everything(), embedding_size=12, multimodal=True, tasks=tasks
    )
    session = protocol.session([RankInfo(0, data_parallel_size=1, max_model_len=512)])
    kind, *frames = session.encode_add(REQUESTS[name], "a#1")
    assert kind == b"\x00"
    return [bytes(frame) for frame in frames]


def unpack(frame: bytes) -> Any:
    return msgpack.unpackb(frame, strict_map_key=False)


UNKNOWN = {"_eos_token_id": (0, 17, 0), "mm_hash": (0, 14, 0)}
"""Keys that we send to every release, and since when they are known; before that they are ignored."""


def without_the_unknown(value: Any, version: str) -> Any:
    release = tuple(map(int, version.split(".")))
    if isinstance(value, list):
        return [without_the_unknown(each, version) for each in value]
    if isinstance(value, dict):
        known = {key: item for key, item in value.items() if UNKNOWN.get(key, release) <= release}
        return {key: without_the_unknown(item, version) for key, item in known.items()}
    return value


def differences(mine: Any, theirs: Any, where: str = "") -> list[str]:
    """Where one does not say the same as the other, whose rest must be defaults."""
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) <= len(theirs):
        rest = [f"{where}[{at}] left out" for at in range(len(mine), len(theirs)) if not is_default(theirs[at])]
        return rest + [each for at, item in enumerate(mine) for each in differences(item, theirs[at], f"{where}[{at}]")]
    if isinstance(mine, dict) and isinstance(theirs, dict):
        rest = [f"{where}.{key} left out" for key in theirs if key not in mine and not is_default(theirs[key])]
        return rest + [each for key in mine for each in differences(mine[key], theirs.get(key), f"{where}.{key}")]
    return [] if mine == theirs else [f"{where}: {mine!r}, not {theirs!r}"]


def is_default(value: Any) -> bool:
    """Of a field that we leave out: nil, zero, empty; 2 is ``RequestOutputKind.FINAL_ONLY``, of pooling alone."""
    return not value or value == 2


def test_the_newest_and_the_oldest_release_are_among_them() -> None:
    assert {"0.10.0", "0.32.0"} <= GOLDEN.keys()
    assert set(GOLDEN["0.32.0"]) == set(REQUESTS)
    assert len(GOLDEN) > 20


@pytest.mark.parametrize(("version", "name"), CASES)
def test_an_add_says_what_that_releases_own_front_end_says(version: str, name: str) -> None:
    golden = [bytes.fromhex(frame) for frame in GOLDEN[version][name]]
    sent = ours(version, name)
    mine, theirs = without_the_unknown(unpack(sent[0]), version), unpack(golden[0])
    if name == "sampled":
        for fields in (mine, theirs):
            [params] = [each for each in fields if isinstance(each, dict)]
            params["_all_stop_token_ids"].sort()
    elif name != "pooled":
        [params] = [each for each in theirs if isinstance(each, dict)]
        params.setdefault("max_tokens", 16)  # its default, which we send all the same
    assert differences(mine, theirs) == []
    assert sent[1:] == golden[1:]


def test_a_difference_is_seen() -> None:
    assert differences([1, {"a": [2]}], [1, {"a": [3], "b": 0}, None]) == ["[1].a[0]: 2, not 3"]
    assert differences([1], [1, 5]) == ["[1] left out"]
    assert differences({}, {"a": 1}) == [".a left out"]
    assert differences([1, 2], [1]) == [": [1, 2], not [1]"]
