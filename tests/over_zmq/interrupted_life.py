"""A program, run by a test: the life of a small group, over and over, each time with a Ctrl-C at another line.

``python interrupted_life.py STRIDE OFFSET`` takes every STRIDE-th of our lines that such a life runs, from the
OFFSET-th on. It prints each line before it is tried, and ends with status 0 if each life ended with KeyboardInterrupt,
at once, and left neither a file nor a descriptor. One that hangs is killed with a dump.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import trio

import lockstep_trio
from chaos.traces import descriptors
from lockstep_trio import open_group
from lockstep_trio.testing.zmq_ranks import ZmqRanks
from over_zmq.driven import PROTOCOL, ask

PACKAGE = str(Path(lockstep_trio.__file__).parent)
NOT_THE_CLIENT = (f"{PACKAGE}/testing", f"{PACKAGE}/cli")
HANGS = 20.0
"""Seconds; a life takes less than one."""

Line = tuple[str, int]


async def serve(ranks: ZmqRanks) -> None:
    await ranks.come_up()
    await ranks.run()


async def life(directory: str) -> None:
    """Two ranks come up; one request is read to its end, one is left, and the group too, with one in flight."""
    address = f"ipc://{directory}/hello"
    with ZmqRanks(address, 2) as ranks:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, ranks)
            async with open_group(address, ranks=2, protocol=PROTOCOL, close_grace=1) as group:
                async with await group.submit(ask(3)) as stream:
                    async for _ in stream:
                        pass
                async with await group.submit(ask(4000)) as stream:
                    await stream.receive()
                stream = await group.submit(ask(4000))
                await stream.receive()
                group.statistics()
            with trio.CancelScope(shield=True):
                await stream.aclose()
            nursery.cancel_scope.cancel()


class Tracer:
    """Sees each line of the client for the first time, and raises SIGINT at one of them."""

    def __init__(self, chosen: Line | None) -> None:
        self.chosen = chosen
        self.seen: dict[Line, None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        return self.line if name.startswith(PACKAGE) and not name.startswith(NOT_THE_CLIENT) else None

    def line(self, frame: FrameType, event: str, argument: object) -> Any:
        at = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and at not in self.seen:
            self.seen[at] = None
            if at == self.chosen:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self.line


@contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(None)


def live(chosen: Line | None) -> list[Line]:
    """One life; the lines that were run."""
    tracer = Tracer(chosen)
    with tempfile.TemporaryDirectory(prefix="t") as directory:
        before = descriptors()
        tempfile.tempdir = directory
        interrupted = False
        try:
            with tracing(tracer):
                trio.run(life, directory)
        except BaseException as error:
            if not only_interrupts(error):
                raise
            interrupted = True
        finally:
            tempfile.tempdir = None
        gc.collect()
        assert interrupted is (chosen in tracer.seen), "it was swallowed, or the line was not run"
        assert list(Path(directory).iterdir()) == []
        assert descriptors() == before, (before, descriptors())
    return list(tracer.seen)


def only_interrupts(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(only_interrupts, error.exceptions))
    return isinstance(error, KeyboardInterrupt)


def main(stride: int, offset: int) -> None:
    live(None)  # what is opened once in a process
    lines = live(None)
    for file, number in lines[offset::stride]:
        faulthandler.dump_traceback_later(HANGS, exit=True)
        print(f"{Path(file).relative_to(PACKAGE)}:{number}", flush=True)
        live((file, number))
    faulthandler.cancel_dump_traceback_later()
    print(f"all of {len(lines[offset::stride])}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
