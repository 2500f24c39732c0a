"""A small trio socket over a plain (not asyncio) pyzmq socket, and the two functions that touch the wire.

`send_frames` and `receive_frames` are the only places in this package that move frames. Both go through a whole
message in one synchronous loop, with no checkpoint and with ``KeyboardInterrupt`` held back, so that no message is ever
sent or taken by half. Receiving makes ``zmq.Frame`` objects on purpose: that costs less than pyzmq's
``recv_multipart`` (1.3 against 2.2 us for a small message, where reading ``RCVMORE`` is the difference) and is the only
way to learn which connection a message came in on (``zmq.SRCFD``).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import cast, final

import trio
import zmq

from lockstep_trio.link.interface import Frame, Unreachable
from lockstep_trio.link.watch import READABLE, WRITABLE, Watch

__all__ = ["BACKOFF", "ZmqSocket", "contents", "milliseconds", "receive_frames", "send_frames"]

BACKOFF = 0.005
"""Seconds between attempts to send on a socket that claims room (``POLLOUT``) but takes nothing.

A ROUTER claims room as soon as *any* of its peers has some, so a full rank with a stranger connected looks writable for
ever (measured). Waiting for ``POLLOUT`` would spin.
"""

ZERO_COPY = 64 * 1024
"""Frames of at least this many bytes are handed to and taken from libzmq without a copy. Below it, copying is cheaper,
and keeps no more alive than itself: libzmq reads small frames of several messages into one buffer."""

_DONT_WAIT = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


def milliseconds(seconds: float) -> int:
    """Seconds as ZeroMQ options want them. Rounded up, so that a short time does not become none."""
    return -int(-seconds * 1000 // 1)


@trio.lowlevel.enable_ki_protection
def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> bool:
    """Send one message whole, or not at all and return False.

    Raises:
        Unreachable: A mandatory ROUTER has no peer of the name in the first frame.
    """
    last = len(frames) - 1
    try:
        for index, frame in enumerate(frames):
            flags = _DONT_WAIT if index == last else _MORE
            size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
            if size < ZERO_COPY:
                socket.send(frame, flags)
            else:
                socket.send(frame, flags, copy=False)
    except zmq.Again:
        # Room is looked for at the first frame and holds for the whole message (router_t::xsend). A PUSH or DEALER
        # whose peer goes away between frames says EAGAIN later; it takes the frames before back (lb_t::sendpipe).
        return False
    except zmq.ZMQError as error:
        if error.errno == errno.EHOSTUNREACH:
            raise Unreachable("no peer of this identity is connected") from None
        raise
    return True


@trio.lowlevel.enable_ki_protection
def receive_frames(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    """The next message, whole, or None if there is none."""
    receive = cast("Callable[[int, bool], zmq.Frame]", socket.recv)
    try:
        frame = receive(_DONT_WAIT, False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more:
        frame = receive(_DONT_WAIT, False)
        frames.append(frame)
    return frames


def contents(frames: Sequence[zmq.Frame]) -> list[Frame]:
    """What is in the frames of a message; of long ones behind the first a view, which keeps the frame alive."""
    if len(frames) == 1:
        return [frames[0].bytes]
    first, *rest = frames
    return [first.bytes, *(frame.bytes if len(frame) < ZERO_COPY else frame.buffer.toreadonly() for frame in rest)]


class _Claim(AbstractContextManager[None]):
    """Refuses a second task in the same direction."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._taken = False

    def __enter__(self) -> None:
        if self._taken:
            raise trio.BusyResourceError(f"another task is already {self._what} on this socket")
        self._taken = True

    def __exit__(self, *exc: object) -> None:
        self._taken = False


@final
class ZmqSocket:
    """A ZeroMQ socket for trio: one task may receive while another one sends.

    Args:
        socket: A plain pyzmq socket, bound or connected by the caller. It belongs to this object from now on.
        linger: Seconds for which frames that were sent survive `close` while their peer does not take them.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, linger: float = 1.0) -> None:
        self._socket = socket
        self._linger = milliseconds(linger)
        self._watch = Watch(socket)
        self._closed = False
        self._receiving = _Claim("receiving")
        self._sending = _Claim("sending")
        # What both directions wait for together. The task that sleeps on the descriptor reads it through the watch.
        self._wanted = [0]
        self._follower: trio.lowlevel.Task | None = None

    @property
    def raw(self) -> zmq.Socket[bytes]:
        """The pyzmq socket, for options. Sending or receiving on it directly loses wake-ups."""
        return self._socket

    def send_nowait(self, frames: Sequence[Frame]) -> bool:
        """Send one message whole. False if there is no room, and then nothing was sent. Allowed for any task.

        Raises:
            Unreachable: A mandatory ROUTER has no such peer.
            trio.ClosedResourceError: The socket is closed.
        """
        self._check_open()
        try:
            return send_frames(self._socket, frames)
        finally:
            self._watch.touched(0)

    def receive_nowait(self) -> list[bytes] | None:
        """The next message, None if there is none just now. Allowed for any task.

        Raises:
            trio.ClosedResourceError: The socket is closed.
        """
        self._check_open()
        frames = receive_frames(self._socket)
        self._watch.touched(0)
        return None if frames is None else [frame.bytes for frame in frames]

    async def send(self, frames: Sequence[Frame]) -> None:
        """Send one message whole, waiting for room if need be.

        Raises:
            Unreachable: A mandatory ROUTER has no such peer.
            trio.BusyResourceError: Another task is in `send`.
            trio.ClosedResourceError: The socket is, or was meanwhile, closed.

        Cancellation: nothing was sent.
        """
        with self._sending:
            await trio.lowlevel.checkpoint_if_cancelled()
            while not self.send_nowait(frames):
                if not self._watch.ask(0) & WRITABLE:
                    await self._until(WRITABLE)
                elif self.send_nowait(frames):
                    break
                else:
                    await trio.sleep(BACKOFF)
            # A checkpoint that can be cancelled here would report "not sent" of a message that was.
            await trio.lowlevel.cancel_shielded_checkpoint()

    async def receive(self) -> list[bytes]:
        """The next message.

        Raises:
            trio.BusyResourceError: Another task is in `receive`.
            trio.ClosedResourceError: The socket is, or was meanwhile, closed.

        Cancellation: no message is lost.
        """
        with self._receiving:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            message = None
            # Asking costs half of what a receive costs that finds nothing, and the wait need not ask again.
            if self._watch.ask(0) & READABLE:
                message = self.receive_nowait()
                await trio.lowlevel.cancel_shielded_checkpoint()
            while message is None:
                await self._until(READABLE)
                message = self.receive_nowait()
            return message

    def close(self) -> None:
        """Close the socket; tasks that wait on it get ``trio.ClosedResourceError``. Idempotent, does not block."""
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        self._hand_over()
        self._socket.close(self._linger)

    def __enter__(self) -> ZmqSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this socket is closed")

    @trio.lowlevel.enable_ki_protection
    async def _until(self, event: int) -> None:
        """Sleep until the socket may be ready for ``event``.

        Only one task can wait for the descriptor. With both directions waiting, the one that came first does so for
        both, and whenever it stops, whatever the reason, the other one has another look and takes over if need be.
        """
        self._wanted[0] |= event
        try:
            if self._watch.waiting:
                await self._follow()
            else:
                await self._watch.wait(self._wanted)
        finally:
            self._wanted[0] &= ~event
            self._hand_over()
        self._check_open()

    async def _follow(self) -> None:
        # What became ready between the last attempt and now wakes the leader, who wakes us.
        self._watch.touched(0)
        self._follower = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._follower = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _hand_over(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            trio.lowlevel.reschedule(follower)
