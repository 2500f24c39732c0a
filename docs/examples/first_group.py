"""Wake a parked group, stream one request, and see the group park again."""

import trio

import lockstep_trio
from lockstep_trio import EngineCoreRequest, Group, RequestOutput, SamplingParams, VllmProtocol


def tell(group: Group[EngineCoreRequest, RequestOutput], when: str) -> None:
    """Print where the group is."""
    state = group.statistics().state
    print(f"{when}: {'stepping' if state.stepping else 'parked'}, wave {state.clock}")


async def main(handshake: str, ranks: int) -> None:
    """Submit one request and read it to its end."""
    async with lockstep_trio.open_group(handshake, ranks=ranks, protocol=VllmProtocol()) as group:
        tell(group, "up")
        request = EngineCoreRequest([1, 2, 3, 4], SamplingParams(max_tokens=5))
        async with await group.submit(request) as stream:
            tell(group, f"submitted to rank {stream.rank}")
            async for output in stream:
                print(output.token_ids, output.finish_reason)
        await group.wait_parked()
        tell(group, "drained")


if __name__ == "__main__":
    trio.run(main, "tcp://127.0.0.1:29550", 2)
