"""Requests that must not leave, as data: what each of them is about, and what an engine makes of it.

``POISONS`` is read three times: over hand-driven ranks (nothing is sent), against a real group (it is none the worse),
and by the engine's own decoder, which says whether ``Harm`` is right. Whoever finds another way to hurt an engine adds
a row here. The rows fit a group of ``RANKS`` engines of ``VOCABULARY``, ``MAX_LOGPROBS`` and ``MAX_MODEL_LEN``.
"""

from __future__ import annotations

import enum
import re
from collections import UserDict
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import attrs

from lockstep_trio import EngineCoreRequest, SamplingParams
from lockstep_trio.engines.vllm import LoRA, RepetitionDetection, StructuredOutputs

VOCABULARY = 256
MAX_LOGPROBS = 20
MAX_MODEL_LEN = 512
RANKS = 2

NAN, INFINITY = float("nan"), float("inf")
INT32 = 2**31 - 1
SURROGATE = "\ud800"


class Harm(enum.Enum):
    """What becomes of an engine that is sent such a request, as a client would send it that does not look."""

    DEAF = "the thread that reads requests ends without a word: its decoder, or SamplingParams, refuses the request"
    FATAL = "the decoder takes it, and the whole group dies of it: in the scheduler or in the model runner"
    ENDLESS = "a request that never ends (seen up to 0.26)"
    GPU = "beyond the fixed tables of the model runner for GPUs, which raises; the one for CPUs has none"
    ANSWERED = "none: the engine answers with an error, which is refused here all the same"
    NONE = "none: the engine ignores it or makes sense of it, which is refused here all the same"
    UNSENDABLE = "cannot be put into MessagePack at all: it would be an accident in the client"


@attrs.frozen
class Poison:
    """One request that is refused."""

    name: str
    request: Any
    field: str
    """What the error must name."""
    value: Any
    """What the error must give as the value."""
    harm: Harm
    seen: bool = False
    """It was sent to a real group (vLLM 0.32.0, two ranks on a CPU) that died of it as ``harm`` says. Where that is
    FATAL and was not seen, it was read from the engine's source. What is said to do no harm was sent and did none, but
    for ids, of which the engine asks nothing, and for fields that came with 0.17 or later, which were read."""

    @property
    def part(self) -> str:
        """The field without the place in it."""
        return re.sub(r"\[.*|[()]|^len", "", self.field)


class Odd:
    """Plain in no sense."""

    def __repr__(self) -> str:
        return "Odd()"


class Several:
    """As a tensor of several items, which offers to be a number and is none (``torch.Tensor.__float__``)."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

    def __index__(self) -> int:
        raise RuntimeError("only integer tensors of a single element can be converted to an index")

    def __repr__(self) -> str:
        return "Several()"


# Anything but a number, with what becomes of it: the decoder is strict, and a bool is no number to it.
NO_NUMBER: dict[str, Any] = {
    "text": "1",
    "a bool": True,
    "a list": [1],
    "a map": {"a": 1},
    "bytes": b"1",
    "a complex number": 1j,
    "an object": Odd(),
    "several numbers": Several(),
    "a lone surrogate": SURROGATE,
}
UNSENDABLE = (complex, Odd, Several)


def harm_of(value: object, harm: Harm = Harm.DEAF) -> Harm:
    """Of a value that is wrong by its type or by its size."""
    too_long = isinstance(value, int) and not -(2**63) <= value < 2**64
    return Harm.UNSENDABLE if isinstance(value, UNSENDABLE) or value == SURROGATE or too_long else harm


def sampled(name: str, value: object, harm: Harm = Harm.DEAF, *, seen: bool = False, **more: Any) -> Poison:
    """A sampling field whose value is wrong as a whole."""
    params = SamplingParams(**{name: value, **more})
    shown = f"{name} is {value!r:.50}"
    return Poison(shown, EngineCoreRequest([1, 2, 3], params), f"sampling.{name}", value, harm_of(value, harm), seen)


def inside(name: str, value: object, place: str, item: object, harm: Harm, *, seen: bool = False) -> Poison:
    """A sampling field in which one item is wrong."""
    whole = sampled(name, value, harm_of(item, harm), seen=seen)
    return attrs.evolve(whole, field=f"sampling.{name}{place}", value=item, harm=harm_of(item, harm))


def asked(name: str, field: str, value: object, harm: Harm, *, seen: bool = False, **fields: Any) -> Poison:
    """A request that is wrong outside of its sampling."""
    request = EngineCoreRequest(**{"prompt_token_ids": [1, 2, 3], **fields})
    return Poison(name, request, field, value, harm_of(value, harm), seen)


def numbers() -> Iterator[Poison]:
    """The fields that are single numbers."""
    beyond: dict[str, list[Any]] = {
        "temperature": [-5e-324, -0.1, 2.0000000000000004, 1e308],
        "top_p": [0, 0.0, -0.0, -0.1, 1.0000000000000002],
        "min_p": [-5e-324, -0.1, 1.0000000000000002],
        "presence_penalty": [-2.0000000000000004, 2.1],
        "frequency_penalty": [-2.1, 2.0000000000000004],
        "repetition_penalty": [0, 0.0, -1.0, -1e308],
    }
    yield sampled("temperature", -1.0, seen=True)
    yield sampled("top_p", 5, seen=True)
    for name, values in beyond.items():
        for value in [*values, NAN, INFINITY, -INFINITY, None]:
            yield sampled(name, value, seen=name == "temperature" and value != value)
        yield sampled(name, 10**400)
        for value in NO_NUMBER.values():
            yield sampled(name, value, seen=name == "temperature" and value == "1")
    for name, integers in {
        "top_k": [-2, -(2**31), -(2**63)],
        "min_tokens": [-1, 17, 2**31, 2**63],
        "max_tokens": [0, -1, -(2**63)],
        "logprobs": [-2, -(2**63)],
        "prompt_logprobs": [-2, -(2**63)],
        "seed": [],
        "n": [0, -1, 2**63],
        "thinking_token_budget": [-2, -(2**63)],
        "routed_experts_prompt_start": [],
        "prompt_logprob_start": [],
    }.items():
        for value in [*integers, 1.5, NAN, INFINITY, Decimal(1), Fraction(1), 2**64, -(2**63) - 1, 10**30]:
            yield sampled(name, value, Harm.UNSENDABLE if isinstance(value, Decimal | Fraction) else Harm.DEAF)
        for value in NO_NUMBER.values():
            yield sampled(name, value)
    yield attrs.evolve(sampled("max_tokens", 0), name="max_tokens is zero", seen=True)


def numbers_that_decode() -> Iterator[Poison]:
    """Single numbers that the decoder takes."""
    yield sampled("max_tokens", None, Harm.ANSWERED, seen=True)
    yield sampled("min_tokens", None)
    yield sampled("n", None)
    yield sampled("top_k", None)
    for name in ("logprobs", "prompt_logprobs"):
        yield sampled(name, MAX_LOGPROBS + 1, Harm.NONE)  # its vocabulary has that many
        yield sampled(name, VOCABULARY + 1, Harm.FATAL, seen=True)
        yield sampled(name, 1000, Harm.FATAL, seen=name == "logprobs")
        yield sampled(name, 2**31, Harm.FATAL)
        yield sampled(name, -1, Harm.NONE)  # all of a small vocabulary; but more than the limit that was set
    yield sampled("n", 2, Harm.NONE)  # only its front end reads it
    for value in (2**31, 2**32, 2**63 - 1):
        yield sampled("top_k", value, Harm.NONE)
        yield sampled("max_tokens", value, Harm.NONE)
    yield sampled("max_tokens", INT32 - 2, Harm.NONE)  # with the prompt it is one more than fits
    yield sampled("seed", 2**63, Harm.NONE)
    yield sampled("min_tokens", 510, Harm.ENDLESS, max_tokens=510)
    yield sampled("ignore_eos", None)
    for name in ("ignore_eos", "skip_reading_prefix_cache", "watermarking"):
        for value in (0, 1, 1.0, "true", [True], Odd()):
            yield sampled(name, value)
    yield sampled("skip_reading_prefix_cache", False, Harm.NONE, prompt_logprobs=0)  # rows of nothing but old memory
    for value in (-1, 2**31, 2**63):
        yield sampled("thinking_token_budget", value, Harm.NONE)  # there is no end to a budget as high as that
    yield sampled("routed_experts_prompt_start", None)
    for value in (-1, 3, 2**31, 2**63):
        # Where experts are returned, a scheduler up to 0.29 at least dies of one that is not within the prompt.
        yield sampled("routed_experts_prompt_start", value, Harm.NONE)


def token_lists() -> Iterator[Poison]:
    """The fields that hold token ids."""
    for name, nothing in (("stop_token_ids", Harm.NONE), ("allowed_token_ids", Harm.NONE)):
        for item in (VOCABULARY, -1, INT32, 2**31, 2**63, -(2**63), 2**64):
            # -1 is the last token: the ids are used as indexes.
            harm = Harm.FATAL if name == "allowed_token_ids" and item != -1 else Harm.NONE
            yield inside(name, [1, item], "[1]", item, harm, seen=harm is Harm.FATAL and item == VOCABULARY)
        for item in (1.0, NAN, "1", None, True, [1], {}, b"", Odd()):
            yield inside(name, [1, item], "[1]", item, Harm.DEAF)
        for value in ("ab", b"ab", 5, 1.5, True, {1: 2}, Odd(), SURROGATE):
            yield sampled(name, value)
        for value in ({1, 2}, frozenset({1}), iter([1])):
            yield sampled(name, value, Harm.UNSENDABLE)
        if name == "stop_token_ids":
            yield sampled(name, None, nothing)
    yield sampled("allowed_token_ids", [], Harm.NONE)
    for item in (VOCABULARY, -1, INT32, 2**31):
        yield sampled("eos_token_id", item, Harm.NONE)
    for item in (1.5, "2", True, [2], NAN, 2**64, Odd()):
        yield sampled("eos_token_id", item)
    yield attrs.evolve(sampled("stop_token_ids", list(range(129)), Harm.GPU, min_tokens=1), name="129 stop ids")
    held_back = SamplingParams(stop_token_ids=[1, VOCABULARY], min_tokens=2)
    name, field = "a stop id outside the vocabulary is held back", "sampling.stop_token_ids[1]"
    yield asked(name, field, VOCABULARY, Harm.FATAL, seen=True, sampling=held_back)


def scores() -> Iterator[Poison]:
    """Ids to give the log-probabilities of. Those of the prompt are read by the model runner for GPUs alone."""
    name = "logprob_token_ids"
    for item in (VOCABULARY, -1, INT32, 2**31, 2**63, -(2**63), 2**64):
        yield inside(name, [1, item], "[1]", item, Harm.FATAL)
    for item in (1.0, NAN, "1", None, True, [1], {}, b"", Odd()):
        yield inside(name, [1, item], "[1]", item, Harm.DEAF)
    for value in ("ab", b"ab", 5, 1.5, True, {1: 2}, Odd(), SURROGATE):
        yield sampled(name, value)
    yield sampled(name, [], Harm.NONE)
    yield attrs.evolve(sampled(name, list(range(129)), Harm.GPU), name="129 ids to score")
    both = SamplingParams(logprobs=1, logprob_token_ids=[7])
    yield asked("ids to score beside logprobs", "sampling.logprobs", 1, Harm.NONE, sampling=both)
    name = "prompt_logprob_token_ids"
    for item in (VOCABULARY, -2, INT32, 2**31, -(2**63)):
        yield inside(name, [[1], [item]], "[1][0]", item, Harm.GPU)
    for item in (1.0, "1", None, [1], {}, Odd()):
        yield inside(name, [[1], [item]], "[1][0]", item, Harm.DEAF)
    for value in (5, 1.5, "abc", b"abc", True, Odd(), SURROGATE):
        yield sampled(name, value)
    for value in ([], [[]], [[], []], [[1]], [[1], [2], [3]]):  # two rows would be right
        yield sampled(name, value, Harm.GPU)
    yield attrs.evolve(sampled(name, [[*range(21)]] * 2, Harm.NONE), name="21 ids to score at each token of the prompt")
    for start in (0, 1, -1, 2**31):
        yield sampled("prompt_logprob_start", start, Harm.NONE)  # of nothing
    for start in (-1, 2, 2**31):
        harmful = sampled("prompt_logprob_start", start, Harm.GPU, prompt_logprob_token_ids=[[1], [2]])
        yield attrs.evolve(harmful, name=f"a prompt of 3 is scored from {start} on")


def endings() -> Iterator[Poison]:
    """``repetition_detection``, and a trace to follow."""
    for name, value, harm in (
        ("max_pattern_size", 0, Harm.NONE),  # off, if min_pattern_size is too
        ("max_pattern_size", -1, Harm.DEAF),
        ("max_pattern_size", 2**31, Harm.NONE),
        ("min_pattern_size", 0, Harm.NONE),  # 1
        ("min_pattern_size", -1, Harm.DEAF),
        ("min_pattern_size", 5, Harm.DEAF),
        ("min_count", 1, Harm.DEAF),
        ("min_count", -(2**63), Harm.DEAF),
        ("min_count", 2**31, Harm.NONE),
    ):
        yield repetition(name, value, harm)
    for name in ("max_pattern_size", "min_pattern_size", "min_count"):
        for value in (2.5, NAN, None, "1", True, [1], 2**64, Odd()):
            yield repetition(name, value, Harm.DEAF)
    for value in (5, "abc", True, [1, 1, 2], Odd(), SURROGATE):
        yield sampled("repetition_detection", value)
    yield sampled("repetition_detection", {"max_pattern_size": 2, "min_count": 2}, Harm.NONE)
    name = "trace_decode_token_ids"
    for item in (VOCABULARY, -1, INT32, 2**31, 2**63, 2**64):
        yield inside(name, [1, item], "[1]", item, Harm.GPU)
    for item in (1.0, "1", None, True, [1], Odd()):
        yield inside(name, [1, item], "[1]", item, Harm.DEAF)
    for value in ("ab", b"ab", 5, True, {1: 2}, Odd()):
        yield sampled(name, value)
    yield sampled(name, [], Harm.NONE)
    yield attrs.evolve(sampled(name, [1] * 510, Harm.GPU), name="a trace beyond the context")
    for beside in ({"prompt_logprobs": 0}, {"bad_words_token_ids": [[1]]}, {"thinking_token_budget": 5}):
        yield attrs.evolve(sampled(name, [1], Harm.NONE, **beside), name=f"a trace beside {beside}")


def repetition(name: str, value: object, harm: Harm) -> Poison:
    """One of its numbers is wrong."""
    given: dict[str, Any] = {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 2, name: value}
    if name == "max_pattern_size" and value == 0:
        given["min_pattern_size"] = 0
    params = SamplingParams(repetition_detection=RepetitionDetection(**given))
    shown, field = f"{name} of a repetition is {value!r}", f"sampling.repetition_detection.{name}"
    return asked(shown, field, value, harm, sampling=params)


def extras() -> Iterator[Poison]:
    """``extra_args``, which the engine's decoder takes in any form. On the engine's own, nobody reads them."""
    name = "extra_args"
    for value in (5, "ab", b"ab", True, [1], [["a", 1]], Odd(), SURROGATE):
        yield sampled(name, value)
    for key in (1, None, True, b"a", (1,)):
        yield attrs.evolve(sampled(name, {key: 1}), value=key, name=f"{name} has the key {key!r}")
    for item in ({1}, Odd(), 2**64, -(2**63) - 1, 1j, Decimal(1), SURROGATE):
        yield inside(name, {"a": item}, "['a']", item, Harm.UNSENDABLE)
        yield inside(name, {"a": [1, {"b": item}]}, "['a'][1]['b']", item, Harm.UNSENDABLE)
    for key in (1.5, None, True, b"a", (1,)):
        yield inside(name, {"a": {key: 1}}, "['a']", key, Harm.NONE)
    for transfers in ("kv_transfer_params", "ec_transfer_params"):
        for item in (5, "ab", [1], True):
            yield inside(name, {transfers: item}, f"['{transfers}']", item, Harm.NONE)  # a connector would raise
    deep: list[object] = []
    for _ in range(32):
        deep = [deep]
    yield attrs.evolve(inside(name, {"a": deep}, "['a']" + "[0]" * 31, [[]], Harm.NONE), name=f"{name} are nested")


def biases() -> Iterator[Poison]:
    """``logit_bias``, of which the engine's decoder takes any float."""
    for key in (VOCABULARY, -1, INT32, 2**31, 2**63):
        yield bias_of(key, 1.0, Harm.NONE if key == -1 else Harm.FATAL, seen=key == VOCABULARY)
    for key in (1.0, "1", None, True, b"1", (1,)):
        yield bias_of(key, 1.0, Harm.DEAF)
    for bias in (100.00000000000001, -101, 1e308, NAN, INFINITY, -INFINITY):
        yield inside("logit_bias", {7: bias}, "[7]", bias, Harm.NONE)
    for bias in ("1", None, True, [1.0], {}, 10**400, Odd(), SURROGATE):
        yield inside("logit_bias", {7: bias}, "[7]", bias, Harm.DEAF)
    for value in ([1], [[1, 2.0]], 5, "1", b"", True, Odd()):
        yield sampled("logit_bias", value)
    many = dict.fromkeys(range(1025), 0.0)
    yield attrs.evolve(sampled("logit_bias", many, Harm.FATAL), name="1025 biases")


def bias_of(key: object, bias: object, harm: Harm, *, seen: bool = False) -> Poison:
    # A real dict cannot hold 1 and True apart, so the odd key stands alone.
    return attrs.evolve(
        inside("logit_bias", {key: bias}, "", key, harm, seen=seen),
        harm=harm_of(key, harm),
        name=f"logit_bias has the key {key!r}",
    )


def bad_words() -> Iterator[Poison]:
    """``bad_words_token_ids``: no list of its front end can be as wrong as these."""
    name = "bad_words_token_ids"
    yield inside(name, [[1], []], "[1]", [], Harm.FATAL, seen=True)
    for item in (VOCABULARY, -1, INT32, 2**31, 2**63, -(2**63)):
        yield inside(name, [[1], [2, item]], "[1][1]", item, Harm.NONE)
    for item in (1.0, "1", None, True, [1], {}, Odd()):
        yield inside(name, [[1], [2, item]], "[1][1]", item, Harm.DEAF)
    for word in (1, "a", b"a", None, True, {1: 2}, Odd()):
        yield inside(name, [[1], word], "[1]", word, Harm.DEAF)
    for value in (5, "ab", b"ab", True, {1: 2}, Odd()):
        yield sampled(name, value)
    yield attrs.evolve(sampled(name, [[1]] * 129, Harm.GPU), name="129 bad words")
    yield attrs.evolve(sampled(name, [[1] * 513] * 2, Harm.GPU), name="bad words of 1026 ids")


def prompts() -> Iterator[Poison]:
    """The prompt."""
    name = "prompt_token_ids"

    def prompt(value: object, field: str, worst: object, harm: Harm, *, seen: bool = False) -> Poison:
        shown = f"the prompt is the {type(value).__name__} {value!r:.40}"
        return asked(shown, field, worst, harm, seen=seen, prompt_token_ids=value)

    yield prompt([], name, [], Harm.FATAL, seen=True)
    yield prompt((), name, (), Harm.FATAL)
    for length in (MAX_MODEL_LEN, 600, 100_000):
        harm, seen = Harm.FATAL, length < 1000
        poison = prompt([1] * length, f"len({name})", length, harm, seen=seen)
        yield attrs.evolve(poison, name=f"the prompt has {length} ids")
    for item in (VOCABULARY, -1, INT32, 2**31, 2**63, -(2**63), 2**64):
        yield prompt([1, item, 2], f"{name}[1]", item, Harm.FATAL, seen=item in (VOCABULARY, -1))
    for item in (1.0, NAN, "1", None, True, [1], {}, b"1", Odd(), SURROGATE):
        yield prompt([1, item, 2], f"{name}[1]", item, Harm.DEAF)
    yield prompt(None, name, None, Harm.ANSWERED, seen=True)
    for value in ("hello", b"hello", bytearray(b"hello"), memoryview(b"hello"), 5, 1.5, True, {1: 2}, SURROGATE):
        yield prompt(value, name, value, Harm.DEAF)
    for value in ({1, 2}, iter([1]), Odd(), UserDict({1: 2})):
        yield prompt(value, name, value, Harm.UNSENDABLE)


def field(name: str, value: object, harm: Harm) -> Poison:
    return asked(f"{name} is {value!r:.40}", name, value, harm, **{name: value})


def the_rest() -> Iterator[Poison]:
    """All that is neither prompt nor sampling."""

    yield attrs.evolve(field("sampling", None, Harm.ANSWERED), seen=True)
    yield field("sampling", {"max_tokens": 5}, Harm.NONE)
    for value in ("greedy", 5, [1], SamplingParams):
        yield field("sampling", value, Harm.UNSENDABLE if isinstance(value, type) else Harm.DEAF)
    for value in (2**63, -(2**63) - 1, 1.0, True, False, "1", None, [1], NAN, Odd()):
        # The engine has no bound for it, nor a use for more than 64 bits.
        yield field("priority", value, Harm.NONE if value == 2**63 else Harm.DEAF)
    for value in (NAN, INFINITY, -INFINITY):
        yield field("arrival_time", value, Harm.NONE)  # it would sort the waiting requests by it
    for value in ("now", None, True, [1.0], 10**400, Odd()):
        yield field("arrival_time", value, Harm.DEAF)
    for value in (5, b"salt", True, ["salt"], {}, SURROGATE, Odd()):
        yield field("cache_salt", value, Harm.DEAF)
    yield field("cache_salt", "", Harm.NONE)
    for value in ("traceparent", 5, True, [["a", "b"]], Odd()):
        yield field("trace_headers", value, Harm.DEAF)
    for item in (1, None, True, [1], SURROGATE):
        yield asked(f"a trace header is {item!r}", "trace_headers['a']", item, Harm.DEAF, trace_headers={"a": item})
    yield asked("a trace header has a number for a name", "trace_headers", 1, Harm.DEAF, trace_headers={1: "a"})
    for value in ("", "x" * 257):
        yield field("request_id", value, Harm.NONE)
    for value in (5, b"id", True, ["id"]):
        yield field("request_id", value, Harm.DEAF)
    for value in (f"id{SURROGATE}", Odd()):
        yield field("request_id", value, Harm.UNSENDABLE)
    for value in (-1, RANKS, 65_536, 2**64, True, False, 0.0, "0", [0], Odd()):
        yield attrs.evolve(field("data_parallel_rank", value, Harm.NONE), harm=Harm.UNSENDABLE)  # the socket says it
    for value in (None, [1, 2, 3], {"prompt_token_ids": [1]}, "hello", SamplingParams(), EngineCoreRequest):
        yield Poison(f"the request is {value!r:.20}", value, "request", value, Harm.UNSENDABLE)


def forms() -> Iterator[Poison]:
    """``structured_outputs``, for engines of which no backend is known."""
    for value in ("json", 5, True, [1], {"regex": "a", "json_object": True}):
        yield sampled("structured_outputs", value)
    yield sampled("structured_outputs", {"json": {}}, Harm.ANSWERED)
    yield sampled("structured_outputs", StructuredOutputs(regex="a"), Harm.UNSENDABLE)


def carried() -> Iterator[Poison]:
    """What engines do not take unless the caller said that they do."""
    for value in (5, "sql", ["sql"], {"name": "sql"}, True):
        yield field("lora", value, Harm.DEAF)
    yield field("lora", LoRA("sql", 1, "/sql"), Harm.UNSENDABLE)
    for name in ("pooling", "prompt_embeds", "prompt_is_token_ids", "mm_features"):
        for value in (5, "x", True):
            yield field(name, value, Harm.DEAF)
    yield field("mm_features", [5], Harm.DEAF)
    for value in (5, ["a"], True):
        yield field("session_id", value, Harm.DEAF)
    yield field("session_id", "", Harm.NONE)
    yield field("session_id", "x" * 257, Harm.NONE)


POISONS: tuple[Poison, ...] = (
    *carried(),
    *numbers(),
    *numbers_that_decode(),
    *token_lists(),
    *scores(),
    *endings(),
    *extras(),
    *biases(),
    *bad_words(),
    *forms(),
    *prompts(),
    *the_rest(),
)

PARTS: tuple[str, ...] = tuple(dict.fromkeys(poison.part for poison in POISONS))
"""The fields that they are about."""


@attrs.frozen
class Harmless:
    """One request that looks wrong and is not."""

    name: str
    request: EngineCoreRequest
    tokens: int
    """How many come."""


def three_tokens(name: str, **params: Any) -> Iterator[Harmless]:
    """A row for the most likely token and one for a drawn one."""
    for how, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        sampling = SamplingParams(temperature=temperature, max_tokens=3, **params)
        yield Harmless(f"{name}, {how}", EngineCoreRequest([1, 2, 5], sampling), 3)


LOOK_WRONG: tuple[Harmless, ...] = (
    Harmless("a prompt of max_model_len - 1", EngineCoreRequest([1] * (MAX_MODEL_LEN - 1)), 1),
    Harmless("max_tokens far beyond the context", EngineCoreRequest([1] * 508, SamplingParams(max_tokens=2**30)), 4),
    *three_tokens("no token left, by bad words", allowed_token_ids=[5], bad_words_token_ids=[[5]]),
    *three_tokens("no token left, by min_tokens", allowed_token_ids=[5], stop_token_ids=[5], min_tokens=3),
    *three_tokens("a penalty that is 0 as a float of 32 bits", repetition_penalty=5e-324),
    *three_tokens("a penalty that is infinite as one", repetition_penalty=1e308),
    *three_tokens("a bias against every token", logit_bias=dict.fromkeys(range(VOCABULARY), -100.0)),
    *three_tokens("a bad word longer than the context", bad_words_token_ids=[[7] * 1024]),
    *three_tokens("a top_p that is 0 as a float of 32 bits", top_p=5e-324, min_p=1.0, top_k=1),
    *three_tokens(
        "log-probabilities where no token is left",
        logprobs=20,
        allowed_token_ids=[5],
        stop_token_ids=[5],
        min_tokens=3,
        prompt_logprobs=20,
    ),
)
