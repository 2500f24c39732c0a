"""Which of the connections on a socket is the rank's own, and whether it still stands.

A port scanner, a stray client or a second process with the rank's name connects to the same endpoint and raises the
same monitor events as the rank. libzmq names the descriptor of the connection in both places that matter: in the
events ``ACCEPTED`` and ``DISCONNECTED``, and in every frame (``zmq.SRCFD``). So a disconnect concerns the rank only if
its descriptor is the one that the rank's own frames came in on.

Descriptors are reused by the kernel, so connections are numbered here in the order they were accepted. Each event is
put into the monitor before its effect is visible: ``ACCEPTED`` before the first frame can be received,
``DISCONNECTED`` before the descriptor is closed. Reading all pending events right after a frame was taken therefore
shows the connection the frame belongs to as the latest one with its descriptor, unless that one ended, and another one
was given its descriptor, between the frame's arrival and now. Such a mistake is made in favour of "still alive": a send
then finds the rank unreachable.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import final

import zmq

from lockstep_trio.link.ending import Ending, Witness, copy_of
from lockstep_trio.link.socket import receive_frames

__all__ = ["NO_DESCRIPTOR", "Connections", "descriptor_of", "origin_of"]

_EVENT = struct.Struct("=Hi")
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_READ_AT_ONCE = 1000
"""Events taken in one go, so that a flood of connections cannot keep the trio loop to itself."""


NO_DESCRIPTOR = -1


def descriptor_of(frame: zmq.Frame) -> int:
    """The descriptor of the connection a frame came in on.

    Whatever is sent to the port by a peer that does not greet like ZeroMQ is taken for messages in the framing of
    ZMTP 1.0 (a port scanner's bytes do become messages, measured); these carry no descriptor.
    """
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return NO_DESCRIPTOR


def origin_of(frame: zmq.Frame) -> str:
    """Who sent a frame as the kernel sees it: ``host`` over tcp, ``localhost:uid:gid:pid`` over ipc on Linux."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


def _origin_of_descriptor(descriptor: int) -> str:
    """The same for a connection that has not sent anything. Empty if it cannot be known."""
    copy = copy_of(descriptor)
    if copy is None:
        return ""
    try:
        with copy:
            if copy.family != socket.AF_UNIX:
                return str(copy.getpeername()[0])
            if not hasattr(socket, "SO_PEERCRED"):
                return "localhost"
            pid, uid, gid = struct.unpack("iII", copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return f"localhost:{uid}:{gid}:{pid}"
    except OSError:
        return ""


@final
class Connections:
    """Reads the monitor of one bound socket and keeps account of its connections.

    Costs the context two sockets: ours, and libzmq's end of the pair. Costs the process one more descriptor once the
    rank's own connection is known and is tcp; see `Witness`.

    Args:
        context: Where the monitor's end of ours belongs.
        watched: The socket, not bound yet, or a connection could slip in unseen.
        name: Of the monitor, once in the context.
        patience: Seconds after which libzmq gives up a silent connection; None if it does not.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        watched: zmq.Socket[bytes],
        name: str,
        patience: float | None = None,
    ) -> None:
        self._watched = watched
        self._patience = patience
        self.monitor = context.socket(zmq.PAIR)
        self.monitor.set(zmq.LINGER, 0)
        # Without a limit: libzmq reports events with a blocking send, in its I/O thread. If the pair were full while
        # the trio loop is busy elsewhere, the whole context would stand still.
        self.monitor.set(zmq.RCVHWM, 0)
        watched.monitor(f"inproc://{name}", _EVENTS)
        self.monitor.connect(f"inproc://{name}")
        self.accepted = 0
        """How many there have been."""
        self.handshakes = 0
        """How many of them ever spoke ZeroMQ, without those that `forget` was about."""
        self.live: dict[int, int] = {}
        """Descriptor and number of those that stand."""
        self._latest: dict[int, int] = {}
        self._outdated = 0
        self.own: int | None = None
        """Descriptor of the rank's own connection, None as long as it is not known."""
        self.handed_on = False
        """Whether the rank's own connection has ended and another one was given its descriptor."""
        self._witness: Witness | None = None
        self.ending: Ending | None = None
        """How the rank's own connection ended; None as long as it has not."""

    @property
    def lost(self) -> bool:
        """Whether the rank's own connection has ended."""
        return self.ending is not None

    @property
    def ended(self) -> bool:
        """Whether nothing more can come from the rank: its connection has ended, or there is none that may be its."""
        return self.lost or (self.own is None and all(map(self.outdated, self.live.values())))

    def read_events(self) -> bool:
        """Take in what the monitor has to tell. False if it may have more."""
        for _ in range(_READ_AT_ONCE):
            frames = receive_frames(self.monitor)
            if frames is None:
                return True
            self._note(*_EVENT.unpack(frames[0].bytes))
        return False

    def _note(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self.accepted += 1
            self.live[descriptor] = self._latest[descriptor] = self.accepted
            self.handed_on = self.handed_on or descriptor == self.own
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            # Its value is 0, not the descriptor (libzmq 4.3.5), so they can only be counted.
            self.handshakes += 1
        elif event == zmq.EVENT_DISCONNECTED:
            self.live.pop(descriptor, None)
            if descriptor == self.own and self.ending is None:
                self.ending = self._witness.tell() if self._witness is not None else Ending("ended")

    def number_of(self, frame: zmq.Frame) -> int:
        """The number of the connection that a frame just taken from the socket came in on; 0 if it cannot be told."""
        self._read_all_events()
        return self._latest.get(descriptor_of(frame), 0)

    def _read_all_events(self) -> None:
        while not self.read_events():
            pass

    def claim(self, number: int, descriptor: int) -> None:
        """This connection is the rank's own."""
        self.own = descriptor
        if self.live.get(descriptor) == number:
            self._witness = Witness(descriptor, self._patience)
            # The descriptor may have been closed, and be another's, since the last look. Then its end is in there.
            self._read_all_events()
        if self.live.get(descriptor) != number:
            self._dismiss_witness()
            self.ending = Ending("ended")
            self.handed_on = self._latest.get(descriptor) != number

    def cut(self) -> None:
        """End the rank's own connection if it stands. libzmq finds out by itself."""
        if self.own is None or self.lost:
            return
        copy = copy_of(self.own)
        if copy is None:
            return
        with copy, contextlib.suppress(OSError):
            self._read_all_events()  # is the descriptor still that connection's?
            if not self.lost:
                copy.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Another process is expected: none of the connections accepted so far is the rank's."""
        self._dismiss_witness()
        self._read_all_events()
        self.own = self.ending = None
        self.handed_on = False
        self._outdated = self.accepted
        self.handshakes = 0

    def outdated(self, number: int) -> bool:
        """Whether a connection was accepted before the latest `forget`, or its number cannot be told."""
        return number <= self._outdated

    def _dismiss_witness(self) -> None:
        if self._witness is not None:
            self._witness.close()
            self._witness = None

    def older_from(self, origin: str, number: int) -> bool:
        """Whether a connection that was accepted before this one, and comes from there, stands."""
        older = (descriptor for descriptor, other in self.live.items() if self._outdated < other < number)
        return any(_origin_of_descriptor(descriptor) == origin for descriptor in older)

    def close(self) -> None:
        """Stop monitoring. To be called before the monitored socket is closed. Idempotent."""
        self._dismiss_witness()
        if not self.monitor.closed:
            if not self._watched.closed:
                self._watched.monitor(None, 0)
            self.monitor.close(0)
