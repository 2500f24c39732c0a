"""Outputs of a given form: one constraint, well formed, by the names that the release has for it."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest

from lockstep_trio import EngineCoreRequest, RequestRejected, SamplingParams, VllmProtocol
from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.engines.vllm import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def sampling_of(form: Any, version: str = "0.32.0", **options: Any) -> dict[str, Any]:
    """The sampling map as it is sent."""
    protocol = VllmProtocol(version=version, max_model_len=99, **{"structured_outputs": "xgrammar", **options})
    session = protocol.session([RankInfo(0, data_parallel_size=1)])
    request = EngineCoreRequest([1], SamplingParams(structured_outputs=form))
    payload = msgpack.unpackb(session.encode_add(request, "a")[1])
    found = next(each for each in payload if isinstance(each, dict))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("form", "sent"),
    [
        (StructuredOutputs(json=SCHEMA), {"json": json.dumps(SCHEMA)}),
        (StructuredOutputs(json='{"a": 1}'), {"json": '{"a": 1}'}),
        (StructuredOutputs(json={}), {"json": "{}"}),
        (StructuredOutputs(json="[" * 64 + "]" * 64), {"json": "[" * 64 + "]" * 64}),
        (StructuredOutputs(regex="a+"), {"regex": "a+"}),
        (StructuredOutputs(regex="(" * 200 + ")" * 200), {"regex": "(" * 200 + ")" * 200}),
        (StructuredOutputs(choice=("yes", "no")), {"grammar": 'root ::= "yes" | "no"'}),
        (StructuredOutputs(choice=['a"\\\n\0\x7fü']), {"grammar": 'root ::= "a\\"\\\\\\n\\u0000\\u007fü"'}),
        (StructuredOutputs(grammar="root ::= 'a'"), {"grammar": "root ::= 'a'"}),
        (StructuredOutputs(json_object=True), {"json_object": True}),
        (StructuredOutputs(structural_tag="{}"), {"structural_tag": "{}"}),
    ],
    ids=repr,
)
def test_one_constraint_is_sent_with_the_backend(form: StructuredOutputs, sent: dict[str, Any]) -> None:
    assert sampling_of(form) == {"max_tokens": 16, "structured_outputs": {**sent, "_backend": "xgrammar"}}


def test_before_0_11_the_map_and_the_backend_have_other_names() -> None:
    form = StructuredOutputs(regex="a")
    for version in ("0.10.0", "0.10.2"):
        sent = sampling_of(form, version, trust_grammars=True, structured_outputs="guidance")
        assert sent == {"max_tokens": 16, "guided_decoding": {"regex": "a", "backend": "guidance"}}
    sent = sampling_of(StructuredOutputs(choice=["a"]), structured_outputs="guidance")
    assert sent["structured_outputs"] == {"choice": ["a"], "_backend": "guidance"}
    sent = sampling_of(form, "0.11.0", trust_grammars=True)
    assert sent["structured_outputs"] == {"regex": "a", "_backend": "xgrammar"}


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (StructuredOutputs(), ""),
        (StructuredOutputs(regex="a", json_object=True), ""),
        (StructuredOutputs(regex="a", choice=[]), ""),
        (StructuredOutputs(json=""), ".json"),
        (StructuredOutputs(json="{"), ".json"),
        (StructuredOutputs(json="[" * 100_000), ".json"),
        (StructuredOutputs(json={"a": {1, 2}}), ".json"),
        (StructuredOutputs(json={"a": float("nan")}), ".json"),
        (StructuredOutputs(json={(1,): 2}), ".json"),  # type: ignore[dict-item]
        (StructuredOutputs(json=[1]), ".json"),  # type: ignore[arg-type]
        (StructuredOutputs(regex=""), ".regex"),
        (StructuredOutputs(regex=b"a"), ".regex"),  # type: ignore[arg-type]
        (StructuredOutputs(regex="\ud800"), ".regex"),
        (StructuredOutputs(regex="a" * 1_000_001), ".regex"),
        (StructuredOutputs(json="[" * 66 + "]" * 66), ".json"),
        (StructuredOutputs(structural_tag="[" * 82 + "]" * 82), ".structural_tag"),
        (StructuredOutputs(regex="a\0"), ".regex"),
        (StructuredOutputs(regex="(" * 201 + ")" * 201), ".regex"),
        (StructuredOutputs(grammar=" \n"), ".grammar"),
        (StructuredOutputs(grammar="[" * 201), ".grammar"),
        (StructuredOutputs(choice=[]), ".choice"),
        (StructuredOutputs(choice="ab"), ".choice"),
        (StructuredOutputs(choice=["a", ""]), ".choice[1]"),
        (StructuredOutputs(choice=["a", 5]), ".choice[1]"),  # type: ignore[list-item]
        (StructuredOutputs(grammar=5), ".grammar"),  # type: ignore[arg-type]
        (StructuredOutputs(json_object=1), ".json_object"),  # type: ignore[arg-type]
        (StructuredOutputs(structural_tag="x"), ".structural_tag"),
    ],
    ids=lambda value: f"{value!r:.60}",
)
def test_what_is_malformed_is_refused_by_name(form: StructuredOutputs, field: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        sampling_of(form)
    assert caught.value.field == f"sampling.structured_outputs{field}"


@pytest.mark.parametrize(
    ("version", "options", "words"),
    [
        ("0.32.0", {"structured_outputs": None}, "backend is not known"),
        ("0.25.1", {}, "trust_grammars=True"),
        ("0.10.0", {}, "trust_grammars=True"),
    ],
)
def test_where_it_is_not_known_or_could_kill_it_is_refused_with_the_way_out(
    version: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestRejected, match=words):
        sampling_of(StructuredOutputs(regex="a"), version, **options)


def test_of_releases_that_name_it_differently_none_is_guessed() -> None:
    protocol = VllmProtocol(structured_outputs="xgrammar", trust_grammars=True)
    answers = {"is_scheduler_paused": False, "post_step": True, "get_supported_tasks": True}
    session = protocol.session([RankInfo(0, answers=answers)])
    with pytest.raises(RequestRejected, match=r"0\.10\.2 to 0\.16"):
        session.encode_add(EngineCoreRequest([1], SamplingParams(structured_outputs=StructuredOutputs(regex="a"))), "a")


def test_a_backend_that_no_engine_has_cannot_be_named() -> None:
    with pytest.raises(ValueError, match="structured_outputs is 'magic'"):
        VllmProtocol(structured_outputs="magic")  # type: ignore[arg-type]
