"""`python -m tests.bench.upstream PORT`: an upstream that costs little and stamps its events with the time.

A body's `rate` and `seconds` say how many events a second a stream has and for how long; a rate of 0 brings heartbeats.
"""

import asyncio
import json
import sys
import time

import uvloop

from tests.router.live import Connection, Received, ScriptedUpstream

HEARTBEAT_S = 5.0
USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
CHUNK = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
    "usage": USAGE,
}


async def answer(received: Received, connection: Connection) -> None:
    if received.method == "GET":
        # other gateways ask for the health by other names
        await connection.answer(200, {})
        return
    body = received.json
    if not body.get("stream"):
        await connection.answer(200, ANSWER)
        return
    await connection.start_stream()
    rate = body["rate"]
    started = time.monotonic()
    for number in range(1, int(body["seconds"] * (rate or 1 / HEARTBEAT_S)) + 1):
        await asyncio.sleep(started + number / (rate or 1 / HEARTBEAT_S) - time.monotonic())
        await connection.chunk(_event() if rate else b": heartbeat\n\n")
    await connection.chunk(b"data: [DONE]\n\n")
    await connection.send(b"0\r\n\r\n")


def _event() -> bytes:
    # the time is the text, which a gateway that writes chunks anew keeps as well
    choice = {"index": 0, "delta": {"content": str(time.monotonic_ns())}, "finish_reason": None}
    return b"data: " + json.dumps(CHUNK | {"choices": [choice]}).encode() + b"\n\n"


async def serve(port: int) -> None:
    upstream = ScriptedUpstream(threads=None, answer=answer)
    await upstream.listen(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
