"""One engine process as its parent holds it: start it, talk to it, notice its end."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from pathlib import Path

import zmq

from config import EngineConfig
from engine.errors import CapacityError, CheckpointError, EngineDiedError
from engine.messages import Failed, FromEngine, Ready, ToEngine, decode_from_engine, encode

SOURCE_ROOT = Path(__file__).parent.parent
EXIT_WAIT_S = 1.0
LAST_WORD_WAIT_S = 0.5
ENGINE_ENVIRONMENT = {
    # threads that spin while they wait starve the server beside them, and each other where cores are few
    "OMP_WAIT_POLICY": "PASSIVE",
    # else every tensor of more than 10 MB takes whole pages of its own, half a gigabyte in all
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


class Inbox:
    """Messages of a socket in the order in which they came. One reader at a time.

    The socket is read when its descriptor says so and emptied at once: a future and several system calls for each
    message, as zmq's own way into asyncio has them, would cost more than a step's tokens do.
    """

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._loop.add_reader(socket.get(zmq.FD), self.look)

    async def take(self) -> bytes:
        while not self._messages:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._messages.popleft()

    def look(self) -> None:
        """Takes what there is. The descriptor tells only once of what came, and telling it to whoever sends counts."""
        while not self._socket.closed and self._socket.get(zmq.EVENTS) & zmq.POLLIN:
            self._messages.append(self._socket.recv(zmq.NOBLOCK))
        if self._messages and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.get(zmq.FD))
        self._socket.close()


class ChildProcess:
    """A started engine process. Its standard input stays open as long as the parent lives; its end ends the process."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.Socket, directory: str) -> None:
        self._process = process
        self._socket = socket
        self._inbox = Inbox(socket)
        self._directory = directory

    @classmethod
    async def spawn(cls, config: EngineConfig, module: str, host_file: int | None = None) -> "ChildProcess":
        """module     that is the process
        host_file  descriptor of the host tier's memory
        """
        # only this user may enter the directory, so nobody else can take the engine's place on the socket
        directory = tempfile.mkdtemp(prefix="longlane-engine-")
        address = f"ipc://{directory}/socket"
        socket = _bind(address)
        try:
            process = await _launch(address, module, host_file)
        except BaseException:
            socket.close()
            shutil.rmtree(directory, ignore_errors=True)
            raise
        assert process.stdin is not None
        process.stdin.write(config.model_dump_json().encode() + b"\n")
        return cls(process, socket, directory)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def send(self, message: ToEngine) -> None:
        """raises  EngineDiedError when nobody is left to receive"""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineDiedError("the engine process has just ended") from error
        self._inbox.look()

    async def receive(self) -> FromEngine:
        return decode_from_engine(await self._inbox.take())

    async def ready(self) -> Ready:
        """Waits until the checkpoint is loaded. raises CheckpointError, CapacityError, EngineDiedError"""
        message = await self._receive_or_end()
        if isinstance(message, Ready):
            return message
        raise _as_error(message) if isinstance(message, Failed) else EngineDiedError(f"unexpected {message}")

    async def ended(self) -> None:
        await self._process.wait()

    async def last_words(self) -> str:
        """Why the process ended, as far as it could say."""
        with contextlib.suppress(TimeoutError):
            while True:
                message = await asyncio.wait_for(self.receive(), LAST_WORD_WAIT_S)
                if isinstance(message, Failed):
                    return message.text
        return f"the engine process ended with {_describe_exit(self._process.returncode)}"

    async def kill(self) -> None:
        """Ends the process, whatever state it is in, and frees everything that was held for it."""
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), EXIT_WAIT_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._inbox.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _receive_or_end(self) -> FromEngine:
        receiving = asyncio.ensure_future(self.receive())
        ending = asyncio.ensure_future(self.ended())
        try:
            await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                return receiving.result()
        finally:
            receiving.cancel()
            ending.cancel()
        raise EngineDiedError(await self.last_words())


async def _launch(address: str, module: str, host_file: int | None) -> asyncio.subprocess.Process:
    files = () if host_file is None else (host_file,)
    # a session of its own: Ctrl-C in the terminal reaches the parent alone, which decides what to do
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, address, *map(str, files)),
        pass_fds=files,
        stdin=asyncio.subprocess.PIPE,
        env=_environment(),
        start_new_session=True,
    )


def _bind(address: str) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.PAIR)
    # what waits is bounded by the requests in flight; a full queue would stop the engine's step
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    socket.bind(address)
    return socket


def _environment() -> dict[str, str]:
    """The parent's environment, with the source tree importable from whatever directory it was started in."""
    path = os.environ.get("PYTHONPATH")
    path = f"{SOURCE_ROOT}{os.pathsep}{path}" if path else str(SOURCE_ROOT)
    return {**ENGINE_ENVIRONMENT, **os.environ, "PYTHONPATH": path}


def _as_error(failed: Failed) -> CheckpointError | CapacityError | EngineDiedError:
    kinds = {"checkpoint": CheckpointError, "capacity": CapacityError, "crash": EngineDiedError}
    return kinds[failed.kind](failed.text)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "no exit status"
    if code >= 0:
        return f"exit status {code}"
    return signal.Signals(-code).name
