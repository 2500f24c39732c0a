"""Schedules that found something once, each with its sentence: a regression suite for any client of a lockstep group.

Those with a rule strand a group that is woken by that rule; ours survives all of them. They are kept as data beside
this module, in the JSON of ``Schedule``.
"""

from __future__ import annotations

import importlib.resources
import json
from functools import cache
from typing import final

import attrs

from .schedules import Schedule


@final
@attrs.frozen
class Known:
    """A schedule that found something."""

    name: str
    sentence: str
    """What happens in it, and what came of it."""
    rule: str | None
    """The rule that it found out, by its name in ``rules.RULES``; None: it found a mistake of the client itself."""
    schedule: Schedule


@cache
def corpus() -> tuple[Known, ...]:
    """All of them."""
    text = importlib.resources.files("lockstep_trio.testing").joinpath("corpus.json").read_text(encoding="utf-8")
    return tuple(
        Known(each["name"], each["sentence"], each["rule"], Schedule.from_json(json.dumps(each["schedule"])))
        for each in json.loads(text)
    )
