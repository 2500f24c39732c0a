"""The startup conversation of engines that dial a handshake socket and say HELLO, sans-IO.

Per rank, on two sockets whose order relative to each other is not known::

    rank -> handshake socket   HELLO   {status, ...}
    we   -> rank               INIT    {addresses: {inputs, outputs}, parallel_config}
    rank -> handshake socket   READY   {status, ...}
    rank -> its input socket   its registration                                  before READY or after it
    we   -> its input socket   questions about what it has not told              behind both, if there are any
    rank -> its output socket  the answers

The identity on both sockets is the rank's index as two bytes, little endian. INIT names one input and one output
endpoint per rank, which are that rank's own. It offers no coordinator and leaves ``parallel_config`` empty: the
engine has all that from its own command line.

Anybody can connect to a handshake socket. What is not recognisably a rank's is dropped and counted; what is, and
does not fit, ends the handshake.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol, TypeVar, final

import attrs

from lockstep_trio.engines.common.packing import pack, quoted, unpack
from lockstep_trio.engines.protocol import Frame, HandshakeReply, RankEndpoints, RankInfo
from lockstep_trio.errors import HandshakeError, WireError

T = TypeVar("T")

MAX_RANKS: Final = 65_536
"""What two bytes of identity can tell apart."""
MAX_STATUS_FRAME: Final = 65_536
"""Longest HELLO or READY that is looked at, bytes; a real one has about a hundred."""


@final
class Stage(enum.Enum):
    """How far a rank has come. The value is what people are told."""

    AWAITING_HELLO = "not heard of yet"
    LOADING = "loading: INIT sent, neither ready nor registered"
    READY = "ready, not yet registered"
    REGISTERED = "registered, not yet ready"
    UP = "up"
    """Ready and registered. It may still be asked something."""


@final
class Event(enum.Enum):
    """What a rank may say."""

    HELLO = "HELLO"
    READY = "READY"
    REGISTRATION = "its registration"


TABLE: Final[Mapping[tuple[Stage, Event], Stage]] = MappingProxyType(
    {
        (Stage.AWAITING_HELLO, Event.HELLO): Stage.LOADING,
        (Stage.LOADING, Event.READY): Stage.READY,
        (Stage.LOADING, Event.REGISTRATION): Stage.REGISTERED,
        (Stage.READY, Event.REGISTRATION): Stage.UP,
        (Stage.REGISTERED, Event.READY): Stage.UP,
        # A rank that says HELLO again was restarted, and starts over.
        (Stage.LOADING, Event.HELLO): Stage.LOADING,
        (Stage.READY, Event.HELLO): Stage.LOADING,
        (Stage.REGISTERED, Event.HELLO): Stage.LOADING,
        (Stage.UP, Event.HELLO): Stage.LOADING,
        # What was sent just before a restart may be read just after it, and is then followed by the real one.
        (Stage.READY, Event.READY): Stage.READY,
        (Stage.UP, Event.READY): Stage.UP,
        (Stage.REGISTERED, Event.REGISTRATION): Stage.REGISTERED,
        (Stage.UP, Event.REGISTRATION): Stage.UP,
    }
)
"""The absent cells: READY or a registration from a rank that never said HELLO, so another client started it."""


class Questions(Protocol):
    """The questions to one rank, and its answers."""

    @property
    def answers(self) -> Mapping[str, bool]:
        """What was asked for -> whether the rank has it."""
        ...

    @property
    def answered(self) -> bool:
        """Nothing is left open."""
        ...

    def take(self) -> Sequence[tuple[Frame, ...]]:
        """The messages to be sent, once."""
        ...

    def receive(self, frames: Sequence[Frame]) -> bool:
        """A message of the rank; whether it is one of the answers."""
        ...


@attrs.define
class _Slot:
    stage: Stage = Stage.AWAITING_HELLO
    ready: Mapping[str, object] = attrs.field(factory=dict)
    registration: Mapping[str, object] = attrs.field(factory=dict)
    questions: Questions | None = None

    @property
    def told(self) -> Mapping[str, object]:
        return {**self.ready, **self.registration}

    @property
    def up(self) -> bool:
        return self.stage is Stage.UP and (self.questions is None or self.questions.answered)

    @property
    def words(self) -> str:
        asked = self.stage is Stage.UP and not self.up
        return "ready and registered, being asked its version" if asked else self.stage.value


def identity_of(rank: int) -> bytes:
    """The ZeroMQ identity of a rank on both of its DEALER sockets.

    Raises:
        HandshakeError: The index does not fit.
    """
    if not 0 <= rank < MAX_RANKS:
        raise HandshakeError(f"rank {rank} is beyond the {MAX_RANKS} ranks that two bytes of identity tell apart")
    return rank.to_bytes(2, "little")


class StatusHandshake(abc.ABC):
    """The conversation with all ranks of one group. ``Handshake`` of ``lockstep_trio.engines.protocol``.

    A subclass says what a registration is, and what it and READY tell.
    """

    def __init__(self, endpoints: Sequence[RankEndpoints]) -> None:
        identity_of(len(endpoints) - 1)  # no rank at all, or too many
        self._inits = tuple(_init(each) for each in endpoints)
        self._slots = tuple(_Slot() for _ in endpoints)
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """Messages on the handshake socket that were nobody's."""
        return self._dropped

    @property
    def begun(self) -> bool:
        """A rank has said HELLO."""
        return any(slot.stage is not Stage.AWAITING_HELLO for slot in self._slots)

    @property
    def all_ready(self) -> bool:
        """Every rank is ready, registered or not."""
        return all(slot.stage in (Stage.READY, Stage.UP) for slot in self._slots)

    @property
    def complete(self) -> bool:
        """Every rank is ready and registered, and has answered what it was asked."""
        return all(slot.up for slot in self._slots)

    @property
    def stages(self) -> Mapping[int, str]:
        """Rank -> its stage, for people."""
        return {rank: slot.words for rank, slot in enumerate(self._slots)}

    def receive(self, identity: bytes, frames: Sequence[bytes]) -> HandshakeReply | None:
        """A message on the handshake socket; returns the INIT that answers a HELLO.

        Raises:
            HandshakeError: It is a rank's, and does not fit.
        """
        message = _status_map(frames) if len(identity) == 2 else None
        if message is None:
            self._dropped += 1
            return None
        rank = int.from_bytes(identity, "little")
        if rank >= len(self._slots):
            raise self._error(
                f"rank {rank} came to a group of {len(self._slots)}, whose last is rank {len(self._slots) - 1}"
            )
        if message["status"] == "HELLO":
            restarted = self._slots[rank].stage is not Stage.AWAITING_HELLO
            self._advance(rank, Event.HELLO)
            self._slots[rank].ready = self._slots[rank].registration = {}
            self._slots[rank].questions = None
            return HandshakeReply((self._inits[rank],), rank, restarted)
        if message["status"] == "READY":
            self._advance(rank, Event.READY)
            self._slots[rank].ready = message
            self._ask(self._slots[rank])
            return None
        raise self._error(f"rank {rank} says {message['status']!r:.80}, which is neither HELLO nor READY")

    def hung_up(self, identity: bytes) -> int | None:
        """The handshake connection of an identity ended; its rank if it was still needed.

        An engine closes it right behind READY, and holds it open while it loads (``_perform_handshake``).
        """
        rank = int.from_bytes(identity, "little")
        if len(identity) != 2 or rank >= len(self._slots):
            return None
        return rank if self._slots[rank].stage in (Stage.LOADING, Stage.REGISTERED) else None

    def registered(self, rank: int, frames: Sequence[bytes]) -> None:
        """The first message of a rank on its own input socket.

        Raises:
            HandshakeError: The engine is too old, or this is no registration.
        """
        registration = self._registration(rank, frames)
        self._advance(rank, Event.REGISTRATION)
        self._slots[rank].registration = registration
        self._ask(self._slots[rank])

    def questions(self) -> Sequence[tuple[int, tuple[Frame, ...]]]:
        """(rank, message) to be sent to its input socket. Each is returned once."""
        asked = [(rank, slot.questions) for rank, slot in enumerate(self._slots) if slot.questions is not None]
        return [(rank, message) for rank, questions in asked for message in questions.take()]

    def answered(self, rank: int, frames: Sequence[Frame]) -> bool:
        """A message of a rank on its output socket; whether it was an answer."""
        questions = self._slots[rank].questions
        return questions is not None and questions.receive(frames)

    def infos(self) -> tuple[RankInfo, ...]:
        """What the ranks told.

        Raises:
            HandshakeError: A rank told something in a type that it cannot have.
        """
        assert self.complete, "infos() before complete"
        infos = []
        for rank, slot in enumerate(self._slots):
            answers = {} if slot.questions is None else slot.questions.answers
            infos.append(attrs.evolve(self._info(rank, slot.told), answers=MappingProxyType(dict(answers))))
        return tuple(infos)

    def _advance(self, rank: int, event: Event) -> None:
        slot = self._slots[rank]
        stage = TABLE.get((slot.stage, event))
        if stage is None:
            raise self._error(
                f"rank {rank} sent {event.value} while it was {slot.stage.value!r}: "
                "was it started by another client? An engine does this once in its life; start it anew"
            )
        slot.stage = stage

    def _ask(self, slot: _Slot) -> None:
        # Again with each READY and registration: the last ones may have been words of a process that was replaced.
        if slot.stage is Stage.UP and (slot.questions is None or not slot.questions.answered):
            slot.questions = self._questions(slot.told)

    def _questions(self, told: Mapping[str, object]) -> Questions | None:
        """What to ask a rank that told this; None for nothing."""
        return None

    @abc.abstractmethod
    def _registration(self, rank: int, frames: Sequence[bytes]) -> Mapping[str, object]:
        """The registration of a rank, as told. Raises ``HandshakeError``."""

    @abc.abstractmethod
    def _info(self, rank: int, told: Mapping[str, object]) -> RankInfo:
        """What a rank's READY and registration, merged, tell. Raises ``HandshakeError``."""

    def _map(self, rank: int, part: str, frame: bytes) -> Mapping[str, object]:
        """A registration that is a map with something in it."""
        try:
            registration = unpack(part, frame)
        except WireError as problem:
            raise self._error(f"rank {rank} registered with something else: {problem}") from problem
        if not isinstance(registration, dict) or not registration:
            raise self._error(f"rank {rank} registered with {quoted(registration)}, a map was expected")
        return registration

    def _told(self, rank: int, told: Mapping[str, object], key: str, kind: type[T]) -> T | None:
        value = told.get(key)
        if value is None or type(value) is kind:
            return value
        raise self._error(f"rank {rank} tells {key} {quoted(value)}, {kind.__name__} was expected")

    def _error(self, reason: str) -> HandshakeError:
        return HandshakeError(reason, self.stages)


def _init(endpoints: RankEndpoints) -> bytes:
    addresses = {"inputs": [endpoints.input], "outputs": [endpoints.output]}
    return pack({"addresses": addresses, "parallel_config": {}})


def _status_map(frames: Sequence[bytes]) -> Mapping[str, object] | None:
    """HELLO or READY, or None for what is neither."""
    if len(frames) != 1 or len(frames[0]) > MAX_STATUS_FRAME:
        return None
    try:
        message = unpack("handshake", frames[0])
    except WireError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("status"), str) else None
