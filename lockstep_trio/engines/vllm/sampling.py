"""The checks of ``SamplingParams``, field by field, and the map that is sent.

The map holds what differs from the engine's defaults and always ``max_tokens`` (``vllm/sampling_params.py``, 0.10 to
0.33). The engine ignores keys that it does not know, so a parameter of some releases alone is refused where it could
be that nobody reads it: see ``SINCE``. Parameters that only vLLM's own front end reads are not here: ``stop``,
``bad_words``, ``detokenize``, ``output_kind``, ``stream_interval``, ``flat_logprobs`` and the like. Three keys are the
ones that this front end computes (``update_from_generation_config``, ``update_from_tokenizer``): ``_eos_token_id`` is
what the scheduler compares with (``v1/core/sched/utils.py: check_stop``), ``_all_stop_token_ids`` is what
``min_tokens`` holds back, ``_bad_words_token_ids`` is what the sampler reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import attrs

from lockstep_trio.engines.vllm.checks import INT32, Limits, flag, real, reject, sequence, token_ids, whole
from lockstep_trio.engines.vllm.plain import check_extra_args
from lockstep_trio.engines.vllm.repetition import check_repetition
from lockstep_trio.engines.vllm.request import SamplingParams
from lockstep_trio.engines.vllm.scoring import check_rows, check_scored, most_logprobs
from lockstep_trio.engines.vllm.structured import check_structured, structured_key
from lockstep_trio.engines.vllm.together import check_lengths, check_together
from lockstep_trio.engines.vllm.version import Version

MAX_ALLOWED_IDS: Final = 1024
"""``v1/worker/gpu/sample/logit_bias.py: MAX_NUM_ALLOWED_TOKEN_IDS``."""
MAX_BIASES: Final = 1024
"""``v1/worker/gpu/sample/logit_bias.py: MAX_NUM_LOGIT_BIAS_TOKENS``."""
MAX_STOP_IDS: Final = 128
"""``v1/worker/gpu/sample/logit_bias.py: MAX_NUM_STOP_TOKEN_IDS``; counts only with ``min_tokens``."""
MAX_BAD_WORDS: Final = 128
"""``vllm/envs.py: VLLM_MAX_NUM_BAD_WORDS``, its default."""
MAX_BAD_WORD_TOKENS: Final = 1024
"""``vllm/envs.py: VLLM_MAX_BAD_WORDS_TOTAL_TOKENS``, its default."""


LOGPROBS_IN_ARRAYS: Final = (0, 11, 1)
"""Before that they come as nested lists, item by item."""
MAX_LISTED: Final = 1024
"""So many of these per token at most: some vocabularies as a list would be a message that is too long to be read, which
a lockstep group does not survive."""
ALL_LOGPROBS: Final = (0, 10, 2)
"""The first release whose ``SamplingParams`` takes -1; the others die of it."""
SINCE: Final[Mapping[str, Version]] = MappingProxyType(
    {
        "skip_reading_prefix_cache": (0, 11, 1),
        "repetition_detection": (0, 17, 0),
        "thinking_token_budget": (0, 19, 0),
        # 0.20 has it, but one of its model runners does not read it, and what the other makes of it is thrown away
        # unless ``logprobs`` is given too (``v1/core/sched/scheduler.py: update_from_output``).
        "logprob_token_ids": (0, 21, 0),
        "routed_experts_prompt_start": (0, 22, 0),
        "trace_decode_token_ids": (0, 29, 0),
        "watermarking": (0, 30, 0),
        # 0.31 has them, but as one list of ids for all tokens of the prompt.
        "prompt_logprob_token_ids": (0, 32, 0),
        "prompt_logprob_start": (0, 32, 0),
    }
)
"""First release with a parameter, as it is meant here; those that are not named have been there all along."""


Check: TypeAlias = Callable[[str, object, Limits], object]
"""(field, value, limits) -> the value as sent. Defaults never come here, so neither does None where it is one."""


def _real(low: float, high: float, words: str, *, above: bool = False) -> Check:
    return lambda field, value, _: real(field, value, low, high, words, above=above)


def _whole(low: int, high: int, words: str) -> Check:
    return lambda field, value, _: whole(field, value, low, high, words)


def _flag(field: str, value: object, _: Limits) -> bool:
    return flag(field, value)


def _token(field: str, value: object, limits: Limits) -> int:
    top = limits.token_bound - 1
    return whole(field, value, 0, top, f"a token id from 0 to {top}, or None")


def _tokens(field: str, value: object, limits: Limits) -> list[int]:
    return list(dict.fromkeys(token_ids(field, value, limits.token_bound)))


def _seed(field: str, value: object, limits: Limits) -> int:
    if not limits.seeds:
        raise reject(field, value, "None: the protocol was told seeds=False")
    return whole(field, value, -(2**63), 2**63 - 1, "a signed 64-bit integer, or None")


def _logprobs(field: str, value: object, limits: Limits) -> int:
    most = most_logprobs(limits)
    # -1 asks for the whole vocabulary, whose size must then be within the engine's limit.
    all_fit = limits.max_logprobs == -1 or (limits.vocab_size is not None and limits.vocab_size <= limits.max_logprobs)
    all_fit = all_fit and limits.versions.all_from(ALL_LOGPROBS)
    if not limits.versions.all_from(LOGPROBS_IN_ARRAYS):
        all_fit, most = all_fit and (limits.vocab_size or INT32) <= MAX_LISTED, min(most, MAX_LISTED)
    words = f"from 0 to {most} (max_logprobs {limits.max_logprobs})" + (", -1 for all" if all_fit else "") + ", or None"
    return whole(field, value, -1 if all_fit else 0, most, words)


def _logit_bias(field: str, value: object, limits: Limits) -> dict[int, float]:
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        raise reject(field, value, f"a mapping of at most {MAX_BIASES} token ids to numbers, or None")
    top = limits.token_bound - 1
    biases: dict[int, float] = {}
    for token, bias in value.items():
        key = whole(field, token, 0, top, f"a mapping from token ids, each from 0 to {top}")
        biases[key] = real(f"{field}[{key}]", bias, -100, 100, "from -100 to 100")
    return biases


def _allowed(field: str, value: object, limits: Limits) -> list[int]:
    ids = _tokens(field, value, limits)
    if not 0 < len(ids) <= MAX_ALLOWED_IDS:
        raise reject(field, value, f"1 to {MAX_ALLOWED_IDS} token ids, or None")
    return ids


def _bad_words(field: str, value: object, limits: Limits) -> list[list[int]]:
    words = [
        list(token_ids(f"{field}[{at}]", each, limits.token_bound))
        for at, each in enumerate(sequence(field, value, "a sequence of sequences of token ids, or None"))
    ]
    if not all(words):
        # The sampler takes the last token of each and would find none.
        raise reject(f"{field}[{words.index([])}]", [], "at least one token id")
    if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_BAD_WORD_TOKENS:
        raise reject(field, value, f"at most {MAX_BAD_WORDS} words of {MAX_BAD_WORD_TOKENS} token ids together")
    return words


def _trace(field: str, value: object, limits: Limits) -> list[int]:
    ids = list(token_ids(field, value, limits.token_bound))
    if not ids:
        raise reject(field, value, "at least one token id, or None")
    return ids


_CHECKS: Final[dict[str, Check]] = {
    "temperature": _real(0, 2, "from 0 to 2"),
    "top_p": _real(0, 1, "above 0, up to 1", above=True),
    "top_k": _whole(-1, INT32, "an integer, -1 or 0 (off) or more"),
    "min_p": _real(0, 1, "from 0 to 1"),
    "presence_penalty": _real(-2, 2, "from -2 to 2"),
    "frequency_penalty": _real(-2, 2, "from -2 to 2"),
    "repetition_penalty": _real(0, math.inf, "above 0 and finite", above=True),
    "seed": _seed,
    "max_tokens": _whole(1, INT32, f"an integer from 1 to {INT32}"),
    "min_tokens": _whole(0, INT32, "an integer from 0 to max_tokens"),
    "stop_token_ids": _tokens,
    "eos_token_id": _token,
    "ignore_eos": _flag,
    "logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed,
    "bad_words_token_ids": _bad_words,
    "structured_outputs": check_structured,
    "logprob_token_ids": check_scored,
    "prompt_logprob_token_ids": check_rows,
    "prompt_logprob_start": _whole(0, INT32, f"an integer from 0 to {INT32}, or None"),
    "repetition_detection": check_repetition,
    "thinking_token_budget": _whole(0, INT32, f"an integer from 0 to {INT32}, or None"),
    "skip_reading_prefix_cache": _flag,
    "watermarking": _flag,
    "routed_experts_prompt_start": _whole(0, INT32, f"an integer from 0 to {INT32}"),
    "trace_decode_token_ids": _trace,
    "extra_args": check_extra_args,
    "n": _whole(1, 1, "1: one request is one sequence"),
}

_FIELDS: Final = tuple((field.name, field.default, _CHECKS[field.name]) for field in attrs.fields(SamplingParams))


def check_sampling(params: SamplingParams, prompt_length: int, limits: Limits) -> dict[str, object]:
    """Check every field and what they mean together; return the map that is sent.

    Raises:
        RequestRejected: Naming the field as ``sampling.<name>``.
    """
    wire: dict[str, object] = {}
    for name, default, check in _FIELDS:
        value = getattr(params, name)
        if value is not default:  # the defaults are the engine's own, and the usual case
            if name in SINCE:
                _need(name, value, limits)
            checked = check(f"sampling.{name}", value, limits)
            if checked not in (default, []):
                wire[name] = checked
    if not SINCE.keys().isdisjoint(wire):
        check_together(params, wire, prompt_length, limits)
    if (form := wire.pop("structured_outputs", None)) is not None:
        wire[structured_key(limits)] = form
    check_lengths(params, wire, prompt_length, limits.max_model_len)
    _put_computed_keys(params, wire)
    return wire


def _need(name: str, value: object, limits: Limits) -> None:
    """Refuse a parameter that might not be read, or be taken for something else."""
    versions, since = limits.versions, SINCE[name]
    if versions.all_from(since):
        return
    first = ".".join(map(str, since))
    if versions.none_from(since):
        words = f"left out: vLLM {versions} does not have it, or not as it is here; {first} was the first"
    else:
        words = (
            f"left out: the engines may be vLLM {versions}, and {first} was the first to have it "
            "(name the release: VllmProtocol(version=...))"
        )
    raise reject(f"sampling.{name}", value, words)


def _put_computed_keys(params: SamplingParams, wire: dict[str, object]) -> None:
    if words := wire.pop("bad_words_token_ids", None):
        wire["_bad_words_token_ids"] = words
    stop = wire.get("stop_token_ids", [])
    assert isinstance(stop, list)
    eos = wire.pop("eos_token_id", None)
    if eos is not None:
        stop = list(dict.fromkeys([*stop, eos]))
        wire["_all_stop_token_ids"] = stop
        if "ignore_eos" not in wire:
            wire["_eos_token_id"] = eos
    if "min_tokens" in wire and len(stop) > MAX_STOP_IDS:
        words_ = f"at most {MAX_STOP_IDS} ids, eos_token_id included, where min_tokens is given"
        raise reject("sampling.stop_token_ids", params.stop_token_ids, words_)
