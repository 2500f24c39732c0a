"""The wake rule in a second formalism: what spin says of ``wake.pml``, beside what the explorer says.

Each case is a program that spin writes and the C compiler translates. It visits every state (exactly: no bit-state
hashing) and reports the first that is wrong, or else that there is none.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import attrs
import pytest

from lockstep_trio.testing.explorer import Case, explore
from lockstep_trio.testing.rank_model import Sync
from lockstep_trio.testing.rules import RULES

MODEL = Path(__file__).with_name("wake.pml")
COMPILER = shutil.which("cc") or shutil.which("gcc")

pytestmark = [
    pytest.mark.formal,
    pytest.mark.skipif(
        shutil.which("spin") is None or COMPILER is None,
        reason="NOT CHECKED BY SPIN: the program `spin` or a C compiler is absent",
    ),
]

SYNCS = [Sync(first=True, every=2), Sync(first=False, every=2)]
SMALL = [Case(2, ((0, 1), (1, 1)), sync=sync) for sync in SYNCS]
MIDDLE = [Case(3, requests, sync=sync) for requests in (((0, 1), (1, 1)), ((0, 1), (0, 1))) for sync in SYNCS]
LARGE = [
    Case(2, requests, sync=sync) for requests in (((0, 1), (1, 1), (0, 1)), ((0, 2), (1, 1), (0, 1))) for sync in SYNCS
]

STRANDING = ["flag-exclude", "raise", "no-fence", "no-rewake"]

FOR_SAFETY = ["-DSAFETY"]
FOR_CYCLES = ["-DNP"]
"""A cycle without progress is any cycle, since nothing in the model is marked as progress."""
MEBIBYTES = 4000
"""What one search may take; the largest case here needs 700."""


@attrs.frozen
class Verdict:
    """What a search found."""

    problem: str | None
    """In spin's words; None if every state was visited and none is wrong."""
    states: int
    transitions: int
    schedule: str
    """The way to it: which frames were sent and taken by which process, one line each, and the state at its end."""

    @property
    def as_explorer(self) -> str | None:
        """The explorer's word for it."""
        return {"invalid end state": "stuck", "non-progress cycle": "livelock"}.get(self.problem or "", self.problem)


def name(case: Case) -> str:
    requests = " ".join(f"{rank},{steps}" for rank, steps in case.requests)
    return f"{case.ranks} ranks, requests {requests}, {'step 1 and ' if case.sync.first else ''}every second step"


def run(command: list[str], where: Path) -> str:
    done = subprocess.run(command, check=False, cwd=where, capture_output=True, text=True, timeout=1800)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{command}: {output}"
    return output


def spin(where: Path, case: Case, rule: str, *, patient: bool = True, cycles: bool = False) -> Verdict:
    """Search a case.

    Args:
        where: An empty folder.
        case: Its ranks, requests and sync; callers always may abort.
        rule: One of ``lockstep_trio.testing.rules.RULES`` that the model knows.
        patient: Some callers may never abort.
        cycles: Look for a run without end, rather than for one with a wrong end.
    """
    assert COMPILER is not None
    assert case.sync.every == 2, "the model knows no other"
    given = {"N": case.ranks, "R": len(case.requests), "FIRST": int(case.sync.first), "PATIENT": int(patient)}
    for index in range(3):  # the model has room for three, whether they are submitted or not
        given[f"HOME{index}"], given[f"STEPS{index}"] = (*case.requests, (0, 1), (0, 1), (0, 1))[index]
    defined = [f"-D{rule.upper().replace('-', '_')}", *(f"-D{key}={value}" for key, value in given.items())]
    began = time.monotonic()
    shutil.copy(MODEL, where)  # spin looks for the way to a bad state beside the model
    run(["spin", "-a", *defined, MODEL.name], where)
    # The other rules are found wrong at once, so for them the compiler's time is most of it.
    how = FOR_CYCLES if cycles else FOR_SAFETY
    flags = ["-O2" if rule == "ours" else "-O0", "-w", "-DCOLLAPSE", f"-DMEMLIM={MEBIBYTES}", *how]
    run([COMPILER, *flags, "-o", "pan", "pan.c"], where)
    # -q: a frame that nobody has taken is wrong at the end of a run. -m: deeper than any run, so that none is cut off.
    output = run(["./pan", "-m100000", *(["-l"] if cycles else ["-q"])], where)
    assert "pan: out of memory" not in output, output
    assert "max search depth too small" not in output, output
    problem = re.search(r"^pan:\d+: (.*?) \(at depth \d+\)", output, re.MULTILINE)
    assert (problem is None) == ("errors: 0" in output), output
    stored, followed = (re.search(rf"(\S+) {what}", output) for what in ("states, stored", "transitions"))
    assert stored is not None, output
    assert followed is not None, output
    verdict = Verdict(
        problem[1] if problem else None,
        int(float(stored[1])),
        int(float(followed[1])),
        run(["spin", "-t", "-c", *defined, MODEL.name], where) if problem and not cycles else "",
    )
    print(
        f"\n{rule}: {name(case)}{'' if patient else ', all may abort'}: {verdict.states:,} states, "
        f"{verdict.transitions:,} transitions, {'cycles' if cycles else 'ends'}: {verdict.problem or 'clean'} "
        f"({time.monotonic() - began:.0f} s)"
    )
    return verdict


@pytest.mark.parametrize("case", SMALL + MIDDLE + LARGE, ids=name)
def test_under_our_rule_every_run_ends_well(tmp_path: Path, case: Case) -> None:
    verdict = spin(tmp_path, case, "ours")
    assert verdict.problem is None, f"{verdict.problem}\n{verdict.schedule}"


@pytest.mark.parametrize("case", [*SMALL, *MIDDLE, LARGE[0]], ids=name)
def test_under_our_rule_every_run_ends(tmp_path: Path, case: Case) -> None:
    assert spin(tmp_path, case, "ours", cycles=True).problem is None


@pytest.mark.parametrize("case", SMALL + MIDDLE + LARGE, ids=name)
@pytest.mark.parametrize("rule", STRANDING)
def test_under_another_rule_some_run_ends_badly(tmp_path: Path, case: Case, rule: str) -> None:
    assert spin(tmp_path, case, rule).problem == "invalid end state"


@pytest.mark.parametrize("case", SMALL, ids=name)
@pytest.mark.parametrize("rule", ["ours", *STRANDING])
def test_spin_and_the_explorer_say_the_same(tmp_path: Path, case: Case, rule: str) -> None:
    here = spin(tmp_path, case, rule, patient=False)
    there = explore(case, lambda: RULES[rule](case.ranks), limit=50_000)
    assert there.complete or there.found is not None
    print(f"the explorer: {there.states:,} states: {there.found.problem if there.found else 'clean'}")
    assert here.as_explorer == (there.found.problem.partition(":")[0] if there.found else None), here.schedule


@pytest.mark.parametrize("sync", SYNCS, ids=str)
def test_a_rule_that_never_comes_to_rest_is_seen_to_go_round_in_circles(tmp_path: Path, sync: Sync) -> None:
    # In the model wave numbers are bytes: they begin again at 0, together, and that closes the circle.
    verdict = spin(tmp_path, Case(2, ((0, 1),), sync=sync), "wake-on-every-done", cycles=True)
    assert verdict.as_explorer == "livelock"
