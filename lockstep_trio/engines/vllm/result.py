"""What comes back for a request: the engine's ``EngineCoreOutput`` arrays, seen as one value.

Most outputs are a token and nothing else, so nothing else is looked at until somebody asks: tokens and the end of the
request are read when an output is received, everything more is a property that reads the arrays each time.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar, cast, final

import attrs

from lockstep_trio.engines.common.finish import FinishReason
from lockstep_trio.engines.vllm.logprobs import Logprobs, read_logprobs
from lockstep_trio.engines.vllm.masks import SamplingMasks, read_masks
from lockstep_trio.engines.vllm.packing import quoted
from lockstep_trio.engines.vllm.parts import (
    KNOWN,
    Array,
    EngineEvent,
    ErrorReport,
    PrefillStats,
    SpecDecodeMetrics,
    count_of,
    error_of,
    events_of,
    headers_of,
    label,
    map_of,
    part_of,
    prefill_of,
    spec_decode_of,
    words_of,
)
from lockstep_trio.engines.vllm.tensors import Tensor, read_tensor
from lockstep_trio.errors import WireError

T = TypeVar("T")

TOKENS: Final = 1
LOGPROBS: Final = 2
FINISH_REASON: Final = 5
STOP_REASON: Final = 6

_NEW_TOKENS: Final = operator.itemgetter(TOKENS)
_INTEGERS: Final = frozenset((int,))


@final
class NamedWeights(tuple[object, ...]):
    """One engine output, and the name of the weights it was made with, which stands beside the outputs on the wire.

    A tuple like those without a name, so that these, which are the rule, cost nothing.
    """

    version: str

    @classmethod
    def of(cls, array: Iterable[object], version: str) -> NamedWeights:
        """That output, with that name."""
        named = cls(array)
        named.version = version
        return named


@final
@attrs.frozen
class RequestOutput:
    """New output of one request: one engine output, or several that nobody had read yet, as one.

    Everything that an engine can send with an output is here. What this release of the engine does not have, or did
    not send this time, is None or empty. Properties read the engine's arrays each time they are asked; keep what they
    return if it is needed twice. One that finds something else than it should raises ``WireError``, which names the
    field, and spoils nothing else.
    """

    request_id: str
    """The caller's id."""
    rank: int
    """The rank that runs it."""
    token_ids: tuple[int, ...]
    """Tokens since the last output, in order; may be empty."""
    finish_reason: FinishReason | None = None
    """Set on the last output only."""
    stop_reason: int | str | None = None
    """The stop token that ended it, or a word of the engine's; None for the end-of-sequence token."""
    raw: tuple[Sequence[object], ...] = attrs.field(default=(), repr=False)
    """The engine's arrays as they came, oldest first; behind them, whatever a later release appended. An array of
    numbers is ``(dtype, shape, data)``, its data ``bytes``, or a read-only ``memoryview`` if it is long."""

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    # -- of the new tokens ---------------------------------------------------------------------------------------

    @property
    def logprobs(self) -> Logprobs | None:
        """One row for each new token, if ``SamplingParams.logprobs`` asked for it."""
        chunks = tuple(self._each("new_logprobs", read_logprobs))
        return Logprobs(chunks) if chunks else None

    @property
    def sampling_masks(self) -> SamplingMasks | None:
        """For each new token, among which tokens it was chosen, since 0.28."""
        chunks = tuple(self._each("new_sampling_mask", read_masks))
        return SamplingMasks(chunks) if chunks else None

    @property
    def routed_experts(self) -> tuple[Tensor, ...]:
        """Which experts each layer chose, oldest first, since 0.14 and where the engine is told to tell."""
        return tuple(self._each("routed_experts", read_tensor))

    @property
    def nans_in_logits(self) -> int:
        """Above zero if the numbers behind this output were no numbers any more, since 0.11.1."""
        counts = (count_of(part_of(array, "num_nans_in_logits")) for array in self.raw)
        return max((count for count in counts if count is not None), default=0)

    @property
    def weight_versions(self) -> tuple[str | None, ...]:
        """For each of ``raw``, the name of the weights it was made with, since 0.32; None while nobody has named them.

        Until then the engine itself says ``default``.
        """
        return tuple(array.version if isinstance(array, NamedWeights) else None for array in self.raw)

    # -- of the prompt -------------------------------------------------------------------------------------------

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """One row for each token of the prompt but the first, if ``SamplingParams.prompt_logprobs`` asked for it."""
        chunks = tuple(self._each("new_prompt_logprobs_tensors", read_logprobs))
        return Logprobs(chunks) if chunks else None

    @property
    def prompt_token_id_logprobs(self) -> Tensor | None:
        """For each token of the prompt, the log-probabilities of certain tokens, since 0.31."""
        return self._last("prompt_token_id_logprobs", read_tensor)

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were found in a cache. Up to 0.19 told with every output, later with the first."""
        return self._count("num_cached_tokens", "num_cached_tokens")

    @property
    def external_cached_tokens(self) -> int | None:
        """Those of them that a KV connector brought, since 0.16."""
        return self._count("num_external_computed_tokens", "num_external_cached_tokens")

    @property
    def prefill_stats(self) -> PrefillStats | None:
        """Where the tokens of the prompt came from, told with the first output, since 0.20."""
        return next(self._each("prefill_stats", prefill_of), None)

    @property
    def pooling_output(self) -> Tensor | None:
        """What a request for pooling comes to."""
        return self._last("pooling_output", read_tensor)

    @property
    def missing_mm_hashes(self) -> tuple[str, ...]:
        """Multimodal items that were referred to by hash and are not in the engine's cache, since 0.28."""
        return self._last("mm_cache_miss_hashes", words_of) or ()

    # -- of the request ------------------------------------------------------------------------------------------

    @property
    def error(self) -> ErrorReport | None:
        """Why the engine gave up on it, since 0.33."""
        return self._last("error", error_of)

    @property
    def events(self) -> tuple[EngineEvent, ...]:
        """What happened to it on the engine, oldest first; only if the engine keeps statistics."""
        return tuple(itertools.chain.from_iterable(self._each("events", events_of)))

    @property
    def spec_decode_metrics(self) -> SpecDecodeMetrics | None:
        """How speculation went, told with the last output, since 0.29."""
        return self._last("spec_decode_metrics", spec_decode_of)

    @property
    def kv_transfer_params(self) -> Mapping[str, object] | None:
        """What the engine's KV connector has to say to the next engine."""
        return self._last("kv_transfer_params", map_of)

    @property
    def ec_transfer_params(self) -> Mapping[str, object] | None:
        """What the engine's encoder cache connector has to say to the next engine, since 0.26."""
        return self._last("ec_transfer_params", map_of)

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """The headers that the request came with, since 0.10.2."""
        return self._last("trace_headers", headers_of)

    @property
    def unknown(self) -> tuple[Sequence[object], ...]:
        """For each of ``raw``, what a release that is not known here appended; mostly nothing."""
        return tuple(array[KNOWN:] for array in self.raw)

    def _each(self, name: str, read: Callable[[str, object], T]) -> Iterator[T]:
        for array in self.raw:
            found = part_of(array, name)
            if found is not None:
                yield read(label(array, name), found)

    def _last(self, name: str, read: Callable[[str, object], T]) -> T | None:
        for array in reversed(self.raw):
            found = part_of(array, name)
            if found is not None:
                return read(label(array, name), found)
        return None

    def _count(self, name: str, statistic: str) -> int | None:
        """The first count that is told, in an item of its own (up to 0.19) or among the prefill stats."""
        for array in self.raw:
            stats = part_of(array, "prefill_stats")
            found = stats.get(statistic) if isinstance(stats, dict) else part_of(array, name)
            if (count := count_of(found)) is not None:
                return count
        return None


def merge(request_id: str, rank: int, raw: Sequence[Array]) -> RequestOutput:
    """The typed view of raw outputs of one request, oldest first. Runs once per read, so it is written to be short.

    Raises:
        WireError: A token id is not an integer.
    """
    arrays = tuple(raw)
    last = arrays[-1]
    lists = cast("Iterable[Iterable[int]]", map(_NEW_TOKENS, arrays))
    tokens = tuple(itertools.chain.from_iterable(lists))
    if not _INTEGERS.issuperset(map(type, tokens)):
        raise WireError(f"EngineCoreOutput[{TOKENS}] new_token_ids", f"not all integers: {quoted(tokens)}")
    finish = last[FINISH_REASON] if len(last) > FINISH_REASON else None
    if finish is None:
        return RequestOutput(request_id, rank, tokens, None, None, arrays)
    stop = last[STOP_REASON] if len(last) > STOP_REASON else None
    return RequestOutput(request_id, rank, tokens, FinishReason.of(finish), _stop_reason(stop), arrays)


def is_bare_abort(raw: Array) -> bool:
    """Whether one raw output says that its request was aborted, and brings no token."""
    return len(raw) > FINISH_REASON and not raw[TOKENS] and FinishReason.of(raw[FINISH_REASON]) is FinishReason.ABORT


def _stop_reason(value: object) -> int | str | None:
    return value if isinstance(value, (int, str)) and not isinstance(value, bool) else None
