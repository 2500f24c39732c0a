"""A clock that jumps and sockets that are real do not go together: the clock jumps before the bytes have come."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
JUMPS = re.compile(r"\b(autojump_clock|autojump_threshold|MockClock)\b")
SOCKETS = re.compile(r"\b(open_zmq_link|open_mock_ranks|ZmqRanks|ZmqSocket|ZmqRankLink|zmq\.Context)\b")


def both(text: str) -> bool:
    return bool(JUMPS.search(text) and SOCKETS.search(text))


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_file_uses_a_jumping_clock_and_real_sockets(path: Path) -> None:
    assert path == Path(__file__) or not both(path.read_text(encoding="utf-8"))


def test_a_file_that_does_is_found() -> None:
    assert both("async def test_it(autojump_clock): link = open_zmq_link(None)")
