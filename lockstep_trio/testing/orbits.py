"""Which states differ by names alone, of ranks and of requests that are alike; a walk need visit but one of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import permutations, product
from typing import final

import attrs

from .rank_model import Add, Drop, FromRank, Out, StartWave, ToRank
from .worlds import Case, Client, Fact, Heard, Lane, Move, Reaction, form_of


@final
@attrs.frozen
class Renaming:
    """A permutation of ranks, and one of requests that goes with it."""

    ranks: tuple[int, ...]
    """What each rank becomes."""
    requests: tuple[int, ...]
    """What each request becomes: one of as many steps, on what its rank becomes."""

    def then(self, other: Renaming) -> Renaming:
        """This one, and the other one after it."""
        return Renaming(
            tuple(other.ranks[each] for each in self.ranks), tuple(other.requests[each] for each in self.requests)
        )

    def fact(self, fact: Fact) -> Fact:
        if isinstance(fact, Heard):
            return Heard(self.ranks[fact.rank], self.from_rank(fact.message))
        return self.move(fact)

    def move(self, fact: Move) -> Move:
        rank = self.ranks[fact.rank] if fact.rank >= 0 else -1
        request = self.requests[fact.request] if fact.request >= 0 else -1
        return Move(fact.kind, rank, request, fact.count)

    def name(self, wire_id: str) -> str:
        return str(self.requests[int(wire_id)])

    def from_rank(self, message: FromRank) -> FromRank:
        return attrs.evolve(message, wire_id=self.name(message.wire_id)) if isinstance(message, Out) else message

    def to_rank(self, message: ToRank) -> ToRank:
        match message:
            case Add(wire_id, steps):
                return Add(self.name(wire_id), steps)
            case Drop(wire_ids):
                return Drop(tuple(sorted(map(self.name, wire_ids))))
            case StartWave(wave, exclude):
                return StartWave(wave, None if exclude is None else self.ranks[exclude])
            case _:
                return message

    def sent(self, boxes: Sequence[tuple[ToRank, ...]]) -> tuple[tuple[ToRank, ...], ...]:
        """What is sent to each rank."""
        renamed: list[tuple[ToRank, ...]] = [()] * len(boxes)
        for rank, box in zip(self.ranks, boxes, strict=True):
            renamed[rank] = tuple(map(self.to_rank, box))
        return tuple(renamed)

    def form(self, lane: Lane, base: int) -> Hashable:
        """What distinguishes a lane once it is renamed."""
        rank = lane.rank.copy()
        rank.index = self.ranks[rank.index]
        rank.held = {self.name(wire_id): steps for wire_id, steps in rank.held.items()}
        rank.fresh = set(map(self.name, rank.fresh))
        return form_of(rank, map(self.to_rank, lane.inbox), map(self.from_rank, lane.outbox), base)


def renamings(case: Case) -> list[Renaming]:
    """Every renaming that maps a case onto itself. The first one changes nothing.

    A rank may become another only if as many requests of as many steps are for it; requests for one rank that take as
    many steps may become each other.
    """
    classes: dict[tuple[int, int], list[int]] = {}
    for index, request in enumerate(case.requests):
        classes.setdefault(request, []).append(index)
    found: list[Renaming] = []
    for ranks in permutations(range(case.ranks)):
        images = [classes.get((ranks[rank], steps), []) for rank, steps in classes]
        if all(len(image) == len(members) for image, members in zip(images, classes.values(), strict=True)):
            for chosen in product(*map(permutations, images)):
                becomes = _pairs(classes.values(), chosen)
                found.append(Renaming(ranks, tuple(becomes[index] for index in range(len(case.requests)))))
    return found


def _pairs(classes: Iterable[Sequence[int]], images: Iterable[Sequence[int]]) -> Mapping[int, int]:
    return {
        index: becomes
        for members, image in zip(classes, images, strict=True)
        for index, becomes in zip(members, image, strict=True)
    }


class ToldApart(Exception):
    """A rule treats ranks or requests differently that differ by name alone."""


@final
class Orbits:
    """Numbers for states: the same for those that a renaming maps onto each other, which are one *orbit*.

    Why a walk that visits one state of each orbit loses nothing: a renaming maps each move of a state onto a move of
    the renamed state, and what comes of the one onto what comes of the other. So from all states of an orbit the same
    orbits are reached in the same number of moves, and all of them are stuck, settled or in breach, or none is.

    That a renaming does so follows for ranks, callers and the network from their models, which compare names and
    nothing else: an index with the one that a START excludes, a wire id with those that are held. For the client it
    does not: its machine is the real one, and its rule anybody's, with a canonical form that nothing here can look
    into. What a client becomes under a renaming is therefore found by telling another one the renamed history, and
    three things are made sure of on the way. For each client that a walk meets, the renamed one has the same moves and
    is settled alike (``_image``). Whatever a client is told on a walk, the renamed one does the same, renamed
    (``check``). Clients that are alike, by whichever history they came, are alike when renamed, once or twice
    (``_agree``). So if a state is left out because, renamed by h, it is alike to a visited one renamed by g, then it is
    alike to the visited one renamed by g and back by h, of which the first two say that it does the same. A rule that
    tells ranks or requests apart does not pass.

    Each state is expanded as it was reached, and not as some representative of its orbit. So schedules are those of the
    case itself, and shortest because no state is nearer to the start than others of its orbit.

    For the states that come of one ``World.start``: their parts remember what was worked out here.
    """

    def __init__(self, renamings: Sequence[Renaming]) -> None:
        self._renamings = renamings
        numbers = {each: number for number, each in enumerate(renamings)}
        self._then = [[numbers[first.then(second)] for second in renamings] for first in renamings]
        self._alike: dict[int, tuple[int, ...]] = {}
        """The number of a client's form -> those of its images."""
        self._numbers: dict[Hashable, int] = {}

    def key(self, client: Client, lanes: Iterable[Lane]) -> int:
        """A number for the orbit of a state, with waves counted from the lowest one in sight.

        That of a state has 32 bits for the client and for each lane, which say exactly what that part is. That of an
        orbit is the lowest one of its states.
        """
        base = client.low
        for lane in lanes:
            if lane.low < base:
                base = lane.low
        keys = [client.keys.get(base) or self._client_keys(client, base)]
        for lane in lanes:
            keys.append(lane.keys.get(base) or self._lane_keys(lane, base))  # noqa: PERF401 - quicker than to extend
        return min(map(sum, zip(*keys, strict=True)))

    def _client_keys(self, client: Client, base: int) -> tuple[int, ...]:
        """What the client contributes, by renaming."""
        images = [self._image(client, which) for which in range(len(self._renamings))]
        keys = client.keys[base] = tuple([self._number(image.form(base)) for image in images])
        self._agree(keys)
        return keys

    def _agree(self, keys: Sequence[int]) -> None:
        """Raise ``ToldApart`` if clients that are alike are not alike when renamed."""
        for key, onwards in zip(keys, self._then, strict=True):
            images = tuple([keys[which] for which in onwards])
            if self._alike.setdefault(key, images) != images:
                raise ToldApart

    def _lane_keys(self, lane: Lane, base: int) -> tuple[int, ...]:
        keys = lane.keys[base] = tuple(
            [
                self._number(renaming.form(lane, base)) << 32 * (1 + renaming.ranks[lane.rank.index])
                for renaming in self._renamings
            ]
        )
        return keys

    def _number(self, form: Hashable) -> int:
        return self._numbers.setdefault(form, len(self._numbers) + 1)

    def _image(self, client: Client, which: int) -> Client:
        """What a client becomes under a renaming."""
        image = client.images.get(which)
        if image is None:
            image = client
            if which and client.origin is not None:
                before, fact = client.origin
                renaming = self._renamings[which]
                image = self._image(before, which).react(renaming.fact(fact)).client
                if _looks(image, self._renamings[0]) != _looks(client, renaming):
                    raise ToldApart
            client.images[which] = image
        return image

    def check(self, client: Client, fact: Fact, reaction: Reaction) -> None:
        """Raise ``ToldApart`` if a client does something about a fact that the renamed one does not."""
        for which, renaming in enumerate(self._renamings):
            image = self._image(client, which)
            other = image.react(renaming.fact(fact))
            if not (
                other.client is self._image(reaction.client, which)
                and other.sent == renaming.sent(reaction.sent)
                and (other.breach is None) == (reaction.breach is None)
            ):
                raise ToldApart


def _looks(client: Client, renaming: Renaming) -> object:
    """What a walk sees of a client once it is renamed. Of requests that are alike any may be submitted first."""
    alike = client.parts.case.requests
    moves = [renaming.move(move) for move in client.moves()]
    return (
        {(each.kind, alike[each.request] if each.kind == "submit" else each.request) for each in moves},
        client.machine.clock,
        client.machine.settled,
        client.closed,
    )
