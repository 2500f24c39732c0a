"""The way of a message through a whole client: link in memory, rank drivers, coordinator, streams."""

from __future__ import annotations

import attrs
import trio
import trio.testing

from fuzz.messages import Source, message_of
from fuzz.promises import keeps_output, keeps_plain
from lockstep_trio.engines.vllm import EngineCoreRequest, RequestOutput, SamplingParams, VllmProtocol
from lockstep_trio.errors import GroupClosed, GroupFailed, Overloaded, RankFailed, UtilityFailed, WireError
from lockstep_trio.runtime import Group, RequestStream, open_group
from lockstep_trio.testing.rank_model import Add
from lockstep_trio.testing.simulated import SimulatedGroup

ENDS = (GroupFailed, RankFailed, GroupClosed, WireError)
"""How a stream may end, besides cleanly."""
AT_LAST = 1_000.0
"""Virtual seconds after which a stream that has not ended never will: stalls are found out after two minutes."""

rest = trio.testing.wait_all_tasks_blocked


@attrs.define
class Run:
    """What came of one run."""

    ends: dict[str, str] = attrs.field(factory=dict)
    """Request -> how its stream ended."""
    call: str = ""
    wire_ids: set[str] = attrs.field(factory=set)
    """As the ranks were told them."""


async def _read(run: Run, stream: RequestStream[RequestOutput]) -> None:
    finished = False
    try:
        async for output in stream:
            assert not finished
            keeps_output(output)
            finished = output.finished
        assert finished
        end = "finished"
    except ENDS as error:
        assert isinstance(error, WireError) or not finished
        end = type(error).__name__
    assert stream.request_id not in run.ends
    run.ends[stream.request_id] = end
    if end == "WireError":  # of the merge: the stream is still open
        await stream.aclose()


async def _call(run: Run, group: Group[EngineCoreRequest, RequestOutput]) -> None:
    try:
        for result in (await group.call_utility("is_sleeping", timeout=None)).values():
            keeps_plain(result)
        run.call = "answered"
    except (UtilityFailed, GroupFailed, RankFailed, GroupClosed, WireError) as error:
        run.call = type(error).__name__


async def _submit(run: Run, group: Group[EngineCoreRequest, RequestOutput], readers: trio.Nursery, name: str) -> None:
    request = EngineCoreRequest([7], SamplingParams(max_tokens=3), request_id=name)
    try:
        readers.start_soon(_read, run, await group.submit(request))
    except (GroupFailed, RankFailed, GroupClosed, Overloaded) as error:
        run.ends[name] = type(error).__name__


async def group_survives(source: Source) -> Run:
    """Three requests and a call while the ranks say anything; then the ranks go on, are lost or fall silent.

    The readers are outside of the group's block, so that they must end by themselves.
    """
    run = Run()
    sim = SimulatedGroup(2, lockstep=source.below(2) == 0)
    sim.start()
    with trio.fail_after(AT_LAST):
        async with (
            trio.open_nursery() as readers,
            open_group(sim.link, ranks=2, protocol=VllmProtocol(vocab_size=256)) as group,
        ):
            for name in ("a", "b", "c"):
                await _submit(run, group, readers, name)
            readers.start_soon(_call, run, group)
            await rest()
            for _ in range(source.below(10)):
                await _something_happens(sim, source)
            await _submit(run, group, readers, "d")
            await rest()
            group.statistics()
            await _end(sim, run, source)
    run.wire_ids = {each.wire_id for rank in sim.ranks for each in rank.log if isinstance(each, Add)}
    assert set(run.ends) == {"a", "b", "c", "d"}, run
    assert run.call
    return run


async def _something_happens(sim: SimulatedGroup, source: Source) -> None:
    kind = source.below(4)
    if kind == 3:
        sim.advance()
    else:
        sim.ports[source.below(2)].send(message_of(source))
    if kind != 2:
        await rest()


async def _end(sim: SimulatedGroup, run: Run, source: Source) -> None:
    match source.below(4):
        case 0:  # the block is left at once
            return
        case 1:
            for port in sim.ports:
                port.disconnect()
        case 2:  # the engines go on, as far as they can
            while sim.advance():
                await rest()
        case _:  # they say no more: found out for as long as somebody waits
            pass
    while len(run.ends) < 4:
        await trio.sleep(10)


def runs(source: Source) -> Run:
    return trio.run(group_survives, source, clock=trio.testing.MockClock(autojump_threshold=0))
