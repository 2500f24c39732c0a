"""The books of a chaos run: what was done to the ranks, what became of each request, and whether the one explains the
other. It knows nothing of the client but its errors, and nothing of the mock ranks but their rule for tokens.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator

import attrs
import trio

from lockstep_trio import (
    EngineLost,
    Fault,
    FaultKind,
    GroupClosed,
    GroupFailed,
    RequestRejected,
    StreamOverflow,
    WireError,
)
from lockstep_trio.testing.engine_rank import tokens_of
from lockstep_trio.testing.mock_process import COLLECTIVE_FAILS_AFTER


class Habit(enum.Enum):
    """How a caller treats its request."""

    READS = "reads to the end"
    DAWDLES = "reads to the end, with pauses that let outputs gather"
    SLEEPS = "reads so late that its outputs may become too many"
    LEAVES = "leaves before the first output or in the middle"
    DROPS = "lets go of its stream without closing it"
    CANCELLED = "is cancelled at any moment, while it submits too"


class Act(enum.Enum):
    """What is done to a rank."""

    KILL = "killed"
    VANISH = "dies by itself, without a word"
    DIE = "dies by itself and says so"
    FREEZE = "frozen for good"
    NAP = "frozen for a moment"
    LONG_NAP = "frozen for longer than stall_timeout, but not for much"
    TEAR = "sends messages that are cut short"
    JUNK = "sends a message that is none"
    DAMAGE_OUTPUT = "sends one output that cannot be read"
    DAMAGE_STATS = "sends load reports that make no sense"
    DELAY = "sends late"
    SLOW_STEP = "takes long for a step"
    UNREAD = "takes in nothing for a while"
    DEAF = "answers no calls for a while"
    REFUSE = "refuses new requests"
    LULL = "no rank: for a while nobody asks for anything new"
    STRANGERS = "is visited by strangers"


GONE = {FaultKind.DISCONNECTED, FaultKind.UNREACHABLE}

EXPLAINS: dict[Act, set[FaultKind]] = {
    Act.KILL: GONE,
    Act.VANISH: GONE,
    Act.DIE: {FaultKind.DIED},
    Act.FREEZE: {FaultKind.STALLED, FaultKind.SEND_TIMEOUT},
    Act.TEAR: {FaultKind.UNDECODABLE},
    Act.JUNK: {FaultKind.UNDECODABLE},
}
"""How the loss of a rank is reported after an act. Acts that are not here may not cost a rank."""
DEADLY = {Act.KILL, Act.VANISH, Act.DIE, Act.FREEZE}
"""After these a rank must be given up, in any group. A lockstep group also dies of a message that cannot be read."""
SPOILS = {Act.DAMAGE_OUTPUT, Act.TEAR, Act.JUNK}
"""Acts after which single streams may end because of what could not be read."""


@attrs.frozen
class Done:
    """An act, and when it began."""

    act: Act
    rank: int
    at: float


@attrs.define
class Asked:
    """A request and what its caller saw."""

    number: int
    prompt: int
    tokens: int
    pin: int | None
    habit: Habit
    rank: int | None = None
    """Where it went; None if it never was admitted."""
    read: list[int] = attrs.field(factory=list)
    aborted: bool = False
    """It ended with the finish reason abort."""
    end: str | None = None
    error: BaseException | None = None

    def ended(self, how: str, error: BaseException | None = None) -> None:
        assert self.end is None, f"{self} ended a second time: {how}"
        self.end, self.error = how, error

    @property
    def where(self) -> int | None:
        return self.pin if self.rank is None else self.rank

    @property
    def how(self) -> str:
        """Its end in a word."""
        return type(self.error).__name__ if self.error is not None else "refused" if self.aborted else str(self.end)


@attrs.define
class Ledger:
    """The books of one group."""

    ranks: int
    lockstep: bool
    done: list[Done] = attrs.field(factory=list)
    asked: list[Asked] = attrs.field(factory=list)

    def note(self, act: Act, rank: int) -> Done:
        done = Done(act, rank, trio.current_time())
        self.done.append(done)
        return done

    def new(self, prompt: int, tokens: int, pin: int | None, habit: Habit) -> Asked:
        asked = Asked(len(self.asked), prompt, tokens, pin, habit)
        self.asked.append(asked)
        return asked

    def did(self, rank: int | None, *acts: Act) -> bool:
        return any(each.act in acts and each.rank == rank for each in self.done)

    def deadly(self, act: Act) -> bool:
        return act in DEADLY or (self.lockstep and act in (Act.TEAR, Act.JUNK))

    # -- judgement -----------------------------------------------------------------------------------------------

    def violations(self) -> Iterator[str]:
        for each in self.asked:
            if verdict := self.judge(each):
                yield f"{verdict}: {each}"
        spoilt = sum(isinstance(each.error, WireError) for each in self.asked)
        damaged = sum(each.act is Act.DAMAGE_OUTPUT for each in self.done)
        if spoilt > damaged and not any(each.act in SPOILS - {Act.DAMAGE_OUTPUT} for each in self.done):
            yield f"{spoilt} streams ended with a WireError, {damaged} outputs were damaged"

    def judge(self, asked: Asked) -> str | None:
        """What is wrong with how a request went, None if nothing is."""
        expected = tokens_of(asked.prompt, asked.tokens)
        if asked.read != expected[: len(asked.read)]:
            return "tokens that the engine did not make"
        if asked.end is None:
            return "it never ended"
        if asked.end == "finished":
            return self._judge_finish(asked)
        if asked.error is not None:
            return self._judge_error(asked, asked.error)
        if asked.end == "left" and asked.habit in (Habit.LEAVES, Habit.DROPS, Habit.CANCELLED):
            return None
        return f"an end that nobody caused: {asked.end}"

    def _judge_finish(self, asked: Asked) -> str | None:
        if asked.aborted:
            return None if self.did(asked.rank, Act.REFUSE) and not asked.read else "aborted without a reason"
        return None if len(asked.read) == asked.tokens else "finished with tokens missing"

    def _judge_error(self, asked: Asked, error: BaseException) -> str | None:
        match error:
            case EngineLost():
                return self._judge_loss(asked, error)
            case StreamOverflow():
                explained = asked.habit is Habit.SLEEPS
            case WireError():
                explained = any(self.did(asked.rank, act) for act in SPOILS)
            case RequestRejected():
                explained = error.field == "data_parallel_rank" and self.did(asked.pin, Act.REFUSE)
            case GroupClosed():
                ends = (Act.REFUSE, *DEADLY, *SPOILS)
                explained = asked.rank is None and all(self.did(rank, *ends) for rank in range(self.ranks))
            case _:
                explained = False
        return None if explained else f"an error that nothing explains ({error!r})"

    def _judge_loss(self, asked: Asked, error: EngineLost) -> str | None:
        whole = isinstance(error, GroupFailed)
        if self.lockstep and not whole:
            return "a lockstep group that lost one rank only"
        if not self.lockstep and not whole and error.rank != asked.where:
            return "the loss of another rank"
        if not self.lockstep and whole and (asked.rank is not None or not self.all_lost):
            return "a failure of the group, of which ranks are left"
        return None if self.explained(error.fault) else f"a loss that nothing explains ({error.fault})"

    @property
    def all_lost(self) -> bool:
        return all(any(each.rank == rank and each.act in EXPLAINS for each in self.done) for rank in range(self.ranks))

    def explained(self, fault: Fault) -> bool:
        """Whether something that was done can have led to this."""
        for each in self.done:
            if fault.kind in EXPLAINS.get(each.act, ()) and (
                each.rank == fault.rank
                # All ranks of a lockstep group wait for the frozen one, and from outside they look the same.
                or (self.lockstep and fault.kind is FaultKind.STALLED)
            ):
                return True
            if self._pulled_down(each, fault):
                return True
        return False

    def _pulled_down(self, done: Done, fault: Fault) -> bool:
        """The others of a lockstep group die a while after the first. Only a slow client hears of that first."""
        late = trio.current_time() >= done.at + COLLECTIVE_FAILS_AFTER
        return self.lockstep and late and done.act in DEADLY and fault.kind is FaultKind.DIED

    # -- figures -------------------------------------------------------------------------------------------------

    def ends(self) -> Counter[str]:
        """How many requests ended how."""
        return Counter(each.how for each in self.asked)
