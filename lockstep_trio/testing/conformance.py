"""What every wire protocol must do, checked against a model rank of its engine: for whoever adds an engine.

An ``EngineCase`` is the protocol, a model of the engine's side, and some requests. ``CHECKS`` are functions of a case
that raise ``AssertionError``; nothing here needs a test runner or a socket::

    @pytest.mark.parametrize("name", CHECKS)
    def test_my_engine_conforms(name: str) -> None:
        CHECKS[name](CASE)

That the engine really speaks as its model does is for tests with the engine's own code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, final

import attrs
import trio
import trio.testing

from lockstep_trio.engines.protocol import (
    Batch,
    EngineProtocol,
    Handshake,
    Pause,
    RankEndpoints,
    Resume,
    Session,
    Sleep,
    WakeUp,
)
from lockstep_trio.errors import EngineLost, HandshakeError, LockstepError, RequestRejected, WireError
from lockstep_trio.runtime import Group, open_group

from .rank_model import Add, Drop
from .simulated import SimulatedGroup

RequestT = TypeVar("RequestT")
OutputT = TypeVar("OutputT")

GUARD: Final = 10.0
"""Seconds until a check with a group in it is given up."""
NOISE: Final = (
    b"",
    b"\xc1",
    b"\x00",
    b"\x90",
    b"\x80",
    b"45",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xdd\xff\xff\xff\xff",
    b"\x91" * 2000,
)
"""What scanners send, what is empty, and what claims to be large."""


class ModelRank(Protocol):
    """The engine's side: ``EngineRank``, or a subclass of ``IndependentRank``."""

    sent: Any
    log: Any

    @property
    def identity(self) -> bytes: ...
    def hello(self) -> bytes: ...
    def ready(self) -> bytes: ...
    def registration(self) -> bytes: ...
    def endpoints(self, init: bytes) -> tuple[str, str]: ...
    def receive(self, frames: Sequence[bytes]) -> None: ...
    def poll(self, count: int | None = None) -> None: ...
    def step(self) -> bool: ...


@final
@attrs.frozen
class EngineCase(Generic[RequestT, OutputT]):
    """One engine to be checked."""

    protocol: EngineProtocol[RequestT, OutputT]
    make_rank: Callable[[int], ModelRank]
    """A new model of the rank with this index, of a group of two independent ranks."""
    make_request: Callable[[int, int | None, str | None], RequestT]
    """A good request from (tokens to generate, pinned rank, the caller's id)."""
    tokens: Callable[[OutputT], Sequence[int]]
    """The new tokens of an output."""
    finished: Callable[[OutputT], bool]
    """Whether it is the last one."""
    bad_requests: Sequence[tuple[Any, str]] = ()
    """Requests that must be refused, each with how the error's field begins."""
    death: tuple[bytes, ...] | None = None
    """The engine's own notice of its death; None if it has none."""


Case: TypeAlias = EngineCase[Any, Any]


# -- startup -------------------------------------------------------------------------------------------------------


def _begin(case: Case) -> tuple[Handshake, list[ModelRank]]:
    endpoints = [RankEndpoints(f"ipc:///in{rank}", f"ipc:///out{rank}") for rank in (0, 1)]
    return case.protocol.handshake(endpoints), [case.make_rank(rank) for rank in (0, 1)]


def _say(handshake: Handshake, rank: int, model: ModelRank, word: str) -> None:
    if word == "registration":
        handshake.registered(rank, [model.registration()])
        return
    reply = handshake.receive(model.identity, [model.hello() if word == "hello" else model.ready()])
    assert (reply is not None) == (word == "hello"), f"{word} was answered with {reply}"
    if reply is not None:
        assert reply.rank == rank, f"the hello of rank {rank} was taken for that of rank {reply.rank}"
        assert model.endpoints(reply.frames[0]) == (f"ipc:///in{rank}", f"ipc:///out{rank}"), "another rank's endpoints"


def _up(case: Case) -> tuple[Session[Any, Any], list[ModelRank]]:
    handshake, models = _begin(case)
    for rank, model in enumerate(models):
        for word in ("hello", "ready", "registration"):
            _say(handshake, rank, model, word)
    assert handshake.complete, f"not up, though nothing is missing: {dict(handshake.stages)}"
    return case.protocol.session(handshake.infos(), lockstep=None), models


def check_identities(case: Case) -> None:
    """Each rank has its own identity, which its model has too."""
    identities = [case.protocol.identity(rank) for rank in range(300)]
    assert len(set(identities)) == len(identities), "two ranks with one identity"
    assert [case.make_rank(rank).identity for rank in (0, 1)] == identities[:2]


def check_startup_in_every_order(case: Case) -> None:
    """Two ranks come up whatever is heard first, and not before everything was."""
    words = [(rank, word) for rank in (0, 1) for word in ("hello", "ready", "registration")]
    for order in itertools.permutations(words):
        if any(order.index((rank, "hello")) > min(map(order.index, words[3 * rank : 3 * rank + 3])) for rank in (0, 1)):
            continue  # nothing comes before a hello
        handshake, models = _begin(case)
        assert not handshake.begun
        for rank, word in order:
            assert not handshake.complete, f"complete before {word} of rank {rank}"
            _say(handshake, rank, models[rank], word)
            assert handshake.begun
        assert handshake.complete
        assert handshake.all_ready
        assert [info.rank for info in handshake.infos()] == [0, 1]


def check_startup_tells_where_it_is(case: Case) -> None:
    """The stages are those of all ranks, and change with what a rank says."""
    handshake, models = _begin(case)
    seen = [dict(handshake.stages)]
    for word in ("hello", "ready", "registration"):
        _say(handshake, 0, models[0], word)
        seen.append(dict(handshake.stages))
    assert all(stages.keys() == {0, 1} for stages in seen)
    assert len({stages[0] for stages in seen}) == len(seen), f"rank 0 is said to be where it was: {seen}"
    assert len({stages[1] for stages in seen}) == 1, f"rank 1 has said nothing: {seen}"


def check_a_restart_while_loading_starts_over(case: Case) -> None:
    """A second hello of a rank is another process in its place."""
    handshake, models = _begin(case)
    for word in ("hello", "ready", "registration"):
        _say(handshake, 0, models[0], word)
    reply = handshake.receive(models[0].identity, [models[0].hello()])
    assert reply is not None
    assert reply.restarted
    _say(handshake, 1, models[1], "hello")
    for word in ("ready", "registration"):
        _say(handshake, 1, models[1], word)
    assert not handshake.complete, "the new process of rank 0 has said nothing but hello"


def check_strangers_are_not_answered(case: Case) -> None:
    """Noise on the handshake socket changes nothing; what no rank of ours can have said ends it or is dropped."""
    handshake, models = _begin(case)
    before = dict(handshake.stages)
    for identity in (b"", b"x", b"stranger", b"\x00" * 255):
        for noise in NOISE:
            assert handshake.receive(identity, [noise]) is None
    for noise in NOISE:
        assert handshake.receive(models[0].identity, [noise]) is None
    assert dict(handshake.stages) == before
    assert not handshake.begun


def check_what_does_not_fit_ends_the_startup(case: Case) -> None:
    """A rank beyond the group, and one that is half way through with somebody else."""
    handshake, models = _begin(case)
    for identity, message in ((case.protocol.identity(2), models[0].hello()), (models[0].identity, models[0].ready())):
        _raises(HandshakeError, handshake.receive, identity, [message])


# -- sessions ------------------------------------------------------------------------------------------------------


def check_what_a_session_says_of_itself(case: Case) -> None:
    """Lockstep only where an abort can be proven, and words for errors."""
    session, _ = _up(case)
    assert session.fence_method is not None or not session.lockstep, "lockstep without a fence"
    assert session.versions
    assert all(session.cautions)


def check_utility_calls(case: Case) -> None:
    """They are encoded, or refused by the name of the method where there are none."""
    session, _ = _up(case)
    if session.fence_method is not None:
        assert session.encode_utility(7, session.fence_method, ())
        return
    error = _raises(RequestRejected, session.encode_utility, 7, "is_sleeping", ())
    assert error.field == "method"


def check_pausing_is_in_concert(case: Case) -> None:
    """Calls that pause or resume are refused, or made by methods that nobody may call by themselves."""
    session, _ = _up(case)
    for call in (Pause("keep", clear_cache=False), Resume(), Sleep(1, "abort"), WakeUp(None)):
        try:
            method, args = session.encode_pause(call)
        except RequestRejected:
            continue
        assert method in session.pause_methods, f"{method} pauses or resumes, and anybody may call it"
        assert session.encode_utility(7, method, args)
    assert session.fence_method not in session.pause_methods


def check_the_head_is_the_callers(case: Case) -> None:
    """Id and rank come back as they were given."""
    session, _ = _up(case)
    for name, rank in ((None, None), ("mine", 1)):
        head = session.head(case.make_request(1, rank, name))
        assert (head.request_id, head.rank) == (name, rank)


def check_bad_requests_are_refused(case: Case) -> None:
    """Each by its field, and by ``head`` or ``encode_add``, which are called before anything is sent."""
    session, _ = _up(case)

    def submit(request: Any) -> None:
        session.head(request)
        session.encode_add(request, "wire-1")

    for request, field in case.bad_requests:
        error = _raises(RequestRejected, submit, request)
        assert error.field.startswith(field), f"{request!r:.200} is refused for {error.field}, not for {field}"
        assert error.limit, "an error that does not say what would do"


def check_requests_and_aborts_arrive(case: Case) -> None:
    """The engine reads what is sent as it was meant."""
    session, (model, _) = _up(case)
    for wire_id, tokens in (("a#1", 3), ("b#2", 1)):
        model.receive(_bytes(session.encode_add(case.make_request(tokens, None, None), wire_id)))
    model.receive(_bytes(session.encode_abort(["a#1"])))
    model.receive(_bytes(session.encode_abort(["b#2", "c#3"])))
    assert list(model.log) == [Add("a#1", 3), Add("b#2", 1), Drop(("a#1",)), Drop(("b#2", "c#3"))], model.log


def _run(case: Case, session: Session[Any, Any], model: ModelRank, *steps: int) -> list[Batch]:
    """What a rank says from requests ``wire-0``, ``wire-1`` and so on, of so many tokens each, to their end."""
    for number, tokens in enumerate(steps):
        model.receive(_bytes(session.encode_add(case.make_request(tokens, None, None), f"wire-{number}")))
    for _ in range(max(steps)):
        model.poll()
        model.step()
    return [session.decode(frames) for frames in model.sent]


def check_outputs_are_read(case: Case) -> None:
    """Each output once, in order, under its own id; the last one is known to be the last."""
    session, (model, _) = _up(case)
    ends = [(wire_id, last) for batch in _run(case, session, model, 3, 1) for wire_id, last, _ in batch.outputs]
    assert [last for wire_id, last in ends if wire_id == "wire-0"] == [False, False, True]
    assert [last for wire_id, last in ends if wire_id == "wire-1"] == [True]
    assert len(ends) == 4


def check_outputs_can_be_merged(case: Case) -> None:
    """Read one by one, or as late as one likes, they give the same tokens."""
    session, (model, _) = _up(case)
    raw = [each for batch in _run(case, session, model, 5) for _, _, each in batch.outputs]
    singly = [session.merge("mine", 1, [each]) for each in raw]
    expected = [token for output in singly for token in case.tokens(output)]
    assert len(expected) == 5
    assert [case.finished(output) for output in singly] == [False] * 4 + [True]
    for cut in range(1, 5):
        first, second = session.merge("mine", 1, raw[:cut]), session.merge("mine", 1, raw[cut:])
        assert [*case.tokens(first), *case.tokens(second)] == expected
        assert (case.finished(first), case.finished(second)) == (False, True)
    assert [session.is_refusal(each) for each in raw] == [False] * 5


def check_damage_is_told(case: Case) -> None:
    """What is no message is a ``WireError``, or a batch that says so; and a real one cut short never tells a lie."""
    session, (model, _) = _up(case)
    _run(case, session, model, 3)
    whole = [bytes(frame) for frame in model.sent[0]]
    cut = [[*whole[:-1], whole[-1][:size]] for size in range(len(whole[-1]))]
    for frames in ([], *([noise] for noise in NOISE), *cut):
        try:
            batch = session.decode(frames)
        except WireError:
            continue
        assert not batch.dead, f"{frames!r:.80} was taken for a death"
        assert not any(last for _, last, _ in batch.outputs), f"{frames!r:.80} was taken for the end of a request"


def check_a_death_notice_is_one(case: Case) -> None:
    """And nothing that only begins like it."""
    session, _ = _up(case)
    if case.death is None:
        return
    assert session.decode(case.death) == Batch(dead=True)
    for like in ([*case.death, b""], [case.death[0] + b"!", *case.death[1:]], [case.death[0][:-1], *case.death[1:]]):
        try:
            assert not session.decode(like).dead, f"{like} was taken for a death"
        except WireError:
            pass


# -- groups --------------------------------------------------------------------------------------------------------


async def _in_a_group(
    case: Case, use: Callable[[Group[Any, Any], SimulatedGroup], Any], *, settles: bool = True
) -> None:
    sim = SimulatedGroup(2, lockstep=False)
    sim.ranks = [case.make_rank(rank) for rank in (0, 1)]  # type: ignore[misc]
    sim.start()

    async def run() -> Group[Any, Any]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sim.run)
            async with open_group(sim.link, ranks=2, protocol=case.protocol, close_grace=GUARD / 2) as group:
                await use(group, sim)
            nursery.cancel_scope.cancel()
        return group

    try:
        with trio.fail_after(GUARD):
            group = await run()
    except trio.TooSlowError:
        raise AssertionError(f"not over after {GUARD} s") from None
    state = group.statistics().state
    assert not settles or (state.in_flight, state.fault) == (0, None), state


async def _read(case: Case, stream: Any) -> list[int]:
    return [token async for output in stream for token in case.tokens(output)]


async def _end(case: Case, stream: Any) -> EngineLost | None:
    """How a stream ends: None is a clean end."""
    try:
        await _read(case, stream)
    except EngineLost as error:
        return error
    return None


def check_a_whole_group(case: Case) -> None:
    """Requests on both ranks are answered alike; one that is left early is aborted, and only that one."""

    async def use(group: Group[Any, Any], sim: SimulatedGroup) -> None:
        answers = []
        for rank in (0, 1):
            async with await group.submit(case.make_request(4, rank, "mine")) as stream:
                assert stream.rank == rank
                answers.append(await _read(case, stream))
        assert answers[0] == answers[1]
        assert len(answers[0]) == 4
        async with await group.submit(case.make_request(1000, 0, "left")) as stream:
            await stream.receive()
        async with await group.submit(case.make_request(2, 0, "mine")) as stream:
            assert await _read(case, stream) == answers[0][:2]
        await trio.testing.wait_all_tasks_blocked()
        dropped = [each for model in sim.ranks for each in model.log if isinstance(each, Drop)]
        assert [len(each.wire_ids) for each in dropped] == [1], "one request was left, and one ABORT is due"
        assert dropped[0].wire_ids[0].startswith("left#")
        added = [each.wire_id for model in sim.ranks for each in model.log if isinstance(each, Add)]
        assert len(set(added)) == len(added) == 4, "an id was used twice on the wire"

    trio.run(_in_a_group, case, use)


def check_a_group_that_loses_a_rank(case: Case) -> None:
    """The streams of the rank that says that it dies end with an error, and those of the other go on."""
    if case.death is None:
        return
    death = case.death

    async def use(group: Group[Any, Any], sim: SimulatedGroup) -> None:
        lost = await group.submit(case.make_request(1000, 1, None))
        await lost.receive()
        sim.ports[1].send(death)
        error = await _end(case, lost)
        assert error is not None, "a clean end of a request whose rank died"
        assert error.rank == 1, f"rank {error.rank} is blamed for what was said on rank 1's socket"
        sim.alive[1] = False
        async with await group.submit(case.make_request(3, 0, None)) as kept:
            assert len(await _read(case, kept)) == 3

    trio.run(lambda: _in_a_group(case, use, settles=False))


def _bytes(frames: Sequence[Any]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


ErrorT = TypeVar("ErrorT", bound=LockstepError)


def _raises(kind: type[ErrorT], call: Callable[..., object], *args: object) -> ErrorT:
    try:
        returned = call(*args)
    except kind as error:
        return error
    raise AssertionError(f"{args!r:.200} gave {returned!r:.80}, not {kind.__name__}")


CHECKS: Final[Mapping[str, Callable[[Case], None]]] = MappingProxyType(
    {name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")}
)
"""Every check, by its name."""
