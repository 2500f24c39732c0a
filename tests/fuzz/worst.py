"""The messages that cost most, and what reading one of them costs. Run by `test_worst.py` in a process of its own.

python worst.py NAME    prints the most memory it took, bytes, and the processor time, seconds
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgpack

from lockstep_trio.engines.vllm.outputs import decode
from lockstep_trio.engines.vllm.packing import MAX_FRAME
from lockstep_trio.errors import WireError

FULL_ARRAY = b"\xdc\xff\xff"
"""Header of the longest array that is let pass."""
MAX_LENGTH = 65_535
PRIME_1, PRIME_2, PRIME_5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
WORD = 2**64


def _rotated(word: int, by: int) -> int:
    return (word << by | word >> (64 - by)) % WORD


def _colliding_pairs() -> Iterator[tuple[int, int]]:
    """Pairs of numbers with one hash: CPython's for tuples (`Objects/tupleobject.c`), solved for the second number."""
    back_1, back_2 = pow(PRIME_1, -1, WORD), pow(PRIME_2, -1, WORD)
    wanted = _rotated(12345 * back_1 % WORD, 33)
    for first in range(1, 2**60):
        begun = _rotated((PRIME_5 + first * PRIME_2) % WORD, 31) * PRIME_1
        second = (wanted - begun) * back_2 % WORD
        if second < 2**61 - 1:  # a larger number is not its own hash
            yield first, second


def _fill(item: bytes) -> bytes:
    """As many of an item as a message may have, in arrays as long as they may be."""
    row = FULL_ARRAY + item * MAX_LENGTH
    rows = MAX_FRAME // len(row)
    if not rows:
        return b"\xdc" + (MAX_FRAME // len(item) - 4).to_bytes(2, "big") + item * (MAX_FRAME // len(item) - 4)
    return b"\xdc" + rows.to_bytes(2, "big") + row * rows


def _answer(value: bytes) -> bytes:
    return b"\x95\x00\x90\xc0\xc0\x93\x07\xc0" + value


def _colliding_map() -> bytes:
    keys = islice(_colliding_pairs(), MAX_LENGTH)
    return b"\xde\xff\xff" + b"".join(msgpack.packb(key) + b"\xc0" for key in keys)


FRAMES: dict[str, Callable[[], bytes]] = {
    "headers of arrays": lambda: FULL_ARRAY * 1023 + b"\xc0" * 70_000,
    "headers of arrays, too many": lambda: FULL_ARRAY * 30_000,
    "headers of maps": lambda: b"\xde\xff\xff" * 30_000,
    "headers of maps with numbers for keys": lambda: b"\xde\xff\xff\x01" * 30_000,
    "empty maps": lambda: _answer(_fill(b"\x80"))[:MAX_FRAME],
    "maps with numbers for keys": lambda: _answer(_fill(b"\x81\x01\x90"))[:MAX_FRAME],
    "numbers": lambda: _answer(_fill(b"\xca\x3f\x80\x00\x00"))[:MAX_FRAME],
    "keys with one hash": lambda: _answer(_colliding_map()),
    "broken outputs": lambda: b"\x92\x00" + FULL_ARRAY + b"\xc3" * MAX_LENGTH,
    "broken outputs with long ids": lambda: b"\x92\x00" + FULL_ARRAY + (b"\x91\xd9\x64" + b"x" * 100) * MAX_LENGTH,
    "pickled data": lambda: _answer(_fill(b"\xd4\x01x"))[:MAX_FRAME],
    "unknown extensions": lambda: _answer(_fill(b"\xd4\x28x"))[:MAX_FRAME],
}


def _peak() -> int:
    # Not getrusage's: its figure begins with what the parent process had.
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def main(name: str) -> None:
    frame = FRAMES[name]()
    assert len(frame) <= MAX_FRAME
    before = _peak()
    begun = time.process_time()
    with contextlib.suppress(WireError):
        decode([frame])
    took = time.process_time() - begun
    print(_peak() - before, took)


if __name__ == "__main__":
    main(sys.argv[1])
