"""What a link offers to the runtime, whatever carries the frames: ZeroMQ sockets, or memory in tests.

A link moves frames and understands none. Every method but ``wait*`` is synchronous and never blocks; one task
at a time may wait on a link. "Gone" is about the rank's *own* connection: strangers that come and go on the
same endpoint do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, final

import attrs

Frame: TypeAlias = bytes | memoryview
"""One frame. Given frames are not copied and must not be written to afterwards."""


class Unreachable(Exception):
    """A send found no peer with the rank's identity. Nothing was sent."""


@final
@attrs.frozen
class Loss:
    """How a rank's own connection was lost."""

    how: str
    """In words, for people."""
    silent: bool = False
    """The other end did not close it: nothing came for longer than heartbeats allow, so it was given up here."""


class RankLink(Protocol):
    """Both directions of one rank's connection. All waiting is done by one owner task."""

    rank: int

    @property
    def input_endpoint(self) -> str:
        """Where the rank shall connect its input socket to."""
        ...

    @property
    def output_endpoint(self) -> str:
        """Where the rank shall connect its output socket to."""
        ...

    def take_registration(self) -> tuple[bytes, ...] | None:
        """The first message that came in on the input socket from the rank's identity, once; None before and after.

        Messages of other identities on that socket, and later ones of this identity, are dropped and counted.
        """
        ...

    def send_nowait(self, frames: Sequence[Frame]) -> bool:
        """Send one message whole. False if the link is full, and then nothing was sent.

        Raises ``Unreachable`` if the rank is not, or no longer, connected. May be called from any task.
        """
        ...

    def receive_nowait(self) -> Sequence[Frame] | None:
        """The next message of the rank's output socket, None if there is none just now.

        Its first frame is ``bytes``. Long ones behind that may be read-only views, to spare a copy.
        """
        ...

    @property
    def gone(self) -> Loss | None:
        """How the rank's own connection was lost; None while it stands.

        Seen only after the events were read, which ``wait`` and ``receive_nowait`` returning None do. Messages may
        still be receivable: drain until None, then believe it.
        """
        ...

    def restart(self) -> None:
        """Expect another process in the rank's place: forget its registration, its connection and their loss.

        Only while the group comes up. Messages of the old process that were not taken yet are dropped.
        """
        ...

    async def wait(self, *, writable: bool) -> None:
        """Return when something may have changed: a message, a registration, a loss, ``wake``, or (if asked) room.

        A message that was not fetched ends every wait at once, behind a checkpoint.
        Spurious returns are allowed. Raises ``trio.BusyResourceError`` if another task waits already and
        ``trio.ClosedResourceError`` once closed. Cancellation: loses nothing.
        """
        ...

    def wake(self) -> None:
        """Make the owner's ``wait`` return soon. The owner may not be waiting: then the next ``wait`` returns."""
        ...

    @property
    def dropped(self) -> int:
        """Messages dropped because they came from strangers or were out of place."""
        ...

    def close(self) -> None:
        """Close both sockets, their monitors and files. Frames still queued get the configured linger. Idempotent."""
        ...


class GroupLink(Protocol):
    """The handshake socket and the links of all ranks of one group."""

    @property
    def ranks(self) -> Sequence[RankLink]: ...

    @property
    def handshake_endpoint(self) -> str:
        """Where ranks say hello, with the port that was really bound."""
        ...

    async def receive_handshake(self) -> tuple[bytes, list[bytes] | None]:
        """The next (identity, frames) on the handshake socket; frames None: its connection there has ended.

        That is told once per connection that said something, after everything it said, and of the connection that an
        identity last spoke on only. One task at a time. Cancellation: loses nothing.
        """
        ...

    def send_handshake(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """Answer an identity. A peer that is gone again is ignored."""
        ...

    def close_handshake(self) -> None:
        """The conversation is over: release the handshake endpoint. Idempotent."""
        ...

    def close(self) -> None:
        """Close everything, files and directories too. Idempotent, bounded by the linger time."""
        ...
