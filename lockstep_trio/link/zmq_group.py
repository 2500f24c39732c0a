"""A group of ranks over ZeroMQ: the handshake socket, a link per rank, one context; and the function that opens it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal, final

import trio

from lockstep_trio.link.endpoints import Endpoint, IpcEndpoint, PrivateDirectory, TcpEndpoint, parse
from lockstep_trio.link.handshake import HandshakeSocket
from lockstep_trio.link.interface import Frame
from lockstep_trio.link.options import HEARTBEAT, HEARTBEAT_TIMEOUT, LinkOptions
from lockstep_trio.link.resources import new_context, reserve_descriptors
from lockstep_trio.link.zmq_link import ZmqRankLink

__all__ = ["Transport", "ZmqGroupLink", "open_zmq_link"]

Transport = Literal["ipc", "tcp"]

_TERM_PATIENCE = 0.5
"""Seconds beyond the linger time that libzmq is given to wind up before it is left to a thread of its own."""


@final
class ZmqGroupLink:
    """See `lockstep_trio.link.interface.GroupLink`. Made by `open_zmq_link`."""

    def __init__(
        self,
        handshake: Endpoint | None,
        identities: Sequence[bytes],
        host: str | None,
        options: LinkOptions,
    ) -> None:
        self._options = options
        self._ranks: list[ZmqRankLink] = []
        self._undo = ExitStack()
        reserve_descriptors(len(identities))
        self._context = new_context(len(identities))
        self._undo.callback(self._terminate)
        try:
            self._directory = self._make_directory() if handshake is None or host is None else None
            self._handshake = HandshakeSocket(self._context, handshake or self._private("handshake"), options)
            self._undo.callback(self._handshake.close)
            self._handshake_endpoint = _reachable(self._handshake.endpoint, host)
            for rank, identity in enumerate(identities):
                self._open_rank(rank, identity, host)
        except BaseException:
            self.close()
            raise

    def _make_directory(self) -> PrivateDirectory:
        directory = PrivateDirectory()
        self._undo.callback(directory.remove)
        return directory

    def _private(self, name: str) -> IpcEndpoint:
        assert self._directory is not None
        return self._directory.endpoint(name)

    def _open_rank(self, rank: int, identity: bytes, host: str | None) -> None:
        endpoints: tuple[Endpoint, Endpoint]
        if host is None:
            endpoints = self._private(f"input-{rank}"), self._private(f"output-{rank}")
        else:
            endpoints = TcpEndpoint(host, 0), TcpEndpoint(host, 0)
        self._ranks.append(ZmqRankLink(self._context, rank, identity, endpoints, self._options))

    @property
    def ranks(self) -> Sequence[ZmqRankLink]:
        """The links of all ranks, in the order of the identities."""
        return self._ranks

    @property
    def handshake_endpoint(self) -> str:
        """Where ranks say hello, with the port that was really bound."""
        return self._handshake_endpoint

    async def receive_handshake(self) -> tuple[bytes, list[bytes] | None]:
        """The next (identity, frames) on the handshake socket, from anybody; frames None: its connection has ended.

        Raises:
            trio.BusyResourceError: Another task is in this method.
            trio.ClosedResourceError: The handshake socket is, or was meanwhile, closed.

        Cancellation: loses nothing.
        """
        return await self._handshake.receive()

    def send_handshake(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """Answer an identity. A peer that is gone again, or does not read, is ignored.

        Raises:
            trio.ClosedResourceError: The handshake socket is closed.
        """
        self._handshake.send_nowait(identity, frames)

    @trio.lowlevel.enable_ki_protection  # as close
    def close_handshake(self) -> None:
        """Release the handshake endpoint. Answers on their way get the linger time. Idempotent."""
        self._handshake.close()

    @trio.lowlevel.enable_ki_protection  # half of it would leave files, and a context that waits for its sockets
    def close(self) -> None:
        """Close everything, files and directories too. Idempotent, takes at most the linger time and half a second."""
        for link in self._ranks:
            link.close()
        self._undo.close()

    def _terminate(self) -> None:
        """Wait for libzmq to have sent what it still has, or given it up.

        Every socket is closed by now and its linger time is finite, so this ends by itself; the thread is there so that
        a fault in that reasoning, or in libzmq, costs a thread and not the caller's trio loop.
        """
        thread = threading.Thread(target=self._context.term, name="lockstep-zmq-term", daemon=True)
        thread.start()
        thread.join(self._options.linger + _TERM_PATIENCE)


def _reachable(bound: Endpoint, host: str | None) -> str:
    """What to tell people who want to connect: every interface is no address."""
    if isinstance(bound, TcpEndpoint) and bound.wildcard and host is not None:
        return str(TcpEndpoint(host, bound.port))
    return str(bound)


@trio.lowlevel.enable_ki_protection  # a Ctrl-C between a bind and the note of how to undo it would leave a file
def open_zmq_link(
    handshake: str | None,
    *,
    identities: Sequence[bytes],
    transport: Transport = "ipc",
    host: str | None = None,
    allow_remote: bool = False,
    send_hwm: int = 128,
    linger: float = 1.0,
    heartbeat: float | None = HEARTBEAT,
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
) -> ZmqGroupLink:
    """Bind a handshake address and a pair of endpoints per rank.

    Args:
        handshake: ``tcp://host:port`` (port 0 or ``*``: any free one) or ``ipc:///path``. None: a path in a private
            directory; `ZmqGroupLink.handshake_endpoint` tells it.
        identities: The name each rank gives its input socket, in the order of the ranks.
        transport: What the ranks' own endpoints are made of: ``ipc`` in a private directory, or ``tcp`` ports that the
            kernel chooses.
        host: With ``tcp``, the address to bind the ranks' endpoints on. None: that of the handshake, or the loopback if
            that one is ipc.
        allow_remote: Permit addresses that other machines can reach. Nothing on the wire is authenticated or secret.
        send_hwm: Messages that may wait for a rank before its link is full.
        linger: Seconds; bounds how long closing may take.
        heartbeat: Seconds between pings, on tcp only. None: none.
        heartbeat_timeout: Seconds of silence until a tcp connection is given up. Ought to be longer than the caller's
            own patience with a silent rank, which knows more.

    Raises:
        ValueError: An address is malformed or not allowed, or another argument makes no sense. Nothing was bound.
        OSError: An address is taken or not available, or the process may not open enough files. All is released again.

    Ownership: the caller closes it. What has been bound is released on every error.
    """
    if not identities or len(set(identities)) != len(identities):
        raise ValueError("there must be at least one identity, and no two may be the same")
    if not all(1 <= len(identity) <= 255 for identity in identities):
        raise ValueError("ZeroMQ identities have from 1 to 255 bytes")
    options = LinkOptions(send_hwm=send_hwm, linger=linger, heartbeat=heartbeat, heartbeat_timeout=heartbeat_timeout)
    endpoint = None if handshake is None else parse(handshake, allow_remote=allow_remote)
    rank_host = _rank_host(endpoint, transport, host, allow_remote)
    return ZmqGroupLink(endpoint, identities, rank_host, options)


def _rank_host(handshake: Endpoint | None, transport: Transport, host: str | None, allow_remote: bool) -> str | None:
    """The address for the ranks' tcp endpoints; None for ipc."""
    if transport == "ipc":
        if host is not None:
            raise ValueError("host is given, but the ranks' endpoints are ipc")
        return None
    if transport != "tcp":
        raise ValueError(f"transport is {transport!r}, not 'ipc' or 'tcp'")
    if host is None:
        host = handshake.host if isinstance(handshake, TcpEndpoint) else "127.0.0.1"
    bracketed = f"[{host}]" if ":" in host else host
    endpoint = parse(f"tcp://{bracketed}:0", allow_remote=allow_remote)
    assert isinstance(endpoint, TcpEndpoint)
    if endpoint.wildcard:
        raise ValueError(f"ranks cannot connect to {host!r}: give an address of this machine as host=")
    return endpoint.host
