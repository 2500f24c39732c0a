"""How a connection ended, told from the kernel's knowledge of plain sockets. With libzmq: test_zmq_link.py."""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
from collections.abc import Iterator

import attrs
import pytest

from link.zmq_peer import doubled
from lockstep_trio.link import ending
from lockstep_trio.link.ending import Ending, Witness, copy_of

GUARD = 10
LONG, NONE_AT_ALL = 1e6, 0.0
"""Patience that no silence of a test exceeds, and one that every silence does."""
CUT_OFF = Ending("was cut off here: what came over it was no ZeroMQ message, or a too large one")


@attrs.frozen
class Line:
    """A connection over the loopback: ours, as libzmq would have it, and the other end."""

    ours: socket.socket
    theirs: socket.socket

    def until_readable(self) -> None:
        assert select.select([self.ours], [], [], GUARD)[0]

    def reset(self) -> None:
        self.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.theirs.close()
        self.until_readable()


@pytest.fixture(params=["127.0.0.1", "::1"])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((request.param, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        listener.listen()
        theirs = socket.create_connection(listener.getsockname()[:2], timeout=GUARD)
        ours, _ = listener.accept()
    with ours, theirs:
        yield Line(ours, theirs)


def test_a_connection_that_the_other_end_closed_has_ended(line: Line) -> None:
    witness = Witness(line.ours.fileno(), NONE_AT_ALL)
    line.theirs.close()
    line.until_readable()
    assert witness.tell() == Ending("ended")


@pytest.mark.parametrize("read_before", [False, True], ids=["error still there", "error taken by another reader"])
def test_a_connection_that_was_reset_has_ended(line: Line, read_before: bool) -> None:
    witness = Witness(line.ours.fileno(), NONE_AT_ALL)
    line.reset()
    if read_before:  # as libzmq does
        with pytest.raises(ConnectionResetError):
            line.ours.recv(1)
    assert witness.tell() == Ending("ended")


def test_a_connection_that_still_stands_was_given_up_for_its_silence(line: Line) -> None:
    told = Witness(line.ours.fileno(), NONE_AT_ALL).tell()
    assert told.silent
    assert told.how.startswith("was given up: nothing came over it")
    assert told.how.endswith("heartbeats neither")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not tell how long")
@pytest.mark.parametrize("waiting", [b"", b"what libzmq did not want to read"])
def test_a_connection_on_which_something_came_just_now_was_cut_off_for_that(line: Line, waiting: bytes) -> None:
    witness = Witness(line.ours.fileno(), LONG)
    if waiting:
        line.theirs.send(waiting)
        line.until_readable()
    assert witness.tell() == CUT_OFF


def test_without_heartbeats_silence_is_no_reason_to_give_a_connection_up(line: Line) -> None:
    assert Witness(line.ours.fileno(), None).tell() == CUT_OFF


def test_where_the_kernel_tells_no_times_a_standing_connection_was_silent(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_kernels_view", lambda _: (0, False, None))
    told = Witness(line.ours.fileno(), LONG).tell()
    assert told == Ending("was given up: nothing came over it, heartbeats neither", silent=True)


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_kernel_that_knows_nothing_of_the_sort_is_no_error(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    no_tcp, other = socket.socketpair()
    with no_tcp, other:
        assert ending._kernels_view(no_tcp) == (0, False, None)


@pytest.mark.skipif(sys.platform != "linux", reason="needs TCP_USER_TIMEOUT")
def test_a_connection_that_the_kernel_gave_up_was_silent(line: Line) -> None:
    # The other end has no room and does not read. A machine that is gone looks the same, but is harder to come by.
    witness = Witness(line.ours.fileno(), LONG)
    line.ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 700)
    line.ours.settimeout(GUARD)
    with pytest.raises(TimeoutError) as caught:
        while True:
            line.ours.send(b"x" * 100_000)
    assert caught.value.errno, "the guard, not the kernel"
    told = witness.tell()
    assert told.silent
    assert told.how.startswith("timed out: nothing came over it for ")


def test_what_is_no_tcp_connection_has_just_ended() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert Witness(left.fileno(), NONE_AT_ALL).tell() == Ending("ended")
    assert Witness(left.fileno(), NONE_AT_ALL).tell() == Ending("ended")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_witness_keeps_its_descriptor_until_it_has_told_or_is_closed(line: Line) -> None:
    before = doubled()
    telling, silent = Witness(line.ours.fileno(), LONG), Witness(line.ours.fileno(), LONG)
    assert doubled() == before + 2
    telling.tell()
    silent.close()
    silent.close()
    assert doubled() == before
    assert silent.tell() == Ending("ended")


def test_as_long_as_a_witness_stands_the_other_end_is_not_told_of_the_close(line: Line) -> None:
    # The reason why it has to be closed before the sockets are.
    witness = Witness(line.ours.fileno(), LONG)
    line.ours.close()
    line.theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        line.theirs.recv(1)
    witness.close()
    line.theirs.settimeout(GUARD)
    assert line.theirs.recv(1) == b""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_copying_what_is_no_socket_leaves_no_descriptor_behind() -> None:
    reader, writer = os.pipe()
    before = doubled()
    try:
        assert copy_of(reader) is None
        assert copy_of(10**6) is None
        assert doubled() == before
    finally:
        os.close(reader)
        os.close(writer)
