"""`python -m tests.bench.server_engine ADDRESS`: an engine process that costs little and notes when it makes a token.

It keeps the protocol of `engine.process`. Every running request gets one token a step; the seed says what is written:
0 content, 1 a thought, 2 the text of a tool call. The times go to the file that LONGLANE_BENCH_STAMPS names, a line of
JSON for each request.
"""

import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from tokenizers import Tokenizer

from config import EngineConfig
from engine.checkpoint_dir import resolve_checkpoint
from engine.messages import Abort, Answer, Ready, Stepped, Submit, decode_to_engine, encode
from engine.request import EngineInfo, EngineStats, Request, TokenEvent

STAMPS = "LONGLANE_BENCH_STAMPS"
STEP_S = 0.01
WORD = " a"
BEGINNINGS = ["</think>\n\n", "", "</think>\n\n<tool_call>\n<function=write>\n<parameter=text>\n"]
VOCAB_SIZE = 8192


@dataclass
class Run:
    request: Request
    beginning: tuple[int, ...]
    num_sent: int = 0
    times: list[int] = field(default_factory=list)


def main() -> None:
    config = EngineConfig.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(sys.argv[1])
    directory = resolve_checkpoint(config.model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    (word,) = tokenizer.encode(WORD, add_special_tokens=False).ids
    beginnings = [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in BEGINNINGS]
    socket.send(encode(Ready(_info(config, directory), EngineStats())))
    with Path(os.environ[STAMPS]).open("a", buffering=1) as stamps:
        _step_for_ever(socket, word, beginnings, stamps)


def _step_for_ever(socket: zmq.Socket, word: int, beginnings: list[tuple[int, ...]], stamps) -> None:
    runs: dict[str, Run] = {}
    due = time.monotonic()
    while True:
        while not runs or socket.poll(0):
            match decode_to_engine(socket.recv()):
                case Submit(request=request):
                    runs[request.request_id] = Run(request, beginnings[request.sampling.seed or 0])
                    socket.send(encode(Answer(request.request_id)))
                case Abort(request_id=request_id):
                    runs.pop(request_id, None)
        due = max(due + STEP_S, time.monotonic() - STEP_S)
        time.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic_ns()
        events = [_advance(run, word, now) for run in runs.values()]
        for event in events:
            if event.finish_reason is not None:
                stamps.write(json.dumps({"id": event.request_id, "times": runs.pop(event.request_id).times}) + "\n")
        # last, so that whoever read a stream to its end finds its times
        socket.send(encode(Stepped(events, EngineStats(num_running=len(runs)))))


def _advance(run: Run, word: int, now: int) -> TokenEvent:
    """The beginning comes whole with the first token: it is not measured."""
    tokens = (word,) if run.num_sent else (*run.beginning, word)
    run.num_sent += 1
    run.times.append(now)
    is_last = run.num_sent == run.request.sampling.max_tokens - len(run.beginning)
    return TokenEvent(run.request.request_id, tokens, finish_reason="length" if is_last else None)


def _info(config: EngineConfig, directory: Path) -> EngineInfo:
    return EngineInfo(
        checkpoint_dir=str(directory),
        max_model_len=config.max_model_len or 262_144,
        vocab_size=VOCAB_SIZE,
        device="bench",
        num_drafts=0,
        max_num_requests=config.max_num_requests,
        kv_cache_tokens=262_144,
    )


def _leave_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
