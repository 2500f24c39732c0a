"""The process limits that a group of ranks runs into: sockets per context and descriptors per process."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import zmq

__all__ = ["new_context", "reserve_descriptors"]

SOCKETS_PER_RANK = 6
"""Input, output, and for each of the two monitors our end and libzmq's end of a pair."""

_SPARE_SOCKETS = 8
"""The handshake socket with its monitor's two, and sockets that tests add."""

DESCRIPTORS_PER_RANK = 18
"""14 on Linux: an eventfd per socket, two listeners, two connections, a witness of each (over tcp), an epoll and its
bell. The rest is for strangers, and for platforms where libzmq needs a pair of descriptors per socket."""

_SPARE_DESCRIPTORS = 64


def new_context(ranks: int) -> zmq.Context[zmq.Socket[bytes]]:
    """A ZeroMQ context that has room for that many ranks; libzmq's own default ends at about 170."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    needed = ranks * SOCKETS_PER_RANK + _SPARE_SOCKETS
    # Allocated at the first socket and fixed from then on.
    context.set(zmq.MAX_SOCKETS, max(needed, context.get(zmq.MAX_SOCKETS)))
    return context


def reserve_descriptors(ranks: int) -> None:
    """Raise the soft limit of open files to what that many ranks need on top of what is open now.

    It is not lowered again: other groups may have come to depend on it.

    Raises:
        OSError: The hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = _open_descriptors()
    needed = opened + ranks * DESCRIPTORS_PER_RANK + _SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(
            errno.EMFILE,
            f"{ranks} ranks need {needed} file descriptors ({opened} are open now), "
            f"the hard limit of this process is {hard}",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _open_descriptors() -> int:
    for directory in ("/proc/self/fd", "/dev/fd"):
        try:
            return sum(1 for _ in Path(directory).iterdir())
        except OSError:
            continue
    return 64
