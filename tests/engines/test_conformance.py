"""Every engine, and the one that a page adds, under one set of checks; and each check can fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from lockstep_trio import (
    EngineCoreRequest,
    SamplingParams,
    TokenSpeedProtocol,
    TokenSpeedRequest,
    TokenSpeedSampling,
    VllmProtocol,
)
from lockstep_trio.engines.protocol import Batch
from lockstep_trio.testing.conformance import CHECKS, Case, EngineCase
from lockstep_trio.testing.engine_rank import DEAD, EngineRank
from lockstep_trio.testing.tokenspeed_rank import DEAD as TOKENSPEED_DEAD
from lockstep_trio.testing.tokenspeed_rank import TokenSpeedRank

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "add-an-engine.md"

VLLM: Case = EngineCase(
    protocol=VllmProtocol(vocab_size=256),
    make_rank=EngineRank,
    make_request=lambda tokens, rank, name: EngineCoreRequest(
        [7], SamplingParams(max_tokens=tokens), request_id=name, data_parallel_rank=rank
    ),
    tokens=lambda output: output.token_ids,
    finished=lambda output: output.finished,
    bad_requests=[
        (None, "request"),
        (EngineCoreRequest([]), "prompt_token_ids"),
        (EngineCoreRequest([256]), "prompt_token_ids"),
        (EngineCoreRequest([7] * 4096), "len(prompt_token_ids)"),
        (EngineCoreRequest([7], SamplingParams(n=2)), "sampling.n"),
        (EngineCoreRequest([7], SamplingParams(top_p=5)), "sampling.top_p"),
        (EngineCoreRequest([7], request_id=""), "request_id"),
    ],
    death=(DEAD,),
)

TOKENSPEED: Case = EngineCase(
    protocol=TokenSpeedProtocol(vocab_size=256),
    make_rank=lambda rank: TokenSpeedRank(rank, size=2),
    make_request=lambda tokens, rank, name: TokenSpeedRequest(
        [7], TokenSpeedSampling(max_new_tokens=tokens), request_id=name, data_parallel_rank=rank
    ),
    tokens=lambda output: output.token_ids,
    finished=lambda output: output.finished,
    bad_requests=[
        (EngineCoreRequest([7]), "request"),
        (TokenSpeedRequest([]), "prompt_token_ids"),
        (TokenSpeedRequest([256]), "prompt_token_ids"),
        (TokenSpeedRequest([7] * 4095), "len(prompt_token_ids)"),
        (TokenSpeedRequest([7], TokenSpeedSampling(n=2)), "sampling.n"),
        (TokenSpeedRequest([7], TokenSpeedSampling(top_k=128)), "sampling.top_k"),
        (TokenSpeedRequest([7], return_logprob=True), "return_logprob"),
        (TokenSpeedRequest([7], request_id=""), "request_id"),
    ],
    death=(TOKENSPEED_DEAD,),
)


def parrot() -> Case:
    """The engine of the page, from the code in it."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "parrot"}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    case: Case = names["CASE"]
    return case


CASES: dict[str, Case] = {"vllm": VLLM, "tokenspeed": TOKENSPEED, "parrot": parrot()}


@pytest.mark.parametrize("engine", CASES)
@pytest.mark.parametrize("name", CHECKS)
def test_every_engine_conforms(engine: str, name: str) -> None:
    CHECKS[name](CASES[engine])


@pytest.mark.parametrize("elements", [9, 10, 14])
def test_an_older_tokenspeed_conforms_too(elements: int) -> None:
    case = attrs.evolve(TOKENSPEED, make_rank=lambda rank: TokenSpeedRank(rank, elements=elements))
    for check in CHECKS.values():
        check(case)


# -- each check can fail -------------------------------------------------------------------------------------------


class Changed:
    """Something with one of its members replaced."""

    def __init__(self, inner: Any, **members: Any) -> None:
        self._inner = inner
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def session_with(change: Callable[[Any], dict[str, Any]]) -> Case:
    """TokenSpeed's, with members of its sessions replaced."""
    protocol = TOKENSPEED.protocol

    def session(infos: Any, *, lockstep: bool | None) -> Any:
        made = protocol.session(infos, lockstep=lockstep)
        return Changed(made, **change(made))

    return attrs.evolve(TOKENSPEED, protocol=Changed(protocol, session=session))


def handshake_with(change: Callable[[Any], dict[str, Any]]) -> Case:
    protocol = TOKENSPEED.protocol

    def handshake(endpoints: Any) -> Any:
        made = protocol.handshake(endpoints)
        return Changed(made, **change(made))

    return attrs.evolve(TOKENSPEED, protocol=Changed(protocol, handshake=handshake))


def decoding(change: Callable[[Batch], Batch]) -> Case:
    return session_with(lambda made: {"decode": lambda frames: change(made.decode(frames))})


def without_ends(batch: Batch) -> Batch:
    return attrs.evolve(batch, outputs=[(wire_id, False, raw) for wire_id, _, raw in batch.outputs])


def always_dead(session: Any) -> dict[str, Any]:
    return {"decode": lambda frames: Batch(dead=True)}


def wrong_rank(made: Any) -> dict[str, Any]:
    def receive(identity: bytes, frames: Any) -> Any:
        reply = made.receive(identity, frames)
        return reply and attrs.evolve(reply, rank=0)

    return {"receive": receive}


def never_restarted(made: Any) -> dict[str, Any]:
    def receive(identity: bytes, frames: Any) -> Any:
        reply = made.receive(identity, frames)
        return reply and attrs.evolve(reply, restarted=False)

    return {"receive": receive}


MUTANTS: dict[str, tuple[Case, str]] = {
    "one identity for all": (
        attrs.evolve(TOKENSPEED, protocol=Changed(TOKENSPEED.protocol, identity=lambda rank: b"\0\0")),
        "identities",
    ),
    "hellos taken for another's": (handshake_with(wrong_rank), "startup_in_every_order"),
    "up too early": (handshake_with(lambda _: {"complete": True}), "startup_in_every_order"),
    "stages that stay": (
        handshake_with(lambda _: {"stages": {0: "loading", 1: "loading"}}),
        "startup_tells_where_it_is",
    ),
    "restarts unnoticed": (handshake_with(never_restarted), "a_restart_while_loading_starts_over"),
    "strangers answered": (
        handshake_with(lambda _: {"receive": lambda identity, frames: b"welcome"}),
        "strangers_are_not_answered",
    ),
    "anybody fits": (
        handshake_with(lambda _: {"receive": lambda identity, frames: None}),
        "what_does_not_fit_ends_the_startup",
    ),
    "lockstep without a fence": (session_with(lambda _: {"lockstep": True}), "what_a_session_says_of_itself"),
    "utility calls made up": (
        session_with(lambda _: {"encode_utility": lambda call_id, method, args: (b"\3", b"")}),
        "utility_calls",
    ),
    "anybody may pause": (
        session_with(lambda _: {"encode_pause": lambda call: ("pause", ()), "encode_utility": lambda *_: (b"\3", b"")}),
        "pausing_is_in_concert",
    ),
    "a pin that is lost": (
        session_with(lambda made: {"head": lambda request: attrs.evolve(made.head(request), rank=None)}),
        "the_head_is_the_callers",
    ),
    "everything admitted": (
        session_with(lambda _: {"encode_add": lambda request, wire_id: (b"\0", b""), "head": lambda request: None}),
        "bad_requests_are_refused",
    ),
    "aborts of one id only": (
        session_with(lambda made: {"encode_abort": lambda ids: made.encode_abort(ids[:1])}),
        "requests_and_aborts_arrive",
    ),
    "no last output": (decoding(without_ends), "outputs_are_read"),
    "an output twice": (
        decoding(lambda batch: attrs.evolve(batch, outputs=[*batch.outputs, *batch.outputs])),
        "outputs_are_read",
    ),
    "only the last of several merged": (
        session_with(lambda made: {"merge": lambda name, rank, raw: made.merge(name, rank, raw[-1:])}),
        "outputs_can_be_merged",
    ),
    "every message a death": (session_with(always_dead), "damage_is_told"),
    "deaths unseen": (decoding(lambda batch: attrs.evolve(batch, dead=False)), "a_death_notice_is_one"),
    "streams without an end": (decoding(without_ends), "a_whole_group"),
    "deaths unseen by a group": (
        decoding(lambda batch: attrs.evolve(batch, dead=False)),
        "a_group_that_loses_a_rank",
    ),
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What never comes need not be awaited for long."""
    if "mutant" in request.fixturenames:
        monkeypatch.setattr("lockstep_trio.testing.conformance.GUARD", 0.2)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_protocol_that_does_not_conform_is_found_out(mutant: str) -> None:
    case, check = MUTANTS[mutant]
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        CHECKS[check](case)


def test_there_is_a_mutant_for_every_check() -> None:
    assert {check for _, check in MUTANTS.values()} == set(CHECKS)
