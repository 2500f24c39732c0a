"""The account of a socket's connections, with events told in orders that real sockets rarely produce."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from lockstep_trio.link.connections import Connections

ACCEPTED, DISCONNECTED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)


@pytest.fixture
def connections() -> Iterator[Connections]:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        connections = Connections(context, socket, "monitor")
        yield connections
        connections.close()
        connections.close()


def tell(connections: Connections, *events: tuple[int, int]) -> None:
    for event, descriptor in events:
        connections._note(event, descriptor)


def test_a_strangers_end_is_no_loss_and_the_ranks_is(connections: Connections) -> None:
    tell(connections, (ACCEPTED, 20), (ACCEPTED, 21))
    connections.claim(2, 21)
    tell(connections, (DISCONNECTED, 20))
    assert not connections.lost
    tell(connections, (DISCONNECTED, 21))
    assert connections.lost
    assert connections.ended


def test_an_end_that_is_still_unread_when_the_rank_gets_the_same_descriptor_is_not_its_end(
    connections: Connections,
) -> None:
    tell(connections, (ACCEPTED, 20), (DISCONNECTED, 20), (ACCEPTED, 20))
    connections.claim(2, 20)
    assert not connections.lost


def test_a_rank_whose_descriptor_went_to_a_stranger_is_lost(connections: Connections) -> None:
    tell(connections, (ACCEPTED, 20), (DISCONNECTED, 20), (ACCEPTED, 20))
    connections.claim(1, 20)
    assert connections.lost


def test_a_rank_that_is_gone_when_its_message_is_read_is_lost(connections: Connections) -> None:
    tell(connections, (ACCEPTED, 20), (DISCONNECTED, 20))
    connections.claim(1, 20)
    assert connections.lost


def test_a_loss_stays_a_loss_whoever_gets_the_descriptor(connections: Connections) -> None:
    tell(connections, (ACCEPTED, 20))
    connections.claim(1, 20)
    tell(connections, (DISCONNECTED, 20), (ACCEPTED, 20))
    assert connections.lost


def test_a_descriptor_that_was_handed_on_is_known(connections: Connections) -> None:
    tell(connections, (ACCEPTED, 20))
    connections.claim(1, 20)
    assert not connections.handed_on
    tell(connections, (DISCONNECTED, 20), (ACCEPTED, 21))
    assert not connections.handed_on
    tell(connections, (ACCEPTED, 20))
    assert connections.handed_on
    connections.forget()
    assert not connections.handed_on


def test_a_descriptor_that_was_handed_on_before_it_was_the_ranks_is_known_too(connections: Connections) -> None:
    tell(connections, (ACCEPTED, 20), (DISCONNECTED, 20), (ACCEPTED, 20))
    connections.claim(1, 20)
    assert connections.handed_on


def test_what_was_accepted_before_another_process_was_expected_is_outdated(connections: Connections) -> None:
    tell(connections, (ACCEPTED, 20), (ACCEPTED, 21))
    connections.claim(1, 20)
    assert not connections.outdated(1)
    connections.forget()
    tell(connections, (ACCEPTED, 22), (DISCONNECTED, 20))
    assert [connections.outdated(number) for number in (0, 1, 2, 3)] == [True, True, True, False]
    assert not connections.lost
    assert not connections.ended
    tell(connections, (DISCONNECTED, 22))
    assert connections.ended, "number 2 stands, but cannot be the rank's"


def test_without_any_connection_nothing_more_can_come(connections: Connections) -> None:
    assert connections.ended
    tell(connections, (ACCEPTED, 20))
    assert not connections.ended
    tell(connections, (DISCONNECTED, 20))
    assert connections.ended


def test_an_unknown_descriptor_is_nobodys_older_connection(connections: Connections) -> None:
    tell(connections, (ACCEPTED, 999_999), (ACCEPTED, 20))
    assert not connections.older_from("127.0.0.1", 2)
