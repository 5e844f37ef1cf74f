"""The engine's own process: `python -m engine.process ADDRESS [FILE]`, settings as JSON in the first line of its input.

FILE is the descriptor of the host tier's memory, which belongs to the parent.
"""

import faulthandler
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from config import EngineConfig
from engine.errors import CapacityError, CheckpointError, QueueFullError, SamplingError
from engine.messages import Abort, Answer, Failed, FromEngine, Ready, Stepped, Submit, decode_to_engine, encode

if TYPE_CHECKING:
    from engine.engine import EngineCore


def main(load: "Callable[[EngineConfig], EngineCore] | None" = None) -> None:
    """load  instead of load_engine"""
    address, host_file = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None
    # Ctrl-C in a terminal reaches every process there; the parent decides what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    config = EngineConfig.model_validate_json(sys.stdin.buffer.readline())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not config.log_reuse:
        logging.getLogger("longlane.engine.reuse").setLevel(logging.WARNING)
    threading.Thread(target=_leave_with_parent, args=(address,), daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.connect(address)
    try:
        run(config, socket, load, host_file)
    except BaseException as error:
        _send(socket, _last_word(error))
        socket.close(linger=1000)
        context.term()
        sys.exit(1)


def run(
    config: EngineConfig,
    socket: zmq.Socket,
    load: "Callable[[EngineConfig], EngineCore] | None" = None,
    host_file: int | None = None,
) -> None:
    """Loads, then steps for ever; between steps it takes what the parent has sent."""
    # torch takes seconds to import: the watch over the parent must stand before
    from engine.loading import load_engine

    if load is not None:
        engine = load(config)
    else:
        engine = load_engine(config) if host_file is None else load_engine(config, host_file=host_file)
    # what was loaded stays: a collection that walks through it would hold up a step
    gc.collect()
    gc.freeze()
    _send(socket, Ready(engine.info, engine.stats()))
    while True:
        _receive(engine, socket)
        events = engine.step()
        _send(socket, Stepped(events, engine.stats()))


def _receive(engine: "EngineCore", socket: zmq.Socket) -> None:
    """Takes every message there is; waits for one when there is nothing to do."""
    while engine.is_idle or socket.poll(0):
        message = decode_to_engine(socket.recv())
        match message:
            case Submit(request=request):
                try:
                    engine.add(request)
                    answer = Answer(request.request_id)
                except QueueFullError as error:
                    answer = Answer(request.request_id, queue_full=str(error))
                except SamplingError as error:
                    answer = Answer(request.request_id, refused=(error.param, error.reason))
                _send(socket, answer)
            case Abort(request_id=request_id):
                engine.abort(request_id)


def _send(socket: zmq.Socket, message: FromEngine) -> None:
    socket.send(encode(message))


def _last_word(error: BaseException) -> Failed:
    if isinstance(error, CheckpointError):
        return Failed("checkpoint", str(error))
    if isinstance(error, CapacityError):
        return Failed("capacity", str(error))
    return Failed("crash", "".join(traceback.format_exception(error)))


def _leave_with_parent(address: str) -> None:
    """The parent holds the other end of our input: when it ends, however it ends, so does this process, at once."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
