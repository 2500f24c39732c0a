"""A link and the rank at its other end, for every kind of link there is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import attrs
import pytest
import zmq

from link.zmq_peer import IDENTITY, ZmqPeer
from lockstep_trio.link.interface import RankLink
from lockstep_trio.link.zmq_group import Transport, open_zmq_link


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Ended with whatever is still open in it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


class Peer(Protocol):
    """The rank's side. Closing ends both its connections once what it sent has left."""

    async def register(self, frames: Sequence[bytes] = ...) -> None: ...
    async def send(self, frames: Sequence[bytes]) -> None: ...
    async def receive(self) -> list[bytes]: ...
    def close(self) -> None: ...


@attrs.frozen
class Pair:
    link: RankLink
    peer: Peer


@contextmanager
def zmq_pair(transport: Transport) -> Iterator[Pair]:
    group = open_zmq_link(None, identities=[IDENTITY], transport=transport, send_hwm=10)
    peer = ZmqPeer(group.ranks[0])
    try:
        yield Pair(group.ranks[0], peer)
    finally:
        peer.forget()
        group.close()


OPENERS: dict[str, Callable[[], AbstractContextManager[Pair]]] = {
    "zmq-ipc": lambda: zmq_pair("ipc"),
    "zmq-tcp": lambda: zmq_pair("tcp"),
}


@pytest.fixture(params=list(OPENERS))
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Fresh for each test; nothing has been said yet."""
    with OPENERS[request.param]() as pair:
        yield pair
