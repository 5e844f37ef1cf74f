"""One engine process as its parent holds it: start it, talk to it, notice its end."""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import zmq
import zmq.asyncio

from config import EngineConfig
from engine.errors import CapacityError, CheckpointError, EngineDiedError
from engine.messages import Failed, FromEngine, Ready, ToEngine, decode_from_engine, encode

SOURCE_ROOT = Path(__file__).parent.parent
EXIT_WAIT_S = 1.0
LAST_WORD_WAIT_S = 0.5


class ChildProcess:
    """A started engine process. Its standard input stays open as long as the parent lives; its end ends the process."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, directory: str) -> None:
        self._process = process
        self._socket = socket
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
            _free(socket, directory)
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
            await self._socket.send(encode(message), flags=zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineDiedError("the engine process has just ended") from error

    async def receive(self) -> FromEngine:
        return decode_from_engine(await self._socket.recv())

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
        while await self._socket.poll(LAST_WORD_WAIT_S * 1000):
            message = await self.receive()
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
        _free(self._socket, self._directory)

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


def _free(socket: zmq.asyncio.Socket, directory: str) -> None:
    socket.close()
    shutil.rmtree(directory, ignore_errors=True)


def _bind(address: str) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
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
    # threads that spin while they wait starve the server beside them, and each other where cores are few
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": path}


def _as_error(failed: Failed) -> CheckpointError | CapacityError | EngineDiedError:
    kinds = {"checkpoint": CheckpointError, "capacity": CapacityError, "crash": EngineDiedError}
    return kinds[failed.kind](failed.text)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "no exit status"
    if code >= 0:
        return f"exit status {code}"
    return signal.Signals(-code).name
