"""What a process leaves behind: tasks, threads, descriptors, children and files. Linux only."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Self

import attrs
import trio

from over_zmq.driven import until


@attrs.frozen
class Traces:
    """What there is of this process at one moment."""

    tasks: int
    threads: int
    descriptors: int
    children: frozenset[int]
    files: frozenset[str]

    @classmethod
    def now(cls, directory: Path) -> Self:
        """``directory`` is the one for temporary files."""
        return cls(
            tasks=trio.lowlevel.current_statistics().tasks_living,
            threads=len(list(Path("/proc/self/task").iterdir())),
            descriptors=descriptors(),
            children=children(),
            files=frozenset(path.name for path in directory.iterdir()),
        )

    def more_than(self, before: Self) -> dict[str, object]:
        """What there is beyond ``before``, by kind; empty if there is nothing."""
        found: dict[str, object] = {
            name: (getattr(before, name), getattr(self, name))
            for name in ("tasks", "threads", "descriptors")
            if getattr(self, name) > getattr(before, name)
        }
        for name in ("children", "files"):
            if extra := getattr(self, name) - getattr(before, name):
                found[name] = extra
        return found


def descriptors() -> int:
    """Open descriptors of this process, but for the one that lists them."""
    return len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208  # half the cost, and it is sampled


def resident() -> float:
    """Resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def children() -> frozenset[int]:
    """Direct children, dead ones that nobody waited for included. The ranks are a launcher's, and end with it."""
    return frozenset(
        int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
    )


async def nothing_more(before: Traces, directory: Path, patience: float = 10.0) -> dict[str, object]:
    """What is left after a while: libzmq closes some things from threads of its own."""
    gc.collect()
    try:
        await until(lambda: not Traces.now(directory).more_than(before), patience)
    except trio.TooSlowError:
        return Traces.now(directory).more_than(before)
    return {}


def exist(pids: tuple[int, ...]) -> list[int]:
    """Those that still exist, be it only because nobody waited for them."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]
