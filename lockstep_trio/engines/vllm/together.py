"""What sampling parameters mean together, and for a prompt of a certain length.

What they mean each for itself is in ``sampling``.
"""

from __future__ import annotations

from typing import Final

from lockstep_trio.engines.vllm.checks import INT32, Limits, reject
from lockstep_trio.engines.vllm.request import SamplingParams

NOT_WITH_TRACE: Final = (
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "structured_outputs",
    "repetition_detection",
    "thinking_token_budget",
    "bad_words_token_ids",
)
"""What vLLM's front end refuses beside a trace (``SamplingParams._validate_trace_replay``)."""

_OF_THE_PROMPT: Final = ("prompt_logprobs", "prompt_logprob_token_ids")


def check_together(params: SamplingParams, wire: dict[str, object], prompt_length: int, limits: Limits) -> None:
    """What the newer parameters mean beside others, and for a prompt of that length.

    Args:
        params: As they were given, for the errors.
        wire: As they are sent, under the names that they have here.
        prompt_length: Tokens.
        limits: What is known about the engines.

    Raises:
        RequestRejected: Naming one of those that do not go together.
    """
    if "logprob_token_ids" in wire and "logprobs" in wire:
        raise reject("sampling.logprobs", params.logprobs, "None where logprob_token_ids is given")
    if wire.get("routed_experts_prompt_start", 0) not in range(prompt_length):
        # Up to 0.29 at least the scheduler asserts it (``v1/core/sched/scheduler.py: update_from_output``).
        words = f"an integer from 0 to {prompt_length - 1}, within the prompt"
        raise reject("sampling.routed_experts_prompt_start", params.routed_experts_prompt_start, words)
    _check_rows_fit(params, wire, prompt_length)
    if wire.get("skip_reading_prefix_cache") is False and not wire.keys().isdisjoint(_OF_THE_PROMPT):
        # Rows of what is in the cache would hold whatever was in memory (``LogprobsTensors.empty_cpu``).
        words = f"True or None where {' or '.join(_OF_THE_PROMPT)} is given"
        raise reject("sampling.skip_reading_prefix_cache", False, words)
    if "trace_decode_token_ids" in wire:
        _check_trace(params, wire, prompt_length, limits.max_model_len)


def _check_rows_fit(params: SamplingParams, wire: dict[str, object], prompt_length: int) -> None:
    """Table and start go together: of another number of rows the model runner dies, or scores what it likes."""
    start = wire.get("prompt_logprob_start", 0)
    if "prompt_logprob_token_ids" not in wire:
        if "prompt_logprob_start" in wire:
            raise reject("sampling.prompt_logprob_start", start, "None where there is no prompt_logprob_token_ids")
        return
    assert isinstance(start, int)
    rows = prompt_length - 1 - start
    if start and rows < 1:
        raise reject("sampling.prompt_logprob_start", start, f"less than {prompt_length - 1}: no rows are left")
    table = wire["prompt_logprob_token_ids"]
    assert isinstance(table, list)
    if table[1][0] != rows:
        words = f"{rows} rows, one for each token of the prompt but the last, from prompt_logprob_start on"
        raise reject("sampling.prompt_logprob_token_ids", params.prompt_logprob_token_ids, words)


def _check_trace(params: SamplingParams, wire: dict[str, object], prompt_length: int, context: int | None) -> None:
    trace = wire["trace_decode_token_ids"]
    assert isinstance(trace, list)
    for name in NOT_WITH_TRACE:
        if name in wire:
            words = f"None where {name} is given"
            raise reject("sampling.trace_decode_token_ids", params.trace_decode_token_ids, words)
    if context is not None and prompt_length + len(trace) > context:
        # A table of the model runner's is as wide as the context (``v1/worker/gpu/sample/trace_replay.py``).
        words = f"at most {context - prompt_length} token ids, as max_model_len is {context}"
        raise reject("sampling.trace_decode_token_ids", params.trace_decode_token_ids, words)


def check_lengths(params: SamplingParams, wire: dict[str, object], prompt_length: int, context: int | None) -> None:
    """Prompt and output, of which there must be room for the fewest; fills in ``max_tokens``.

    Raises:
        RequestRejected: There is none.
    """
    most = wire.setdefault("max_tokens", 16)  # required: the engine takes no "not given" for it
    fewest = wire.get("min_tokens", 0)
    assert isinstance(most, int)
    assert isinstance(fewest, int)
    if fewest > most:
        raise reject("sampling.min_tokens", params.min_tokens, f"an integer from 0 to max_tokens, {most}")
    if context is not None and fewest and prompt_length + fewest > context:
        # Up to 0.26 at least, check_stop looks at min_tokens before it looks at the end of the context: such a
        # request would neither end nor be scheduled again, and its group would step for ever.
        raise reject("sampling.min_tokens", params.min_tokens, f"at most {context} (max_model_len) with the prompt")
    if prompt_length + most > INT32:
        raise reject("sampling.max_tokens", params.max_tokens, f"at most {INT32} with the prompt")
