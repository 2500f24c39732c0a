from __future__ import annotations

import pytest

from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.engines.vllm.version import Versions, parse_version, settle_version
from lockstep_trio.errors import HandshakeError

ANY = 10**6


@pytest.mark.parametrize(
    ("text", "oldest", "newest"),
    [
        ("0.32.0", (0, 32, 0), (0, 32, 0)),
        ("0.32.0+cpu", (0, 32, 0), (0, 32, 0)),
        ("0.10.1.1", (0, 10, 1), (0, 10, 1)),
        ("0.33.1rc1.dev5+gabcdef", (0, 33, 1), (0, 33, 1)),
        ("v0.20.2", (0, 20, 2), (0, 20, 2)),
        ("0.20", (0, 20, 0), (0, 20, ANY)),
        ("0.20rc1", (0, 20, 0), (0, 20, ANY)),
        ("1.0.0", (1, 0, 0), (1, 0, 0)),
        ("0.1.dev100+gabc", (0, 1, 0), (0, 1, ANY)),
    ],
)
def test_a_version_is_its_first_numbers(text: str, oldest: tuple[int, int, int], newest: tuple[int, int, int]) -> None:
    assert parse_version(text) == Versions(oldest, newest)


@pytest.mark.parametrize("text", ["dev", "", "0", "0.", "0.999999"])
def test_what_has_no_two_numbers_is_no_version(text: str) -> None:
    assert parse_version(text) is None


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.9.2", False), ("0.10.0", True), ("0.33.7", True), ("0.34.0", False), ("0.10", True), ("0.9", False)],
)
def test_versions_from_10_to_33_are_known(version: str, known: bool) -> None:
    parsed = parse_version(version)
    assert parsed is not None
    assert parsed.supported is known


def test_a_range_tells_what_is_certain() -> None:
    versions = Versions.between((0, 17), (0, 19))
    assert [versions.all_from(each) for each in ((0, 16, 0), (0, 17, 0), (0, 17, 1))] == [True, True, False]
    assert [versions.none_from(each) for each in ((0, 19, 1), (0, 20, 0))] == [False, True]


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        (Versions((0, 32, 0), (0, 32, 0)), "0.32.0"),
        (Versions.between((0, 17), (0, 19)), "0.17.0 to 0.19"),
        (Versions((0, 10, 2), (0, 16, ANY)), "0.10.2 to 0.16"),
    ],
)
def test_a_range_reads_well(versions: Versions, text: str) -> None:
    assert str(versions) == text


def test_what_the_ranks_say_is_the_version() -> None:
    assert str(settle_version([RankInfo(0, version="0.28.0")], None)) == "0.28.0"


def test_what_the_caller_says_wins() -> None:
    assert str(settle_version([RankInfo(0, version="0.35.0")], "0.33.0")) == "0.33.0"
    assert str(settle_version([RankInfo(0)], "0.16.0")) == "0.16.0"


@pytest.mark.parametrize("version", ["0.9.2", "0.34.0", "1.0", "dev"])
def test_a_version_that_is_not_known_is_refused_with_the_ones_that_are(version: str) -> None:
    with pytest.raises(HandshakeError, match=rf"{version}.*0\.10 to 0\.33.*VllmProtocol"):
        settle_version([RankInfo(0, version=version)], None)


EMPTY = {"get_supported_tasks": False, "post_step": False, "is_scheduler_paused": False}


@pytest.mark.parametrize(
    ("raw", "config_hash", "answers", "found"),
    [
        ({"max_model_len": 5, "dtype": "float32"}, None, {}, "0.22.0 to 0.22"),
        ({"max_model_len": 5}, None, {"_pause_complete": True}, "0.21.0 to 0.21"),
        ({"max_model_len": 5}, None, {"_pause_complete": False}, "0.20.0 to 0.20"),
        ({}, None, {**EMPTY, "is_scheduler_paused": True}, "0.17.0 to 0.19"),
        ({}, None, {**EMPTY, "post_step": True}, "0.10.2 to 0.16"),
        ({}, "a hash", {**EMPTY, "post_step": True}, "0.11.1 to 0.16"),
        ({}, None, {**EMPTY, "get_supported_tasks": True}, "0.10.1"),
        ({}, None, EMPTY, "0.10.0"),
    ],
)
def test_what_is_not_told_is_concluded_from_what_there_is(
    raw: dict[str, object], config_hash: str | None, answers: dict[str, bool], found: str
) -> None:
    assert str(settle_version([RankInfo(0, config_hash=config_hash, raw=raw, answers=answers)], None)) == found
