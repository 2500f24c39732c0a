"""Addresses: what may be bound, and how to bind it without hurting anybody.

libzmq by itself is dangerous here (measured, 4.3.5): binding an ipc path over a *live* listener succeeds and steals it,
the first owner hears nothing more; binding over a regular file destroys the file; the socket file stays behind after
closing. And it binds ``tcp://*`` for whoever asks. So everything is checked first, and nothing is bound or changed if
the check fails: ``ValueError`` for an address that is malformed or not allowed, ``OSError`` for one that is taken or
not ours. Ports are never probed and bound later: port 0 (or ``*``) lets the kernel choose, `bind` tells the outcome.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias, final

import attrs
import zmq

__all__ = ["Endpoint", "IpcEndpoint", "PrivateDirectory", "TcpEndpoint", "bind", "parse", "remove_file"]

_WILDCARDS = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - named in order to refuse them
_LOCK_PATIENCE = 2.0
_CONNECT_PATIENCE = 1.0


@final
@attrs.frozen
class TcpEndpoint:
    """A tcp address. Port 0 lets the kernel choose."""

    host: str
    """Without brackets; ``localhost`` has become ``127.0.0.1``, because libzmq binds numbers and interfaces only."""
    port: int

    @property
    def wildcard(self) -> bool:
        """Whether it means every interface, so that nobody can connect *to* it."""
        return self.host in _WILDCARDS

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it. An interface's name counts as not."""
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port or '*'}"


@final
@attrs.frozen
class IpcEndpoint:
    """The absolute path of a unix socket."""

    path: Path

    def __str__(self) -> str:
        return f"ipc://{self.path}"


Endpoint: TypeAlias = TcpEndpoint | IpcEndpoint


def parse(address: str, *, allow_remote: bool = False) -> Endpoint:
    """Read an address and refuse what must not be bound. Touches nothing.

    Args:
        address: ``ipc:///path`` or ``tcp://host:port``; port 0 or ``*`` for any free one.
        allow_remote: Whether other machines may reach it.

    Raises:
        ValueError: Malformed, too long, of another kind, or open to the network without ``allow_remote``.
    """
    scheme, separator, rest = address.partition("://")
    if separator and scheme == "ipc":
        return _parse_ipc(address, rest)
    if separator and scheme == "tcp":
        return _parse_tcp(address, rest, allow_remote)
    raise ValueError(f"{address!r} is neither an ipc:// nor a tcp:// address")


def _parse_ipc(address: str, path: str) -> IpcEndpoint:
    if not path or path == "*" or path.endswith("/") or "\0" in path:
        raise ValueError(f"{address!r} names no socket file")
    if path.startswith("@"):
        raise ValueError(
            f"{address!r} is an abstract name, which any user of this machine could connect to; use a path"
        )
    absolute = Path(path).absolute()
    size, limit = len(os.fsencode(absolute)), zmq.IPC_PATH_MAX_LEN
    if size > limit:
        raise ValueError(f"{address!r}: the path has {size} bytes, a unix socket's can have at most {limit}")
    return IpcEndpoint(absolute)


def _parse_tcp(address: str, rest: str, allow_remote: bool) -> TcpEndpoint:
    host, separator, port_text = rest.rpartition(":")
    if not separator or not host:
        raise ValueError(f"{address!r} is not of the form tcp://host:port")
    if host.startswith("[") != host.endswith("]") or (":" in host and not host.startswith("[")):
        raise ValueError(f"{address!r}: an IPv6 address goes into brackets")
    host = host.removeprefix("[").removesuffix("]")
    if not host or "[" in host or "]" in host:
        raise ValueError(f"{address!r} names no host")
    endpoint = TcpEndpoint("127.0.0.1" if host == "localhost" else host, _parse_port(address, port_text))
    if not endpoint.loopback and not allow_remote:
        raise ValueError(f"{address!r} can be reached from other machines; allow_remote=True permits that")
    return endpoint


def _parse_port(address: str, text: str) -> int:
    if text == "*":
        return 0
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        raise ValueError(f"{address!r}: the port is not a number from 0 to 65535")
    return int(text)


def remove_file(endpoint: IpcEndpoint) -> None:
    """Remove the file of a socket that was bound here. Somebody may have done so before us."""
    with contextlib.suppress(OSError):
        endpoint.path.unlink()


def bind(sock: zmq.Socket[bytes], endpoint: Endpoint) -> Endpoint:
    """Bind a socket, after making sure that nobody is hurt by it, and return the address with its real port.

    Raises:
        OSError: The address is taken or not available (it is in the message); nothing was changed.
    """
    if isinstance(endpoint, TcpEndpoint):
        if ":" in endpoint.host:
            sock.set(zmq.IPV6, 1)
        _bind_raw(sock, endpoint)
        port = sock.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        return TcpEndpoint(endpoint.host, int(port))
    directory = endpoint.path.parent
    with _sole_binder(directory):
        _check_directory(endpoint, directory)
        _clear_path(endpoint)
        _bind_raw(sock, endpoint)
        endpoint.path.chmod(0o600)
    return endpoint


def _bind_raw(sock: zmq.Socket[bytes], endpoint: Endpoint) -> None:
    try:
        sock.bind(str(endpoint))
    except zmq.ZMQError as error:
        number = error.errno or errno.EINVAL
        raise _os_error(number, endpoint, os.strerror(number)) from None


def _os_error(number: int, endpoint: Endpoint, why: str) -> OSError:
    return OSError(number, f"cannot listen at {endpoint}: {why}")


@contextlib.contextmanager
def _sole_binder(directory: Path) -> Iterator[None]:
    """Keep two of us from both finding the same stale file and removing it, the second one the first one's new socket.

    The lock is on the directory itself, so it leaves nothing behind.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Anybody who can read the directory can hold this lock for ever, hence no blocking on it.
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, f"{directory} stays locked by another process") from None
                time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)


def _check_directory(endpoint: IpcEndpoint, directory: Path) -> None:
    """Refuse a directory where another user could replace the socket: it must be ours alone, or sticky like /tmp."""
    status = directory.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise _os_error(errno.EPERM, endpoint, f"{directory} is a symbolic link; name the real directory")
    if status.st_uid not in (os.geteuid(), 0):
        raise _os_error(errno.EPERM, endpoint, f"{directory} belongs to user {status.st_uid}, not to us")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(status.st_mode)
        raise _os_error(errno.EPERM, endpoint, f"{directory} can be written by others (mode {mode:04o})")


def _clear_path(endpoint: IpcEndpoint) -> None:
    """Remove a dead socket of ours; refuse anything else that is there."""
    try:
        status = endpoint.path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise _os_error(errno.EEXIST, endpoint, "something that is not a socket is there")
    if status.st_uid != os.geteuid():
        raise _os_error(errno.EADDRINUSE, endpoint, f"a socket of user {status.st_uid} is there")
    if _answers(endpoint.path):
        raise _os_error(errno.EADDRINUSE, endpoint, "somebody is listening there")
    endpoint.path.unlink()


def _answers(path: Path) -> bool:
    """Whether anybody listens at a socket file. Only a plain refusal counts as nobody."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_PATIENCE)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


@final
class PrivateDirectory:
    """A fresh directory that only we can enter, for unix sockets with short paths."""

    def __init__(self) -> None:
        # The usual place can be too deep for a unix socket (macOS, a test's TMPDIR): then /tmp.
        base = tempfile.gettempdir()
        if len(os.fsencode(base)) > zmq.IPC_PATH_MAX_LEN - 40:
            base = "/tmp"  # noqa: S108 - mkdtemp makes a fresh name with mode 0700
        self.path = Path(tempfile.mkdtemp(prefix="lockstep-", dir=base))

    def endpoint(self, name: str) -> IpcEndpoint:
        """The address of a socket in it."""
        return _parse_ipc(name, str(self.path / name))

    def remove(self) -> None:
        """Remove it with whatever is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
