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
from lockstep_trio.engines.vllm.result import RequestOutput, merge
from lockstep_trio.errors import WireError

VIEWS = [name for name, value in vars(RequestOutput).items() if isinstance(value, property)]
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


def _output(part: bytes) -> bytes:
    """One output with a part in the place of its logprobs."""
    return b"\x92\x00\x91\x93\xa1a\x90" + part


def _logprobs_as_lists() -> bytes:
    rows = FULL_ARRAY + (b"\x91\x01") * MAX_LENGTH
    return _output(
        b"\x93" + rows + FULL_ARRAY + (b"\x91\xca" + bytes(4)) * MAX_LENGTH + FULL_ARRAY + b"\x01" * MAX_LENGTH
    )


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
    "arrays in one frame of their own": lambda: _answer(_fill(b"\x93\xa4int8\x91\x08\x01"))[:MAX_FRAME],
    "arrays without a frame": lambda: _output(_fill(b"\x93\xa4int8\x91\x07\x01"))[:MAX_FRAME],
    "maps where arrays may be": lambda: _output(_fill(b"\x81\xa1k\x90"))[:MAX_FRAME],
    "logprobs as lists": _logprobs_as_lists,
}
AUX = bytes(8)
"""A frame of its own, behind each message."""


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
        for _, _, raw in decode([frame, AUX]).outputs:
            output = merge("a", 0, [raw])  # type: ignore[list-item]
            for view in VIEWS:
                with contextlib.suppress(WireError):
                    getattr(output, view)
    took = time.process_time() - begun
    print(_peak() - before, took)


if __name__ == "__main__":
    main(sys.argv[1])
