"""Is it the engine or is it us? Drive a real two-rank group with blocking pyzmq and msgpack, nothing of this project.

``PYTHONPATH=tests python -m interop.probe_raw`` needs pyzmq and msgpack; it builds the engine's environment if need be.
It prints what it saw and when, and exits 0 only if handshake, waves, calls and the notice of a death all came about.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.utils.monitor

from interop.environment import ensure
from interop.group import VllmGroup, free_port

RANKS = 2
STARTUP_LIMIT = 300.0
ANSWER_LIMIT = 20.0
PROMPT = [1, 2, 3, 4]
ADD, START, UTILITY = b"\x00", b"\x02", b"\x03"


class RawClient:
    """One input and one output socket per rank, a monitor on each input socket."""

    def __init__(self, group: VllmGroup, directory: Path) -> None:
        self.group = group
        self.context = zmq.Context()
        self.handshake = self._bind(zmq.ROUTER, group.handshake)
        self.addresses = [(f"ipc://{directory}/in{rank}", f"ipc://{directory}/out{rank}") for rank in range(RANKS)]
        self.inputs = [self._bind(zmq.ROUTER, address) for address, _ in self.addresses]
        self.outputs = [self._bind(zmq.PULL, address) for _, address in self.addresses]
        self.monitors = [each.get_monitor_socket(zmq.EVENT_DISCONNECTED) for each in self.inputs]

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        bound = self.context.socket(kind)
        bound.linger = 0
        bound.bind(address)
        return bound

    def receive(self, bound: zmq.Socket[bytes], limit: float) -> list[bytes]:
        """One message; the group is looked at every second, so that a failed start is told at once."""
        deadline = time.monotonic() + limit
        while not bound.poll(1000):
            self.group.check_running()
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing came for {limit} s; the end of the log:\n{self.group.log_tail()}")
        return bound.recv_multipart()

    def shake_hands(self) -> None:
        for _ in range(2 * RANKS):
            identity, payload = self.receive(self.handshake, STARTUP_LIMIT)
            message, rank = msgpack.unpackb(payload), int.from_bytes(identity, "little")
            say(f"rank {rank}: {message}")
            if message["status"] == "HELLO":
                inputs, outputs = self.addresses[rank]
                init = {"addresses": {"inputs": [inputs], "outputs": [outputs]}, "parallel_config": {}}
                self.handshake.send_multipart([identity, msgpack.packb(init)])
        for rank, bound in enumerate(self.inputs):
            identity, payload = self.receive(bound, STARTUP_LIMIT)
            assert int.from_bytes(identity, "little") == rank
            say(f"rank {rank} registers: {msgpack.unpackb(payload)}")

    def send(self, rank: int, kind: bytes, payload: object) -> None:
        self.inputs[rank].send_multipart([rank.to_bytes(2, "little"), kind, msgpack.packb(payload)])

    def add(self, rank: int, request: str, tokens: int) -> None:
        sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "_all_stop_token_ids": []}
        self.send(rank, ADD, [request, PROMPT, None, sampling, None, time.time(), None, None, None])

    def outputs_of(self, rank: int) -> Iterator[list[Any]]:
        """Decoded output batches; ends the run if none comes."""
        while True:
            yield msgpack.unpackb(self.receive(self.outputs[rank], ANSWER_LIMIT)[0])


def wave(client: RawClient, number: int, holder: int, tokens: int) -> list[int]:
    """A whole wave with one request: its tokens, after DONE from every rank."""
    client.add(holder, f"request-{number}", tokens)
    for rank in range(RANKS):
        client.send(rank, START, [number, None])
    streamed: list[int] = []
    for rank in range(RANKS):
        for _, outputs, _, _, _, _, done, *_ in client.outputs_of(rank):
            for output in outputs:
                streamed += output[1]
            if done is not None:
                say(f"rank {rank} is done with wave {done}")
                assert done == number
                break
    return streamed


def call(client: RawClient, rank: int, method: str) -> object:
    client.send(rank, UTILITY, [0, 7, method, []])
    return next(batch[4] for batch in client.outputs_of(rank) if batch[4] is not None)


def death(client: RawClient, number: int) -> None:
    """Kill rank 0 while rank 1 streams, and print what each socket tells until rank 1 is gone as well."""
    client.add(1, "cut-off", 400)
    for rank in range(RANKS):
        client.send(rank, START, [number, None])
    assert next(client.outputs_of(1))[1]
    client.group.kill_rank(0)
    killed = time.monotonic()
    poller = zmq.Poller()
    for watched in (*client.monitors, client.outputs[1]):
        poller.register(watched, zmq.POLLIN)
    seen: set[int] = set()
    while seen != set(range(RANKS)):
        ready = dict(poller.poll(60_000))
        assert ready, "no notice of the death"
        after = f"{time.monotonic() - killed:.3f} s after SIGKILL of rank 0"
        if client.outputs[1] in ready and (frame := client.outputs[1].recv()) == b"ENGINE_CORE_DEAD":
            say(f"rank 1 says {frame!r} {after}")
        for rank, monitor in enumerate(client.monitors):
            if monitor in ready:
                event = zmq.utils.monitor.recv_monitor_message(monitor)
                say(f"rank {rank}: {zmq.Event(event['event']).name} {after}")
                seen.add(rank)


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGUN:8.2f} s  {text}", flush=True)


def main() -> None:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        group = VllmGroup(ensure(), directory / "group", port=free_port(), ranks=RANKS)
        client = RawClient(group, directory)
        stack.callback(client.context.destroy, linger=0)
        say("starting")
        stack.enter_context(group)
        client.shake_hands()
        say(f"ready; engines {group.engine_pids()}, workers {group.worker_pids()}")
        streams = [wave(client, number, holder, 24) for number, holder in enumerate((1, 0, 1))]
        say(f"tokens: {streams}")
        assert streams[0] == streams[1] == streams[2]
        assert len(streams[0]) == 24
        for rank in range(RANKS):
            say(f"rank {rank}: is_sleeping {call(client, rank, 'is_sleeping')}")
        begun = time.monotonic()
        for number in range(3, 13):
            wave(client, number, number % RANKS, 1)
        say(f"ten one-token waves in {time.monotonic() - begun:.2f} s")
        death(client, 13)
        begun = time.monotonic()
        group.stop()
        say(f"stopped in {time.monotonic() - begun:.2f} s; left: {group.pids()}")


BEGUN = time.monotonic()

if __name__ == "__main__":
    main()
