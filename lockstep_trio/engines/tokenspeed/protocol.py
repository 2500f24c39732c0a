"""TokenSpeed's wire protocol as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NoReturn, cast, final

import attrs

from lockstep_trio.engines.common.agreement import compare
from lockstep_trio.engines.common.handshake import identity_of
from lockstep_trio.engines.protocol import Batch, Frame, PauseCall, RankEndpoints, RankInfo, RequestHead
from lockstep_trio.engines.tokenspeed import encode, outputs, result
from lockstep_trio.engines.tokenspeed.admission import Limits, admit, check_head
from lockstep_trio.engines.tokenspeed.handshake import TokenSpeedHandshake
from lockstep_trio.engines.tokenspeed.request import TokenSpeedRequest
from lockstep_trio.engines.tokenspeed.result import TokenSpeedOutput
from lockstep_trio.errors import HandshakeError, RequestRejected

COMPARED: Final[Mapping[str, Callable[[RankInfo], object]]] = MappingProxyType(
    {"version": lambda info: info.version, "max_model_len": lambda info: info.max_model_len}
)
"""What ranks of one group have in common. Not their data-parallel size: servers of several sizes make one group."""

NO_VOCABULARY: Final = (
    "vocab_size is not known, and the engines do not tell it: a token id beyond the vocabulary would be sent, and "
    "may kill the group. Give it: TokenSpeedProtocol(vocab_size=...)"
)
NO_UTILITY: Final = "left alone: TokenSpeed has no utility calls on this wire"
NO_WAVES: Final = (
    "lockstep=True cannot be had from TokenSpeed: its ranks step together by themselves, never park, and know no wake "
    "message. Leave lockstep out"
)


@final
@attrs.frozen
class TokenSpeedSession:
    """Encoder and decoder for one connected group. ``Session`` of ``lockstep_trio.engines.protocol``."""

    limits: Limits = attrs.field(factory=Limits)
    """What requests are checked against."""
    told_version: str | None = None
    """What the engines say they are; None if they do not."""

    @property
    def lockstep(self) -> bool:
        """False, whatever data-parallel size the ranks report: they never park, so nobody needs to wake them."""
        return False

    @property
    def fence_method(self) -> None:
        """None: there are no utility calls on this wire."""
        return

    @property
    def versions(self) -> str:
        """Both sides' versions, for errors."""
        told = "tells no version" if self.told_version is None else f"says it is TokenSpeed {self.told_version}"
        return f"the engine {told}; 0.1.1 is read here, and what only appends to its arrays"

    @property
    def cautions(self) -> tuple[str, ...]:
        """What is not checked for want of knowledge."""
        return (NO_VOCABULARY,) if self.limits.vocab_size is None else ()

    def head(self, request: TokenSpeedRequest) -> RequestHead:
        """The caller's id and pinned rank.

        Raises:
            RequestRejected: One of them is of the wrong type.
        """
        return check_head(request)

    def encode_add(self, request: TokenSpeedRequest, wire_id: str) -> tuple[Frame, ...]:
        """Check the request against everything that is known, then encode it.

        Raises:
            RequestRejected: With the field, the value and the limit.
        """
        return encode.encode_add(wire_id, admit(request, self.limits))

    def encode_abort(self, wire_ids: Sequence[str]) -> tuple[Frame, ...]:
        """An ABORT."""
        return encode.encode_abort(wire_ids)

    def encode_start(self, wave: int, exclude: int | None) -> NoReturn:
        """There are no waves: never called for a session that is not in lockstep."""
        raise NotImplementedError(f"TokenSpeed knows no waves, so wave {wave} (not for {exclude}) cannot be started")

    def encode_pause(self, call: PauseCall) -> NoReturn:
        """There are no utility calls.

        Raises:
            RequestRejected: Always.
        """
        raise RequestRejected("method", type(call).__name__, NO_UTILITY)

    @property
    def pause_methods(self) -> frozenset[str]:
        """None."""
        return frozenset()

    def encode_utility(self, call_id: int, method: str, args: Sequence[object]) -> NoReturn:
        """There are no utility calls.

        Raises:
            RequestRejected: Always.
        """
        del call_id, args
        raise RequestRejected("method", method, NO_UTILITY)

    def decode(self, frames: Sequence[Frame]) -> Batch:
        """One message of a rank.

        Raises:
            WireError: It cannot be read.
        """
        return outputs.decode(frames)

    def is_refusal(self, raw: object) -> bool:
        """False: an abort tells of a request that the engine does not take, and never that it is shutting down."""
        del raw
        return False

    def merge(self, request_id: str, rank: int, raw: Sequence[object]) -> TokenSpeedOutput:
        """One or more raw outputs of ``decode``, of one request and oldest first, as one.

        Raises:
            WireError: A token id is not an integer, or a log-probability is not a number.
        """
        return result.merge(request_id, rank, cast("Sequence[Sequence[object]]", raw))


@final
@attrs.frozen
class TokenSpeedProtocol:
    r"""The protocol of TokenSpeed, text path. ``EngineProtocol`` of ``lockstep_trio.engines.protocol``.

    For engines started with ``ts serve --headless``, whose ``--data-parallel-address`` and
    ``--data-parallel-rpc-port`` name the address that ``open_group`` is given. The group's rank is the engine's
    ``--zmq-engine-index`` plus its data-parallel rank.

    Example:
        >>> protocol = TokenSpeedProtocol(vocab_size=151_936)
        >>> protocol.identity(1)
        b'\x01\x00'
    """

    vocab_size: int | None = attrs.field(default=None, kw_only=True)
    """The model's vocabulary as the engine counts it; None if unknown."""
    max_model_len: int | None = attrs.field(default=None, kw_only=True)
    """The context that the engines really offer, tokens, where that is less than what they report: they log it as
    ``effective`` when one request cannot have all of the KV cache. None to go by what they report."""
    output_logprobs: bool = attrs.field(default=False, kw_only=True)
    """The engines run with ``--enable-output-logprobs``; without it they abort requests that want some."""

    def __attrs_post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        if self.vocab_size is not None and not 0 < self.vocab_size <= 2**31:
            raise ValueError(f"vocab_size is {self.vocab_size}; it must be from 1 to 2**31")
        if self.max_model_len is not None and self.max_model_len < 3:
            raise ValueError(f"max_model_len is {self.max_model_len}; it must be at least 3")

    def identity(self, rank: int) -> bytes:
        """The rank's index as two bytes, little endian."""
        return identity_of(rank)

    def handshake(self, endpoints: Sequence[RankEndpoints]) -> TokenSpeedHandshake:
        """A new conversation with one rank per pair of endpoints."""
        return TokenSpeedHandshake(endpoints)

    def session(self, infos: Sequence[RankInfo], *, lockstep: bool | None = None) -> TokenSpeedSession:
        """Settle on limits.

        Args:
            infos: What the ranks told, by rank.
            lockstep: None or False; there is nothing to choose.

        Raises:
            HandshakeError: The ranks disagree with each other, or lockstep was asked for.
        """
        if lockstep:
            raise HandshakeError(NO_WAVES)
        compare(infos, COMPARED)
        limits = Limits(self.vocab_size, self._context(infos), self.output_logprobs)
        return TokenSpeedSession(limits, infos[0].version)

    def _context(self, infos: Sequence[RankInfo]) -> int | None:
        """The least of what is known: a request can be no longer than the KV cache of any rank either."""
        told = [self.max_model_len, *(each for info in infos for each in (info.max_model_len, _cache_tokens(info)))]
        return min((each for each in told if each is not None), default=None)


def _cache_tokens(info: RankInfo) -> int | None:
    size = info.raw.get("kv_cache_size_tokens")
    return size if type(size) is int and size > 0 else None
