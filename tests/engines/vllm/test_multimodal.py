from __future__ import annotations

from typing import Any

import attrs
import pytest

from lockstep_trio import EngineCoreRequest, RequestRejected
from lockstep_trio.engines.vllm import Batched, Flat, MultiModalFeature, Shared, Tensor
from lockstep_trio.engines.vllm.admission import admit
from lockstep_trio.engines.vllm.checks import Limits
from lockstep_trio.engines.vllm.layout import request_layout
from lockstep_trio.engines.vllm.version import Versions, parse_version

PIXELS = Tensor("float32", (2,), bytes(range(8)))
IN_LINE = ["float32", [2]]
LARGE = Tensor("uint8", (1000,), bytes(1000))


def feature(**changes: Any) -> MultiModalFeature:
    plain = MultiModalFeature(
        modality="image", identifier="hash", offset=1, length=2, data={"pixel_values": Batched(PIXELS)}
    )
    return attrs.evolve(plain, **changes)


def limits(version: str) -> Limits:
    versions = parse_version(version)
    assert versions is not None
    layout = request_layout(versions)
    assert layout is not None
    return Limits(256, 20, 64, versions, layout, multimodal=True)


NOW = limits("0.32.0")


def fields(version: str, *features: MultiModalFeature) -> dict[str, Any]:
    return admit(EngineCoreRequest([1] * 10, mm_features=features), limits(version)).fields


def kind_and_settings(version: str, part: object) -> Any:
    [sent] = fields(version, feature(data={"x": part}))["mm_features"]
    data = sent["data"]
    return (data["x"] if isinstance(data, dict) else data[0])["field"]


def test_from_0_10_2_on_a_feature_is_one_map() -> None:
    [sent] = fields("0.32.0", feature())["mm_features"]
    assert sent.keys() == {"data", "modality", "identifier", "mm_position", "mm_hash"}
    assert (sent["modality"], sent["identifier"], sent["mm_hash"]) == ("image", "hash", "hash")
    assert sent["mm_position"] == {"offset": 1, "length": 2}
    assert sent["data"]["pixel_values"]["data"][:2] == IN_LINE
    [other] = fields("0.32.0", feature(mm_hash="item"))["mm_features"]
    assert (other["identifier"], other["mm_hash"]) == ("hash", "item")


def test_up_to_0_15_an_item_is_an_array_of_named_parts() -> None:
    [sent] = fields("0.15.0", feature())["mm_features"]
    [part] = sent["data"]
    assert (part["modality"], part["key"], part["data"][:2]) == ("image", "pixel_values", IN_LINE)


def test_up_to_0_10_1_a_request_has_three_arrays() -> None:
    two = (feature(identifier="b", offset=5), feature(identifier="a"))
    sent = fields("0.10.1", *two)
    assert sent["mm_hashes"] == ["a", "b"]
    assert sent["mm_placeholders"] == [{"offset": 1, "length": 2}, {"offset": 5, "length": 2}]
    assert [item[0]["key"] for item in sent["mm_kwargs"]] == ["pixel_values"] * 2
    assert [len(inputs) for inputs in fields("0.10.0", *two)["mm_inputs"]] == [1, 1]


@pytest.mark.parametrize(
    ("part", "named", "in_order"),
    [
        (Batched(PIXELS), ["batched", {}], ["batched"]),
        (
            Flat(PIXELS, slices=[[0, 2, None]], dim=1),
            ["flat", {"slices": [[0, 2, None]], "dim": 1}],
            ["flat", [[0, 2, None]], 1],
        ),
        (Flat(PIXELS, slices=[[(0, 2)]]), ["flat", {"slices": [[[0, 2]]], "dim": 0}], ["flat", [[[0, 2]]], 0]),
        (Shared(PIXELS, batch_size=3), ["shared", {"batch_size": 3}], ["shared", 3]),
    ],
)
def test_settings_have_names_from_0_13_on(part: object, named: Any, in_order: Any) -> None:
    assert kind_and_settings("0.13.0", part) == kind_and_settings("0.33.0", part) == named
    assert kind_and_settings("0.12.0", part) == kind_and_settings("0.10.2", part) == in_order


def test_what_stays_on_the_cpu_says_so() -> None:
    part = Batched(PIXELS, keep_on_cpu=True)
    assert kind_and_settings("0.32.0", part) == ["batched", {"keep_on_cpu": True}]
    with pytest.raises(RequestRejected, match="has it not") as caught:
        fields("0.12.0", feature(data={"x": part}))
    assert caught.value.field == "mm_features[0].data['x'].keep_on_cpu"


def test_features_are_sent_in_the_order_of_their_places_and_named_in_that_of_the_caller() -> None:
    sent = fields("0.32.0", feature(offset=7, identifier="late"), feature(offset=0, identifier="early"))
    assert [each["identifier"] for each in sent["mm_features"]] == ["early", "late"]
    with pytest.raises(RequestRejected) as caught:
        fields("0.32.0", feature(offset=7), feature(offset=9))
    assert caught.value.field == "mm_features[1].length"


def test_large_arrays_are_frames_wherever_they_are() -> None:
    mask = Tensor("bool", (2,), b"\x01\x00")
    data = {"a": Batched([LARGE, [PIXELS, LARGE]]), "b": Shared(2.5), "c": Shared(-3)}
    admitted = admit(EngineCoreRequest([1] * 10, mm_features=[feature(data=data, is_embed=mask)]), NOW)
    assert [frame is LARGE.data for frame in admitted.aux] == [True, True]
    sent: Any = admitted.fields["mm_features"]
    assert sent[0]["mm_position"]["is_embed"][:2] == ["bool", [2]]
    first, (second, third) = sent[0]["data"]["a"]["data"]
    assert (first, second[:2], third) == (["uint8", [1000], 1], IN_LINE, ["uint8", [1000], 2])
    assert (sent[0]["data"]["b"]["data"], sent[0]["data"]["c"]["data"]) == (2.5, -3)


def test_no_features_are_as_none() -> None:
    for nothing in ((), []):
        assert "mm_features" not in admit(EngineCoreRequest([1], mm_features=nothing), Limits()).fields


def test_engines_of_which_nothing_was_said_get_none() -> None:
    with pytest.raises(RequestRejected, match=r"VllmProtocol\(multimodal=True\)") as caught:
        admit(EngineCoreRequest([1] * 10, mm_features=[feature()]), Limits())
    assert caught.value.field == "mm_features"


@pytest.mark.parametrize(
    ("first", "last"), [((0, 10, 1), (0, 10, 2)), ((0, 12, 0), (0, 13, 0)), ((0, 15, 0), (0, 16, 0))]
)
def test_engines_that_may_be_of_releases_that_differ_get_none(
    first: tuple[int, int, int], last: tuple[int, int, int]
) -> None:
    either = Limits(256, 20, 64, Versions(first, last), multimodal=True)
    with pytest.raises(RequestRejected, match=r"VllmProtocol\(version=\.\.\.\)"):
        admit(EngineCoreRequest([1] * 10, mm_features=[feature()]), either)


def nest(levels: int, innermost: object) -> object:
    value = innermost
    for _ in range(levels):
        value = [value]
    return value


REFUSED: dict[str, tuple[MultiModalFeature, str]] = {
    "before the prompt": (feature(offset=-1), "offset"),
    "behind the prompt": (feature(offset=10), "offset"),
    "no placeholder": (feature(length=0), "length"),
    "more placeholders than prompt": (feature(length=10), "length"),
    "a mask of another length": (feature(is_embed=Tensor("bool", (3,), bytes(3))), "is_embed"),
    "a mask of numbers": (feature(is_embed=Tensor("uint8", (2,), bytes(2))), "is_embed"),
    "a mask that is a list": (feature(is_embed=[True, False]), "is_embed"),
    "no modality": (feature(modality=""), "modality"),
    "no identifier": (feature(identifier=None), "identifier"),
    "a hash that is bytes": (feature(mm_hash=b"x"), "mm_hash"),
    "no data": (feature(data={}), "data"),
    "data without names": (feature(data=[Batched(PIXELS)]), "data"),
    "data with a number for a name": (feature(data={1: Batched(PIXELS)}), "data"),
    "an array without a kind": (feature(data={"x": PIXELS}), "data['x']"),
    "no array": (feature(data={"x": Batched("x")}), "data['x'].data"),  # type: ignore[arg-type]
    "nothing": (feature(data={"x": Batched(None)}), "data['x'].data"),  # type: ignore[arg-type]
    "not a number": (feature(data={"x": Shared(float("nan"))}), "data['x'].data"),
    "a bool": (feature(data={"x": Shared(True)}), "data['x'].data"),
    "65 bits": (feature(data={"x": Shared(2**64)}), "data['x'].data"),
    "too deep": (feature(data={"x": Batched(nest(5, PIXELS))}), "data['x'].data[0][0][0][0]"),  # type: ignore[arg-type]
    "an item of no array": (feature(data={"x": Batched([PIXELS, None])}), "data['x'].data[1]"),  # type: ignore[list-item]
    "data that is too short": (feature(data={"x": Batched(Tensor("uint8", (3,), b"x"))}), "data['x'].data"),
    "no flag": (feature(data={"x": Batched(PIXELS, keep_on_cpu=1)}), "data['x'].keep_on_cpu"),  # type: ignore[arg-type]
    "a ninth dimension": (feature(data={"x": Flat(PIXELS, dim=8)}), "data['x'].dim"),
    "no slices": (feature(data={"x": Flat(PIXELS, slices=5)}), "data['x'].slices"),  # type: ignore[arg-type]
    "a slice of four": (feature(data={"x": Flat(PIXELS, slices=[[1, 2, 3, 4]])}), "data['x'].slices[0]"),
    "a slice of text": (feature(data={"x": Flat(PIXELS, slices=[["a"]])}), "data['x'].slices[0]"),  # type: ignore[list-item]
    "slices too deep": (
        feature(data={"x": Flat(PIXELS, slices=nest(6, 1))}),  # type: ignore[arg-type]
        "data['x'].slices[0][0][0][0]",
    ),
    "shared by nobody": (feature(data={"x": Shared(PIXELS, batch_size=0)}), "data['x'].batch_size"),
}


@pytest.mark.parametrize(("wrong", "field"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_name(wrong: MultiModalFeature, field: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        admit(EngineCoreRequest([1] * 10, mm_features=[wrong]), NOW)
    assert caught.value.field == f"mm_features[0].{field}"


@pytest.mark.parametrize("given", [5, "x", {"a": 1}])
def test_what_is_no_sequence_of_features_is_refused(given: Any) -> None:
    with pytest.raises(RequestRejected) as caught:
        admit(EngineCoreRequest([1] * 10, mm_features=given), NOW)
    assert caught.value.field == "mm_features"
    with pytest.raises(RequestRejected) as caught:
        admit(EngineCoreRequest([1] * 10, mm_features=[feature(), given]), NOW)
    assert caught.value.field == "mm_features[1]"
