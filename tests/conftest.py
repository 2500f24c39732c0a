"""Which tests are the core set, how much Hypothesis may draw, and the figures that tests measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

try:
    import hypothesis
except ImportError:  # the extra `testing` is absent; the tests that need it skip themselves
    pass
else:
    # A busy machine is slow without being wrong, so there is no deadline anywhere. CI repeats itself; nights explore.
    _quiet = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
    hypothesis.settings.register_profile(
        "ci", deadline=None, derandomize=True, max_examples=100, database=None, suppress_health_check=_quiet
    )
    hypothesis.settings.register_profile(
        "night", deadline=None, max_examples=5_000, print_blob=True, suppress_health_check=_quiet
    )
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

HERE = Path(__file__).parent
CORE_FOLDERS = {"core", "engines", "link", "runtime", "testing"}
"""Folders below tests/ that are in the core set, as are the files beside this one; `slow` keeps a test out of it."""
NOT_CORE = {"slow", "explore", "night", "vllm", "tokenspeed"}

# Without the extra `cli` its tests cannot even be imported.
collect_ignore = ["cli"] if find_spec("click") is None or find_spec("rich") is None else []

figures_key = pytest.StashKey[list[tuple[str, float, str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[figures_key] = []
    spec = find_spec("lockstep_trio")
    if spec is None or spec.origin is None:
        raise pytest.UsageError("lockstep_trio is not installed: python -m pip install -e '.[dev]', or use nox")
    if os.environ.get("LOCKSTEP_TRIO_TESTS_INSTALLED") and Path(spec.origin).parent == HERE.parent / "lockstep_trio":
        raise pytest.UsageError(f"the checkout would be tested instead of the installed wheel: {spec.origin}")


def pytest_report_header() -> str:
    spec = find_spec("lockstep_trio")
    return f"lockstep_trio: {spec.origin if spec else 'absent'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(HERE).parts
        marks = {mark.name for mark in item.iter_markers()}
        if (len(place) == 1 or place[0] in CORE_FOLDERS) and not marks & NOT_CORE:
            item.add_marker(pytest.mark.core)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, float, str], None]:
    """Record a measured value, `figure("death noticed", 0.14, "s")`; all of them are printed at the end of the run."""
    return lambda name, value, unit: request.config.stash[figures_key].append((name, value, unit))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if figures := config.stash[figures_key]:
        terminalreporter.section("figures")
        for name, value, unit in figures:
            terminalreporter.line(f"{name}: {value:.6g} {unit}")
