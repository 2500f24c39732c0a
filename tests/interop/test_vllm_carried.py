"""What a request can carry besides tokens, read by the message classes of every release. No engine runs for this."""

from __future__ import annotations

import array
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interop.release_judge import ReleaseJudge
from lockstep_trio import EngineCoreRequest, RequestRejected, SamplingParams, VllmProtocol
from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.engines.vllm import (
    Adapters,
    Batched,
    Flat,
    LoRA,
    MultiModalFeature,
    PoolingParams,
    Shared,
    Tensor,
)
from lockstep_trio.engines.vllm.layout import REQUEST, holding
from lockstep_trio.engines.vllm.pooling import POOLING, tasks_of
from lockstep_trio.engines.vllm.version import Versions, parse_version

pytestmark = pytest.mark.vllm

HIDDEN = 8
SIZES = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1, "bool": 1}


def exactly(release: str) -> Versions:
    versions = parse_version(release)
    assert versions is not None
    return versions


class Everything(Adapters):  # type: ignore[misc]
    """As if all adapters had been loaded."""

    def __contains__(self, lora: object) -> bool:
        return True


def carried(release_judge: ReleaseJudge, release: str, request: EngineCoreRequest, **told: Any) -> dict[str, Any]:
    """The request as that release's classes read it."""
    protocol = VllmProtocol(version=release, vocab_size=256, **told)
    session = protocol.session([RankInfo(0, data_parallel_size=1, max_model_len=512)])
    _, *frames = session.encode_add(request, "a#1")
    value: dict[str, Any] = release_judge.decode("add", [bytes(frame) for frame in frames])
    assert value["request_id"] == "a#1"
    assert value["arrival_time"] == request.arrival_time
    return value


@st.composite
def tensors(draw: st.DrawFn, *dtypes: str, shape: tuple[int, ...] | None = None) -> Tensor:
    dtype = draw(st.sampled_from(dtypes or tuple(SIZES)))
    drawn = draw(st.lists(st.integers(1, 9), max_size=3)) if shape is None else shape
    items = 1
    for size in drawn:
        items *= size
    data = bytes(at % 2 if dtype == "bool" else (7 * at) % 251 for at in range(items * SIZES[dtype]))
    return Tensor(dtype, tuple(drawn), data)


def as_read(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": f"torch.{tensor.dtype}", "shape": list(tensor.shape), "data": bytes(tensor.data).hex()}


def test_an_adapter_is_read_by_its_three_fields(release_judge: ReleaseJudge, release: str) -> None:
    request = EngineCoreRequest([1], lora=LoRA("sql", 7, "/models/sql"))
    lora = carried(release_judge, release, request, adapters=Everything())["lora_request"]
    assert (lora["lora_name"], lora["lora_int_id"], lora["lora_path"]) == ("sql", 7, "/models/sql")


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_embeddings_are_read(release_judge: ReleaseJudge, release: str, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 60))
    embeds = data.draw(tensors("float32", "bfloat16", shape=(rows, HIDDEN)))
    mask = data.draw(st.none() | st.lists(st.booleans(), min_size=rows, max_size=rows))
    ids = None if mask is None else [3] * rows
    request = EngineCoreRequest(ids, prompt_embeds=embeds, prompt_is_token_ids=mask)
    [names] = holding(REQUEST, exactly(release))
    needed = {"prompt_embeds"} if mask is None else {"prompt_embeds", "prompt_is_token_ids"}
    if not needed <= set(names):
        with pytest.raises(RequestRejected, match=r"does not have it"):
            carried(release_judge, release, request, embedding_size=HIDDEN)
        return
    value = carried(release_judge, release, request, embedding_size=HIDDEN)
    assert (value["prompt_token_ids"], value["prompt_embeds"]) == (ids, as_read(embeds))
    assert value.get("prompt_is_token_ids") == mask


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_what_to_make_of_a_prompt_is_read(release_judge: ReleaseJudge, release: str, data: st.DataObject) -> None:
    versions = exactly(release)
    task = data.draw(st.sampled_from(tasks_of(versions)))
    fields: Mapping[str, st.SearchStrategy[Any]] = {
        "use_activation": st.booleans(),
        "dimensions": st.integers(1, 2**31 - 1),
        "step_tag_id": st.integers(0, 255),
        "returned_token_ids": st.lists(st.integers(0, 255), max_size=3),
        "skip_reading_prefix_cache": st.booleans(),
    }
    [names] = holding(POOLING, versions)
    switches = {"use_activation", "normalize"} & set(names)
    drawn = data.draw(st.fixed_dictionaries({}, optional=fields))
    request = EngineCoreRequest([1] * data.draw(st.sampled_from([1, 512])), pooling=PoolingParams(task, **drawn))
    unknown = {name for name in drawn if name not in names and name != "use_activation"}
    if unknown or (not switches and drawn.get("use_activation") is False):
        with pytest.raises(RequestRejected):
            carried(release_judge, release, request, tasks=[task])
        return
    value = carried(release_judge, release, request, tasks=[task])
    assert value["sampling_params"] is None
    params = value["pooling_params"]
    assert params["task"] == task
    for name in fields.keys() & set(names) - {"use_activation", "skip_reading_prefix_cache"}:
        assert params[name] == drawn.get(name)
    for name in switches:
        assert params[name] is drawn.get("use_activation", True)
    if "skip_reading_prefix_cache" in names:
        by_token = task in ("token_embed", "token_classify", "embed&token_classify") or None
        assert params["skip_reading_prefix_cache"] is drawn.get("skip_reading_prefix_cache", by_token)
    assert "FINAL_ONLY" in str(params["output_kind"]) or str(params["output_kind"]) == "2"


fields = (
    st.builds(Batched, tensors() | st.lists(tensors(), min_size=1, max_size=2))
    | st.builds(Flat, tensors(), slices=st.just([[0, 2, None], [2, 5, 1]]) | st.just([[[0, 1, None], [3, 4, None]]]))
    | st.builds(Shared, tensors() | st.integers(-5, 5) | st.floats(-1, 1), batch_size=st.integers(1, 3))
)
CLASSES = {Batched: "MultiModalBatchedField", Flat: "MultiModalFlatField", Shared: "MultiModalSharedField"}


@st.composite
def features(draw: st.DrawFn) -> MultiModalFeature:
    length = draw(st.integers(1, 300))
    return MultiModalFeature(
        modality=draw(st.sampled_from(["image", "audio"])),
        identifier=draw(st.text("abc", min_size=1, max_size=5)),
        offset=draw(st.integers(0, 500 - length)),
        length=length,
        is_embed=draw(st.none() | tensors("bool", shape=(length,))),
        data=draw(st.dictionaries(st.sampled_from(["pixel_values", "image_grid_thw"]), fields, min_size=1)),
    )


def nested(value: Any) -> Any:
    if isinstance(value, Tensor):
        return as_read(value)
    return [nested(each) for each in value] if isinstance(value, list) else value


def item_read(item: Any, feature: MultiModalFeature) -> None:
    """That an item has all its arrays, each in its kind of field with its settings."""
    assert item.keys() == feature.data.keys()
    for name, field in feature.data.items():
        assert item[name]["data"] == nested(field.data)
        assert item[name]["field"]["class"] == CLASSES[type(field)]
        assert item[name]["field"].get("batch_size") == getattr(field, "batch_size", None)
        if isinstance(field, Flat):
            first = field.slices[0]
            read = item[name]["field"]["slices"][0]
            wanted = [str(slice(*each)) for each in first] if isinstance(first[0], list) else str(slice(*first))
            assert (read, item[name]["field"]["dim"]) == (wanted, field.dim)


@given(st.lists(features(), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_features_are_read_in_the_order_of_their_places(
    release_judge: ReleaseJudge, release: str, drawn: list[MultiModalFeature]
) -> None:
    request = EngineCoreRequest([1] * 500, SamplingParams(max_tokens=1), mm_features=drawn)
    value = carried(release_judge, release, request, multimodal=True)
    ordered = sorted(drawn, key=lambda feature: feature.offset)
    if exactly(release).none_from((0, 10, 2)):
        places, hashes = value["mm_placeholders"], value["mm_hashes"]
        items = value["mm_kwargs"] if "mm_kwargs" in value else [None] * len(drawn)
        assert len(value.get("mm_inputs", items)) == len(drawn)
    else:
        places = [feature["mm_position"] for feature in value["mm_features"]]
        hashes = [feature["identifier"] for feature in value["mm_features"]]
        items = [feature["data"] for feature in value["mm_features"]]
        assert [feature["modality"] for feature in value["mm_features"]] == [feature.modality for feature in ordered]
    assert hashes == [feature.identifier for feature in ordered]
    for place, item, feature in zip(places, items, ordered, strict=True):
        assert (place["offset"], place["length"]) == (feature.offset, feature.length)
        assert place["is_embed"] == (None if feature.is_embed is None else as_read(feature.is_embed))
        if item is not None:
            item_read(item, feature)


def test_what_comes_from_an_array_of_python_is_read_as_it_was(release_judge: ReleaseJudge, release: str) -> None:
    numbers = array.array("f", [0.25 * at for at in range(100)])
    feature = MultiModalFeature(
        modality="image", identifier="x", offset=0, length=1, data={"pixel_values": Batched(Tensor.of(numbers))}
    )
    value = carried(release_judge, release, EngineCoreRequest([1], mm_features=[feature]), multimodal=True)
    assert numbers.tobytes().hex() in str(value)
