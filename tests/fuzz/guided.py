"""Coverage-guided fuzzing of every decoder, with atheris (libFuzzer). ``nox -s fuzz`` runs it on the wheel.

    python guided.py [--runs 1000000] [--target NAME ...] [--seed N]    each target in a process of its own
    python guided.py --replay NAME HEX                                  one input again, without atheris

An input fails that raises anything, takes more than `TIME`, or brings the process above `MEMORY`. The corpus of a run
begins with valid messages and is thrown away; an input that failed is printed, and belongs into a regression test.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__)
TIME = 1.0
"""Seconds of processor time that one input may take; none of them is longer than `LONGEST`."""
MEMORY = 256
"""Megabytes that the process may have at its peak; some 70 are Python, the package and what libFuzzer keeps."""
HANG = 30
"""Seconds after which libFuzzer gives up on an input."""
LONGEST = 4096
"""Bytes of one input."""


@attrs.frozen
class Target:
    check: Callable[[bytes], None]
    share: float
    """Of all inputs."""
    seeds: Callable[[], Iterable[bytes]]
    longest: int = LONGEST


def targets() -> dict[str, Target]:
    """Imports the package, so that a child can have it instrumented."""
    from fuzz import messages, promises, whole

    spelled = messages.Spelled

    def frames() -> Iterable[bytes]:
        return [*map(messages.packed, [*messages.STEPS, *messages.WORDS]), *messages.GOLDEN, *messages.RAW]

    def noise() -> Iterable[bytes]:
        chance = random.Random(1)
        return [bytes(40), *(chance.randbytes(chance.randrange(200)) for _ in range(100))]

    def texts(*found: str) -> Callable[[], Iterable[bytes]]:
        return lambda: [text.encode() for text in found]

    def text(data: bytes) -> str:
        return data.decode("utf-8", "surrogateescape")

    return {
        "unpack": Target(promises.unpacks, 0.15, frames),
        # With none, one or two frames of large arrays behind it.
        "decode": Target(lambda data: promises.decodes([data, *messages.AUX[: len(data) % 3]]), 0.20, frames),
        "message": Target(lambda data: promises.decodes(messages.message_of(spelled(data))), 0.30, noise),
        "handshake": Target(lambda data: promises.handshake_goes(spelled(data)), 0.20, noise),
        "version": Target(lambda data: promises.version_parses(text(data)), 0.05, texts("0.32.0", "v0.20.1.dev5"), 64),
        "endpoint": Target(lambda data: promises.endpoint_parses(text(data)), 0.08, texts(*promises.ADDRESSES), 256),
        "client": Target(lambda data: _run_client(whole, spelled(data)), 0.02, noise, 512),
    }


def _run_client(whole: Any, source: Any) -> None:
    whole.runs(source)


class Watch:
    """Checks one input after the other, and keeps the record in a file: libFuzzer leaves without a word to Python."""

    def __init__(self, check: Callable[[bytes], None], record: Path) -> None:
        from fuzz.messages import TOUCHED

        self._check = check
        self._touched = TOUCHED
        self._record = record
        self._slowest = 0.0

    def __call__(self, data: bytes) -> None:
        begun = time.process_time()
        self._check(data)
        took = time.process_time() - begun
        if took > self._slowest:
            self._slowest = took
            self._record.write_text(json.dumps({"slowest": took, "size": len(data), "input": data[:60].hex()}))
        assert took <= TIME, f"{took:.2f} s of processor time"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= MEMORY * 1024, "too much memory"
        assert not self._touched.exists(), "something was unpickled"


def child(name: str, record: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["lockstep_trio"]):
        target = targets()[name]
    logging.disable()
    atheris.Setup([sys.argv[0], *arguments], Watch(target.check, Path(record)))
    atheris.Fuzz()


def fuzz(name: str, target: Target, runs: int, seed: int) -> bool:
    """Run one target and print a line about it. Returns whether no input failed."""
    with tempfile.TemporaryDirectory(prefix="lockstep-trio-fuzz-") as place:
        corpus, log, record = Path(place, "corpus"), Path(place, "log"), Path(place, "record")
        corpus.mkdir()
        for at, data in enumerate(target.seeds()):
            (corpus / f"seed-{at}").write_bytes(data[: target.longest])
        options = [f"-runs={runs}", f"-seed={seed}", f"-max_len={target.longest}", f"-rss_limit_mb={2 * MEMORY}"]
        options += [f"-timeout={HANG}", "-print_final_stats=1", f"-artifact_prefix={place}/"]
        command = [sys.executable, str(HERE), "--child", name, str(record), *options, str(corpus)]
        with log.open("wb") as output:
            code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
        written = log.read_text(errors="replace")
        _report(name, written, json.loads(record.read_text()) if record.exists() else {})
        if code != 0:
            print(f"\n{name}: exit code {code}\n...{written[-6000:]}")
            for artifact in Path(place).glob("*-*"):
                print(f"replay: python {HERE.name} --replay {name} {artifact.read_bytes().hex() or repr('')}")
    return code == 0


def _report(name: str, written: str, record: dict[str, Any]) -> None:
    def last(pattern: str) -> str:
        found = re.findall(pattern, written)
        return found[-1] if found else "?"

    inputs, speed = last(r"executed_units: *(\d+)"), last(r"average_exec_per_sec: *(\d+)")
    edges, features, peak = last(r"cov: (\d+)"), last(r"ft: (\d+)"), last(r"peak_rss_mb: *(\d+)")
    slowest = f"{record['slowest'] * 1e3:.1f} ms ({record['size']} bytes)" if record else "?"
    print(f"{name:<10} {inputs:>9} {speed:>9} {edges:>7} {features:>9} {peak:>8}   {slowest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz every decoder.")
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs in all, shared out among the targets")
    parser.add_argument("--target", action="append", help="only this one (repeatable)")
    parser.add_argument("--seed", type=int, default=0, help="0 for another one each time")
    parser.add_argument("--replay", nargs=2, metavar=("NAME", "HEX"))
    chosen = parser.parse_args()
    known = targets()
    if chosen.replay:
        name, data = chosen.replay
        known[name].check(bytes.fromhex(data))
        return
    wanted = {name: known[name] for name in chosen.target or known}
    shares = sum(target.share for target in wanted.values())
    begun = time.monotonic()
    print(f"{'target':<10} {'inputs':>9} {'per s':>9} {'edges':>7} {'features':>9} {'peak MB':>8}   slowest input")
    fine = [fuzz(name, each, int(chosen.runs * each.share / shares), chosen.seed) for name, each in wanted.items()]
    print(f"{time.monotonic() - begun:.0f} s; at most {TIME} s and {MEMORY} MB were allowed")
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    # Beside the package the tests' helpers are needed, and nothing else of this folder.
    with contextlib.suppress(ValueError):
        sys.path.remove(str(HERE.parent))
    sys.path.append(str(HERE.parents[1]))
    os.environ.setdefault("PYTHONHASHSEED", "0")
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main()
