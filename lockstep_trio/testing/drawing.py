"""Time lines: what a schedule of the explorer does, drawn as text or as SVG.

There is a lane for the client and one per rank, and time runs downwards. Every frame is an arrow from where it is sent
to where it is taken, so that a START that crosses a DONE is seen to cross it; each rank's lane shows what it does
meanwhile. Both drawings are made from one ``Timeline``, in which everything has a row.
"""

from __future__ import annotations

import enum
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple, TypeAlias, final

import attrs

from lockstep_trio.core import PausePhase, WaveRule

from .explorer import Case, Move, World
from .rank_model import Add, Answer, Call, Done, Drop, FromRank, Out, Pause, RankModel, Resume, StartWave, ToRank


@final
class Place(enum.Enum):
    """What a rank is doing. The value says so in a time line."""

    PARKED = "parked"
    """Without work, until a message comes."""
    POLL = "at its poll"
    """With work, between two steps: it takes in messages."""
    BARRIER = "at the barrier"
    """It waits until all ranks have come to the same step, and takes in nothing."""
    RESUMING = "waits to resume"
    """It waits until all ranks have come to resume, and takes in nothing."""


@final
class Fate(enum.Enum):
    """What became of a frame."""

    TAKEN = "taken"
    LOST = "lost"
    """By the network."""
    UNDER_WAY = "under way"
    """Nobody has taken it by the end of the schedule."""


@final
@attrs.frozen
class Frame:
    """A message between the client and a rank: an arrow."""

    rank: int
    to_client: bool
    label: str
    move: int
    """The number of the move that sent it, from 1."""
    sent: int
    """The row in which it was sent."""
    ended: int
    """The row in which it was taken or lost; of one that is under way, a row below all moves."""
    fate: Fate


@final
@attrs.frozen
class Note:
    """Words beside a lane."""

    row: int
    rank: int | None
    """None: beside the client's."""
    text: str


@final
@attrs.frozen
class Change:
    """From this row on, a rank is doing something else."""

    row: int
    rank: int
    place: Place


@final
@attrs.frozen
class Moment:
    """One move and the row in which it begins."""

    number: int
    row: int
    sentence: str


@final
@attrs.frozen
class Timeline:
    """What a schedule does, row by row. See ``timeline``."""

    ranks: int
    rows: int
    end: int
    """The row below all moves, from which on it is said what is left."""
    moments: tuple[Moment, ...]
    frames: tuple[Frame, ...]
    """In the order in which they ended."""
    notes: tuple[Note, ...]
    changes: tuple[Change, ...]
    ending: str
    """What is wrong with the last state, or what it is."""

    def text(self, *, ascii_only: bool = False) -> str:
        """For a terminal or a report: some 40 columns, and 20 to 25 more per rank; no line ends with a blank.

        Args:
            ascii_only: Without box-drawing characters.
        """
        drawn = _Text(self).draw()
        return drawn.translate(TO_ASCII) if ascii_only else drawn

    def svg(self) -> str:
        """A document of its own, which fits light and dark pages; without scripts, and without fonts to load."""
        return _Svg(self).draw()


def timeline(
    case: Case, rule: Callable[[], WaveRule], schedule: Sequence[Move], *, problem: str | None = None
) -> Timeline:
    """Replay a schedule and write down who sends what, and when it is taken.

    For what ``explore`` has found: ``timeline(case, rule, found.schedule, problem=found.problem)``.

    Args:
        case: What was explored.
        rule: Makes a fresh rule, as for ``explore``.
        schedule: Moves that are possible one after the other from the start.
        problem: What is wrong with the last state. None: that nothing can move, should it be so.
    """
    scribe = _Scribe(World.start(case, rule()))
    for move in schedule:
        scribe.make(move)
    return scribe.finish(problem)


# -- from moves to rows ------------------------------------------------------------------------------------------------


def to_rank_label(message: ToRank) -> str:
    """What a message to a rank is called."""
    match message:
        case Add(wire_id, _):
            return f"ADD {wire_id}"
        case Drop(wire_ids):
            return f"ABORT {' '.join(wire_ids)}"
        case StartWave(wave, exclude):
            return f"START({wave})" if exclude is None else f"START({wave}) but {exclude}"
        case Call():
            return "fence"
        case Pause(_, mode):
            return f"pause {mode}"
        case Resume():
            return "resume"


def _arrival_label(message: ToRank) -> str:
    """The same where it is taken: whom a START leaves out is said there only if it is that rank."""
    return to_rank_label(StartWave(message.wave) if isinstance(message, StartWave) else message)


def from_rank_label(message: FromRank) -> str:
    """What a message from a rank is called."""
    match message:
        case Out(wire_id, final, aborted):
            return f"{'aborted' if aborted else 'end of' if final else 'output'} {wire_id}"
        case Done(wave):
            return f"DONE({wave})"
        case Answer(call_id, refused):
            return "refused" if refused else "answer" if call_id else "fence answer"


def place_of(rank: RankModel) -> Place:
    """What a rank is doing."""
    if rank.at_barrier:
        return Place.BARRIER
    if rank.resuming is not None:
        return Place.RESUMING
    return Place.POLL if rank.has_work else Place.PARKED


def _client_note(move: Move) -> str | None:
    """What the client does by itself; None if it only takes in what a rank sent, or nothing."""
    match move.kind:
        case "submit" | "abort":
            return f"{move.kind} {move.request}"
        case "close" | "pause" | "resume":
            return move.kind
        case "nudge":
            return "suspects a split"
        case "start again":
            return "repeats START"
        case _:
            return None


LONGEST = 18
"""Letters in a row of words beside a lane, where they can be divided: three ranks are to fit into some 100 columns."""


class _Sent(NamedTuple):
    label: str
    move: int
    row: int


_Way: TypeAlias = tuple[int, bool]
"""A rank, and whether it is towards the client. Frames of one way are taken in the order in which they were sent."""


@final
class _Scribe:
    """Makes one move after the other and writes down what happens."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ranks = range(len(world.ranks))
        self._number = 0
        self._row = 0
        """The first row of the move at hand. Each lane goes on from there by itself: what they do is simultaneous."""
        self._next: dict[int | None, int] = {}
        """By lane, the next row that is free for words."""
        self._wire = 0
        """The next row that is free for what the client sends and hears."""
        self._under_way: dict[_Way, deque[_Sent]] = {
            (rank, up): deque() for rank in self._ranks for up in (False, True)
        }
        self._moments: list[Moment] = []
        self._frames: list[Frame] = []
        self._notes: list[Note] = []
        self._changes: list[Change] = []
        self._begin()
        self._note_client(world, world, first=True)
        for rank in world.ranks:
            self._changes.append(Change(0, rank.index, place_of(rank)))
            self._say_all(rank.index, [place_of(rank).value, f"wave {rank.wave}"])
        self._end()

    def _begin(self) -> None:
        self._wire = self._row
        self._next = dict.fromkeys((None, *self._ranks), self._row)

    def _end(self) -> None:
        self._row = max(self._row + 1, self._wire, *self._next.values())

    def _say(self, lane: int | None, text: str) -> int:
        row = self._next[lane]
        self._notes.append(Note(row, lane, text))
        self._next[lane] = row + 1
        return row

    def _say_all(self, lane: int | None, words: Iterable[str]) -> int | None:
        """In as few rows as fit. Returns the first one."""
        lines: list[str] = []
        for word in words:
            if lines and len(lines[-1]) + len(word) <= LONGEST - 2:
                lines[-1] += f", {word}"
            else:
                lines.append(word)
        rows = [self._say(lane, line) for line in lines]
        return rows[0] if rows else None

    def make(self, move: Move) -> None:
        """One move."""
        before, after = self._world, self._world.after(move)
        self._number += 1
        self._moments.append(Moment(self._number, self._row, str(move)))
        self._begin()
        self._note_move(move)
        taken, heard = self._take(move)
        for rank in self._ranks:  # what a rank emits
            for message in after.outboxes[rank][len(before.outboxes[rank]) - heard.get(rank, 0) :]:
                self._send(rank, True, from_rank_label(message), self._say(rank, from_rank_label(message)))
        kept = [len(box) - taken.get(rank, 0) for rank, box in enumerate(before.inboxes)]
        self._send_to_ranks(
            [list(map(to_rank_label, box[size:])) for box, size in zip(after.inboxes, kept, strict=True)]
        )
        self._note_client(before, after)
        for old, new in zip(before.ranks, after.ranks, strict=True):
            self._note_rank(old, new)
        self._end()
        self._world = after

    def _note_move(self, move: Move) -> None:
        note = _client_note(move)
        if note is not None:
            self._say(None, note)
        match move.kind:
            case "step" | "resume together":
                for rank in self._ranks:
                    self._say(rank, "steps" if move.kind == "step" else "resumes")
            case "finish":
                self._say(move.rank, "by itself:")
            case "abort inside step":
                self._say(move.rank, f"drops {move.request} early")
            case "poll" if not move.count:
                self._say(move.rank, "takes nothing")

    def _take(self, move: Move) -> tuple[dict[int, int], dict[int, int]]:
        """Let frames end. Returns how many each rank took, and how many of each rank's the client did or never will."""
        match move.kind:
            case "poll":
                for message in self._world.inboxes[move.rank][: move.count]:
                    number = self._under_way[move.rank, False][0].move
                    row = self._say(move.rank, f"{_arrival_label(message)} ({number})")
                    self._arrive(move.rank, False, row, Fate.TAKEN)
                    if isinstance(message, StartWave) and message.exclude == move.rank:
                        self._say(move.rank, "leaves it out")
                return {move.rank: move.count}, {}
            case "deliver":
                self._arrive(move.rank, True, self._wire, Fate.TAKEN)
                self._wire += 1
                return {}, {move.rank: 1}
            case "lose":
                first = self._under_way[move.rank, True][0]
                self._arrive(move.rank, True, self._say(move.rank, f"lost {first.label} ({first.move})"), Fate.LOST)
                return {}, {move.rank: 1}
            case _:
                return {}, {}

    def _send(self, rank: int, to_client: bool, label: str, row: int) -> None:
        self._under_way[rank, to_client].append(_Sent(label, self._number, row))

    def _arrive(self, rank: int, to_client: bool, row: int, fate: Fate) -> None:
        label, move, sent = self._under_way[rank, to_client].popleft()
        self._frames.append(Frame(rank, to_client, label, move, sent, row, fate))

    def _send_to_ranks(self, boxes: list[list[str]]) -> None:
        """A row for each message, and only one for what all ranks get alike."""
        while any(boxes):
            heads = [box[0] for box in boxes if box]
            # Something that another rank gets further down its row waits, so that both get it in one row.
            label = next((each for each in heads if all(each not in box[1:] for box in boxes)), heads[0])
            for rank, box in enumerate(boxes):
                if box and box[0] == label:
                    self._send(rank, False, box.pop(0), self._wire)
            self._wire += 1

    def _note_client(self, before: World, after: World, *, first: bool = False) -> None:
        old, new = before.machine.snapshot(), after.machine.snapshot()
        said: list[str] = []
        if first or new.clock != old.clock:
            said.append(f"clock {new.clock}")
        if first or new.stepping != old.stepping:
            said.append("stepping" if new.stepping else "idle")
        if new.pause != old.pause:
            said.append("works again" if new.pause is PausePhase.WORKING else new.pause.name.lower())
        self._say_all(None, said)

    def _note_rank(self, old: RankModel, new: RankModel) -> None:
        said: list[str] = []
        if place_of(new) is not place_of(old):
            said.append(place_of(new).value)
        if new.wave != old.wave:
            said.append(f"wave {new.wave}")
        for word, then, now in (("pausing", old.pending, new.pending), ("paused", old.ignoring, new.ignoring)):
            if now and not then:
                said.append(word)
        row = self._say_all(new.index, said)
        if row is not None:
            self._changes.append(Change(row, new.index, place_of(new)))

    def finish(self, problem: str | None) -> Timeline:
        """All moves have been made."""
        self._begin()
        end = self._row
        for (rank, to_client), frames in self._under_way.items():
            while frames:
                first = frames[0]
                word = "unheard" if to_client else "unread"
                self._arrive(rank, to_client, self._say(rank, f"{word} {first.label} ({first.move})"), Fate.UNDER_WAY)
        self._end()
        return Timeline(
            ranks=len(self._ranks),
            rows=self._row,
            end=end,
            moments=tuple(self._moments),
            frames=tuple(self._frames),
            notes=tuple(self._notes),
            changes=tuple(self._changes),
            ending=self._ending(problem),
        )

    def _ending(self, problem: str | None) -> str:
        world = self._world
        if problem is None:
            stuck = next(world.moves(), None) is None and not world.settled
            problem = "stuck" if stuck else "settled" if world.settled else "so far"
        elif problem.startswith("stuck"):
            problem = "stuck"  # what follows says it better
        return f"{problem}: {', '.join(f'rank {rank.index} {_stands(rank)}' for rank in world.ranks)}"


def _stands(rank: RankModel) -> str:
    match place_of(rank):
        case Place.BARRIER:
            return "waits at the barrier"
        case place:
            return str(place.value)


# -- as text -----------------------------------------------------------------------------------------------------------


UP, DOWN, LEFT, RIGHT = 1, 2, 4, 8
BOX = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"
"""By the sum of the directions in which a line leaves the cell."""
MEANINGS = {
    Place.PARKED: "parked",
    Place.POLL: "at its poll, with work",
    Place.BARRIER: "waits at the barrier",
    Place.RESUMING: "waits to resume",
}
GLYPHS = {Place.PARKED: "┆", Place.POLL: "┃", Place.BARRIER: "║", Place.RESUMING: "╬"}
TO_ASCII = str.maketrans("╵╷│╴┘┐┤╶└┌├─┴┬┼┆┃║╬", "'.|-+++-+++-+++:!#%")


@final
class _Text:
    """A time line on a grid of characters.

    The client's lane is on the left. Frames towards a rank come down a column of their own, left of its lane, and those
    from it another one: a column is a queue, and what entered it first leaves it first. A line that crosses a column or
    a lane without entering it passes below.
    """

    def __init__(self, line: Timeline) -> None:
        self._line = line
        self._bits: dict[tuple[int, int], int] = {}
        self._corners: set[tuple[int, int]] = set()
        self._characters: dict[tuple[int, int], str] = {}
        words = [_width(note.text for note in line.notes if note.rank == rank) for rank in range(line.ranks)]
        self._client = 5 + _width(note.text for note in line.notes if note.rank is None)
        self._inward: list[int] = []
        """By rank, the column of what is under way to it. That of what comes from it is two further, its lane four."""
        column = self._client + 5 + _width(frame.label for frame in line.frames)
        for width in words:
            self._inward.append(column)
            column += 7 + width

    def draw(self) -> str:
        line = self._line
        for frame in line.frames:
            self._up(frame) if frame.to_client else self._down(frame)
        self._lanes()
        for note in line.notes:
            if note.rank is None:
                self._put(note.row, self._client - 1 - len(note.text), note.text)
            else:
                self._put(note.row, self._inward[note.rank] + 6, note.text)
        for moment in line.moments:
            self._put(moment.row, 0, f"{moment.number:3}")
        self._put(line.end, 0, "end")
        rows = [self._characters_of(row) for row in range(line.rows)]
        return "\n".join([self._key(), "", self._heads(), *rows, "", f"=> {line.ending}", ""])

    def _key(self) -> str:
        """What the lanes are drawn with, as far as it occurs."""
        places = {change.place for change in self._line.changes}
        words = [f"{glyph} {MEANINGS[place]}" for place, glyph in GLYPHS.items() if place in places]
        return "   ".join([*words, "(n): sent in move n"])

    def _heads(self) -> str:
        head = "client".rjust(self._client + 1)
        for rank, column in enumerate(self._inward):
            head = f"{head.ljust(column + 4)}rank {rank}"
        return head

    def _down(self, frame: Frame) -> None:
        """Towards a rank: from the client to the column, down, and to the lane."""
        column = self._inward[frame.rank]
        self._across(frame.sent, self._client, column)
        self._label(frame.sent, self._client + 2, frame.label)
        self._corner(frame.sent, column, LEFT | DOWN)
        self._along(frame.sent + 1, frame.ended, column)
        if frame.fate is Fate.TAKEN:
            self._corner(frame.ended, column, UP | RIGHT)
            self._across(frame.ended, column, column + 4)
            self._put(frame.ended, column + 3, ">")
        else:
            self._corner(frame.ended, column, UP)

    def _up(self, frame: Frame) -> None:
        """From a rank: from the lane to the column, down, and to the client."""
        column = self._inward[frame.rank] + 2
        self._across(frame.sent, column, column + 2)
        self._corner(frame.sent, column, RIGHT | DOWN)
        self._along(frame.sent + 1, frame.ended, column)
        if frame.fate is Fate.TAKEN:
            self._corner(frame.ended, column, UP | LEFT)
            self._across(frame.ended, self._client, column)
            self._put(frame.ended, self._client + 1, "<")
            self._label(frame.ended, self._client + 3, frame.label)
        elif frame.fate is Fate.LOST:
            self._put(frame.ended, column, "x")
        else:
            self._corner(frame.ended, column, UP)

    def _lanes(self) -> None:
        line = self._line
        for row in range(line.rows):
            self._put(row, self._client, "│")
        for frame in line.frames:
            if not frame.to_client:
                self._put(frame.sent, self._client, "├")
        for change in line.changes:  # in the order of time: each one overwrites what was there before it
            for row in range(change.row, line.rows):
                self._put(row, self._inward[change.rank] + 4, GLYPHS[change.place])

    def _across(self, row: int, start: int, end: int) -> None:
        """A horizontal line between two columns, which it does not touch."""
        for column in range(start + 1, end):
            self._add(row, column, LEFT | RIGHT)

    def _along(self, start: int, end: int, column: int) -> None:
        """A vertical line from one row up to, and without, another one."""
        for row in range(start, end):
            self._add(row, column, UP | DOWN)

    def _corner(self, row: int, column: int, bits: int) -> None:
        self._add(row, column, bits)
        self._corners.add((row, column))

    def _add(self, row: int, column: int, bits: int) -> None:
        self._bits[row, column] = self._bits.get((row, column), 0) | bits

    def _label(self, row: int, column: int, text: str) -> None:
        self._put(row, column, f" {text} ")

    def _put(self, row: int, column: int, text: str) -> None:
        for at, character in enumerate(text, column):
            self._characters[row, at] = character

    def _characters_of(self, row: int) -> str:
        width = 1 + max(column for at, column in (*self._bits, *self._characters) if at == row)
        return "".join(self._character(row, column) for column in range(width)).rstrip()

    def _character(self, row: int, column: int) -> str:
        cell = row, column
        bits = self._bits.get(cell, 0)
        if bits == UP | DOWN | LEFT | RIGHT and cell not in self._corners:
            bits = UP | DOWN
        return self._characters.get(cell, BOX[bits])


def _width(words: Iterable[str]) -> int:
    return max(map(len, words), default=0)


# -- as SVG ------------------------------------------------------------------------------------------------------------


ROW = 18
"""Pixels from one row to the next."""
LETTER = 6.7
"""Pixels that a letter of a label takes at most, whichever monospaced font there is."""
TOP = 92
"""Where the first row is: below the title and the heads of the lanes."""
MARGIN = 16

STYLE = """
.{id} text {{ font: 11px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1f2328; }}
.{id} .back {{ fill: #ffffff; }}
.{id} .title {{ font-size: 14px; font-weight: bold; }}
.{id} .head {{ font-size: 12px; font-weight: bold; }}
.{id} .number, .{id} .note {{ fill: #59636e; }}
.{id} .ending {{ font-size: 13px; font-weight: bold; fill: #c6202d; }}
.{id} .rule {{ stroke: #e4e8ec; }}
.{id} .client {{ stroke: #1f2328; stroke-width: 2; }}
.{id} .parked {{ stroke: #8c959f; stroke-width: 1.5; stroke-dasharray: 2 4; }}
.{id} .poll {{ stroke: #1a7f37; stroke-width: 3; }}
.{id} .barrier {{ stroke: #bf6a00; stroke-width: 9; }}
.{id} .resuming {{ stroke: #8250df; stroke-width: 9; }}
.{id} .frame {{ fill: none; stroke-width: 1.4; }}
.{id} .down {{ stroke: #0a58ca; }}
.{id} .up {{ stroke: #a8328a; }}
.{id} .down-head, .{id} text.down {{ fill: #0a58ca; stroke: none; }}
.{id} .up-head, .{id} text.up {{ fill: #a8328a; stroke: none; }}
.{id} .under-way, .{id} .lost {{ stroke-dasharray: 5 4; }}
.{id} .cross {{ fill: none; stroke: #c6202d; stroke-width: 2; }}
@media (prefers-color-scheme: dark) {{
.{id} text {{ fill: #e6edf3; }}
.{id} .back {{ fill: #0d1117; }}
.{id} .number, .{id} .note {{ fill: #9aa4af; }}
.{id} .ending {{ fill: #ff7b72; }}
.{id} .rule {{ stroke: #21262d; }}
.{id} .client {{ stroke: #e6edf3; }}
.{id} .parked {{ stroke: #6e7681; }}
.{id} .poll {{ stroke: #3fb950; }}
.{id} .barrier {{ stroke: #e3a008; }}
.{id} .resuming {{ stroke: #a371f7; }}
.{id} .down {{ stroke: #79b8ff; }}
.{id} .up {{ stroke: #f59ad7; }}
.{id} .down-head, .{id} text.down {{ fill: #79b8ff; stroke: none; }}
.{id} .up-head, .{id} text.up {{ fill: #f59ad7; stroke: none; }}
.{id} .cross {{ stroke: #ff7b72; }}
}}
"""

CLASSES = {Place.PARKED: "parked", Place.POLL: "poll", Place.BARRIER: "barrier", Place.RESUMING: "resuming"}


@final
class _Svg:
    """A time line as a drawing. The client is in the middle, so that few arrows pass a lane that is not theirs."""

    def __init__(self, line: Timeline) -> None:
        self._line = line
        # Several drawings may be put into one page, where ids and styles are everybody's.
        self._id = f"timeline-{zlib.crc32(repr(line).encode()):08x}"
        self._lefts = line.ranks // 2
        self._bottom = TOP + ROW * line.rows
        self._place_lanes()
        self.height = self._bottom + 76

    def _place_lanes(self) -> None:
        """Lanes from left to right, as far apart as what is written between them needs."""
        line = self._line
        words = [
            12 + LETTER * _width(note.text for note in line.notes if note.rank == rank) for rank in range(line.ranks)
        ]
        label = 110 + LETTER * _width(frame.label for frame in line.frames)
        x = MARGIN + 34 + LETTER * _width(note.text for note in line.notes if note.rank is None)
        self._lanes: list[float] = []
        for rank in range(self._lefts):
            x += words[rank] + (24 if rank == 0 else 48)
            self._lanes.append(x)
        self._client = x = x + (label if self._lefts else 40)
        for rank in range(self._lefts, line.ranks):
            x += label if rank == self._lefts else words[rank - 1] + 48
            self._lanes.append(x)
        foot = 1.25 * LETTER * max(len(line.ending), len(_KEY_LINE))
        self.width = round(max(x + words[-1], MARGIN + foot) + MARGIN)

    def draw(self) -> str:
        return "\n".join(
            [*self._opening(), *self._grid(), *self._all_lanes(), *self._arrows(), *self._words(), "</svg>", ""]
        )

    def _opening(self) -> Iterator[str]:
        own = self._id
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{own}" role="img" '
            f'aria-labelledby="{own}-title {own}-desc" '
            f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}">'
        )
        yield f'<title id="{own}-title">{escape(self._title)}</title>'
        told = "\n".join(f"{moment.number}. {moment.sentence}" for moment in self._line.moments)
        yield f'<desc id="{own}-desc">{escape(told)}\n{escape(self._line.ending)}</desc>'
        yield f"<style>{STYLE.format(id=own)}</style>"
        yield "<defs>"
        for way in ("down", "up"):
            yield (
                f'<marker id="{own}-{way}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
                f'orient="auto"><path class="{way}-head" d="M0 1 L10 5 L0 9 z"/></marker>'
            )
        yield "</defs>"
        yield f'<rect class="back" width="{self.width}" height="{self.height}"/>'

    @property
    def _title(self) -> str:
        moves, ranks = len(self._line.moments), self._line.ranks
        return f"Time line of {moves} move{'s'[: moves != 1]}, the client and {ranks} rank{'s'[: ranks != 1]}"

    def _grid(self) -> Iterator[str]:
        """A thin line above each move, and its number."""
        for moment in self._line.moments:
            y = self._y(moment.row) - ROW / 2
            yield f'<path class="rule" d="M{MARGIN} {y:g} H{self.width - MARGIN}"/>'
            yield self._text(MARGIN + 20, moment.row, str(moment.number), "number", "end")
        yield f'<path class="rule" d="M{MARGIN} {self._y(self._line.end) - ROW / 2:g} H{self.width - MARGIN}"/>'
        yield self._text(MARGIN + 20, self._line.end, "end", "number", "end")

    def _all_lanes(self) -> Iterator[str]:
        top, bottom = TOP - ROW / 2, self._bottom - ROW / 2
        yield f'<g class="lane" id="{self._id}-client">'
        yield f'<text class="head" x="{self._client:g}" y="{TOP - 22}" text-anchor="middle">client</text>'
        yield f'<path class="client" d="M{self._client:g} {top:g} V{bottom:g}"/></g>'
        for rank, x in enumerate(self._lanes):
            yield f'<g class="lane" id="{self._id}-rank-{rank}">'
            yield f'<text class="head" x="{x:g}" y="{TOP - 22}" text-anchor="middle">rank {rank}</text>'
            changes = [change for change in self._line.changes if change.rank == rank]
            ends = [*(self._y(change.row) for change in changes[1:]), bottom]
            for change, end in zip(changes, ends, strict=True):
                start = self._y(change.row) if change.row else top
                yield f'<path class="{CLASSES[change.place]}" d="M{x:g} {start:g} V{end:g}"/>'
            yield "</g>"

    def _arrows(self) -> Iterator[str]:
        for frame in self._line.frames:
            way = "up" if frame.to_client else "down"
            lane = self._lanes[frame.rank]
            start, end = (lane, self._client) if frame.to_client else (self._client, lane)
            top, bottom = self._y(frame.sent), self._y(frame.ended)
            # One that was taken ends at the edge of the lane; one that waits, before it; one that was lost, halfway.
            short = {Fate.TAKEN: 5, Fate.UNDER_WAY: 24, Fate.LOST: abs(start - end) / 2}[frame.fate]
            gap = short if end < start else -short
            head = f' marker-end="url(#{self._id}-{way})"' if frame.fate is Fate.TAKEN else ""
            fate = frame.fate.value.replace(" ", "-")
            what = f"{frame.label}, sent in move {frame.move}, {frame.fate.value}"
            yield (
                f'<path class="frame {way} {fate}" d="M{start:g} {top:g} L{end + gap:g} {bottom:g}"{head}>'
                f"<title>{escape(what)}</title></path>"
            )
            if frame.fate is Fate.LOST:
                yield f'<path class="cross" d="M{end + gap - 5:g} {bottom - 5:g} l10 10 m0 -10 l-10 10"/>'

    def _words(self) -> Iterator[str]:
        """Above the arrows, each on a patch of background."""
        yield f'<text class="title" x="{MARGIN}" y="28">{escape(self._title)}</text>'
        for note in self._line.notes:
            if note.rank is None:
                yield self._text(MARGIN + 30, note.row, note.text, "word", "start")
            else:
                yield self._beside(self._lanes[note.rank], note.row, note.text, "note", left=note.rank < self._lefts)
        labels = {
            (frame.ended if frame.to_client else frame.sent, frame.rank < self._lefts, frame.to_client, frame.label)
            for frame in self._line.frames
            if not frame.to_client or frame.fate is Fate.TAKEN
        }
        for row, left, to_client, label in sorted(labels):
            yield self._beside(self._client, row, label, "up" if to_client else "down", left=left, distance=18)
        yield from self._foot()

    def _foot(self) -> Iterator[str]:
        y = self._bottom + 12
        yield f'<text class="ending" x="{MARGIN}" y="{y:g}">{escape(self._line.ending)}</text>'
        x: float = MARGIN
        for place, words in MEANINGS.items():
            yield f'<path class="{CLASSES[place]}" d="M{x + 5:g} {y + 22:g} v16"/>'
            yield f'<text class="note" x="{x + 16:g}" y="{y + 34:g}">{words}</text>'
            x += 36 + LETTER * len(words)
        yield f'<text class="note" x="{MARGIN}" y="{y + 54:g}">{KEY_REST}</text>'

    def _beside(self, x: float, row: int, text: str, kind: str, *, left: bool, distance: float = 12) -> str:
        """Words at some distance from a lane, on a patch that hides what passes behind them."""
        width = LETTER * len(text)
        at = x - distance if left else x + distance
        patch = at - width if left else at
        place = f'x="{patch - 2:g}" y="{self._y(row) - 7:g}" width="{width + 4:g}" height="14"'
        words = self._text(at, row, text, kind, "end" if left else "start")
        return f'<rect class="back" opacity="0.85" {place}/>{words}'

    def _text(self, x: float, row: int, text: str, kind: str, anchor: str) -> str:
        return f'<text class="{kind}" x="{x:g}" y="{self._y(row) + 4:g}" text-anchor="{anchor}">{escape(text)}</text>'

    def _y(self, row: int) -> float:
        return TOP + ROW * row


KEY_REST = "(n): sent in move n; a dashed arrow was taken by nobody"
_KEY_LINE = "     ".join(words for words in MEANINGS.values())
