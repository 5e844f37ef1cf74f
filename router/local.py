"""`python -m router.local`: engine server and gateway together on this machine, as `make serve` runs them."""

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from config import ConfigError, EngineConfig, RouterConfig, ServerConfig, load, split_flags, usage
from config.keys import Key, digest, generate, write_keys
from config.listen import PortError, bind
from config.output import while_read
from router.discovery import known_upstreams

SECTIONS = {"engine": EngineConfig, "server": ServerConfig, "router": RouterConfig}
START_S = 900.0
# a child that dies this often within this time is not started again
RESTARTS, RESTART_WINDOW_S = 3, 60.0
KILL_AFTER_S = 5.0
_PR_SET_PDEATHSIG = 1


class StackError(Exception):
    """The stack cannot run; the text says why."""


def main(argv: Sequence[str]) -> int:
    if {"--help", "-h"} & set(argv):
        print(usage("router.local", SECTIONS))
        return 0
    try:
        settings = load(SECTIONS, argv)
        _check_ports(settings["server"], settings["router"])
        with tempfile.TemporaryDirectory(prefix="longlane-") as folder:
            return asyncio.run(_run(settings, _children(settings, argv, Path(folder))))
    except (ConfigError, PortError, StackError) as error:
        print(f"longlane: {error}", file=sys.stderr)
        return 1


def say(text: str) -> None:
    print(f"longlane: {text}" if text else "", flush=True)


@dataclass(slots=True)
class Child:
    """One of the programs, in a process group of its own so that Ctrl-C reaches it through us alone."""

    name: str
    arguments: list[str]
    environment: Mapping[str, str]
    drain_s: float
    process: asyncio.subprocess.Process | None = None
    deaths: list[float] = field(default_factory=list)

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *self.arguments,
            env={**os.environ, **self.environment},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    async def stop(self, hurried: asyncio.Event) -> None:
        """SIGTERM, then SIGKILL to the whole group once the drain time is over or somebody is in a hurry."""
        if self.process is None:
            return
        if self.process.returncode is None:
            self.process.terminate()
            endings = [asyncio.ensure_future(each) for each in (self.process.wait(), hurried.wait())]
            limit_s = self.drain_s + KILL_AFTER_S
            await asyncio.wait(endings, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            for ending in endings:
                ending.cancel()
        self.kill_group()
        await self.process.wait()

    def kill_group(self) -> None:
        """Ends what a dead child may have left in its group; the engine, in a session of its own, ends by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def may_restart(self) -> bool:
        now = time.monotonic()
        self.deaths = [at for at in self.deaths if now - at < RESTART_WINDOW_S] + [now]
        return len(self.deaths) < RESTARTS


def _end_with_parent() -> None:
    # runs in the child: a killed parent leaves nobody on the ports
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _check_ports(server: ServerConfig, router: RouterConfig) -> None:
    for host, port, flag in (
        (server.host, server.port, "--server-port"),
        (router.host, router.port, "--router-port"),
        (router.admin_host, router.admin_port, "--admin-port"),
    ):
        if port == 0:
            raise StackError(f"{flag} 0 is not possible here: the other program has to know the port")
        bind(host, port, flag).close()


def _children(settings: Mapping[str, Any], argv: Sequence[str], folder: Path) -> list[Child]:
    """Both programs with the flags that belong to them, sharing secrets that nobody else knows."""
    server, router = settings["server"], settings["router"]
    flags = split_flags(SECTIONS, argv)
    _check_reached(server, router)
    secret = _gateway_secret(server, router)
    server_env, router_env = {"LONGLANE_SERVER_GATEWAY_SECRET": secret}, {"LONGLANE_ROUTER_GATEWAY_SECRET": secret}
    router_env["LONGLANE_ROUTER_LONG_URL"] = _url(server.host, server.port)
    if router.keys_file is not None and server.keys_file is None:
        # keys on the gateway alone would leave the server's port open beside it
        key = _gateway_key(server, router)
        write_keys(folder / "keys.toml", [Key(name="gateway", sha256=digest(key))])
        server_env["LONGLANE_SERVER_KEYS_FILE"] = str(folder / "keys.toml")
        router_env["LONGLANE_ROUTER_LONG_KEY"] = key
    router_env.setdefault("LONGLANE_ROUTER_LOG_FORMAT", os.environ.get("LONGLANE_ROUTER_LOG_FORMAT", "text"))
    return [
        Child("engine server", ["server", *flags["engine"], *flags["server"]], server_env, server.drain_s),
        Child("gateway", ["router", *flags["router"]], router_env, router.drain_s),
    ]


def _gateway_key(server: ServerConfig, router: RouterConfig) -> str:
    """What the gateway will show this machine's server: the key that its upstream there is given, else a new one."""
    here = router.model_copy(update={"long_url": _url(server.host, server.port)})
    listed = known_upstreams(here) if router.upstreams or router.upstreams_file else ()
    given = [one.key for one in listed if urlsplit(one.url).port == server.port and one.key] or [router.long_key]
    return given[0].get_secret_value() if given[0] else generate()


def _check_reached(server: ServerConfig, router: RouterConfig) -> None:
    if router.upstreams and all(urlsplit(one.url).port != server.port for one in known_upstreams(router)):
        raise StackError(
            f"no upstream is at {_url(server.host, server.port)}, so the engine here would get no request: "
            "add one to [[router.upstreams]], or run `python -m router` alone"
        )


def _gateway_secret(server: ServerConfig, router: RouterConfig) -> str:
    """The one that either is given, else a new one."""
    given = {one.get_secret_value() for one in (server.gateway_secret, router.gateway_secret) if one is not None}
    if len(given) > 1:
        raise StackError("server and router have different values of gateway_secret: give both the same one, or none")
    return given.pop() if given else secrets.token_urlsafe(32)


async def _run(settings: Mapping[str, Any], children: Sequence[Child]) -> int:
    stopped, hurried = asyncio.Event(), asyncio.Event()

    def end() -> None:
        (hurried if stopped.is_set() else stopped).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end)
    work = asyncio.ensure_future(_bring_up(settings, children))
    waiting = asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        say(f"stopping; what runs has {max(child.drain_s for child in children):g} s to end, or Ctrl-C once more")
    finally:
        for task in (work, waiting):
            task.cancel()
        await asyncio.gather(work, waiting, return_exceptions=True)
        await asyncio.gather(*(child.stop(hurried) for child in reversed(children)))
    say("stopped")
    return 0


async def _bring_up(settings: Mapping[str, Any], children: Sequence[Child]) -> None:
    """Starts one after the other, so that the gateway finds its upstream ready; then watches both."""
    server, router = settings["server"], settings["router"]
    engine_child, gateway_child = children
    server_url, gateway_url = _url(server.host, server.port), _url(router.host, router.port)
    started = time.monotonic()
    say(f"starting the engine server on {server_url} with {settings['engine'].model}")
    await engine_child.start()
    await _wait_ready(engine_child, server_url)
    key = gateway_child.environment.get("LONGLANE_ROUTER_LONG_KEY")
    card = await asyncio.to_thread(_first_model, server_url, key)
    say(f"the engine is ready after {time.monotonic() - started:.1f} s: {_describe(card)}")
    await gateway_child.start()
    await _wait_ready(gateway_child, gateway_url)
    say(f"the gateway is ready on {gateway_url} (metrics on {_url(router.admin_host, router.admin_port)}/metrics)")
    _say_examples(gateway_url, card["id"], has_keys=router.keys_file is not None)
    await asyncio.gather(*(_keep_alive(child) for child in children))


async def _wait_ready(child: Child, url: str) -> None:
    """Returns when `/ready` says yes; raises StackError when the child ends first or takes too long."""
    deadline, told = time.monotonic() + START_S, time.monotonic()
    while time.monotonic() < deadline:
        if child.process.returncode is not None:
            raise StackError(
                f"the {child.name} ended with exit code {child.process.returncode} before it was ready; "
                "its own words stand above"
            )
        status, state = await asyncio.to_thread(_get, f"{url}/ready", None)
        if status == 200:
            return
        if time.monotonic() - told >= 5:
            told = time.monotonic()
            say(f"waiting for the {child.name}: {state.get('status', 'not there yet')}")
        await asyncio.sleep(0.1)
    raise StackError(f"the {child.name} was not ready within {START_S:g} s")


async def _keep_alive(child: Child) -> None:
    """Starts a dead child again; raises StackError when it does not stay up."""
    while True:
        code = await child.process.wait()
        child.kill_group()
        if not child.may_restart():
            raise StackError(
                f"the {child.name} ended {RESTARTS} times within {RESTART_WINDOW_S:g} s, "
                f"the last time with exit code {code}: everything stops"
            )
        say(f"the {child.name} ended with exit code {code}: starting it again")
        await child.start()


def _get(url: str, key: str | None) -> tuple[int, dict[str, Any]]:
    """Status and JSON object; status 0 while nothing listens."""
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as response:
            return response.status, _object(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _object(error.read())
    except OSError:
        # nothing listens yet
        return 0, {}


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _first_model(url: str, key: str | None) -> dict[str, Any]:
    status, models = _get(f"{url}/v1/models", key)
    cards = models.get("data") or []
    if status != 200 or not cards:
        raise StackError(f"the engine server answers {status} on /v1/models")
    return cards[0]


def _describe(card: Mapping[str, Any]) -> str:
    return f"{card['id']} on {card.get('device', 'an unnamed device')}, {card.get('max_model_len')} tokens of context"


def _say_examples(url: str, model: str, has_keys: bool) -> None:
    key = "$LONGLANE_KEY" if has_keys else "anything"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 200})
    print(
        f"""
curl {url}/v1/chat/completions \\
  -H "Authorization: Bearer {key}" -H "Content-Type: application/json" \\
  -d '{body}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{"YOUR KEY" if has_keys else key}")
stream = client.chat.completions.create(
    model="{model}", messages=[{{"role": "user", "content": "Hello!"}}], max_tokens=200, stream=True
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)

Press Ctrl-C to stop both.
""",
        flush=True,
    )


def _url(host: str, port: int) -> str:
    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reached}:{port}"


if __name__ == "__main__":
    sys.exit(while_read(main, sys.argv[1:]))
