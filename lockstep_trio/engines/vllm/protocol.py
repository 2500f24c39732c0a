"""vLLM's wire protocol as a whole, for engines from 0.10 to 0.33: what the ranks told decides how to speak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast, final

import attrs

from lockstep_trio.engines.protocol import Batch, Frame, PauseCall, RankEndpoints, RankInfo, RequestHead
from lockstep_trio.engines.vllm import encode, outputs, result
from lockstep_trio.engines.vllm.adapters import Adapters
from lockstep_trio.engines.vllm.admission import admit, check_head
from lockstep_trio.engines.vllm.agreement import check_agreement, settle_lockstep
from lockstep_trio.engines.vllm.checks import Limits
from lockstep_trio.engines.vllm.handshake import VllmHandshake, identity_of
from lockstep_trio.engines.vllm.layout import request_layout
from lockstep_trio.engines.vllm.pausing import PAUSE_METHODS, encode_pause
from lockstep_trio.engines.vllm.pooling import ALL_TASKS
from lockstep_trio.engines.vllm.request import EngineCoreRequest
from lockstep_trio.engines.vllm.result import RequestOutput
from lockstep_trio.engines.vllm.structured import BACKENDS, Backend
from lockstep_trio.engines.vllm.version import SUPPORTED, parse_version, settle_version

FENCE_METHOD: Final = "is_sleeping"
"""In every version, without side effects, answered by a parked rank without waking it."""

NO_CONTEXT: Final = (
    "max_model_len is not known, and engines up to 0.19 do not tell it: a prompt that is too long would be sent, and "
    "could kill the group. Give it: VllmProtocol(max_model_len=...)"
)
NO_SIZE: Final = (
    "the engines step in lockstep and do not tell how many of them do (from 0.24 on they tell): all ranks of their "
    "group must be in this one"
)
NO_VOCABULARY: Final = (
    "vocab_size is not known, and the engines do not tell it: a token id beyond the vocabulary would be sent, and "
    "would kill the group. Give it: VllmProtocol(vocab_size=...)"
)


@final
@attrs.frozen
class VllmSession:
    """Encoder and decoder for one connected group. ``Session`` of ``lockstep_trio.engines.protocol``."""

    lockstep: bool
    """Whether the ranks step in lockstep and need waves to be started."""
    limits: Limits = attrs.field(factory=Limits)
    """What requests are checked against."""

    told_version: str | None = None
    """What the engines say they are; None if they do not."""
    told_size: bool = True
    """Whether they say how many of them step in lockstep."""

    @property
    def fence_method(self) -> str:
        """A harmless utility method."""
        return FENCE_METHOD

    @property
    def versions(self) -> str:
        """Both sides' versions, for errors."""
        found = f"does not tell its version and is spoken to as to vLLM {self.limits.versions}"
        told = found if self.told_version is None else f"says it is vLLM {self.told_version}"
        return f"the engine {told}; vLLM {SUPPORTED} is read here"

    @property
    def cautions(self) -> tuple[str, ...]:
        """What is not checked for want of knowledge."""
        unknown = {
            NO_VOCABULARY: self.limits.vocab_size is None,
            NO_CONTEXT: self.limits.max_model_len is None,
            NO_SIZE: self.lockstep and not self.told_size,
        }
        return tuple(words for words, holds in unknown.items() if holds)

    def head(self, request: EngineCoreRequest) -> RequestHead:
        """The caller's id and pinned rank.

        Raises:
            RequestRejected: One of them is of the wrong type.
        """
        return RequestHead(*check_head(request))

    def encode_add(self, request: EngineCoreRequest, wire_id: str) -> tuple[Frame, ...]:
        """Check the request against everything that is known, then encode it.

        Raises:
            RequestRejected: With the field, the value and the limit.
        """
        return encode.encode_add(wire_id, admit(request, self.limits), self.limits.layout)

    def encode_abort(self, wire_ids: Sequence[str]) -> tuple[Frame, ...]:
        """An ABORT."""
        return encode.encode_abort(wire_ids)

    def encode_start(self, wave: int, exclude: int | None) -> tuple[Frame, ...]:
        """A START_DP_WAVE."""
        return encode.encode_start(wave, exclude)

    def encode_utility(self, call_id: int, method: str, args: Sequence[object]) -> tuple[Frame, ...]:
        """A UTILITY call.

        Raises:
            RequestRejected: An argument is not plain data.
        """
        return encode.encode_utility(call_id, method, args)

    def encode_pause(self, call: PauseCall) -> tuple[str, tuple[object, ...]]:
        """Method and arguments of a call that pauses or resumes.

        Raises:
            RequestRejected: These engines cannot, or something is out of range.
        """
        return encode_pause(call, self.limits.versions, lockstep=self.lockstep)

    @property
    def pause_methods(self) -> frozenset[str]:
        """What ``encode_pause`` calls."""
        return PAUSE_METHODS

    def decode(self, frames: Sequence[Frame]) -> Batch:
        """One message of a rank.

        Raises:
            WireError: It cannot be read, or a wave in it cannot.
        """
        return outputs.decode(frames)

    def is_refusal(self, raw: object) -> bool:
        """Whether an output is an abort without a token: so an engine answers each ADD while it shuts down."""
        return result.is_bare_abort(cast("Sequence[object]", raw))

    def merge(self, request_id: str, rank: int, raw: Sequence[object]) -> RequestOutput:
        """One or more raw outputs of ``decode``, of one request and oldest first, as one.

        Raises:
            WireError: A token id is not an integer.
        """
        return result.merge(request_id, rank, cast("Sequence[Sequence[object]]", raw))


@final
@attrs.frozen
class VllmProtocol:
    r"""The protocol of vLLM 0.10 to 0.33. ``EngineProtocol`` of ``lockstep_trio.engines.protocol``.

    What the engines do not tell can be told here, and makes admission tighter: without ``vocab_size`` a token id
    beyond the vocabulary passes, and kills the group.

    Example:
        >>> protocol = VllmProtocol(vocab_size=151_936)
        >>> protocol.identity(1)
        b'\x01\x00'
    """

    vocab_size: int | None = attrs.field(default=None, kw_only=True)
    """The model's vocabulary as the engine counts it; None if unknown."""
    max_logprobs: int = attrs.field(default=20, kw_only=True)
    """The engines' ``--max-logprobs``; -1 for no limit but the vocabulary."""
    max_model_len: int | None = attrs.field(default=None, kw_only=True)
    """Prompt and output together, tokens: engines up to 0.19 do not tell it. Where they do, the smaller one holds."""
    structured_outputs: Backend | None = attrs.field(default=None, kw_only=True)
    """The engines' backend for structured outputs; one serves all requests. None: structured outputs are refused."""
    trust_grammars: bool = attrs.field(default=False, kw_only=True)
    """Every schema and grammar that is submitted compiles. Up to 0.25 the group dies of one that does not, so there
    structured outputs are refused without this; later it fails its own request."""
    seeds: bool = attrs.field(default=True, kw_only=True)
    """Whether a request may have a ``seed``. On a CPU the engine dies of one whose prompt is prefilled in more than one
    step (0.32.0, ``v1/worker/gpu_model_runner.py: _bookkeeping_sync``), which no engine tells and no request shows:
    False, unless ``--max-num-batched-tokens`` has room for all prompts at once. With a GPU there is nothing to fear."""
    tasks: Sequence[str] = attrs.field(default=("generate",), kw_only=True)
    """What the engines can do, as ``VllmCalls.supported_tasks`` tells it: ``generate`` to sample tokens, or the pooling
    tasks. The group dies of another task than these."""
    adapters: Adapters | None = attrs.field(default=None, kw_only=True)
    """Keeps the adapters that requests may use. None: none."""
    embedding_size: int | None = attrs.field(default=None, kw_only=True)
    """Numbers per embedding (``hidden_size``), where engines run with ``--enable-prompt-embeds``; None: they do not."""
    multimodal: bool = attrs.field(default=False, kw_only=True)
    """The engines' model takes multimodal features, and those that are submitted are what its own processor makes: what
    fits the model is not known here, and the group dies of what does not."""
    version: str | None = attrs.field(default=None, kw_only=True)
    """Speak to the engines as to this release, such as ``"0.32.0"`` or all of ``"0.32"``, whatever they say, and do not
    ask them for it; None to go by what they say, or answer."""

    def __attrs_post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        if self.vocab_size is not None and not 0 < self.vocab_size <= 2**31:
            raise ValueError(f"vocab_size is {self.vocab_size}; it must be from 1 to 2**31")
        if self.max_logprobs < -1:
            raise ValueError(f"max_logprobs is {self.max_logprobs}; it must be -1 or more")
        if self.max_model_len is not None and not 1 < self.max_model_len <= 2**31:
            raise ValueError(f"max_model_len is {self.max_model_len}; it must be from 2 to 2**31")
        if self.structured_outputs not in (None, *BACKENDS):
            names = ", ".join(BACKENDS)
            raise ValueError(f"structured_outputs is {self.structured_outputs!r}; it must be one of {names}, or None")
        if isinstance(self.tasks, str) or not set(self.tasks) <= ALL_TASKS:
            raise ValueError(f"tasks is {self.tasks!r}; it must be some of {', '.join(sorted(ALL_TASKS))}")
        if self.embedding_size is not None and not 0 < self.embedding_size <= 2**20:
            raise ValueError(f"embedding_size is {self.embedding_size}; it must be from 1 to 2**20")
        if self.version is not None:
            versions = parse_version(self.version)
            if versions is None or not versions.supported:
                raise ValueError(f"version is {self.version!r}; it must be from {SUPPORTED}")
            if request_layout(versions) is None:
                raise ValueError(f"version is {self.version!r}; its releases differ, give all three numbers")

    def identity(self, rank: int) -> bytes:
        """The rank's index as two bytes, little endian."""
        return identity_of(rank)

    def handshake(self, endpoints: Sequence[RankEndpoints]) -> VllmHandshake:
        """A new conversation with one rank per pair of endpoints."""
        return VllmHandshake(endpoints, pinned=self.version is not None)

    def session(self, infos: Sequence[RankInfo], *, lockstep: bool | None = None) -> VllmSession:
        """Settle on version, limits and lockstep.

        Args:
            infos: What the ranks told, by rank.
            lockstep: Whether they step in lockstep, if the caller knows better; None to go by what they told.

        Raises:
            HandshakeError: The ranks disagree with each other or with their number, or are of a version that is
                not supported.
        """
        check_agreement(infos)
        versions = settle_version(infos, self.version)
        layout = request_layout(versions)
        assert layout is not None, versions  # what was pinned was checked, and what is found out is told apart
        context = min((each for each in (infos[0].max_model_len, self.max_model_len) if each is not None), default=None)
        limits = Limits(
            self.vocab_size,
            self.max_logprobs,
            context,
            versions,
            layout,
            self.structured_outputs,
            self.trust_grammars,
            self.seeds,
            tuple(self.tasks),
            self.adapters,
            self.embedding_size,
            self.multimodal,
        )
        together = settle_lockstep(infos, lockstep)
        return VllmSession(together, limits, infos[0].version, told_size=infos[0].data_parallel_size is not None)
