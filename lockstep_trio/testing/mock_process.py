"""Mock ranks as real processes over real ZeroMQ: one launcher that forks a process per rank.

The ranks of a lockstep group meet in every step over socket pairs, in a star around rank 0, as a collective would have
them meet: a rank that does not come holds up all others, and one that dies takes them along after a while.

    python -m lockstep_trio.testing.mock_process --ranks 2 --handshake ipc:///some/path

The launcher prints one line of JSON, ``{"pids": [...]}``, and then lives until its standard input ends, or all ranks
are gone. Blocking code throughout, like the engine's own loop.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, final

import attrs
import zmq

from .engine_rank import DEAD, EngineRank
from .rank_model import Sync, Vote

COLLECTIVE_FAILS_AFTER = 1.0
"""Seconds from the death of a rank until the others' collective fails (vLLM 0.32 with gloo: 0.7 to 1.2)."""


@final
@attrs.frozen
class MockOptions:
    """How the mock ranks behave."""

    ranks: int
    handshake: str
    """Where the client waits for hellos."""
    lockstep: bool = True
    step_time: float = 0.0
    """Seconds that a step takes."""
    sync: Sync = Sync()  # noqa: RUF009  # frozen
    """When a lockstep group agrees on a drain."""
    version: str = "0.32.0"
    """Engine version that they claim."""
    max_model_len: int = 4096
    load_times: Sequence[float] = (0.0,)
    """Seconds between the client's INIT and the rank's registration, by rank; the last is also that of all further."""
    receive_limit: int = 0
    """Messages of the client that ZeroMQ keeps for a rank which does not take them; 0 for no limit, as in vLLM."""

    def load_time(self, rank: int) -> float:
        return self.load_times[min(rank, len(self.load_times) - 1)]


class CollectiveFailed(Exception):
    """Another rank is gone."""


@final
class Star:
    """All ranks exchange some bits, and each learns which of them any rank had set. Rank 0 is in the middle."""

    def __init__(self, peers: Sequence[socket.socket], *, middle: bool) -> None:
        self._peers = peers
        self._middle = middle

    def agree(self, bits: int) -> int:
        """Wait for all ranks. Returns the bits of all. Raises ``CollectiveFailed``."""
        try:
            if not self._middle:
                self._peers[0].sendall(bytes([bits]))
                return self._read(self._peers[0])
            agreed = reduce(or_, map(self._read, self._peers), bits)
            for peer in self._peers:
                peer.sendall(bytes([agreed]))
        except OSError as error:
            raise CollectiveFailed from error
        return agreed

    @staticmethod
    def _read(peer: socket.socket) -> int:
        received = peer.recv(1)
        if not received:
            raise CollectiveFailed
        return received[0]


@final
class MockRank:
    """One process: connects, says hello, and runs the engine's loop until its lifeline ends."""

    def __init__(self, index: int, options: MockOptions, star: Star, lifeline: int) -> None:
        self._engine = EngineRank(
            index,
            size=options.ranks if options.lockstep else 1,
            sync=options.sync,
            version=options.version,
            max_model_len=options.max_model_len,
        )
        self._options = options
        self._star = star
        self._lifeline = lifeline
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._line = zmq.Poller()
        for poller in (self._poller, self._line):
            poller.register(lifeline, zmq.POLLIN)
        self._leaving: deque[tuple[float, tuple[bytes, ...]]] = deque()
        """Messages that wait, with the time when they may leave."""
        self._random = random.Random(index)  # noqa: S311  # for jitter
        self._reads_from = 0.0
        """Until then nothing is taken in."""

    def run(self) -> None:
        requests, outputs = self._start()
        try:
            while True:
                self._take_in(requests, outputs)
                self._engine.poll()
                self._flush(outputs)
                if self._engine.model.resuming is not None:
                    self._engine.resume(Vote(self._star.agree(self._engine.model.vote)))
                    self._flush(outputs)
                if self._engine.model.at_barrier:
                    self._step()
                    self._flush(outputs)
                    self._die_when_due(outputs)
        except CollectiveFailed:
            time.sleep(COLLECTIVE_FAILS_AFTER)
            self._say_last(outputs)

    def _start(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        handshake = self._connect(zmq.DEALER, self._options.handshake)
        handshake.send(self._engine.hello())
        self._wait(handshake)
        request_endpoint, output_endpoint = self._engine.endpoints(handshake.recv())
        self._load()
        requests = self._connect(zmq.DEALER, request_endpoint)
        outputs = self._connect(zmq.PUSH, output_endpoint)
        requests.send(self._engine.registration())
        handshake.send(self._engine.ready())
        self._poller.unregister(handshake)
        handshake.close(linger=5000)
        self._poller.register(requests, zmq.POLLIN)
        return requests, outputs

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = 1000
        if kind == zmq.DEALER:
            made.setsockopt(zmq.IDENTITY, self._engine.identity)
            made.setsockopt(zmq.RCVHWM, self._options.receive_limit)
        made.connect(endpoint)
        if endpoint == self._options.handshake:
            self._poller.register(made, zmq.POLLIN)
        return made

    def _load(self) -> None:
        """As if weights were read."""
        until = time.monotonic() + self._options.load_time(self._engine.index)
        while (left := until - time.monotonic()) > 0:
            if self._line.poll(math.ceil(left * 1000)):
                os._exit(0)

    def _wait(self, wanted: zmq.Socket[bytes], outputs: zmq.Socket[bytes] | None = None) -> None:
        """Until there is something to take in. Meanwhile what is delayed leaves when it is due."""
        while True:
            poller = self._poller if self._reads else self._line
            ready: dict[Any, int] = dict(poller.poll(self._patience()))
            if self._lifeline in ready:
                os._exit(0)
            if outputs is not None:
                self._flush(outputs)
            if wanted in ready:
                return

    @property
    def _reads(self) -> bool:
        return time.monotonic() >= self._reads_from

    def _patience(self) -> int | None:
        """Milliseconds that it may sleep for, None for ever."""
        wakes = [] if self._reads else [self._reads_from]
        if self._leaving:
            wakes.append(self._leaving[0][0])
        return math.ceil(max(0.0, min(wakes) - time.monotonic()) * 1000) if wakes else None

    def _take_in(self, requests: zmq.Socket[bytes], outputs: zmq.Socket[bytes]) -> None:
        """All that has arrived; without work, wait for at least one message."""
        if not self._engine.model.has_work:
            self._wait(requests, outputs)
        elif self._lifeline in dict(self._poller.poll(0)):
            os._exit(0)
        while self._reads:
            try:
                self._engine.receive(requests.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return

    def _flush(self, outputs: zmq.Socket[bytes]) -> None:
        """What the engine has said leaves, or waits for its time, in order."""
        faults, now = self._engine.faults, time.monotonic()
        while self._engine.sent:
            due = now + faults.delay + faults.jitter * self._random.random()
            if self._leaving:
                due = max(due, self._leaving[-1][0])
            self._leaving.append((due, self._engine.sent.popleft()))
        while self._leaving and self._leaving[0][0] <= now:
            outputs.send_multipart(self._leaving.popleft()[1])
        if faults.unread:
            self._reads_from, faults.unread = now + faults.unread, 0.0

    def _step(self) -> None:
        if self._engine.lockstep:
            self._star.agree(0)
        slow = self._engine.faults.slow_step if self._engine.faults.take("slow_steps") else 0.0
        if slow or self._options.step_time:
            time.sleep(max(slow, self._options.step_time))
        if self._engine.step():
            self._engine.conclude(Vote(self._star.agree(self._engine.model.vote)))

    def _die_when_due(self, outputs: zmq.Socket[bytes]) -> None:
        faults = self._engine.faults
        if faults.dies_after is None:
            return
        faults.dies_after -= 1
        if faults.dies_after <= 0:
            if faults.last_words:
                self._say_last(outputs)
            os.kill(os.getpid(), signal.SIGKILL)

    def _say_last(self, outputs: zmq.Socket[bytes]) -> None:
        """The engine's own notice of its death, behind all that it said before."""
        while self._leaving:
            outputs.send_multipart(self._leaving.popleft()[1])
        outputs.send(DEAD)
        self._context.destroy(linger=1000)  # waits until the last word has left


def launch(options: MockOptions, *, until_stdin_ends: bool = True) -> int:
    """Fork the ranks, print their pids, and stay until told to end them: by SIGINT, SIGTERM or the end of stdin.

    Must be called from a process with a single thread and without ZeroMQ sockets: it forks.

    Args:
        options: How the ranks behave.
        until_stdin_ends: Whether the end of standard input is such a sign; False for people, who may have none.

    Returns:
        0 after such a sign, 1 if all ranks went by themselves.
    """
    pairs = [socket.socketpair() for _ in range(options.ranks - 1)]
    lifeline_out, lifeline_in = os.pipe()
    pids = []
    for index in range(options.ranks):
        pid = os.fork()
        if pid == 0:
            os.close(lifeline_in)
            _become(index, options, pairs, lifeline_out)
        pids.append(pid)
    for pair in pairs:
        for end in pair:
            end.close()
    os.close(lifeline_out)
    signals = _collect_signals()  # before the pids are told: who knows them may send one at once
    sys.stdout.write(json.dumps({"pids": pids}) + "\n")
    sys.stdout.flush()
    told = _stay(pids, signals, watch_stdin=until_stdin_ends)
    os.close(lifeline_in)
    return 0 if told else 1


def _collect_signals() -> list[int]:
    """From now on SIGINT, unless it is ignored, and SIGTERM only go into this list."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda given, _: received.append(given))
    return received


def _become(index: int, options: MockOptions, pairs: Sequence[tuple[socket.socket, socket.socket]], line: int) -> None:
    """Be a rank; never returns. Ends of other ranks' pairs are closed, or a death would not show."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher's to handle: it ends the lifeline
    sys.stdin.close()
    mine = [pair[0] for pair in pairs] if index == 0 else [pairs[index - 1][1]]
    for pair in pairs:
        for end in pair:
            if end not in mine:
                end.close()
    try:
        MockRank(index, options, Star(mine, middle=index == 0), line).run()
    except BaseException as error:  # noqa: BLE001  # a forked child must not unwind into its parent's frames
        sys.stderr.write(f"mock rank {index}: {error!r}\n")
        os._exit(1)
    os._exit(0)


def _stay(pids: Sequence[int], signals: Sequence[int], *, watch_stdin: bool) -> bool:
    """Until there is a sign or all ranks are gone; then end those that are left. Returns whether there was a sign."""
    left = set(pids)
    told = False
    poller = zmq.Poller()
    if watch_stdin:
        poller.register(0, zmq.POLLIN)
    while left and not told:
        told = bool((poller.poll(100) and not os.read(0, 4096)) or signals)
        while left and (gone := os.waitpid(-1, os.WNOHANG)[0]):
            left.discard(gone)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    for pid in left:
        os.waitpid(pid, 0)
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the launcher."""
    parser = argparse.ArgumentParser(prog="mock ranks")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--handshake", required=True)
    parser.add_argument("--independent", action="store_true")
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--sync-every", type=int, default=16)
    parser.add_argument("--no-sync-first", action="store_true")
    parser.add_argument("--version", default="0.32.0")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--load-time", type=float, action="append", help="once for every rank, or once per rank")
    parser.add_argument("--receive-limit", type=int, default=0)
    given = parser.parse_args(arguments)
    return launch(
        MockOptions(
            ranks=given.ranks,
            handshake=given.handshake,
            lockstep=not given.independent,
            step_time=given.step_time,
            sync=Sync(not given.no_sync_first, given.sync_every),
            version=given.version,
            max_model_len=given.max_model_len,
            load_times=given.load_time or (0.0,),
            receive_limit=given.receive_limit,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
