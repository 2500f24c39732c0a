"""The handshake socket: what anybody says there, and when the connection of somebody who spoke has ended.

An end is told of the connection that an identity last spoke on. So a scanner's says nothing, and neither does the old
connection of a rank that was restarted and has spoken on a new one since.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import final

import trio
import zmq

from lockstep_trio.link.connections import Connections
from lockstep_trio.link.endpoints import Endpoint
from lockstep_trio.link.interface import Frame, Unreachable
from lockstep_trio.link.options import LinkOptions, listen, open_router
from lockstep_trio.link.socket import milliseconds, receive_frames, send_frames
from lockstep_trio.link.watch import READABLE, Watch

__all__ = ["HandshakeSocket"]

_SEND_HWM = 1000
_ROUTER, _MONITOR = range(2)
_WANTED = (READABLE, READABLE)


@final
class HandshakeSocket:
    """A ROUTER with a monitor. One task receives; whoever wants to sends."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, options: LinkOptions) -> None:
        self._closed = False
        self._spoke_on: dict[bytes, int] = {}
        """Identity and number of the connection that it last spoke on, until that has ended."""
        self._undo = ExitStack()
        try:
            self.endpoint = self._open(context, endpoint, options)
        except BaseException:
            self.close()
            raise

    def _open(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, options: LinkOptions) -> Endpoint:
        """Each step leaves behind how to undo it; `close` goes backwards through them."""
        undo = self._undo.callback
        self._router = open_router(context, _SEND_HWM, options.linger)
        undo(self._router.close, milliseconds(options.linger))
        # Comes before binding, or a connection could slip in unseen.
        self._connections = Connections(context, self._router, "handshake")
        undo(self._connections.close)
        bound = listen(self._router, endpoint, options, self._undo)
        self._watch = Watch(self._router, self._connections.monitor)
        undo(self._watch.close)
        return bound

    async def receive(self) -> tuple[bytes, list[bytes] | None]:
        """The next (identity, frames), from anybody; frames None: the connection on which it last spoke has ended.

        Raises:
            trio.BusyResourceError: Another task is in this method.
            trio.ClosedResourceError: The socket is, or was meanwhile, closed.

        Cancellation: loses nothing.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        if self._watch.waiting:
            raise trio.BusyResourceError("another task is already receiving on the handshake socket")
        news = self._next()
        if news is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
        while news is None:
            await self._watch.wait(_WANTED)
            news = self._next()
        return news

    def _next(self) -> tuple[bytes, list[bytes] | None] | None:
        message = self._take()
        if message is not None:
            return message
        gone = self._somebody_gone()
        if gone is None:
            return None
        # libzmq hands over all it has read before it says DISCONNECTED, so what was said there is readable by now.
        message = self._take()
        if message is not None:
            return message
        del self._spoke_on[gone]
        return gone, None

    def _take(self) -> tuple[bytes, list[bytes]] | None:
        frames = receive_frames(self._router)
        self._watch.stirred(_ROUTER)
        if frames is None:
            return None
        identity, *rest = (frame.bytes for frame in frames)
        number = self._connections.number_of(frames[-1])
        if number:  # a scanner's bytes that look like a message have none
            self._spoke_on[identity] = number
        return identity, rest

    def _somebody_gone(self) -> bytes | None:
        if self._connections.read_events():
            self._watch.drained(_MONITOR)
        else:
            self._watch.stirred(_MONITOR)
        standing = set(self._connections.live.values())
        return next((identity for identity, number in self._spoke_on.items() if number not in standing), None)

    def send_nowait(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """Answer an identity. A peer that is gone again, or does not read, is ignored. Allowed for any task.

        Raises:
            trio.ClosedResourceError: The socket is closed.
        """
        self._check_open()
        try:
            send_frames(self._router, (identity, *frames))
        except Unreachable:
            return
        finally:
            self._watch.touched(_ROUTER)

    def close(self) -> None:
        """Release the endpoint; who waits gets ``trio.ClosedResourceError``. Answers under way get the linger time.

        Idempotent; does not block.
        """
        self._closed = True
        self._undo.close()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("the handshake socket is closed")
