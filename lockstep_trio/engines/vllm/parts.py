"""Where the parts of an output stand, release by release, and the smaller ones of them as values.

``EngineCoreOutput`` is an array (``vllm/v1/engine/__init__.py``, 0.9.2 to 0.33.0). Items 0 to 8 have never moved;
behind them fields came and went. The engine always sends the array whole, so its length and what is in item 10 tell
which layout it is, and nobody needs to know the release.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias, cast, final

import attrs

from lockstep_trio.engines.vllm.packing import quoted
from lockstep_trio.errors import WireError

Array: TypeAlias = Sequence[object]
"""One ``EngineCoreOutput`` as it came."""

_HEAD: Final = (
    "request_id new_token_ids new_logprobs new_prompt_logprobs_tensors pooling_output finish_reason stop_reason "
    "events kv_transfer_params"
)


def _places(names: str) -> Mapping[str, int]:
    return MappingProxyType({name: at for at, name in enumerate(f"{_HEAD} {names}".split())})


TO_0_10_1: Final = _places("num_cached_tokens")
TO_0_13: Final = _places("trace_headers num_cached_tokens num_nans_in_logits")
TO_0_15: Final = _places("trace_headers num_cached_tokens routed_experts num_nans_in_logits")
TO_0_19: Final = _places(
    "trace_headers num_cached_tokens num_external_computed_tokens routed_experts num_nans_in_logits"
)
TO_0_25: Final = _places("trace_headers prefill_stats routed_experts num_nans_in_logits")
SINCE_0_26: Final = _places(
    "ec_transfer_params trace_headers prefill_stats routed_experts num_nans_in_logits mm_cache_miss_hashes "
    "new_sampling_mask spec_decode_metrics prompt_token_id_logprobs error"
)

KNOWN: Final = len(SINCE_0_26)
"""Items that have a name here. What 0.34 and later append is behind them."""


def places(array: Array) -> Mapping[str, int]:
    """Name -> index, for the layout that this array has."""
    size = len(array)
    if size <= len(TO_0_10_1):
        return TO_0_10_1
    if size <= len(TO_0_19) and type(array[10]) is int:  # num_cached_tokens; since 0.20 there is a map or nil
        return TO_0_13 if size <= len(TO_0_13) else TO_0_15 if size <= len(TO_0_15) else TO_0_19
    return TO_0_25 if size <= len(TO_0_25) else SINCE_0_26


def part_of(array: Array, name: str) -> object:
    """What stands there; None if this release does not have it, or the array stops before it."""
    at = places(array).get(name)
    return array[at] if at is not None and at < len(array) else None


def label(array: Array, name: str) -> str:
    """What an error calls the part."""
    return f"EngineCoreOutput[{places(array)[name]}] {name}"


@final
class EventKind(enum.Enum):
    """What happened to a request on the engine (``EngineCoreEventType`` of ``vllm/v1/engine/__init__.py``)."""

    QUEUED = 1
    """It was put into the engine's queue."""
    SCHEDULED = 2
    """It was taken into a step for the first time."""
    PREEMPTED = 3
    """It was put back, to make room for others."""
    OTHER = 0
    """Something that this version does not know."""

    @classmethod
    def of(cls, number: int) -> EventKind:
        """The kind that the engine has this number for."""
        return _KINDS.get(number, cls.OTHER)


_KINDS: Final = {kind.value: kind for kind in EventKind}


@final
@attrs.frozen
class EngineEvent:
    """Something that happened to a request on the engine."""

    kind: EventKind
    """What it was."""
    timestamp: float
    """When: seconds of that engine's monotonic clock, to be compared with nothing but other events of the same rank."""


@final
@attrs.frozen
class PrefillStats:
    """Where the tokens of a prompt came from, since 0.20. None: not told."""

    prompt_tokens: int | None
    """All of them."""
    computed_tokens: int | None
    """Those that had to be computed."""
    cached_tokens: int | None
    """Those that were found in a cache, here or elsewhere."""
    local_cached_tokens: int | None
    """Those found in the prefix cache of this rank."""
    external_cached_tokens: int | None
    """Those that a KV connector brought."""
    cache_creation_tokens: int | None
    """Those that were put into the cache, since 0.26."""


@final
@attrs.frozen
class SpecDecodeMetrics:
    """How speculation went for one request, told with its last output, since 0.29."""

    num_spec_tokens: int | None
    """Most tokens that are proposed at once."""
    num_draft_tokens: int | None
    """Tokens proposed, in all."""
    histogram: tuple[int, ...]
    """At index n: in how many steps n proposed tokens were accepted."""
    per_step_accepted: tuple[int, ...]
    """Accepted tokens, step by step; only if the request asked for detail."""
    per_step_drafted: tuple[int, ...]
    """Proposed tokens, likewise."""


@final
@attrs.frozen
class ErrorReport:
    """Why the engine gave up on a request, since 0.33."""

    code: str
    """In a word, for programs: ``validation_error``, ``engine_paused``."""
    message: str
    """In a sentence, for people."""
    retryable: bool
    """The same request may succeed later."""


def count_of(value: object) -> int | None:
    """A number of things; None for anything else, -1 included, which vLLM has for "not known yet"."""
    return value if type(value) is int and value >= 0 else None


def map_of(part: str, value: object) -> Mapping[str, object]:
    """A map with text for keys."""
    if type(value) is dict and all(type(key) is str for key in value):
        return MappingProxyType(value)
    raise WireError(part, f"{quoted(value)} where a map was expected")


def words_of(part: str, value: object) -> tuple[str, ...]:
    """A list of text."""
    if type(value) is tuple and all(type(each) is str for each in value):
        return value
    raise WireError(part, f"{quoted(value)} where a list of text was expected")


def events_of(part: str, value: object) -> tuple[EngineEvent, ...]:
    """A list of events."""
    if type(value) is not tuple:
        raise WireError(part, f"{quoted(value)} where a list of events was expected")
    return tuple(_event(part, each) for each in value)


def _event(part: str, value: object) -> EngineEvent:
    match value:
        # By type too, because True is an int.
        case {"type": int() as kind, "timestamp": float() | int() as when} if bool not in (type(kind), type(when)):
            return EngineEvent(EventKind.of(kind), float(when))
        case _:
            raise WireError(part, f"{quoted(value)} where an event was expected")


def headers_of(part: str, value: object) -> Mapping[str, str]:
    """A map of text to text."""
    headers = map_of(part, value)
    if not all(type(each) is str for each in headers.values()):
        raise WireError(part, f"{quoted(value)} where a map of text to text was expected")
    return cast("Mapping[str, str]", headers)


def prefill_of(part: str, value: object) -> PrefillStats:
    """A map of counts."""
    told = map_of(part, value)
    names = ("prompt", "computed", "cached", "local_cached", "external_cached", "cache_creation")
    return PrefillStats(*(count_of(told.get(f"num_{name}_tokens")) for name in names))


def spec_decode_of(part: str, value: object) -> SpecDecodeMetrics:
    """A map of counts and lists of counts."""
    told = map_of(part, value)
    lists = (_counts(f"{part}.{name}", told.get(name, ())) for name in _LISTS)
    return SpecDecodeMetrics(count_of(told.get("num_spec_tokens")), count_of(told.get("num_draft_tokens")), *lists)


_LISTS: Final = ("histogram", "per_step_accepted", "per_step_drafted")


def _counts(part: str, value: object) -> tuple[int, ...]:
    if type(value) is tuple and all(type(each) is int for each in value):
        return value
    raise WireError(part, f"{quoted(value)} where a list of integers was expected")


def error_of(part: str, value: object) -> ErrorReport:
    """A map of what went wrong."""
    match value:
        case {"code": str() as code, "message": str() as message, **rest}:
            return ErrorReport(code, message, rest.get("retryable") is True)
        case _:
            raise WireError(part, f"{quoted(value)} where an error with a code and a message was expected")
