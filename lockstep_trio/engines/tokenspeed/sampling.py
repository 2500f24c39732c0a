"""The checks of ``TokenSpeedSampling``, field by field, and the array that is sent.

The engine's ``SamplingParams`` is a positional array whose order is its contract
(``tokenspeed/runtime/sampling/sampling_params.py``); any prefix of it is legal. It is sent as short as it can be and
never with ``is_normalized``, so that each engine version applies its own rules: which ``top_k`` stands for none, and
which seed a greedy request has.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import attrs

from lockstep_trio.engines.common.checks import INT32, flag, real, reject, text, token_ids, whole
from lockstep_trio.engines.tokenspeed.request import TokenSpeedSampling

MAX_TOP_K: Final = 127
"""``_TOP_K_FUSED_MAX`` less one: ``verify`` refuses 128, the kernel's own limit."""
CONSTRAINTS: Final = ("json_schema", "regex", "ebnf", "structural_tag")
"""The engine takes one of the first three, or refuses; and of two with the last it takes the former in silence."""

ORDER: Final = (
    *("max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "min_new_tokens", "json_schema", "regex", "ebnf", "structural_tag"),
    *("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "thinking_budget"),
    *("custom_params", "stream_interval", "logit_bias", "seed"),
)
"""The engine's fields up to the last one that is ever sent."""

NOT_OFFERED: Final[Mapping[str, object]] = {
    "stop": None,
    "min_new_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "thinking_budget": None,
    "custom_params": None,
}
"""What is sent for fields of the engine's that have no counterpart here: its own defaults."""

Check: TypeAlias = Callable[[str, object], object]
"""(field, value) -> the value as sent. Defaults never come here."""


def _token_set(bound: int) -> Check:
    # None where there are none: an empty array and nil mean the same to the engine, and nil may be left out.
    return lambda field, value: list(dict.fromkeys(token_ids(field, value, bound))) or None


def _logit_bias(bound: int) -> Check:
    def check(field: str, value: object) -> dict[str, float] | None:
        if not isinstance(value, Mapping):
            raise reject(field, value, "a mapping of token ids to numbers, or None")
        # The engine's keys are strings, and what has an int for a key it drops whole, without an answer.
        biases: dict[str, float] = {}
        for token, bias in value.items():
            key = whole(field, token, 0, bound - 1, f"a mapping from token ids, each from 0 to {bound - 1}")
            biases[str(key)] = real(f"{field}[{key}]", bias, -100, 100, "from -100 to 100")
        return biases or None

    return check


def _constraint(field: str, value: object) -> str | None:
    return text(field, value, None)


@functools.cache
def checks(bound: int) -> Mapping[str, Check]:
    """The check of each field, for token ids below ``bound``."""
    share = functools.partial(real, low=0, high=1)
    penalty = functools.partial(real, low=-2, high=2, words="from -2 to 2")
    count = functools.partial(whole, low=1, high=INT32, words=f"an integer from 1 to {INT32}, or None")
    return {
        "max_new_tokens": count,
        "stop_token_ids": _token_set(bound),
        "temperature": functools.partial(real, low=0, high=sys.float_info.max, words="0 or more, and finite"),
        "top_p": functools.partial(share, words="above 0, up to 1", above=True),
        "top_k": _top_k,
        "min_p": functools.partial(share, words="from 0 to 1"),
        "frequency_penalty": penalty,
        "presence_penalty": penalty,
        "repetition_penalty": functools.partial(real, low=0, high=2, words="above 0, up to 2", above=True),
        **dict.fromkeys(CONSTRAINTS, _constraint),
        "ignore_eos": flag,
        "stream_interval": count,
        "logit_bias": _logit_bias(bound),
        "seed": functools.partial(whole, low=0, high=2**63 - 1, words="an integer from 0 to 2**63 - 1, or None"),
        "n": functools.partial(whole, low=1, high=1, words="1: one request is one sequence"),
    }


def _top_k(field: str, value: object) -> int:
    words = f"-1 (off) or an integer from 1 to {MAX_TOP_K}"
    top_k = whole(field, value, -1, MAX_TOP_K, words)
    if top_k == 0:
        raise reject(field, value, words)
    return top_k


_DEFAULTS: Final = {field.name: field.default for field in attrs.fields(TokenSpeedSampling)}


def check_sampling(params: TokenSpeedSampling, bound: int) -> list[object]:
    """Check every field and what they mean together; return the array that is sent.

    Args:
        params: What was asked for.
        bound: One above the highest token id.

    Raises:
        RequestRejected: Naming the field as ``sampling.<name>``.
    """
    wire: dict[str, object] = {}
    checked = checks(bound)
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value is not default:  # the defaults are the engine's own, and the usual case
            sent = checked[name](f"sampling.{name}", value)
            if sent is not None and sent != default:
                wire[name] = sent
    _check_constraints(wire)
    last = max((ORDER.index(name) for name in wire), default=-1)
    return [wire.get(name, _on_the_wire(name)) for name in ORDER[: last + 1]]


def _check_constraints(wire: Mapping[str, object]) -> None:
    given = [name for name in CONSTRAINTS if name in wire]
    if len(given) > 1:
        raise reject(f"sampling.{given[1]}", wire[given[1]], f"None where sampling.{given[0]} is given")


def _on_the_wire(name: str) -> object:
    """The default of a field as the engine has it; a set is nil there while it is empty."""
    return (_DEFAULTS.get(name) or None) if name == "stop_token_ids" else {**_DEFAULTS, **NOT_OFFERED}[name]
