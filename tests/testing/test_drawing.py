"""Time lines: what a schedule does, as text and as SVG, and that nothing of it is left out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from lockstep_trio.testing.drawing import Fate, Place, Timeline, timeline
from lockstep_trio.testing.explorer import Case, Move, World, explore, replay
from lockstep_trio.testing.rules import RULES

SMALL = Case(2, ((0, 1), (1, 1)))

FLAG_EXCLUDE = (
    Move("submit", request=0),
    Move("abort", request=0),
    Move("submit", request=1),
    Move("abort", request=1),
    Move("poll", 0, count=3),
    Move("poll", 1, count=1),
)

PICTURE = """\
┆ parked   ║ waits at the barrier   (n): sent in move n

             client                      rank 0               rank 1
    clock 0, idle │                      ┆ parked, wave 0     ┆ parked, wave 0
  1      submit 0 ├─ ADD 0 ──────────┐   ┆                    ┆
         stepping ├─ START(0) but 0 ─┼───┆────────────────┐   ┆
  2       abort 0 ├─ ABORT 0 ────────┤   ┆                │   ┆
  3      submit 1 ├─ ADD 1 ──────────│───┆────────────────┤   ┆
  4       abort 1 ├─ ABORT 1 ────────│───┆────────────────┤   ┆
  5               │                  ├──>┆ ADD 0 (1)      │   ┆
                  │                  ├──>┆ START(0) (1)   │   ┆
                  │                  │   ┆ leaves it out  │   ┆
                  │                  └──>┆ ABORT 0 (2)    │   ┆
  6               │                      ┆                ├──>┆ START(0) (1)
                  │                      ┆                │   ║ at the barrier
end               │                      ┆                │   ║ unread ADD 1 (3)
                  │                      ┆                ╵   ║ unread ABORT 1 (4)

=> stuck: rank 0 parked, rank 1 waits at the barrier
"""

SVG = "{http://www.w3.org/2000/svg}"


def drawn(rule: str, case: Case, schedule: Sequence[Move], problem: str | None = None) -> Timeline:
    return timeline(case, partial(RULES[rule], case.ranks), schedule, problem=problem)


def wander(seed: int, case: Case, moves: int) -> list[Move]:
    """A schedule under our rule in which a bit of everything happens."""
    chance = random.Random(seed)
    world = World.start(case, RULES["ours"](case.ranks))
    schedule = []
    while len(schedule) < moves and (possible := list(world.moves())):
        schedule.append(chance.choice(possible))
        world = world.after(schedule[-1])
    return schedule


WIDE = Case(3, ((0, 2), (1, 1), (2, 3)), pauses=1, pause_mode="abort", nudges=1, repeats=1, engine_finishes=True)


def with_class(root: ET.Element, tag: str, name: str) -> list[ET.Element]:
    return [each for each in root.iter(SVG + tag) if name in each.get("class", "").split()]


# -- the model ---------------------------------------------------------------------------------------------------------


def test_a_frame_goes_from_the_row_of_its_move_to_the_row_in_which_it_is_taken() -> None:
    line = drawn("flag-exclude", SMALL, FLAG_EXCLUDE)
    assert [(frame.rank, frame.label, frame.move, frame.sent, frame.ended, frame.fate) for frame in line.frames] == [
        (0, "ADD 0", 1, 1, 6, Fate.TAKEN),
        (0, "START(0) but 0", 1, 2, 7, Fate.TAKEN),
        (0, "ABORT 0", 2, 3, 9, Fate.TAKEN),
        (1, "START(0) but 0", 1, 2, 10, Fate.TAKEN),
        (1, "ADD 1", 3, 4, 12, Fate.UNDER_WAY),
        (1, "ABORT 1", 4, 5, 13, Fate.UNDER_WAY),
    ]
    assert [(change.row, change.rank, change.place) for change in line.changes] == [
        (0, 0, Place.PARKED),
        (0, 1, Place.PARKED),
        (11, 1, Place.BARRIER),
    ]


@pytest.mark.parametrize("seed", range(12))
def test_every_frame_is_drawn_once_and_what_is_left_is_said_to_be_under_way(seed: int) -> None:
    schedule = wander(seed, WIDE, 60)
    line = drawn("ours", WIDE, schedule)
    world = replay(World.start(WIDE, RULES["ours"](3)), schedule)
    for rank in range(3):
        left = [frame for frame in line.frames if frame.rank == rank and frame.fate is Fate.UNDER_WAY]
        assert sum(not frame.to_client for frame in left) == len(world.inboxes[rank])
        assert sum(frame.to_client for frame in left) == len(world.outboxes[rank])
    taken = sum(move.count for move in schedule) + sum(move.kind == "deliver" for move in schedule)
    assert sum(frame.fate is Fate.TAKEN for frame in line.frames) == taken


@pytest.mark.parametrize("seed", range(12))
def test_frames_of_one_way_never_overtake_each_other_and_are_taken_after_they_were_sent(seed: int) -> None:
    line = drawn("ours", WIDE, wander(seed, WIDE, 60))
    for rank in range(3):
        for to_client in (False, True):
            frames = [each for each in line.frames if (each.rank, each.to_client) == (rank, to_client)]
            assert all(frame.sent < frame.ended < line.rows for frame in frames)
            assert all(one.sent < two.sent and one.ended < two.ended for one, two in pairwise(frames))


@pytest.mark.parametrize("seed", range(12))
def test_no_two_words_share_a_place(seed: int) -> None:
    line = drawn("ours", WIDE, wander(seed, WIDE, 60))
    places = [(note.row, note.rank) for note in line.notes]
    assert len(places) == len(set(places))
    assert [moment.row for moment in line.moments] == sorted({moment.row for moment in line.moments})
    assert all(moment.row < line.end for moment in line.moments)


def test_what_all_ranks_get_alike_is_one_row_and_comes_behind_what_one_of_them_gets_first() -> None:
    line = drawn("ours", Case(3, ((2, 1),)), [Move("submit", request=0)])
    assert [(frame.rank, frame.label, frame.sent) for frame in line.frames] == [
        (0, "START(0)", 2),
        (1, "START(0)", 2),
        (2, "ADD 0", 1),
        (2, "START(0)", 2),
    ]


def test_a_frame_that_the_network_loses_ends_where_it_is_lost() -> None:
    case = Case(2, ((0, 1), (1, 1)), lost_done=True)
    found = explore(case, partial(RULES["ours"], 2), limit=5_000).found
    assert found is not None
    line = drawn("ours", case, found.schedule)
    lost = [frame for frame in line.frames if frame.fate is Fate.LOST]
    assert [frame.label for frame in lost] == ["DONE(0)"]
    row = line.text().splitlines()[3 + lost[0].ended]
    assert "x" in row
    assert f"lost DONE(0) ({lost[0].move})" in row


PAUSE_AND_RESUME = (
    *(Move("submit", request=0), Move("poll", 0, count=2), Move("pause"), Move("step"), Move("poll", 0, count=1)),
    *(Move("step"), Move("deliver", 0), Move("deliver", 0), Move("deliver", 0), Move("deliver", 0)),
    *(Move("resume"), Move("poll", 0, count=1), Move("resume together"), Move("deliver", 0)),
)


def test_a_pause_and_a_resume_are_told_of_by_the_client_and_by_the_rank() -> None:
    line = drawn("ours", Case(1, ((0, 2),), pauses=1, pause_mode="wait"), PAUSE_AND_RESUME)
    assert [note.text for note in line.notes if note.rank is None] == [
        "clock 0, idle",
        "submit 0",
        "stepping",
        "pause",
        "pausing",
        "clock 1, idle",
        "paused",
        "resume",
        "works again",
    ]
    assert [frame.label for frame in line.frames] == [
        *("ADD 0", "START(0)", "pause wait"),
        *("output 0", "end of 0", "DONE(0)", "answer"),
        *("resume", "answer"),
    ]
    assert [change.place for change in line.changes] == [
        *(Place.PARKED, Place.BARRIER, Place.POLL, Place.BARRIER, Place.PARKED, Place.RESUMING, Place.PARKED)
    ]


# -- its end -----------------------------------------------------------------------------------------------------------


def test_the_end_says_where_each_rank_is_stuck() -> None:
    ending = "stuck: rank 0 parked, rank 1 waits at the barrier"
    assert drawn("flag-exclude", SMALL, FLAG_EXCLUDE).ending == ending
    assert drawn("flag-exclude", SMALL, FLAG_EXCLUDE, "stuck: nothing can move").ending == ending


def test_another_problem_is_named_before_where_the_ranks_are() -> None:
    ending = drawn("ours", SMALL, [], "clock 1 is above a rank's wave 0").ending
    assert ending == "clock 1 is above a rank's wave 0: rank 0 parked, rank 1 parked"


def test_a_schedule_that_is_not_stuck_is_not_called_so() -> None:
    case = Case(1, ((0, 1),))
    way = [Move("submit", request=0), Move("poll", 0, count=2), Move("step"), Move("deliver", 0), Move("deliver", 0)]
    assert drawn("ours", case, way[:2]).ending == "so far: rank 0 waits at the barrier"
    assert drawn("ours", case, way).ending == "settled: rank 0 parked"


# -- as text -----------------------------------------------------------------------------------------------------------


def test_the_text_of_the_shortest_schedule_that_strands_a_rank_under_a_flag() -> None:
    assert drawn("flag-exclude", SMALL, FLAG_EXCLUDE).text() == PICTURE


def test_a_start_that_crosses_a_done_is_seen_to_cross_it() -> None:
    schedule = [
        *(Move("submit", request=0), Move("poll", 0, count=2), Move("poll", 1, count=1), Move("step")),
        *(Move("deliver", 0), Move("deliver", 0), Move("submit", request=1), Move("poll", 1, count=1)),
        Move("deliver", 1),
    ]
    rows = drawn("ours", SMALL, schedule).text().splitlines()
    assert [row[18:] for row in rows[-8:-3]] == [
        "├─ ADD 1 ────────┆─────────────────────┐ │ ┆",
        "├─ START(1) ─┬───┆─────────────────────┤ │ ┆",
        "│            │   ┆                     ├─│>┆ ADD 1 (7)",
        "│            │   ┆                     │ │ ║ at the barrier",
        "│<─ DONE(0) ─│───┆─────────────────────│─┘ ║",
    ]


def test_in_ascii_it_is_as_wide_and_has_no_other_character() -> None:
    line = drawn("ours", WIDE, wander(3, WIDE, 60))
    plain = line.text(ascii_only=True)
    assert plain.isascii()
    assert list(map(len, plain.splitlines())) == list(map(len, line.text().splitlines()))


@pytest.mark.parametrize("rule", ["flag-exclude", "raise", "no-fence", "no-rewake", "silence", "gate"])
def test_what_is_found_for_three_ranks_fits_into_some_100_columns(rule: str) -> None:
    case = Case(3, ((0, 1), (2, 1)))
    found = explore(case, partial(RULES[rule], 3), limit=50_000).found
    assert found is not None
    lines = drawn(rule, case, found.schedule).text().splitlines()
    assert max(map(len, lines)) <= 105
    assert all(line == line.rstrip() for line in lines)


# -- as SVG ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_drawing_has_a_lane_per_rank_and_one_for_the_client(ranks: int) -> None:
    root = ET.fromstring(drawn("ours", Case(ranks, ((0, 1),)), [Move("submit", request=0)]).svg())
    heads = [lane.findtext(f"{SVG}text") for lane in with_class(root, "g", "lane")]
    assert sorted(map(str, heads)) == ["client", *(f"rank {rank}" for rank in range(ranks))]


@pytest.mark.parametrize("seed", range(6))
def test_the_drawing_has_an_arrow_per_frame(seed: int) -> None:
    line = drawn("ours", WIDE, wander(seed, WIDE, 40))
    root = ET.fromstring(line.svg())
    arrows = with_class(root, "path", "frame")
    told = [arrow.findtext(f"{SVG}title") for arrow in arrows]
    assert told == [f"{frame.label}, sent in move {frame.move}, {frame.fate.value}" for frame in line.frames]
    assert sum(arrow.get("marker-end") is not None for arrow in arrows) == sum(
        frame.fate is Fate.TAKEN for frame in line.frames
    )


def test_everything_in_the_drawing_is_inside_of_it() -> None:
    root = ET.fromstring(drawn("ours", WIDE, wander(3, WIDE, 40)).svg())
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for patch in root.iter(f"{SVG}rect"):
        x, y = float(patch.get("x", 0)), float(patch.get("y", 0))
        assert 0 <= x <= x + float(patch.get("width", 0)) <= width
        assert 0 <= y <= y + float(patch.get("height", 0)) <= height
    assert 400 < width < 1400
    assert 400 < height < 2000


def test_patches_of_words_do_not_overlap() -> None:
    root = ET.fromstring(drawn("ours", WIDE, wander(3, WIDE, 60)).svg())
    rows: dict[float, list[tuple[float, float]]] = {}
    for patch in list(root.iter(f"{SVG}rect"))[1:]:
        x = float(patch.get("x", 0))
        rows.setdefault(float(patch.get("y", 0)), []).append((x, x + float(patch.get("width", 0))))
    assert all(one[1] <= two[0] for row in rows.values() for one, two in pairwise(sorted(row)))


def test_the_drawing_stands_alone_and_tells_its_story_to_those_who_cannot_see_it() -> None:
    text = drawn("flag-exclude", SMALL, FLAG_EXCLUDE).svg()
    root = ET.fromstring(text)
    assert not [each for each in root.iter() if each.tag in {f"{SVG}script", f"{SVG}image", f"{SVG}foreignObject"}]
    assert text.replace('xmlns="http://www.w3.org/2000/svg"', "").count("http") == 0
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    label = root.get("aria-labelledby", "").split()
    assert [root.findtext(SVG + name) for name in ("title",)] == ["Time line of 6 moves, the client and 2 ranks"]
    assert label == [root.find(SVG + name).get("id") for name in ("title", "desc")]
    story = root.findtext(f"{SVG}desc", "").splitlines()
    assert story[0] == "1. the caller submits request 0"
    assert story[-1] == "stuck: rank 0 parked, rank 1 waits at the barrier"


def test_two_drawings_on_one_page_share_no_name_and_the_same_one_is_the_same_again() -> None:
    one, two = drawn("flag-exclude", SMALL, FLAG_EXCLUDE), drawn("flag-exclude", SMALL, FLAG_EXCLUDE[:5])
    assert one.svg() == drawn("flag-exclude", SMALL, FLAG_EXCLUDE).svg()
    ids = [{each.get("id") for each in ET.fromstring(line.svg()).iter()} - {None} for line in (one, two)]
    assert not ids[0] & ids[1]


def test_whatever_is_written_into_the_drawing_is_escaped() -> None:
    problem = "<b> & 'so' on"
    root = ET.fromstring(drawn("ours", SMALL, [], problem).svg())
    assert with_class(root, "text", "ending")[0].text == f"{problem}: rank 0 parked, rank 1 parked"
