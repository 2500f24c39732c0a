"""What it costs to read a message of 256 outputs, and what those pay who ask for logprobs.

    python tests/benchmarks/read_outputs.py                    this version, in microseconds and beside msgpack alone
    python tests/benchmarks/read_outputs.py --against PATH     and beside the package in another directory

Each figure is the shortest of many runs, and versions take turns, so that a busy machine spoils neither.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

OUTPUTS = 256
COLUMNS = 21
"""Of logprobs: the token and 20 others."""
ROUNDS = 500
TURNS = 5
HERE = Path(__file__).resolve()


def shortest(run: Callable[[], object]) -> float:
    run()
    found = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return min(found) * 1e6


def array(dtype: str, shape: list[int], code: str, frames: list[bytes] | None) -> list[Any]:
    size = 1
    for each in shape:
        size *= each
    data = struct.pack(f"<{size}{code}", *range(size))
    if frames is None:
        return [dtype, shape, msgpack.ExtType(3, data)]
    frames.append(data)
    return [dtype, shape, len(frames)]


def message(logprobs: bool = False, weights: str = "default", aux: bool = False) -> list[bytes]:
    """A step of a 0.32 with 256 requests."""
    frames: list[bytes] | None = [] if aux else None
    outputs = []
    for at in range(OUTPUTS):
        output: list[Any] = [f"request-{at}#{at:x}", [at], *[None] * 11, 0, *[None] * 4]
        if logprobs:
            shape = [1, COLUMNS]
            output[2] = [
                array("<i4", shape, "i", frames),
                array("<f4", shape, "f", frames),
                array("<i4", [1], "i", None),
                None,
            ]
        outputs.append(output)
    stats = {"num_running_reqs": OUTPUTS, "num_waiting_reqs": 2, "kv_cache_usage": 0.25}
    return [msgpack.packb([0, outputs, stats, 12.5, None, None, None, None, weights]), *(frames or [])]


def measure() -> dict[str, float]:
    from lockstep_trio.engines.vllm.outputs import decode
    from lockstep_trio.engines.vllm.result import RequestOutput, merge

    def read(frames: list[bytes]) -> list[Any]:
        return [merge(wire_id, 0, [raw]) for wire_id, _, raw in decode(frames).outputs]  # type: ignore[list-item]

    text, named, inline, aux = message(), message(weights="step-7"), message(True), message(True, aux=True)
    found = {
        "msgpack alone": shortest(lambda: msgpack.unpackb(text[0], use_list=False)),
        "decode": shortest(lambda: decode(text)),
        "decode and merge": shortest(lambda: read(text)),
        "decode and merge, weights with a name": shortest(lambda: read(named)),
        "msgpack alone, with logprobs": shortest(lambda: msgpack.unpackb(inline[0], use_list=False)),
        "decode and merge, with logprobs in line": shortest(lambda: read(inline)),
        "decode and merge, with logprobs in frames of their own": shortest(lambda: read(aux)),
    }
    if hasattr(RequestOutput, "logprobs"):
        outputs = read(inline)
        found["look at the logprobs of each"] = shortest(lambda: [each.logprobs for each in outputs])
        found["and at each row"] = shortest(lambda: [row.logprob for each in outputs for row in each.logprobs])
    return found


def child(package: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, str(HERE), "--child"], env=environment, check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a directory with another lockstep_trio in it")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(measure()))
        return
    packages = [HERE.parents[2], *([chosen.against.resolve()] if chosen.against else [])]
    best: list[dict[str, float]] = [{} for _ in packages]
    for _ in range(TURNS):
        for mine, package in zip(best, packages, strict=True):
            for name, value in child(package).items():
                mine[name] = min(value, mine.get(name, value))
    print(
        f"{OUTPUTS} outputs, us{'':<44} {'here':>8} {'/msgpack':>9}"
        + (f" {'there':>8} {'ratio':>6}" if chosen.against else "")
    )
    for name, value in best[0].items():
        line = f"{name:<60} {value:8.1f} {value / best[0]['msgpack alone']:9.2f}"
        if chosen.against and name in best[1]:
            line += f" {best[1][name]:8.1f} {value / best[1][name]:6.2f}"
        print(line)


if __name__ == "__main__":
    # Not this directory: the package of the environment is measured, or that of PYTHONPATH.
    sys.path.remove(str(HERE.parent))
    main()
