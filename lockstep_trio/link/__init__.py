"""Moving frames: ZeroMQ sockets under Trio, and the contract that every link keeps. Private to the package."""

from .interface import Frame, GroupLink, Loss, RankLink, Unreachable
from .zmq_group import Transport, ZmqGroupLink, open_zmq_link

__all__ = ["Frame", "GroupLink", "Loss", "RankLink", "Transport", "Unreachable", "ZmqGroupLink", "open_zmq_link"]
