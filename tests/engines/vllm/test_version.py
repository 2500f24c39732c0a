from __future__ import annotations

import pytest

from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.engines.vllm.version import is_supported, parse_version, priority_position, settle_version
from lockstep_trio.errors import HandshakeError


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.0", (0, 32)),
        ("0.32.0+cpu", (0, 32)),
        ("0.33.1rc1.dev5+gabcdef", (0, 33)),
        ("v0.20.2", (0, 20)),
        ("0.20", (0, 20)),
        ("1.0.0", (1, 0)),
        ("0.1.dev100+gabc", (0, 1)),
        ("dev", None),
        ("", None),
        ("0", None),
        ("0.", None),
        ("0.99999999999", None),
    ],
)
def test_a_version_is_its_first_two_numbers(text: str, version: tuple[int, int] | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(("version", "known"), [((0, 19), False), ((0, 20), True), ((0, 33), True), ((0, 34), False)])
def test_versions_from_20_to_33_are_known(version: tuple[int, int], known: bool) -> None:
    assert is_supported(version) is known
    assert not is_supported(None)


def test_what_the_ranks_say_is_the_version() -> None:
    assert settle_version([RankInfo(0, version="0.28.0")], None) == (0, 28)


def test_what_the_caller_says_wins() -> None:
    assert settle_version([RankInfo(0, version="0.35.0")], "0.33") == (0, 33)


def test_ranks_that_do_not_say_have_no_version() -> None:
    assert settle_version([RankInfo(0)], None) is None


@pytest.mark.parametrize("version", ["0.19.1", "0.34.0", "1.0", "dev"])
def test_a_version_that_is_not_known_is_refused_with_the_ones_that_are(version: str) -> None:
    with pytest.raises(HandshakeError, match=rf"{version}.*0\.20 to 0\.33.*VllmProtocol"):
        settle_version([RankInfo(0, version=version)], None)


@pytest.mark.parametrize(
    ("version", "raw", "position"),
    [
        ((0, 20), {}, 12),
        ((0, 21), {}, 13),
        ((0, 33), {}, 13),
        (None, {"dtype": "float32"}, 13),  # 0.22
        (None, {"max_model_len": 5}, None),  # 0.20 or 0.21
    ],
)
def test_the_place_of_the_priority_depends_on_the_version(
    version: tuple[int, int] | None, raw: dict[str, object], position: int | None
) -> None:
    assert priority_position(version, [RankInfo(0, raw=raw)]) == position
