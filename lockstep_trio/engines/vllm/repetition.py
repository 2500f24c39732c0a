"""Outputs that go round in circles, and are ended for it.

The scheduler looks at the end of an output after each of its tokens, and ends it with ``FinishReason.REPETITION``
(``v1/core/sched/utils.py: check_sequence_repetition``, from 0.17 on).
"""

from __future__ import annotations

from typing import final

import attrs

from lockstep_trio.engines.vllm.checks import INT32, Limits, reject, whole


@final
@attrs.frozen(kw_only=True)
class RepetitionDetection:
    """When an output counts as repeating itself: it ends in some sequence of tokens, again and again.

    Each step of the engine tries every length that fits what there is, in Python: long patterns slow down all requests.
    """

    max_pattern_size: int
    """The longest sequence that is looked for, tokens."""
    min_pattern_size: int = 1
    """The shortest one."""
    min_count: int
    """How many times in a row it must be there, 2 or more."""


def check_repetition(field: str, value: object, _: Limits) -> dict[str, object]:
    """Check what is asked and return the map that is sent.

    The engine means "off" by a ``max_pattern_size`` of 0 and 1 by a ``min_pattern_size`` of 0. Here they are refused:
    there is one way to say either.

    Raises:
        RequestRejected: One of the sizes is out of range; ``RepetitionDetectionParams.__post_init__`` would raise.
    """
    if not isinstance(value, RepetitionDetection):
        raise reject(field, value, "RepetitionDetection, or None")
    longest = whole(f"{field}.max_pattern_size", value.max_pattern_size, 1, INT32, f"an integer from 1 to {INT32}")
    words = f"an integer from 1 to max_pattern_size, {longest}"
    shortest = whole(f"{field}.min_pattern_size", value.min_pattern_size, 1, longest, words)
    count = whole(f"{field}.min_count", value.min_count, 2, INT32, f"an integer from 2 to {INT32}")
    return {"max_pattern_size": longest, "min_pattern_size": shortest, "min_count": count}
