"""What comes in on a rank's output socket, without what others put there.

Once the rank's own connection is known, telling its messages from others is one comparison per message (0.24 us to ask
a frame for its descriptor, and the way of receiving that makes it possible is cheaper than the usual one). Finding it
out is the difficulty, because a PUSH does not say who it is, and a stranger may speak before the rank does. Until it is
known, messages are kept with the number of their connection, and each new one may decide the matter; see `_judge`.
"""

from __future__ import annotations

from collections import deque
from typing import final

import attrs
import zmq

from lockstep_trio.link.connections import NO_DESCRIPTOR, Connections, descriptor_of, origin_of
from lockstep_trio.link.interface import Frame
from lockstep_trio.link.socket import contents, receive_frames
from lockstep_trio.link.watch import Watch

__all__ = ["Outputs"]

_BURST = 100
"""Foreign messages dropped in one go, so that a flood of them cannot keep the trio loop to itself."""

_KEPT = 1000
"""Messages kept while it is not known whose they are."""


@attrs.frozen
class _Early:
    number: int
    descriptor: int
    origin: str
    frames: list[Frame]


@final
class Outputs:
    """Receives from the PULL socket at ``position`` of the watch."""

    def __init__(self, socket: zmq.Socket[bytes], connections: Connections, watch: Watch, position: int) -> None:
        self._socket = socket
        self._connections = connections
        self._watch = watch
        self._position = position
        self._early: list[_Early] = []
        self._unjudged = False
        self._ready: deque[list[Frame]] = deque()
        self.expected_from: str | None = None
        """Where the rank's registration came from; None before that."""
        self.dropped = 0

    @property
    def pending(self) -> bool:
        """Whether `next` may have something that is not in the socket any more."""
        return bool(self._ready) or (self._unjudged and self.expected_from is not None)

    def next(self, *, rank_lost: bool) -> list[Frame] | None:
        """The rank's next message, None if there is none just now.

        Args:
            rank_lost: Whether the rank's input connection has ended.
        """
        if self._connections.own is None:
            self._find_own(rank_lost)
        if self._ready:
            return self._ready.popleft()
        return None if self._connections.own is None else self._next_own(self._connections.own)

    def _receive(self) -> list[zmq.Frame] | None:
        frames = receive_frames(self._socket)
        if frames is None:
            self._watch.drained(self._position)
        else:
            self._watch.stirred(self._position)
        return frames

    def _next_own(self, own: int) -> list[Frame] | None:
        """Once the rank is lost and its descriptor another's, its last words and the other's cannot be told any more.

        Then both are dropped: two lives of a rank must never be mixed, and last words are there at once.
        """
        for _ in range(_BURST):
            frames = self._receive()
            if frames is None:
                return None
            if descriptor_of(frames[0]) == own and not self._connections.handed_on:
                return contents(frames)
            self.dropped += 1
        return None

    def _find_own(self, rank_lost: bool) -> None:
        self.take_in()
        if self.expected_from is None:
            return
        self._unjudged = False
        undecided = []
        for early in self._early:
            verdict = self._judge(early, self.expected_from, rank_lost)
            if verdict:
                self._settle(early)
                return
            if verdict is None:
                undecided.append(early)
        self.dropped += len(self._early) - len(undecided)
        self._early = undecided

    def take_in(self) -> None:
        """Receive without deciding, so that each message is seen while its connection can be told."""
        for _ in range(_BURST):
            frames = self._receive()
            if frames is None:
                return
            self._keep(frames)

    def _keep(self, frames: list[zmq.Frame]) -> None:
        descriptor = descriptor_of(frames[0])
        if descriptor == NO_DESCRIPTOR or len(self._early) >= _KEPT:
            self.dropped += 1
            return
        number = self._connections.number_of(frames[0])
        if self._connections.outdated(number):
            self.dropped += 1
            return
        self._early.append(_Early(number, descriptor, origin_of(frames[0]), contents(frames)))
        self._unjudged = True

    def forget(self) -> None:
        """Another process is expected in the rank's place: drop what was not fetched, of whomever it is."""
        self.dropped += len(self._early) + len(self._ready)
        self._early.clear()
        self._ready.clear()
        self._unjudged = False
        self.expected_from = None

    def _judge(self, early: _Early, expected: str, rank_lost: bool) -> bool | None:
        """Whether an early message is the rank's, which identifies its connection; None if that must be seen.

        It is if nobody else ever spoke ZeroMQ on this endpoint. Otherwise it must come from where the registration came
        from (over ipc that is the process), and no older connection from there may stand: the rank is told the endpoint
        before anybody can find it by trying. A connection that has ended cannot be the rank's as long as the rank's
        other one stands; if that has ended too, these were its last words, unless a connection that stands has a better
        claim.

        What this cannot tell: a stranger of the same process, or over tcp of the same host, that came before the rank,
        completed a handshake and stays. It keeps the rank from being heard; the group then fails as silent.
        """
        connections = self._connections
        stands = connections.live.get(early.descriptor) == early.number
        if not stands and not rank_lost:
            return None
        if connections.handshakes <= 1:
            return True
        if early.origin != expected:
            return False
        return not connections.older_from(early.origin, early.number if stands else connections.accepted + 1)

    def _settle(self, proof: _Early) -> None:
        self._connections.claim(proof.number, proof.descriptor)
        own = [early.frames for early in self._early if early.number == proof.number]
        self._ready.extend(own)
        self.dropped += len(self._early) - len(own)
        self._early = []
