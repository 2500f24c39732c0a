"""What a caller asks of a vLLM engine. Plain frozen values: nothing is checked before they are submitted.

The names are those of ``EngineCoreRequest`` (``vllm/v1/engine/__init__.py``) and ``SamplingParams``
(``vllm/sampling_params.py``). What those classes compute from a tokenizer is given here as token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs

from lockstep_trio.engines.vllm.lora import LoRA
from lockstep_trio.engines.vllm.multimodal import MultiModalFeature
from lockstep_trio.engines.vllm.pooling import PoolingParams
from lockstep_trio.engines.vllm.repetition import RepetitionDetection
from lockstep_trio.engines.vllm.structured import StructuredOutputs
from lockstep_trio.engines.vllm.tensors import Tensor


@final
@attrs.frozen
class SamplingParams:
    """How to pick the tokens of one request. The defaults are the engine's own.

    The ranges are those that the engine itself insists on. It does so while it decodes the request and outside
    of any ``try``, so a value out of range would not be refused there: it would kill the engine. Hence they are
    checked here, by ``submit``, which raises ``RequestRejected``.
    """

    temperature: float = 1.0
    """0 to 2; 0 is greedy."""
    top_p: float = 1.0
    """Above 0, up to 1; 1 is off."""
    top_k: int = 0
    """0 and -1 are off."""
    min_p: float = 0.0
    """0 to 1; 0 is off."""
    presence_penalty: float = 0.0
    """-2 to 2; 0 is off."""
    frequency_penalty: float = 0.0
    """-2 to 2; 0 is off."""
    repetition_penalty: float = 1.0
    """Above 0, finite; 1 is off."""
    seed: int | None = None
    """Signed 64 bits. None: the engine's own generator, shared by its requests."""
    max_tokens: int = 16
    """Most tokens to generate, 1 or more. The request also ends where the model's context does."""
    min_tokens: int = 0
    """Fewest tokens before a stop token may come; up to ``max_tokens``."""
    stop_token_ids: Sequence[int] = ()
    """Each of these ends the request. A model's second and further end-of-sequence ids belong here."""
    eos_token_id: int | None = None
    """The model's end-of-sequence id. The engine does not look it up by itself; None means that there is none."""
    ignore_eos: bool = False
    """Go on after ``eos_token_id``."""
    logprobs: int | None = None
    """Log-probabilities per output token, up to the engine's ``max_logprobs``; 0 is the sampled token alone, -1
    the whole vocabulary, None off. They come as ``RequestOutput.logprobs``."""
    prompt_logprobs: int | None = None
    """Likewise per prompt token; ``RequestOutput.prompt_logprobs``."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> what to add to its logit, -100 to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these may come. None: all; empty is refused."""
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """Sequences of token ids that must not come."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the output. Needs an engine with a tokenizer, and ``VllmProtocol(structured_outputs=...)``."""
    logprob_token_ids: Sequence[int] | None = None
    """1 to 128 token ids, each counted once: log-probabilities of these and of the sampled token, in place of the
    likeliest ones; ``logprobs`` must be None (from 0.21.0 on). Rows may be wider than was asked for: the rest is token
    0 at minus infinity. Engines without the newer model runner, those on a CPU among them, do not keep requests apart:
    other requests of the same step that ask for ``logprobs`` get only their sampled tokens, and if the engine also
    speculates, it dies of such company."""
    prompt_logprob_token_ids: Sequence[Sequence[int]] | None = None
    """For each token of the prompt but the last, up to ``max_logprobs`` token ids: how likely each is to be next, as
    ``RequestOutput.prompt_token_id_logprobs`` (from 0.32.0 on, with the newer model runner only; the other ignores it).
    Shorter rows are filled up, as -1 is, whose score is minus infinity."""
    prompt_logprob_start: int | None = None
    """The first token of the prompt that ``prompt_logprob_token_ids`` has a row for; None is 0."""
    repetition_detection: RepetitionDetection | None = None
    """When to end an output that repeats itself, with ``FinishReason.REPETITION`` (from 0.17.0 on)."""
    thinking_token_budget: int | None = None
    """Most tokens between the marks of thought, 0 or more; then the end mark is forced (from 0.19.0 on). An engine that
    was started without a reasoning parser ignores it."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt again, whatever is cached of it (from 0.11.1 on). None: where something is asked about
    each of its tokens, and there it cannot be False."""
    watermarking: bool | None = None
    """Whether to mark the text, on an engine that is set up to (from 0.30.0 on). None: yes up to 0.31, and no from 0.32
    on, where vLLM's own front end says yes."""
    routed_experts_prompt_start: int = 0
    """``RequestOutput.routed_experts`` begins with this token of the prompt (from 0.22.0 on)."""
    trace_decode_token_ids: Sequence[int] | None = None
    """The tokens to make, whatever the model thinks of them; log-probabilities are its own (from 0.29.0 on). Once they
    are through it goes on by itself, up to ``max_tokens``. An engine without ``--enable-trace-replay`` ignores them."""
    extra_args: Mapping[str, Any] | None = None
    """Arguments by name, for what is plugged into the engine; ``kv_transfer_params`` are for its connector. Plain data,
    at most 32 deep. Whoever reads them there trusts them, and what it raises kills the group."""
    n: int = 1
    """Always 1: one request is one sequence."""


@final
@attrs.frozen
class EngineCoreRequest:
    """One request: a prompt, and how to go on from it or what to make of it."""

    prompt_token_ids: Sequence[int] | None
    """The prompt, 1 to ``max_model_len - 1`` ids (for ``pooling``, ``max_model_len``). A list of ints is the fast case;
    arrays are accepted. None where ``prompt_embeds`` is all of it."""
    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    """How to pick tokens."""
    request_id: str | None = attrs.field(default=None, kw_only=True)
    """The caller's name for the request, up to 256 characters; None to have one made."""
    data_parallel_rank: int | None = attrs.field(default=None, kw_only=True)
    """The rank that shall run it; None to have one chosen."""
    priority: int = attrs.field(default=0, kw_only=True)
    """Lower is sooner, where the engine schedules by priority. Signed 64 bits."""
    cache_salt: str | None = attrs.field(default=None, kw_only=True)
    """Requests share cached prefixes only with those of the same salt."""
    trace_headers: Mapping[str, str] | None = attrs.field(default=None, kw_only=True)
    """Headers of a distributed trace, for engines that trace (from 0.10.2 on)."""
    arrival_time: float = attrs.field(default=0.0, kw_only=True)
    """Breaks ties of priority: earlier is sooner. Seconds of whatever clock all requests use."""
    pooling: PoolingParams | None = attrs.field(default=None, kw_only=True)
    """What to make of the prompt, in place of ``sampling``. The engines' tasks must be named to the protocol."""
    lora: LoRA | None = attrs.field(default=None, kw_only=True)
    """The adapter to use, one that ``Adapters.add`` has loaded."""
    prompt_embeds: Tensor | None = attrs.field(default=None, kw_only=True)
    """Embeddings in place of token ids, ``(tokens, VllmProtocol(embedding_size=...))`` of ``float32``, ``float16`` or
    ``bfloat16`` (from 0.11.0 on). What is longer than a few rows is sent without a copy, see ``Tensor.of``."""
    prompt_is_token_ids: Sequence[bool] | None = attrs.field(default=None, kw_only=True)
    """Where ``prompt_token_ids`` and ``prompt_embeds`` are both given, for each position: whether its token counts, or
    else its embedding (from 0.21.0 on). None otherwise."""
    mm_features: Sequence[MultiModalFeature] = attrs.field(default=(), kw_only=True)
    """Images and the like, whose placeholders are in the prompt."""
    session_id: str | None = attrs.field(default=None, kw_only=True)
    """Requests of one session, for connectors that keep what they have in common (from 0.28.0 on)."""
