"""A whole group over ZeroMQ: handshake, opening and what is left after closing, limits of the process."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
import zmq

from link.zmq_peer import ZmqPeer, all_outputs, connect, next_output, registered
from lockstep_trio.link import resources, zmq_group
from lockstep_trio.link.socket import ZmqSocket
from lockstep_trio.link.zmq_group import ZmqGroupLink, open_zmq_link
from lockstep_trio.link.zmq_link import ZmqRankLink

GUARD = 10
Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ls-") as name:  # pytest's own are too deep for a unix socket
        yield Path(name)


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where private directories are made during a test, so that those of others are not counted."""
    with tempfile.TemporaryDirectory(prefix="lb-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@contextlib.contextmanager
def opened(handshake: str | None = None, ranks: int = 1, **options: object) -> Iterator[ZmqGroupLink]:
    identities = [rank.to_bytes(2, "little") for rank in range(ranks)]
    group = open_zmq_link(handshake, identities=identities, **options)  # type: ignore[arg-type]
    try:
        yield group
    finally:
        group.close()


def hello(context: Context, group: ZmqGroupLink) -> ZmqSocket:
    """A rank's handshake socket."""
    return connect(context, zmq.DEALER, group.handshake_endpoint, b"rank")


def descriptors() -> list[str]:
    """What this process has open, leaving out what listing them opens."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(entry.readlink()).partition(":")[0])
    return sorted(name for name in found if not name.startswith("/proc"))


def private_directories() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("lockstep-*"))


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


# ------------------------------------------------------------------------------------------------------- handshake


@pytest.mark.parametrize("handshake", [None, "tcp://127.0.0.1:0"])
async def test_a_conversation_on_the_handshake_socket(handshake: str | None, context: Context) -> None:
    with opened(handshake) as group, hello(context, group) as peer, trio.fail_after(GUARD):
        await peer.send([b"HELLO", b"there"])
        assert await group.receive_handshake() == (b"rank", [b"HELLO", b"there"])
        group.send_handshake(b"rank", [b"INIT"])
        assert await peer.receive() == [b"INIT"]
        group.send_handshake(b"nobody", [b"INIT"])


async def test_one_task_at_a_time_receives_handshakes_and_a_cancelled_one_loses_nothing(context: Context) -> None:
    with opened() as group, trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(group.receive_handshake)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await group.receive_handshake()
            nursery.cancel_scope.cancel()
        with hello(context, group) as peer:
            await peer.send([b"HELLO"])
            assert await group.receive_handshake() == (b"rank", [b"HELLO"])


async def test_closing_the_handshake_ends_its_waiter_and_frees_its_address(context: Context, directory: Path) -> None:
    for handshake in (f"ipc://{directory}/hello", "tcp://127.0.0.1:0"):
        with opened(handshake) as group, trio.fail_after(GUARD):

            async def wait(group: ZmqGroupLink = group) -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await group.receive_handshake()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                group.close_handshake()
            group.close_handshake()
            await wait()
            with pytest.raises(trio.ClosedResourceError):
                group.send_handshake(b"x", [b"y"])
            assert os.listdir(directory) == []  # noqa: PTH208
            peer = ZmqPeer(group.ranks[0])  # the ranks' links go on
            await peer.register()
            await registered(group.ranks[0])
            peer.forget()


async def test_answers_on_their_way_survive_the_closing_of_the_handshake(context: Context) -> None:
    with opened() as group, hello(context, group) as peer, trio.fail_after(GUARD):
        await peer.send([b"HELLO"])
        await group.receive_handshake()
        group.send_handshake(b"rank", [b"INIT", b"x" * 1_000_000])
        group.close_handshake()
        assert await peer.receive() == [b"INIT", b"x" * 1_000_000]


async def test_a_scanner_on_the_handshake_port_yields_only_junk(context: Context) -> None:
    with opened("tcp://127.0.0.1:0") as group, trio.fail_after(GUARD):
        host, _, port = group.handshake_endpoint.removeprefix("tcp://").rpartition(":")
        for greeting in (b"", b"GET /metrics HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\xff" * 64, b"\x45"):
            with socket.create_connection((host, int(port)), timeout=GUARD) as scanner:
                scanner.sendall(greeting)
        with hello(context, group) as peer:
            await peer.send([b"HELLO"])
            while (await group.receive_handshake()) != (b"rank", [b"HELLO"]):
                pass


# ------------------------------------------------------------------------------------------------ opening and closing


def test_the_default_lives_in_a_private_directory_that_is_gone_afterwards() -> None:
    before = private_directories()
    with opened(ranks=2) as group:
        (directory,) = private_directories() - before
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        endpoints = [group.handshake_endpoint, *(rank.input_endpoint for rank in group.ranks)]
        endpoints += [rank.output_endpoint for rank in group.ranks]
        paths = {Path(endpoint.removeprefix("ipc://")) for endpoint in endpoints}
        assert {path.parent for path in paths} == {directory}
        assert all(path.is_socket() and stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
        assert len(paths) == 5
        group.close()
        group.close()
        assert not directory.exists()
    assert private_directories() == before


def test_a_given_handshake_path_is_removed_too_and_nothing_else(directory: Path) -> None:
    (directory / "other").touch()
    with opened(f"ipc://{directory}/hello") as group:
        assert group.handshake_endpoint == f"ipc://{directory}/hello"
        assert (directory / "hello").is_socket()
    assert [path.name for path in directory.iterdir()] == ["other"]


@pytest.mark.parametrize(
    ("handshake", "options", "prefix"),
    [
        ("tcp://127.0.0.1:0", {}, "ipc://"),
        ("tcp://127.0.0.1:0", {"transport": "tcp"}, "tcp://127.0.0.1:"),
        ("tcp://127.0.0.2:0", {"transport": "tcp"}, "tcp://127.0.0.2:"),
        (None, {"transport": "tcp"}, "tcp://127.0.0.1:"),
        ("tcp://127.0.0.1:0", {"transport": "tcp", "host": "127.0.0.3"}, "tcp://127.0.0.3:"),
        ("tcp://*:0", {"transport": "tcp", "host": "127.0.0.3", "allow_remote": True}, "tcp://127.0.0.3:"),
    ],
)
def test_where_the_ranks_endpoints_are(handshake: str | None, options: dict[str, object], prefix: str) -> None:
    with opened(handshake, ranks=2, **options) as group:
        for rank in group.ranks:
            assert rank.input_endpoint.startswith(prefix)
            assert rank.output_endpoint.startswith(prefix)
        if handshake == "tcp://*:0":
            assert group.handshake_endpoint.startswith("tcp://127.0.0.3:")


@pytest.mark.parametrize(
    ("handshake", "options", "complaint"),
    [
        ("tcp://*:0", {}, "allow_remote"),
        ("tcp://0.0.0.0:5570", {}, "allow_remote"),
        ("tcp://*:0", {"transport": "tcp", "allow_remote": True}, "host="),
        (None, {"transport": "tcp", "host": "0.0.0.0"}, "allow_remote"),
        (None, {"transport": "tcp", "host": "10.0.0.1"}, "allow_remote"),
        (None, {"host": "127.0.0.1"}, "ipc"),
        (None, {"transport": "udp"}, "udp"),
        (None, {"identities": []}, "at least one"),
        (None, {"identities": [b"a", b"a"]}, "the same"),
        (None, {"identities": [b""]}, "255"),
        (None, {"identities": [b"x" * 256]}, "255"),
        (None, {"send_hwm": 0}, "send_hwm"),
    ],
)
def test_what_is_refused_before_anything_is_bound(
    handshake: str | None, options: dict[str, object], complaint: str
) -> None:
    before = private_directories()
    with nothing_left(), pytest.raises(ValueError, match=complaint):
        open_zmq_link(handshake, **({"identities": [b"a"]} | options))  # type: ignore[arg-type]
    assert private_directories() == before


def test_an_address_that_is_taken_leaves_nothing_behind(directory: Path) -> None:
    before = private_directories()
    (directory / "file").write_text("data")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        for handshake in (f"ipc://{directory}/file", f"tcp://127.0.0.1:{other.getsockname()[1]}"):
            with nothing_left(), pytest.raises(OSError, match=handshake):
                open_zmq_link(handshake, identities=[b"a"])
    assert private_directories() == before
    assert (directory / "file").read_text() == "data"


def test_a_second_group_at_the_same_path_fails_and_the_first_keeps_working(directory: Path) -> None:
    async def talk(group: ZmqGroupLink) -> None:
        with trio.fail_after(GUARD), zmq.Context() as context, hello(context, group) as peer:
            await peer.send([b"HELLO"])
            assert await group.receive_handshake() == (b"rank", [b"HELLO"])

    with opened(f"ipc://{directory}/hello") as group:
        with pytest.raises(OSError, match="listening"):
            open_zmq_link(f"ipc://{directory}/hello", identities=[b"a"])
        trio.run(talk, group)


@pytest.mark.parametrize("fails_at", ["open_router", "open_pull", "Watch", "Connections", "Outputs", "listen"])
def test_whatever_fails_while_opening_nothing_is_left(fails_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep_trio.link import zmq_link

    before = private_directories()
    original = getattr(zmq_link, fails_at)
    calls = 0

    def fail_later(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(zmq_link, fails_at, fail_later)
    with nothing_left(), pytest.raises(KeyboardInterrupt):
        open_zmq_link(None, identities=[b"%d" % rank for rank in range(5)], transport="tcp")
    assert private_directories() == before


async def test_port_0_works_for_200_groups_that_open_at_once(figure: Callable[[str, float, str], None]) -> None:
    groups: list[ZmqGroupLink] = []

    def open_one() -> None:
        groups.append(open_zmq_link("tcp://127.0.0.1:0", identities=[b"a"], transport="tcp", linger=0))

    began = time.perf_counter()
    try:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:  # in threads, so that really many bind at the same time
                for _ in range(200):
                    nursery.start_soon(trio.to_thread.run_sync, open_one)
        figure("200 groups opened at once", time.perf_counter() - began, "s")
        endpoints = {group.handshake_endpoint for group in groups}
        endpoints |= {rank.input_endpoint for group in groups for rank in group.ranks}
        endpoints |= {rank.output_endpoint for group in groups for rank in group.ranks}
        assert len(endpoints) == 600
        assert all(zmq_endpoint.startswith("tcp://127.0.0.1:") for zmq_endpoint in endpoints)
    finally:
        for group in groups:
            group.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_the_same_addresses_can_be_bound_again_at_once_a_hundred_times(
    transport: str, directory: Path, figure: Callable[[str, float, str], None]
) -> None:
    with opened("tcp://127.0.0.1:0") as group:
        port = group.handshake_endpoint
    handshake = port if transport == "tcp" else f"ipc://{directory}/hello"
    began = time.perf_counter()
    for _ in range(100):
        with opened(handshake, transport=transport) as group:
            assert group.handshake_endpoint == handshake
        assert not any(directory.iterdir())
    figure(f"opened and closed at the same address ({transport})", (time.perf_counter() - began) / 100, "s")


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_the_same_addresses_can_be_bound_again_at_once_after_somebody_spoke_there(
    transport: str, directory: Path, context: Context
) -> None:
    # The kernel keeps a tcp connection that we closed first in mind for a minute; that must not hold up the port.
    with opened("tcp://127.0.0.1:0") as group:
        port = group.handshake_endpoint
    handshake = port if transport == "tcp" else f"ipc://{directory}/hello"
    with trio.fail_after(GUARD):
        for _ in range(10):
            with opened(handshake, transport=transport) as group, hello(context, group) as peer:
                await peer.send([b"HELLO"])
                assert await group.receive_handshake() == (b"rank", [b"HELLO"])
                async with trio.open_nursery() as nursery:  # as an opening does that is cancelled
                    nursery.start_soon(group.receive_handshake)
                    nursery.start_soon(lambda: group.ranks[0].wait(writable=False))
                    await trio.testing.wait_all_tasks_blocked()
                    nursery.cancel_scope.cancel()
                group.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_64_ranks_come_talk_and_go_without_leaving_a_descriptor(transport: str) -> None:
    warm_up = zmq.Context()
    warm_up.term()
    before_directories = private_directories()
    with nothing_left(), trio.fail_after(60), opened(ranks=64, transport=transport) as group:
        peers = [ZmqPeer(link, rank.to_bytes(2, "little")) for rank, link in enumerate(group.ranks)]

        async def talk(link: ZmqRankLink, peer: ZmqPeer) -> None:
            await peer.register([b"%d" % link.rank])
            assert await registered(link) == (b"%d" % link.rank,)
            assert link.send_nowait([b"ping"])
            await peer.send(await peer.receive())
            assert await next_output(link) == [b"ping"]
            peer.close()
            assert await all_outputs(link) == []

        async with trio.open_nursery() as nursery:
            for link, peer in zip(group.ranks, peers, strict=True):
                nursery.start_soon(talk, link, peer)
        for peer in peers:
            peer.forget()
    assert private_directories() == before_directories


# ------------------------------------------------------------------------------------------------ closing is bounded

DEAF_RANK = """
import sys, zmq
context = zmq.Context()
dealer = context.socket(zmq.DEALER)
dealer.set(zmq.ROUTING_ID, b"\\0\\0")
dealer.set(zmq.RCVHWM, 1)
dealer.connect(sys.argv[1])
dealer.send(b"")
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_closing_with_unsent_messages_to_a_stopped_rank_ends_in_time(transport: str) -> None:
    with opened(transport=transport, linger=0.3, send_hwm=1000) as group, trio.fail_after(GUARD):
        link = group.ranks[0]
        process = subprocess.Popen(  # noqa: ASYNC220 - starting it is quick
            [sys.executable, "-c", DEAF_RANK, link.input_endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            await registered(link)
            os.kill(process.pid, signal.SIGSTOP)
            sent = 0
            while link.send_nowait([b"x" * 10_000]):
                sent += 1
            assert sent >= 1000
            began = time.perf_counter()
            group.close()
            assert time.perf_counter() - began < 0.3 + 0.5 + 0.2
        finally:
            process.kill()
            process.communicate()


def test_a_context_that_does_not_end_does_not_hold_up_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_group, "_TERM_PATIENCE", 0.1)
    with opened(linger=0) as group:
        forgotten = group._context.socket(zmq.PAIR)  # a context waits for every socket
        began = time.perf_counter()
        group.close()
        assert time.perf_counter() - began < 1
        forgotten.close()


def test_a_closed_link_of_one_rank_does_not_disturb_the_others() -> None:
    async def main(group: ZmqGroupLink) -> None:
        group.ranks[0].close()
        with trio.fail_after(GUARD):
            peer = ZmqPeer(group.ranks[1], b"\x01\x00")
            await peer.register()
            await registered(group.ranks[1])
            peer.forget()

    with opened(ranks=2) as group:
        trio.run(main, group)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_an_interpreter_that_ends_without_closing_does_not_hang(transport: str) -> None:
    code = f"""
import trio
from lockstep_trio.link.zmq_group import open_zmq_link
group = open_zmq_link(None, identities=[b"a", b"b"], transport={transport!r})
async def main():
    with trio.move_on_after(0.05):
        await group.ranks[0].wait(writable=False)
trio.run(main)
print(group.handshake_endpoint)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=20, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ipc://")


# ------------------------------------------------------------------------------------------------------------ limits


def test_sockets_for_a_thousand_ranks_are_reserved_and_not_fewer_than_usual() -> None:
    with resources.new_context(1000) as context:
        assert context.get(zmq.MAX_SOCKETS) >= 6000
    with resources.new_context(1) as context, zmq.Context() as usual:
        assert context.get(zmq.MAX_SOCKETS) == usual.get(zmq.MAX_SOCKETS)


def test_a_rank_needs_no_more_than_is_reserved_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = zmq.Context()
    exact.set(zmq.MAX_SOCKETS, 8 * resources.SOCKETS_PER_RANK + 3)
    monkeypatch.setattr(zmq_group, "new_context", lambda _: exact)
    before = len(descriptors())
    with opened(ranks=8, transport="tcp"):
        with pytest.raises(zmq.ZMQError):
            exact.socket(zmq.PAIR)
        assert len(descriptors()) - before <= 8 * (resources.DESCRIPTORS_PER_RANK - 4)


def run_with_limits(soft: int, hard: int, ranks: int) -> str:
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from lockstep_trio.link.zmq_group import open_zmq_link
try:
    group = open_zmq_link(None, identities=[b"%d" % rank for rank in range({ranks})])
    group.close()
except OSError as error:
    print(error.errno, error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


MANY_RANKS = """
import os, resource, sys, trio, zmq
from link.zmq_peer import all_outputs, connect, next_output, registered
from lockstep_trio.link.zmq_group import open_zmq_link

COUNT, transport, hard = int(sys.argv[1]), sys.argv[2], resource.getrlimit(resource.RLIMIT_NOFILE)[1]
NAMES = [rank.to_bytes(2, "little") for rank in range(COUNT)]
OTHERS = 8  # descriptors of the other side's two sockets: an eventfd, a connection, an epoll and its bell each

def opened():
    return len(os.listdir("/dev/fd"))

async def talk(link, context):
    with connect(context, zmq.DEALER, link.input_endpoint, NAMES[link.rank]) as dealer, connect(
        context, zmq.PUSH, link.output_endpoint
    ) as push:
        await dealer.send([b"%d" % link.rank])
        assert await registered(link) == (b"%d" % link.rank,)
        assert link.send_nowait([b"ping"])
        await push.send(await dealer.receive())
        assert await next_output(link) == [b"ping"]
        met.append(link.rank)
        await everybody.wait()
    assert await all_outputs(link) == []

async def main():
    global met, everybody
    met, everybody = [], trio.Event()
    zmq.Context().term()  # what pyzmq keeps once it was used
    before = opened()
    context = zmq.Context()
    group = open_zmq_link(None, identities=NAMES, transport=transport)
    needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, needed + OTHERS * COUNT), hard))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for link in group.ranks:
                nursery.start_soon(talk, link, context)
            while len(met) < COUNT:
                await trio.sleep(0.01)
            ours = opened() - before - OTHERS * COUNT
            everybody.set()
    group.close()
    context.term()
    print(needed, ours, before, opened())

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
trio.run(main)
"""


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="the hard limit here is lower")
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_128_ranks_come_up_talk_and_go_in_a_process_that_may_open_1024_files(
    transport: str, figure: Callable[[str, float, str], None]
) -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", MANY_RANKS, "128", transport],
        check=False, capture_output=True, text=True, timeout=90, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    needed, ours, before, after = map(int, done.stdout.split())
    figure(f"descriptors per rank ({transport})", ours / 128, "")
    assert before < 1024 < needed
    assert ours <= 128 * (resources.DESCRIPTORS_PER_RANK - 3)
    assert after == before


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="the hard limit here is lower")
def test_the_soft_limit_of_open_files_is_raised_to_what_128_ranks_need() -> None:
    assert 2048 <= int(run_with_limits(256, 4096, 128)) <= 4096


def test_the_soft_limit_is_left_alone_if_it_suffices() -> None:
    assert int(run_with_limits(1024, 1024, 4)) == 1024


def test_a_hard_limit_that_is_too_low_is_an_error_with_numbers() -> None:
    number, message = run_with_limits(256, 512, 128).split("\n")[0].split(" ", 1)
    assert int(number) == errno.EMFILE
    assert "128 ranks need" in message
    assert "512" in message
