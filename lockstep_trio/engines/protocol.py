"""What an engine's wire protocol must offer: the contract between ``engines`` and ``runtime``.

A protocol translates between requests, outputs and frames. It holds no machine, opens no socket and reads no
clock. A third engine is one more folder beside ``vllm`` that offers these classes.

Life of a connection: ``EngineProtocol.handshake`` -> frames are fed to the ``Handshake`` until ``complete`` ->
``EngineProtocol.session(infos)`` -> a ``Session`` that encodes and decodes for that very engine version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar, final

import attrs

Frame: TypeAlias = bytes | memoryview
"""One ZeroMQ frame. Owned by whoever received it; never written to."""

RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
OutputT_co = TypeVar("OutputT_co", covariant=True)


@final
@attrs.frozen
class RankEndpoints:
    """Where one rank shall connect to: its own input and output socket."""

    input: str
    """Endpoint of our ROUTER: requests flow to the rank through it."""
    output: str
    """Endpoint of our PULL: outputs come back through it."""


@final
@attrs.frozen
class RankInfo:
    """What one rank told about itself while it started. Everything but ``rank`` may be None (not told)."""

    rank: int
    version: str | None = None
    """Engine version as reported."""
    data_parallel_size: int | None = None
    """Number of ranks the engine believes to be in its lockstep group; 1 for an independent rank."""
    config_hash: str | None = None
    """Hash of the parallel configuration, equal on all ranks that fit together."""
    max_model_len: int | None = None
    """Longest prompt plus output, tokens."""
    raw: Mapping[str, object] = attrs.field(factory=dict, repr=False)
    """READY and registration maps merged, as they came."""
    block_size: int | None = attrs.field(default=None, kw_only=True)
    """Tokens per block of its KV cache."""
    answers: Mapping[str, bool] = attrs.field(factory=dict, repr=False)
    """What it was asked because it had not told it: whether it has a method."""


@final
@attrs.frozen
class RequestHead:
    """The part of a request that the runtime needs; the rest is the engine's business."""

    request_id: str | None
    """The caller's id, None to have one made."""
    rank: int | None
    """Pinned rank, None to have one selected."""


PauseMode: TypeAlias = Literal["wait", "abort", "keep"]
"""What becomes of requests in flight: those that have begun go on to their end and others wait; all are aborted; or all
are frozen, and go on when the group is resumed."""


@final
@attrs.frozen
class Pause:
    """Stop working."""

    mode: PauseMode
    clear_cache: bool


@final
@attrs.frozen
class Resume:
    """Work again."""


@final
@attrs.frozen
class Sleep:
    """Stop working and let go of memory: nothing at level 0, the weights to the host at 1, everything at 2."""

    level: int
    mode: PauseMode


@final
@attrs.frozen
class WakeUp:
    """Take back memory, all of it or what has these tags, and work again once there is all of it."""

    tags: tuple[str, ...] | None


@final
@attrs.frozen
class AskPaused:
    """Tell whether you are paused, True or False."""


PauseCall: TypeAlias = Pause | Resume | Sleep | WakeUp | AskPaused


@final
@attrs.frozen
class LoadReport:
    """A rank's own account of its queues."""

    waiting: int = 0
    """Requests queued, not yet running."""
    running: int = 0
    """Requests that take part in steps."""
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1; None if not told."""
    while_idle: bool = attrs.field(default=True, kw_only=True)
    """The rank reports once more when it falls idle. Where it does not, its last words count what has ended since, and
    are not believed any more once we hold nothing on it."""


@final
@attrs.frozen
class UtilityReply:
    """A rank's answer to one utility call."""

    call_id: int
    failure: str | None
    """The engine's words, None on success."""
    result: object
    """Plain msgpack data; None on failure."""
    draining: bool = False
    """The failure is that the rank is shutting down: it finishes what it has and takes nothing new."""


@final
@attrs.define
class Batch:
    """One message of a rank, decoded as far as it could be. Handled in the order of its fields."""

    outputs: Sequence[tuple[str, bool, object]] = ()
    """(wire id, whether it is the request's last output, raw output for ``Session.merge``), in order."""
    utility: UtilityReply | None = None
    wave_done: int | None = None
    """Number of the wave that this rank completed; 0 is a number."""
    wave_asked: int | None = None
    """Number of a wave that this rank asks to be started."""
    load: LoadReport | None = None
    dead: bool = False
    """The message is the engine's own notice of its death; nothing else is in it."""
    unanswered: bool = False
    """There was an answer to a utility call, and it could not be read: whoever awaits it awaits it in vain."""
    unreadable: Sequence[tuple[str, str]] = ()
    """(wire id, what is wrong) of outputs of which no more than that could be read: their requests cannot go on."""
    nameless: int = 0
    """Outputs of which not even the wire id could be read: some requests miss tokens and will never know."""
    damage: tuple[str, ...] = ()
    """Everything that could not be read, in words; none of it vital."""


@final
@attrs.frozen
class HandshakeReply:
    """What to do about a message on the handshake socket."""

    frames: tuple[bytes, ...]
    """To be sent to the identity that it came from."""
    rank: int
    restarted: bool
    """The rank had said hello before, so this is another process in its place."""


class Handshake(Protocol):
    """The startup conversation with all ranks, sans-IO. Errors are ``HandshakeError`` and end it for good."""

    def receive(self, identity: bytes, frames: Sequence[bytes]) -> HandshakeReply | None:
        """A message on the handshake socket. Returns how to answer it, None if it needs no answer."""
        ...

    def hung_up(self, identity: bytes) -> int | None:
        """The handshake connection of ``identity`` ended. Returns its rank if that was too early: it died."""
        ...

    def registered(self, rank: int, frames: Sequence[bytes]) -> None:
        """The first message of ``rank`` on its own input socket (frames without the identity)."""
        ...

    def questions(self) -> Sequence[tuple[int, tuple[Frame, ...]]]:
        """(rank, message) to be sent to its input socket: what it has not told. Each is returned once."""
        ...

    def answered(self, rank: int, frames: Sequence[Frame]) -> bool:
        """A message of ``rank`` on its output socket. Returns whether it was an answer; any other is kept for later."""
        ...

    @property
    def begun(self) -> bool:
        """A rank has said hello."""
        ...

    @property
    def all_ready(self) -> bool:
        """Every rank is ready, registered or not."""
        ...

    @property
    def complete(self) -> bool:
        """Every rank is ready and registered, and has answered whatever it was asked."""
        ...

    @property
    def stages(self) -> Mapping[int, str]:
        """Rank -> the stage it is at, for people."""
        ...

    def infos(self) -> tuple[RankInfo, ...]:
        """What the ranks told, by rank. Only once ``complete``."""
        ...


class Session(Protocol[RequestT_contra, OutputT_co]):
    """Encoder and decoder for one connected group."""

    @property
    def lockstep(self) -> bool:
        """Whether the ranks step in lockstep and need waves to be started."""
        ...

    @property
    def fence_method(self) -> str | None:
        """A harmless utility method whose reply proves that everything sent before it was consumed.

        None where there are no utility calls; then ``lockstep`` must be False, because no abort could be proven, and
        a silent rank is given up without having been asked.
        """
        ...

    @property
    def versions(self) -> str:
        """What version the engine says it is and which ones are read here, in words, for errors."""
        ...

    @property
    def cautions(self) -> Sequence[str]:
        """What the user should know about this session, once. Mostly nothing."""
        ...

    def head(self, request: RequestT_contra) -> RequestHead: ...

    def encode_add(self, request: RequestT_contra, wire_id: str) -> tuple[Frame, ...]:
        """Check the request against everything that is known, then encode it. Raises ``RequestRejected``."""
        ...

    def encode_abort(self, wire_ids: Sequence[str]) -> tuple[Frame, ...]: ...

    def encode_start(self, wave: int, exclude: int | None) -> tuple[Frame, ...]: ...

    def encode_utility(self, call_id: int, method: str, args: Sequence[object]) -> tuple[Frame, ...]:
        """Raises ``RequestRejected`` for arguments that are not plain data, or where there are no utility calls."""
        ...

    def encode_pause(self, call: PauseCall) -> tuple[str, tuple[object, ...]]:
        """The method and the arguments of a utility call that pauses or resumes.

        Raises ``RequestRejected`` where this engine cannot, or not in lockstep.
        """
        ...

    @property
    def pause_methods(self) -> frozenset[str]:
        """Methods that nobody may call but in concert: what ``encode_pause`` returns."""
        ...

    def decode(self, frames: Sequence[Frame]) -> Batch:
        """Raises ``WireError`` if the message, or a vital part of it, cannot be read."""
        ...

    def is_refusal(self, raw: object) -> bool:
        """Whether a raw output, the first and last of its request, may mean that the rank is shutting down."""
        ...

    def merge(self, request_id: str, rank: int, raw: Sequence[object]) -> OutputT_co:
        """The typed view of one or more raw outputs of one request, oldest first, as one."""
        ...


class EngineProtocol(Protocol[RequestT_contra, OutputT_co]):
    """An engine's wire protocol as a whole."""

    def identity(self, rank: int) -> bytes:
        """The ZeroMQ identity of a rank's input connection."""
        ...

    def handshake(self, endpoints: Sequence[RankEndpoints]) -> Handshake: ...

    def session(self, infos: Sequence[RankInfo], *, lockstep: bool | None) -> Session[RequestT_contra, OutputT_co]:
        """Settle on version, limits and lockstep. ``lockstep`` overrides the detection.

        Raises ``HandshakeError`` if the ranks disagree with each other or with their number.
        """
        ...
