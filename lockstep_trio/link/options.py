"""What can be set about a group's sockets, and the sockets made with it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import final

import attrs
import zmq

from lockstep_trio.link.endpoints import Endpoint, IpcEndpoint, bind, remove_file
from lockstep_trio.link.socket import milliseconds

__all__ = ["HEARTBEAT", "HEARTBEAT_TIMEOUT", "LinkOptions", "listen", "open_pull", "open_router"]

OUTPUT_RECEIVE_HWM = 0
"""Messages libzmq keeps for us of each rank's outputs: no limit, as vLLM's own client has it.

With a limit libzmq stops reading the connection when it is reached, and if the rank then closes or dies, it drops what
is still in the kernel's buffer (measured with 1000: of 12,500 messages sent before a clean close 1,001 arrived;
``stream_engine_base_t::in_event_internal`` with ``_input_stopped``). Those are the last words of a rank. Nor would a
limit bound anything but our own memory: the engine puts what it cannot send into a queue without limit."""

INPUT_RECEIVE_HWM = 1000
"""The same for what comes in on an input or handshake socket. A rank says one thing there, the rest is junk."""

HEARTBEAT = 5.0
"""Seconds between pings."""

HEARTBEAT_TIMEOUT = 150.0
"""Seconds. Above the 60 s after which a silent rank is probed and the 60 s that it has to answer, so that of a process
that is stopped we hear from the client, who knows what the rank was doing, and not from a connection that ends."""

MAX_INPUT_SIZE = 16 * 1024 * 1024
"""Bytes. All that legitimately comes in on an input or handshake socket are small notes of the rank; libzmq cuts off
whoever sends more. Outputs have no such limit."""


@final
@attrs.frozen(kw_only=True)
class LinkOptions:
    """What can be set about the sockets of a rank."""

    send_hwm: int = 128
    """Messages that may wait in libzmq for the rank before `ZmqRankLink.send_nowait` returns False. Only beyond that do
    they count against the client's own bounds in bytes and in time, so it should not be many: prompts can be long."""
    linger: float = 1.0
    """Seconds for which frames already sent survive closing while the rank does not take them."""
    heartbeat: float | None = HEARTBEAT
    """Seconds between ZMTP pings over tcp (libzmq's own thread answers them, however busy the engine is). None: none.
    They keep a quiet connection alive and find a dead machine. Over ipc the kernel reports everything there is."""
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    """Seconds of silence after a ping until the connection is given up."""

    @property
    def patience(self) -> float | None:
        """Seconds after which libzmq gives up a silent tcp connection; None if it does not."""
        return None if self.heartbeat is None else self.heartbeat_timeout

    def __attrs_post_init__(self) -> None:
        if self.send_hwm < 1:
            raise ValueError(
                f"send_hwm is {self.send_hwm}; it must be at least 1: without a limit a stuck rank is unseen"
            )
        if not 0 <= self.linger < 3600:
            raise ValueError(f"linger is {self.linger}; it must be from 0 to 3600 seconds")
        if self.heartbeat is not None and not 0 < self.heartbeat <= self.heartbeat_timeout < 2**31 / 1000:
            raise ValueError("heartbeat must be positive and not above heartbeat_timeout")


def listen(socket: zmq.Socket[bytes], endpoint: Endpoint, options: LinkOptions, undo: ExitStack) -> Endpoint:
    """Bind a socket; over tcp a quiet connection is to stay, and a broken one to be known. ``undo`` removes its file.

    Raises:
        OSError: As `lockstep_trio.link.endpoints.bind`.
    """
    if not isinstance(endpoint, IpcEndpoint):
        _set_heartbeat(socket, options)
    bound = bind(socket, endpoint)
    if isinstance(bound, IpcEndpoint):
        undo.callback(remove_file, bound)
    return bound


def _set_heartbeat(socket: zmq.Socket[bytes], options: LinkOptions) -> None:
    socket.set(zmq.TCP_KEEPALIVE, 1)
    if options.heartbeat is not None:
        socket.set(zmq.HEARTBEAT_IVL, milliseconds(options.heartbeat))
        socket.set(zmq.HEARTBEAT_TIMEOUT, milliseconds(options.heartbeat_timeout))


def open_router(context: zmq.Context[zmq.Socket[bytes]], send_hwm: int, linger: float) -> zmq.Socket[bytes]:
    """A ROUTER that says so when it cannot deliver, and where nobody can take over a name that is in use."""
    router = context.socket(zmq.ROUTER)
    router.set(zmq.ROUTER_MANDATORY, 1)
    router.set(zmq.ROUTER_HANDOVER, 0)
    router.set(zmq.SNDHWM, send_hwm)
    router.set(zmq.RCVHWM, INPUT_RECEIVE_HWM)
    router.set(zmq.LINGER, milliseconds(linger))
    router.set(zmq.MAXMSGSIZE, MAX_INPUT_SIZE)
    return router


def open_pull(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """A PULL for a rank's outputs."""
    pull = context.socket(zmq.PULL)
    pull.set(zmq.RCVHWM, OUTPUT_RECEIVE_HWM)
    pull.set(zmq.LINGER, 0)
    return pull
