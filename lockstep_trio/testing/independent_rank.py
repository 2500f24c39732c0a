"""A model of a rank that steps by itself, for engines without lockstep: bytes in, bytes out, steps when told.

What an engine says and how it reads is a subclass's to write, from the engine's own sources and not from the client's
protocol, so that each can catch the other's mistakes. ``SimulatedGroup`` and ``ZmqRanks`` take such ranks in place of
vLLM's: replace their ``ranks`` before they come up.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Sequence

from .engine_rank import Job
from .rank_model import Add, Drop, Out, RankModel, ToRank


class IndependentRank(abc.ABC):
    """One rank. ``receive`` what arrives, then ``poll`` and ``step`` it; what it sends is collected in ``sent``.

    Args:
        index: Its index in the group.
    """

    def __init__(self, index: int) -> None:
        self.model = RankModel(index)
        self.arrived: deque[ToRank] = deque()
        """What has come in and was not taken by a poll yet."""
        self.sent: deque[tuple[bytes, ...]] = deque()
        """Messages for the client, oldest first. The transport takes them from here."""
        self.log: list[ToRank] = []
        """Everything that came in, in order of arrival."""
        self._jobs: dict[str, Job] = {}

    @property
    def index(self) -> int:
        return self.model.index

    @property
    def identity(self) -> bytes:
        """Of its connections to the handshake socket and to its input socket."""
        return self.index.to_bytes(2, "little")

    @property
    def holds(self) -> bool:
        """It has a request, or is about to."""
        return bool(self.model.held)

    # -- what the engine says and reads --------------------------------------------------------------------------

    @abc.abstractmethod
    def hello(self) -> bytes: ...

    @abc.abstractmethod
    def ready(self) -> bytes: ...

    @abc.abstractmethod
    def registration(self) -> bytes: ...

    @abc.abstractmethod
    def endpoints(self, init: bytes) -> tuple[str, str]:
        """(input, output) to connect to, from the client's answer to ``hello``."""

    @abc.abstractmethod
    def death(self) -> tuple[bytes, ...]:
        """The engine's own notice of its death."""

    @abc.abstractmethod
    def _decode(self, frames: Sequence[bytes]) -> tuple[Add, int] | Drop:
        """A request with the last token of its prompt, or ids to drop. Raises ``ValueError`` for anything else."""

    @abc.abstractmethod
    def _encode(self, outputs: Sequence[tuple[str, Sequence[int], bool]]) -> tuple[bytes, ...]:
        """One message: (wire id, new tokens, whether it is the last output) of each request."""

    # -- the loop ------------------------------------------------------------------------------------------------

    def receive(self, frames: Sequence[bytes]) -> None:
        """A message of the client has arrived. The loop takes it at its next poll."""
        message: ToRank
        match self._decode(frames):
            case (message, last_token):
                self._jobs[message.wire_id] = Job(last_token)
            case message:
                pass
        self.log.append(message)
        self.arrived.append(message)

    def poll(self, count: int | None = None) -> None:
        """Take ``count`` of the arrived messages (None: all), then step next or sleep."""
        taken = [self.arrived.popleft() for _ in range(len(self.arrived) if count is None else count)]
        self.model.poll(taken)

    def step(self) -> bool:
        """Every request that it holds advances by a token. Returns False: nothing is agreed on with other ranks."""
        ends = [message for message in self.model.step() if isinstance(message, Out)]
        if ends:
            self.sent.append(self._encode([(end.wire_id, self._next(end), end.final) for end in ends]))
        return False

    def _next(self, end: Out) -> Sequence[int]:
        return [self._jobs[end.wire_id].next_token()]
