"""Prompts of embeddings: vectors where token ids would be looked up.

An engine that runs without ``--enable-prompt-embeds`` looks at the ids alone, of which there are none; one that runs
with it copies the rows into a buffer of its model's width, and the whole group dies of another width
(``v1/worker/gpu_model_runner.py: _prepare_inputs``). Types are converted by the copy. So the width has to be said:
``VllmProtocol(embedding_size=...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lockstep_trio.engines.common.admission import check_prompt
from lockstep_trio.engines.vllm.checks import INT32, Limits, flag, reject, sequence
from lockstep_trio.engines.vllm.fields import need_field
from lockstep_trio.engines.vllm.frames import AuxFrames
from lockstep_trio.engines.vllm.request import EngineCoreRequest
from lockstep_trio.engines.vllm.tensors import Tensor

DTYPES: Final = ("float32", "float16", "bfloat16")


def check_embeds(
    request: EngineCoreRequest, limits: Limits, room: int, aux: AuxFrames
) -> tuple[int, dict[str, object]]:
    """Check a prompt that has embeddings, or says that it has.

    Args:
        request: The request.
        limits: What is known about the engines.
        room: Tokens of the context that must be left.
        aux: Takes the embeddings.

    Returns:
        Its length, and the fields of the request that carry it.

    Raises:
        RequestRejected: With the field, the value and the limit.
    """
    embeds: object = request.prompt_embeds
    if embeds is None:
        raise reject("prompt_is_token_ids", request.prompt_is_token_ids, "None where there are no prompt_embeds")
    need_field("prompt_embeds", embeds, limits)
    if limits.embedding_size is None:
        words = "None: VllmProtocol(embedding_size=...) says that the engines take embeddings, and how wide"
        raise reject("prompt_embeds", embeds, words)
    words = f"a Tensor of shape (tokens, {limits.embedding_size}) and one of {', '.join(DTYPES)}"
    if not isinstance(embeds, Tensor) or embeds.dtype not in DTYPES or len(embeds.shape) != 2:
        raise reject("prompt_embeds", embeds, words)
    length, width = embeds.shape
    if width != limits.embedding_size:
        raise reject("prompt_embeds", embeds, words)
    most = INT32 if limits.max_model_len is None else limits.max_model_len - room
    if not 0 < length <= most:
        raise reject("len(prompt_embeds)", length, f"from 1 to {most} tokens")
    if (asked := getattr(request.sampling, "prompt_logprobs", None)) is not None:
        raise reject("sampling.prompt_logprobs", asked, "None: embeddings are no tokens")
    fields = {"prompt_embeds": aux.put("prompt_embeds", embeds)}
    return length, fields | _tokens(request, length, limits, room)


def _tokens(request: EngineCoreRequest, length: int, limits: Limits, room: int) -> dict[str, object]:
    """Those of a prompt that is mixed."""
    mask = request.prompt_is_token_ids
    if request.prompt_token_ids is None and mask is None:
        return {"prompt_token_ids": None}
    need_field("prompt_is_token_ids", mask, limits)
    words = f"{length} bools, one for each row of prompt_embeds"
    given: Sequence[object] = sequence("prompt_is_token_ids", mask, words)
    if len(given) != length:
        raise reject("prompt_is_token_ids", mask, words)
    flags = [flag(f"prompt_is_token_ids[{at}]", each) for at, each in enumerate(given)]
    # Ids at the other positions are read as well, and then thrown away; they have to be in the vocabulary all the same.
    ids = check_prompt(request.prompt_token_ids, limits.token_bound, limits.max_model_len, room)
    if len(ids) != length:
        raise reject("prompt_token_ids", request.prompt_token_ids, f"{length} token ids, one for each row")
    return {"prompt_token_ids": ids, "prompt_is_token_ids": flags}
