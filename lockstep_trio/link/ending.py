"""How a tcp connection ended: closed by the other end, or given up here because nothing came.

libzmq says DISCONNECTED for both and gives no reason (4.3.5; the event's value is the descriptor). So a second
descriptor of the connection is kept, from the moment it is known to be the rank's, and asked when the event comes.
libzmq has closed its own by then, or is about to; what the kernel knows about the connection is still there. Measured
(Linux, heartbeats each 0.1 s with a timeout of 0.5 s where they matter):

=====================================  ==========================  ===========  ======================================
what happened                          ``recv(MSG_PEEK)``          state        ``tcpi_retransmits``, ``tcpi_probes``
=====================================  ==========================  ===========  ======================================
the process was killed, or closed it   end of file                 CLOSE_WAIT   0, 0
the same with data it had not read     end of file (libzmq took    CLOSE        0, 0; or not, and the last ACK came
                                       the ECONNRESET)                          within ``tcpi_rto``
the process is stopped, or the way     EAGAIN                      ESTABLISHED  0, 0 (its kernel still acknowledges)
swallows everything: heartbeats end
the same, but the kernel gave up       end of file (libzmq took    CLOSE        not both 0, and the last ACK came
first (keepalive, user timeout)        the ETIMEDOUT)                           longer ago than ``tcpi_rto``
what came was no ZeroMQ, or too large  EAGAIN or data, soon after  ESTABLISHED  0, 0
                                       the last data
=====================================  ==========================  ===========  ======================================

The price: as long as the second descriptor is open, the kernel does not tell the other end that libzmq closed the
first. So it is closed as soon as it was asked, and before the sockets are.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import final

import attrs

__all__ = ["Ending", "Witness", "copy_of"]

_TCP_INFO = struct.Struct("=8B24I")
"""The head of ``struct tcp_info`` (``linux/tcp.h``), which only ever grew at its end."""
_STATE, _RETRANSMITS, _PROBES = 0, 2, 3
_RESEND_AFTER, _LAST_DATA, _LAST_ACK = 8 + 0, 8 + 11, 8 + 12
"""Microseconds, and milliseconds ago."""
_CLOSE = 7
"""``TCP_CLOSE``: reset, or given up by the kernel. After a FIN it is CLOSE_WAIT."""
_TOLERANCE = 0.5
"""The silence that the kernel counted, against the time after which libzmq gives up. They run on different clocks and
from different moments, but what was cut off for its contents was heard only just now."""


@final
@attrs.frozen
class Ending:
    """How a connection ended."""

    how: str
    """In words, to follow the connection's name."""
    silent: bool = False


def copy_of(descriptor: int) -> socket.socket | None:
    """A socket object over a second descriptor of the same connection; None if that is none."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


@final
class Witness:
    """A second descriptor of a tcp connection. Without one (over ipc, or if none can be had) it only knows "ended".

    Args:
        descriptor: libzmq's.
        patience: Seconds after which libzmq gives up a silent connection; None if it does not.
    """

    def __init__(self, descriptor: int, patience: float | None) -> None:
        self._patience = patience
        self._copy = copy_of(descriptor)
        if self._copy is not None and self._copy.family not in (socket.AF_INET, socket.AF_INET6):
            self.close()

    def tell(self) -> Ending:
        """What the kernel knows about the end. To be asked once libzmq said that it came, and once only."""
        if self._copy is None:
            return Ending("ended")
        try:
            return self._ending(self._copy)
        finally:
            self.close()

    def _ending(self, copy: socket.socket) -> Ending:
        state, given_up, quiet = _kernels_view(copy)
        for_so_long = "" if quiet is None else f" for {quiet:.1f} s"
        if not _standing(copy):
            if given_up and state == _CLOSE:
                return Ending(f"timed out: nothing came over it{for_so_long}, the system gave it up", silent=True)
            return Ending("ended")
        if self._patience is not None and (quiet is None or quiet >= self._patience * _TOLERANCE):
            return Ending(f"was given up: nothing came over it{for_so_long}, heartbeats neither", silent=True)
        return Ending("was cut off here: what came over it was no ZeroMQ message, or a too large one")

    def close(self) -> None:
        """Give up the descriptor. Idempotent."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None


def _standing(copy: socket.socket) -> bool:
    """Whether the other end has not closed the connection."""
    try:
        return bool(copy.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _kernels_view(copy: socket.socket) -> tuple[int, bool, float | None]:
    """The state, whether the kernel waited in vain for an answer, and the seconds since data came; if it can be known.

    libzmq has read the socket's error before we can (``SO_ERROR`` is 0 by now), hence the second of them. A peer whose
    buffers are full drops data, so that it is sent again, but acknowledges each time: that is no waiting in vain.
    """
    if sys.platform != "linux":
        return 0, False, None
    try:
        known = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        fields = _TCP_INFO.unpack(known)
    except (OSError, struct.error):
        return 0, False, None
    unanswered = fields[_LAST_ACK] * 1000 > fields[_RESEND_AFTER]
    in_vain = unanswered and bool(fields[_RETRANSMITS] or fields[_PROBES])
    return fields[_STATE], in_vain, fields[_LAST_DATA] / 1000
