"""Hypothesis strategies for schedules. The only module of the kit that needs Hypothesis (the extra ``testing``).

Example::

    @given(schedules(lockstep=True))
    def test_my_rule_strands_nobody(schedule):
        run_schedule(schedule, MyRule).require()

A failing schedule is shrunk, and its error has it as a literal and as JSON.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from hypothesis import strategies as st

from .rank_model import Sync
from .schedules import (
    Action,
    Advance,
    Call,
    CancelReceive,
    CloseGroup,
    Deliver,
    Forget,
    Hold,
    Kill,
    Leave,
    Let,
    PauseGroup,
    Poll,
    Receive,
    Release,
    Rest,
    ResumeGroup,
    Schedule,
    Step,
    Submit,
    Turns,
)

_callers: Final = st.integers(0, 3)
_ranks: Final = st.integers(0, 2)
_some: Final = st.none() | st.integers(1, 3)

EVERYDAY: Final[Sequence[st.SearchStrategy[Action]]] = (
    # What moves frames and ranks comes up most: without it a schedule is a list of submits to a group that sleeps.
    st.builds(Submit, st.sampled_from([1, 1, 2, 3, 20]), st.none() | _ranks),
    st.builds(Submit, st.sampled_from([1, 2, 20]), st.none() | _ranks, st.integers(1, 3)),
    st.builds(Advance, st.integers(1, 3)),
    st.builds(Advance, st.integers(1, 20)),
    st.builds(Rest),
    st.builds(Turns, st.integers(1, 4)),
    st.builds(Hold, _ranks, st.booleans()),
    st.builds(Let, _ranks, st.booleans(), st.integers(1, 2)),
    st.builds(Release, _ranks, st.booleans()),
    st.builds(Deliver, _ranks, _some),
    st.builds(Poll, _ranks, _some),
    st.builds(Step, _ranks),
    st.builds(Receive, _callers),
    st.builds(CancelReceive, _callers),
    st.builds(Leave, _callers),
    st.builds(Leave, _callers),
    st.builds(Forget, _callers),
)
"""What happens to a group that is well."""

PAUSES: Final[Sequence[st.SearchStrategy[Action]]] = (
    st.builds(PauseGroup, st.sampled_from(["keep", "wait", "abort"])),
    st.builds(ResumeGroup),
)

DISASTERS: Final[Sequence[st.SearchStrategy[Action]]] = (
    st.builds(Call),
    st.builds(CloseGroup),
    st.builds(Kill, _ranks, st.sampled_from(["disconnect", "dead", "silent"])),
)
"""What ends a group or a rank."""

SYNCS: Final = (Sync(first=True, every=2), Sync(first=False, every=2), Sync(first=False, every=5))
"""Drains agreed on so often that waves are short."""


def _flat(parts: list[list[Action]]) -> tuple[Action, ...]:
    return tuple(itertools.chain.from_iterable(parts))


def schedules(
    *,
    lockstep: bool,
    actions: Sequence[st.SearchStrategy[Action]] = EVERYDAY,
    disasters: bool = False,
    pauses: bool = False,
) -> st.SearchStrategy[Schedule]:
    """Schedules of up to a hundred actions, on two or three ranks.

    Args:
        lockstep: One lockstep group, or independent ranks.
        actions: What may happen.
        disasters: Ranks may die and the owner may leave, too.
        pauses: The group may be paused and resumed, too.
    """
    # Often enough for one or two per schedule, and not for one at its beginning.
    offered = [*actions, *(PAUSES if pauses else ()), *((*actions, *actions, *DISASTERS) if disasters else ())]
    return st.builds(
        Schedule,
        # Lists of lists, because Hypothesis makes lists of about six.
        st.lists(st.lists(st.one_of(offered), min_size=1, max_size=10), min_size=1, max_size=10).map(_flat),
        ranks=st.sampled_from([2, 2, 3]),
        lockstep=st.just(lockstep),
        sync=st.sampled_from(SYNCS),
        capacity=st.sampled_from([None, None, 1, 3]),
        unread_limit=st.sampled_from([8192, 8192, 2]),
        max_in_flight=st.sampled_from([65536, 65536, 2]),
        seed=st.integers(0, 7),
    )
