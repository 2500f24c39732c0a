"""Importing the package brings neither its extras nor anything it has no use for."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

EXTRAS = {"click", "rich", "hypothesis", "numpy", "pytest", "_pytest", "asyncio"}


def loaded_by(statement: str) -> set[str]:
    """Top-level names of what a fresh interpreter has loaded after the statement."""
    program = f"import json, sys; {statement}; print(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "module", ["lockstep_trio", "lockstep_trio.core", "lockstep_trio.testing", "lockstep_trio.cli"]
)
def test_importing_a_public_package_imports_no_extra(module: str) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not there yet")
    assert loaded_by(f"import {module}") & EXTRAS == set()
