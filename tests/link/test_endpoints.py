"""Addresses: what may be bound, and that nobody is hurt by it."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from lockstep_trio.link import endpoints
from lockstep_trio.link.endpoints import IpcEndpoint, PrivateDirectory, TcpEndpoint, bind, parse

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.set(zmq.LINGER, 0)
        yield socket


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ls-") as name:  # pytest's own are too deep for a unix socket
        yield Path(name)


@pytest.mark.parametrize(
    ("address", "endpoint", "text"),
    [
        ("tcp://127.0.0.1:5570", TcpEndpoint("127.0.0.1", 5570), "tcp://127.0.0.1:5570"),
        ("tcp://127.0.0.1:0", TcpEndpoint("127.0.0.1", 0), "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:*", TcpEndpoint("127.0.0.1", 0), "tcp://127.0.0.1:*"),
        ("tcp://localhost:1", TcpEndpoint("127.0.0.1", 1), "tcp://127.0.0.1:1"),
        ("tcp://127.8.8.8:65535", TcpEndpoint("127.8.8.8", 65535), "tcp://127.8.8.8:65535"),
        ("tcp://[::1]:7", TcpEndpoint("::1", 7), "tcp://[::1]:7"),
        ("ipc:///run/x/y", IpcEndpoint(Path("/run/x/y")), "ipc:///run/x/y"),
    ],
)
def test_addresses_that_are_fine(address: str, endpoint: object, text: str) -> None:
    assert parse(address) == endpoint
    assert str(parse(address)) == text


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("", "neither"),
        ("127.0.0.1:5570", "neither"),
        ("inproc://x", "neither"),
        ("udp://127.0.0.1:5", "neither"),
        ("tcp://", "form"),
        ("tcp://127.0.0.1", "form"),
        ("tcp://:5570", "form"),
        ("tcp://127.0.0.1:", "port"),
        ("tcp://127.0.0.1:-1", "port"),
        ("tcp://127.0.0.1:65536", "port"),
        ("tcp://127.0.0.1:http", "port"),
        ("tcp://127.0.0.1:٣", "port"),
        ("tcp://::1:5", "brackets"),
        ("tcp://[::1:5", "brackets"),
        ("tcp://*:5570", "allow_remote"),
        ("tcp://0.0.0.0:5570", "allow_remote"),
        ("tcp://[::]:5570", "allow_remote"),
        ("tcp://10.0.0.1:5570", "allow_remote"),
        ("tcp://eth0:5570", "allow_remote"),
        ("tcp://example.org:5570", "allow_remote"),
        ("ipc://", "no socket file"),
        ("ipc://*", "no socket file"),
        ("ipc:///tmp/", "no socket file"),
        ("ipc://@abstract", "abstract"),
        ("ipc:///tmp/" + "x" * 103, "the path has 108 bytes, a unix socket's can have at most 10[37]"),
        ("ipc:///tmp/" + "ü" * 52, "the path has 109 bytes"),
    ],
)
def test_addresses_that_are_not(address: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse(address)


def test_the_longest_path_can_be_bound(router: zmq.Socket[bytes], directory: Path) -> None:
    path = directory / ("x" * (zmq.IPC_PATH_MAX_LEN - len(str(directory)) - 1))
    assert bind(router, parse(f"ipc://{path}")) == IpcEndpoint(path)
    assert path.is_socket()


def test_a_path_may_be_relative_and_is_told_in_full(
    router: zmq.Socket[bytes], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    assert str(bind(router, parse("ipc://here"))) == f"ipc://{Path.cwd()}/here"


@pytest.mark.parametrize("address", ["tcp://*:0", "tcp://0.0.0.0:0", "tcp://10.1.2.3:1"])
def test_the_network_has_to_be_allowed(address: str) -> None:
    assert isinstance(parse(address, allow_remote=True), TcpEndpoint)


def test_port_0_tells_the_port_that_was_bound(router: zmq.Socket[bytes]) -> None:
    bound = bind(router, parse("tcp://127.0.0.1:0"))
    assert isinstance(bound, TcpEndpoint)
    assert bound.port != 0
    with socket.create_connection(("127.0.0.1", bound.port), timeout=10):
        pass


def test_ipv6_loopback(router: zmq.Socket[bytes]) -> None:
    try:
        bound = bind(router, parse("tcp://[::1]:0"))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    assert isinstance(bound, TcpEndpoint)
    with socket.create_connection(("::1", bound.port), timeout=10):
        pass


def test_a_port_that_is_taken_is_named(router: zmq.Socket[bytes]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(OSError, match=address) as caught:
            bind(router, parse(address))
        assert caught.value.errno == errno.EADDRINUSE


def test_an_address_that_is_not_this_machines_is_named(router: zmq.Socket[bytes]) -> None:
    with pytest.raises(OSError, match=r"tcp://192\.0\.2\.1:5570"):
        bind(router, parse("tcp://192.0.2.1:5570", allow_remote=True))


def test_a_new_socket_is_ours_alone(router: zmq.Socket[bytes], directory: Path) -> None:
    bind(router, parse(f"ipc://{directory}/s"))
    assert stat.S_IMODE((directory / "s").stat().st_mode) == 0o600


def test_a_regular_file_is_refused_and_left_alone(router: zmq.Socket[bytes], directory: Path) -> None:
    path = directory / "precious"
    path.write_text("data")
    with pytest.raises(OSError, match=f"ipc://{path}.*not a socket"):
        bind(router, parse(f"ipc://{path}"))
    assert path.read_text() == "data"


def test_a_symbolic_link_is_refused_and_left_alone(router: zmq.Socket[bytes], directory: Path) -> None:
    path = directory / "link"
    path.symlink_to(directory / "nowhere")
    with pytest.raises(OSError, match="not a socket"):
        bind(router, parse(f"ipc://{path}"))
    assert path.is_symlink()


def test_a_live_listener_is_refused_and_keeps_working(router: zmq.Socket[bytes], directory: Path) -> None:
    address = f"ipc://{directory}/s"
    with zmq.Context() as context, context.socket(zmq.PULL) as first, context.socket(zmq.PUSH) as push:
        bind(first, parse(address))
        with pytest.raises(OSError, match=f"{address}.*listening") as caught:
            bind(router, parse(address))
        assert caught.value.errno == errno.EADDRINUSE
        push.connect(address)
        push.send(b"still there?")
        assert first.poll(10_000)
        assert first.recv() == b"still there?"


def test_a_listener_that_does_not_accept_is_live_too(router: zmq.Socket[bytes], directory: Path) -> None:
    path = directory / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(0)
        with pytest.raises(OSError, match="listening"):
            bind(router, parse(f"ipc://{path}"))


def test_a_socket_of_another_kind_is_live_too(router: zmq.Socket[bytes], directory: Path) -> None:
    path = directory / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(OSError, match="listening"):
            bind(router, parse(f"ipc://{path}"))


def test_a_dead_socket_of_ours_is_replaced(router: zmq.Socket[bytes], directory: Path) -> None:
    path = directory / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
    assert path.is_socket()
    bind(router, parse(f"ipc://{path}"))
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_what_belongs_to_another_user_is_refused(router: zmq.Socket[bytes], directory: Path) -> None:
    path = directory / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    os.chown(path, 12345, 12345)
    with pytest.raises(OSError, match="user 12345"):
        bind(router, parse(f"ipc://{path}"))
    assert path.exists()
    path.unlink()
    os.chown(directory, 12345, 12345)
    with pytest.raises(OSError, match="user 12345"):
        bind(router, parse(f"ipc://{path}"))
    os.chown(directory, 0, 0)
    assert not path.exists()


def test_a_directory_where_others_may_write_is_refused_unless_sticky(
    router: zmq.Socket[bytes], directory: Path
) -> None:
    shared = directory / "shared"
    shared.mkdir()
    for mode in (0o777, 0o770, 0o702):
        shared.chmod(mode)
        with pytest.raises(OSError, match=f"others \\(mode 0{mode:o}\\)"):
            bind(router, parse(f"ipc://{shared}/s"))
    assert not list(shared.iterdir())
    shared.chmod(0o1777)
    bind(router, parse(f"ipc://{shared}/s"))


def test_a_directory_that_is_a_symbolic_link_is_refused(router: zmq.Socket[bytes], directory: Path) -> None:
    (directory / "link").symlink_to(directory)
    with pytest.raises(OSError, match="symbolic link"):
        bind(router, parse(f"ipc://{directory}/link/s"))


def test_a_directory_that_is_absent_is_an_error(router: zmq.Socket[bytes], directory: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        bind(router, parse(f"ipc://{directory}/absent/s"))


def test_of_many_that_find_a_dead_socket_at_once_exactly_one_gets_the_address(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "s"
    original = endpoints._answers

    def answers_slowly(path: Path) -> bool:
        answer = original(path)
        time.sleep(0.02)  # time for all to find the same
        return answer

    monkeypatch.setattr(endpoints, "_answers", answers_slowly)
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        outcomes: list[str] = []
        start, end = threading.Barrier(8), threading.Barrier(8)

        def compete(outcomes: list[str], start: threading.Barrier, end: threading.Barrier) -> None:
            with zmq.Context() as context, context.socket(zmq.PULL) as mine:
                start.wait(10)
                try:
                    bind(mine, parse(f"ipc://{path}"))
                    outcomes.append("mine")
                except OSError as error:
                    outcomes.append(errno.errorcode[error.errno or 0])
                end.wait(10)

        threads = [threading.Thread(target=compete, args=(outcomes, start, end)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["EADDRINUSE"] * 7 + ["mine"]
        path.unlink()


def test_a_private_directory_is_private_and_goes_away_with_its_contents() -> None:
    directory = PrivateDirectory()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert directory.path.stat().st_uid == os.geteuid()
    directory.endpoint("x").path.touch()
    directory.remove()
    directory.remove()
    assert not directory.path.exists()


def test_a_private_directory_has_short_names_even_if_the_usual_place_is_deep(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = directory / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    private = PrivateDirectory()
    assert len(str(private.endpoint("output-65535").path)) <= 60
    private.remove()


@pytest.mark.parametrize("address", ["tcp://[]:5", "tcp://[[::1]]:5", "tcp://[]]:5"])
def test_brackets_without_a_host_in_them_are_refused_even_with_permission(address: str) -> None:
    with pytest.raises(ValueError, match="names no host"):
        parse(address, allow_remote=True)
