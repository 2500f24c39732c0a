"""Run vLLM's command line so that nothing of it outlives whoever started it.

It runs inside the engine's environment: ``python launch.py serve ...``, as the leader of its own session, with a pipe
on stdin of which the starter holds the other end. The engine is a child of this process, which only guards: when the
engine ends, or a SIGTERM comes, or the pipe ends because the starter closed it or died, however it died, it asks the
engine to go, kills what is left of the session and collects every process, then ends with the engine's exit code.

A death signal from the kernel was rejected: it follows the starting thread, and tests start engines from worker
threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

GRACE = 10.0
"""Seconds that the engine has to end after SIGTERM. It kills its own ranks after 5 s (vLLM 0.32)."""

ROUND = 2.0
"""Seconds between the rounds of killing what the engine left behind."""

TICK = 0.1
PR_SET_CHILD_SUBREAPER = 36


class Guard:
    """Waits for one child and for the end of stdin; adopts and collects the child's orphans."""

    def __init__(self, engine: int) -> None:
        self.engine = engine
        self.exit_code: int | None = None
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.ask)

    def run(self) -> int:
        self.wait(lambda: self.asked or self.stdin_ended(), limit=None)
        self.ask()
        self.wait(lambda: False, limit=GRACE)
        self.clear()
        return 1 if self.exit_code is None else self.exit_code

    def ask(self, *_: object) -> None:
        """Tell the engine to go; also the handler of our own signals."""
        self.asked = True
        if self.exit_code is None:
            os.kill(self.engine, signal.SIGTERM)

    def wait(self, enough: Callable[[], bool], limit: float | None) -> None:
        """Until the engine has ended, or ``enough()``, or the limit in seconds."""
        deadline = time.monotonic() + limit if limit is not None else float("inf")
        while self.exit_code is None and not enough() and time.monotonic() < deadline:
            self.collect()
            time.sleep(TICK)

    def stdin_ended(self) -> bool:
        readable, _, _ = select.select([0], [], [], 0)
        return bool(readable) and not os.read(0, 4096)

    def collect(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.engine:
                    self.exit_code = os.waitstatus_to_exitcode(status)

    def clear(self) -> None:
        """Kill the rest; the trackers of shared memory last, because they remove what the killed ones leave behind."""
        for number, trackers_too in ((signal.SIGTERM, False), (signal.SIGKILL, False), (signal.SIGKILL, True)):
            for pid in self.others():
                if trackers_too or b"resource_tracker" not in command_line(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            deadline = time.monotonic() + ROUND
            while self.others() and time.monotonic() < deadline:
                time.sleep(TICK)

    def others(self) -> list[int]:
        """What is left of the session, without us."""
        self.collect()
        session = os.getsid(0)
        return [pid for pid in processes() if pid != os.getpid() and session_of(pid) == session]


def processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def command_line(pid: int) -> bytes:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def run_engine() -> None:
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    from vllm.entrypoints.cli.main import main as vllm_main  # type: ignore[import-not-found, unused-ignore]

    sys.argv[0] = "vllm"
    vllm_main()


def main() -> None:
    if os.getsid(0) != os.getpid():
        sys.exit("start this as the leader of a session of its own: the guard kills the whole session")
    # Orphaned workers come to us instead of to a process 1 that may not collect them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    engine = os.fork()
    if engine == 0:
        run_engine()
        return
    code = Guard(engine).run()
    sys.exit(code if code >= 0 else 128 - code)


# The engine's workers are spawned, and import this file again.
if __name__ == "__main__":
    main()
