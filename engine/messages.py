"""What the client and the engine process say to each other, as msgpack over one pair of sockets."""

from typing import Literal

import msgspec

from engine.request import EngineInfo, EngineStats, Request, TokenEvent


class Submit(msgspec.Struct, tag=True, frozen=True):
    request: Request


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_id: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    info: EngineInfo
    stats: EngineStats


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The engine's word on one Submit: taken, or the queue is full, or (parameter, reason) of what cannot be done."""

    request_id: str
    queue_full: str | None = None
    refused: tuple[str, str] | None = None


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """One step: the events of all requests and the counters after it. It is also the sign of life."""

    events: list[TokenEvent]
    stats: EngineStats


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The last word of an engine process."""

    kind: Literal["checkpoint", "capacity", "crash"]
    text: str


ToEngine = Submit | Abort
FromEngine = Ready | Answer | Stepped | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
