"""The environment with TokenSpeed's own classes, and a judge in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from interop.tokenspeed.environment import TokenSpeedEnvironment, locate
from interop.tokenspeed.judge import TokenSpeedJudge


@pytest.fixture(scope="session")
def tokenspeed() -> TokenSpeedEnvironment:
    found = locate()
    if found is None:
        pytest.skip("no environment for it: python tests/interop/tokenspeed/environment.py --ensure")
    return found


@pytest.fixture(scope="module")
def judge(tokenspeed: TokenSpeedEnvironment) -> Iterator[TokenSpeedJudge]:
    with TokenSpeedJudge(tokenspeed) as judge:
        judge.version()  # one that cannot start is better told once
        yield judge
