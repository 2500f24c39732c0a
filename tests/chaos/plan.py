"""What a chaos run will do, drawn from a seed and nothing else, and printed as a literal when something goes wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import attrs

from chaos.ledger import Act

T = TypeVar("T")

RANKS: Final = 4
STALL: Final = 2.0
"""``stall_timeout`` and ``probe_timeout`` of every group, seconds."""

HARMLESS: Final = (
    Act.NAP,
    Act.LONG_NAP,
    Act.DAMAGE_OUTPUT,
    Act.DAMAGE_STATS,
    Act.DELAY,
    Act.SLOW_STEP,
    Act.UNREAD,
    Act.REFUSE,
    Act.STRANGERS,
    Act.STRANGERS,
    Act.STRANGERS,
)
DEADLY: Final = (Act.KILL, Act.VANISH, Act.DIE, Act.FREEZE)
"""Each rank suffers one of these at most."""
LOCKSTEP_ENDS: Final = (*DEADLY, Act.KILL, Act.TEAR, Act.JUNK, None)
INDEPENDENT_ONLY: Final = (Act.DEAF, Act.TEAR, Act.JUNK, None)
"""A deaf rank answers no fence, so a lockstep group that has one does not come to rest."""
MORTALITY: Final = (0, 1, 2, RANKS)
"""How many ranks of an independent group die."""


@attrs.frozen
class Move:
    """One act: how long after the one before, on which rank, and how much of it."""

    after: float
    act: Act
    rank: int
    amount: float
    """From 0 to 1: how long, or how many."""


@attrs.frozen
class Plan:
    """One group, from its opening to its end."""

    seed: int
    lockstep: bool
    transport: str
    moves: tuple[Move, ...]


class Deck(Generic[T]):
    """Cards that are shuffled anew only when all were drawn, so that a short run has a bit of everything."""

    def __init__(self, draw: random.Random, cards: Sequence[T]) -> None:
        self._draw, self._cards = draw, cards
        self._left: list[T] = []

    def card(self) -> T:
        if not self._left:
            self._left = self._draw.sample(self._cards, len(self._cards))
        return self._left.pop()


class Planner:
    """Draws one plan after the other."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._harmless = Deck(self._draw, HARMLESS)
        self._ends = Deck(self._draw, LOCKSTEP_ENDS)
        self._independent = Deck(self._draw, INDEPENDENT_ONLY)
        self._deadly = Deck(self._draw, DEADLY)
        self._mortality = Deck(self._draw, MORTALITY)

    def plan(self, *, lockstep: bool) -> Plan:
        draw = self._draw
        acts: list[Act | None] = [self._harmless.card() for _ in range(draw.randrange(2, 5))]
        if lockstep:
            # Most of what can go wrong with waves needs a group that parks and is woken.
            acts = [each for act in acts for each in (Act.LULL, act)]
            acts.append(self._ends.card())
        else:
            acts.append(self._independent.card())
            acts += [self._deadly.card() for _ in range(self._mortality.card())]
        mortal = draw.sample(range(RANKS), RANKS)
        moves = []
        for act in acts:
            if act is not None:
                rank = mortal.pop() if act in DEADLY else draw.randrange(RANKS)
                moves.append(Move(draw.uniform(0.02, 0.3), act, rank, draw.random()))
        return Plan(draw.randrange(2**32), lockstep, draw.choice(("ipc", "ipc", "tcp")), tuple(moves))
