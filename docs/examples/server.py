"""A line of token ids in, a line per output back: ``echo 1 2 3 | nc 127.0.0.1 8000``."""

import contextlib
import functools
import sys

import trio

import lockstep_trio
from lockstep_trio import EngineCoreRequest, Group, RequestOutput, SamplingParams, VllmProtocol


async def serve(group: Group[EngineCoreRequest, RequestOutput], client: trio.SocketStream) -> None:
    """Answer one client."""
    with contextlib.suppress(trio.BrokenResourceError):  # the client went away, seen at the next output
        line = b""
        while b"\n" not in line and len(line) < 65_536 and (some := await client.receive_some()):
            line += some
        try:
            request = EngineCoreRequest([int(word) for word in line.split()], SamplingParams(max_tokens=200))
            async with await group.submit(request) as stream:  # leaving it early aborts the request on the engine
                async for output in stream:
                    await client.send_all(b"%s\n" % " ".join(map(str, output.token_ids)).encode())
        except ValueError as error:  # not a number, or RequestRejected: the engine might not have survived it
            await client.send_all(f"bad request: {error}\n".encode())
        except lockstep_trio.LockstepError as error:  # GroupFailed, Overloaded and the like
            await client.send_all(f"sorry: {error}\n".encode())


async def main(handshake: str, ranks: int, port: int) -> None:
    """Serve until the group is lost."""
    protocol = VllmProtocol(vocab_size=256)  # the model's; a token id beyond it would kill the engine
    async with (
        lockstep_trio.open_group(handshake, ranks=ranks, protocol=protocol) as group,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(functools.partial(trio.serve_tcp, functools.partial(serve, group), port, host="127.0.0.1"))
        fault = await group.wait_failed()  # every stream has raised GroupFailed by now
        nursery.cancel_scope.deadline = trio.current_time() + 1  # a second for the last words to clients
    sys.exit(f"the group is lost: {fault}")


if __name__ == "__main__":
    trio.run(main, "tcp://127.0.0.1:29550", 2, 8000)
