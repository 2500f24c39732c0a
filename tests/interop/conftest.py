"""A real engine per test module that asks for one, and a group held open on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from interop.environment import DEFAULT_VERSION, Environment, locate
from interop.group import VllmGroup, free_port
from interop.host import GroupHost
from interop.judge import Judge
from interop.release_judge import ReleaseJudge
from interop.releases import RELEASES, find


@pytest.fixture(scope="session")
def engine_version() -> str:
    """The release that is run; modules that run another one override it."""
    return DEFAULT_VERSION


@pytest.fixture(scope="session")
def engine_arguments() -> tuple[str, ...]:
    """More of the command line of ``engine``; for modules to override."""
    return ()


@pytest.fixture(scope="module")
def environment(engine_version: str) -> Environment:
    found = locate(engine_version)
    if found is None:
        ensure = f"python tests/interop/environment.py --version {engine_version} --ensure"
        pytest.skip(f"no environment of vLLM {engine_version}: {ensure}")
    return found


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest,
    environment: Environment,
    engine_arguments: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmGroup]:
    """Two ranks that are still loading. Stopped with the module: two groups at once would not fit a small machine."""
    failed = request.session.testsfailed
    directory = tmp_path_factory.mktemp("engine")
    with VllmGroup(environment, directory, port=free_port(), ranks=2, arguments=engine_arguments) as group:
        print(f"\nstarting a real engine, which takes some minutes; its log: {group.log_path}", flush=True)
        yield group
        if request.session.testsfailed > failed:
            print(f"\nthe end of the engine's log:\n{group.log_tail(60)}")
    assert group.pids() == []


@pytest.fixture(scope="module")
def host(engine: VllmGroup) -> Iterator[GroupHost]:
    """The group that those two ranks make, up and open."""
    with GroupHost(engine) as host:
        yield host


@pytest.fixture(scope="session", params=[*RELEASES, DEFAULT_VERSION])
def release(request: pytest.FixtureRequest) -> str:
    """Each release with a layout of its own, and the one that is run."""
    return str(request.param)


@pytest.fixture(scope="session")
def release_judge(release: str) -> Iterator[ReleaseJudge]:
    """The message classes of that release; of session scope, so that the tests of all modules share a judge."""
    found = find(release)
    if found is None:
        pytest.skip("its wheel is not there: python tests/interop/releases.py --ensure")
    with ReleaseJudge(found) as judge:
        judge.version()
        yield judge


@pytest.fixture(scope="module")
def judge(environment: Environment) -> Iterator[Judge]:
    with Judge(environment) as judge:
        judge.version()  # it loads for a while, and one that cannot is better told once
        yield judge
