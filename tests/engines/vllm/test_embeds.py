from __future__ import annotations

from typing import Any

import pytest

from lockstep_trio import EngineCoreRequest, RequestRejected, SamplingParams, VllmProtocol
from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.engines.vllm import PoolingParams, Tensor
from lockstep_trio.engines.vllm.admission import admit
from lockstep_trio.engines.vllm.checks import Limits
from lockstep_trio.engines.vllm.layout import request_layout
from lockstep_trio.engines.vllm.version import parse_version

LIMITS = Limits(256, 20, 16, embedding_size=4)


def rows(count: int, width: int = 4, dtype: str = "float32") -> Tensor:
    return Tensor(dtype, (count, width), bytes(count * width * (4 if dtype == "float32" else 2)))


def test_embeddings_stand_in_for_the_prompt() -> None:
    short = admit(EngineCoreRequest(None, prompt_embeds=rows(2)), LIMITS)
    assert short.fields["prompt_token_ids"] is None
    assert not short.aux
    embeds = rows(15, dtype="bfloat16")
    assert admit(EngineCoreRequest(None, prompt_embeds=embeds), LIMITS).aux == []
    wide = Limits(256, 20, 16, embedding_size=64)
    long = rows(15, 64)
    admitted = admit(EngineCoreRequest(None, prompt_embeds=long), wide)
    assert admitted.fields["prompt_embeds"] == ["float32", [15, 64], 1]
    [frame] = admitted.aux
    assert frame is long.data


def test_a_mixed_prompt_says_of_each_position_what_counts() -> None:
    mask = [True, False]
    request = EngineCoreRequest([3, 0], prompt_embeds=rows(2), prompt_is_token_ids=mask)
    fields = admit(request, LIMITS).fields
    assert (fields["prompt_token_ids"], fields["prompt_is_token_ids"]) == ([3, 0], mask)


def old(version: str) -> Limits:
    versions = parse_version(version)
    assert versions is not None
    layout = request_layout(versions)
    assert layout is not None
    return Limits(256, 20, 16, versions, layout, embedding_size=4)


REFUSED: dict[str, tuple[Limits, dict[str, Any], str]] = {
    "engines that take none": (Limits(), {"prompt_embeds": rows(2)}, "prompt_embeds"),
    "engines that have no such field": (old("0.10.2"), {"prompt_embeds": rows(2)}, "prompt_embeds"),
    "engines that cannot mix": (
        old("0.20.0"),
        {"prompt_token_ids": [1, 2], "prompt_embeds": rows(2), "prompt_is_token_ids": [True, True]},
        "prompt_is_token_ids",
    ),
    "another width": (LIMITS, {"prompt_embeds": rows(2, 5)}, "prompt_embeds"),
    "integers": (LIMITS, {"prompt_embeds": Tensor("int32", (2, 4), bytes(32))}, "prompt_embeds"),
    "one dimension": (LIMITS, {"prompt_embeds": Tensor("float32", (4,), bytes(16))}, "prompt_embeds"),
    "no tensor": (LIMITS, {"prompt_embeds": [[1.0] * 4]}, "prompt_embeds"),
    "too little data": (LIMITS, {"prompt_embeds": Tensor("float32", (2, 4), bytes(31))}, "prompt_embeds"),
    "no rows": (LIMITS, {"prompt_embeds": rows(0)}, "len(prompt_embeds)"),
    "as many as the context has": (LIMITS, {"prompt_embeds": rows(16)}, "len(prompt_embeds)"),
    "ids, and no word which of them count": (
        LIMITS,
        {"prompt_token_ids": [1, 2], "prompt_embeds": rows(2)},
        "prompt_is_token_ids",
    ),
    "no ids where some count": (
        LIMITS,
        {"prompt_embeds": rows(2), "prompt_is_token_ids": [True, False]},
        "prompt_token_ids",
    ),
    "a word too few": (
        LIMITS,
        {"prompt_token_ids": [1, 2], "prompt_embeds": rows(2), "prompt_is_token_ids": [True]},
        "prompt_is_token_ids",
    ),
    "no bool": (
        LIMITS,
        {"prompt_token_ids": [1, 2], "prompt_embeds": rows(2), "prompt_is_token_ids": [True, 0]},
        "prompt_is_token_ids[1]",
    ),
    "an id too many": (
        LIMITS,
        {"prompt_token_ids": [1, 2, 3], "prompt_embeds": rows(2), "prompt_is_token_ids": [True, True]},
        "prompt_token_ids",
    ),
    "words without embeddings": (
        LIMITS,
        {"prompt_token_ids": [1, 2], "prompt_is_token_ids": [True, True]},
        "prompt_is_token_ids",
    ),
    "log-probabilities of a prompt without tokens": (
        LIMITS,
        {"prompt_embeds": rows(2), "sampling": SamplingParams(prompt_logprobs=1)},
        "sampling.prompt_logprobs",
    ),
}


@pytest.mark.parametrize(("limits", "given", "field"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_name(limits: Limits, given: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        admit(EngineCoreRequest(**{"prompt_token_ids": None, **given}), limits)
    assert caught.value.field == field


def test_embeddings_that_are_pooled_may_fill_the_context() -> None:
    limits = Limits(256, 20, 16, embedding_size=4, tasks=("embed",))
    admit(EngineCoreRequest(None, prompt_embeds=rows(16), pooling=PoolingParams("embed")), limits)


def test_without_a_context_the_wire_is_the_limit() -> None:
    admit(EngineCoreRequest(None, prompt_embeds=rows(1000)), Limits(embedding_size=4))


@pytest.mark.parametrize("size", [0, -1, 2**20 + 1])
def test_the_protocol_refuses_a_width_that_none_has(size: int) -> None:
    with pytest.raises(ValueError, match="embedding_size is"):
        VllmProtocol(embedding_size=size)


def test_what_the_protocol_was_told_reaches_admission() -> None:
    protocol = VllmProtocol(embedding_size=4, tasks=["embed"], multimodal=True, version="0.32.0")
    limits = protocol.session([RankInfo(0, data_parallel_size=1)]).limits
    assert (limits.embedding_size, limits.tasks, limits.multimodal) == (4, ("embed",), True)
