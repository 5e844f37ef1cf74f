"""How long a conversation waits for its first token when it comes back, by where the engine finds it again.

    python tests/bench/returns.py --model DIR --prompt-tokens 90000 --host-cache-bytes 16GiB --disk-cache-dir DIR

It grows as an agent's does: every turn brings back everything before it, its answer too, and something new. First at
once, then with other conversations of the same length in between, then after the engine process was killed, and then in
a service started anew. Whether the device still holds it decides `--kv-cache-tokens`. Prints JSON: seconds from
submission to the first token, and tokens that were reused, brought back and computed.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from pydantic import Field

sys.path.insert(0, str(Path(__file__).parents[2]))

from config import ConfigError, EngineConfig, load, usage
from config.section import Section
from engine import EngineClient, EngineError, Request, SamplingParams
from engine.bench import about, keep

# copies and files follow the answers
SETTLE_S = 3.0


class ReturnsConfig(Section):
    """The conversation that comes back, and those in between."""

    prompt_tokens: int = Field(default=2048, ge=64)
    new_tokens: int = Field(default=64, ge=1)
    answer_tokens: int = Field(default=200, ge=2)
    others: int = Field(default=5, ge=0)
    repeats: int = Field(default=3, ge=1)
    kills: bool = True
    fills: bool = False
    """Fill the KV cache and the states with random numbers instead of computing long prompts, on a GPU; what comes back
    is copied and continued as ever, only that "new" says nothing."""

    out: Path | None = None


class Returns:
    """One service after the other, and what was measured so far."""

    def __init__(self, engine: EngineConfig, config: ReturnsConfig) -> None:
        self._engine = engine
        self._config = config
        self._random = Random(0)
        self._num_requests = 0
        self._conversation: list[int] = []
        self.report: dict[str, Any] = {}

    async def measure(self) -> None:
        client = EngineClient(self._engine, "engine.bench_filled" if self._config.fills else "engine.process")
        await client.start()
        try:
            self._conversation = self._text(client, self._config.prompt_tokens - self._config.new_tokens)
            self.report |= about(self._engine, client) | self._config.model_dump(mode="json") | {"rows": []}
            await self._ask(client, self._text(client, 64))
            await self._row(client, "new")
            for _ in range(self._config.repeats):
                await self._row(client, "at once")
            for _ in range(self._config.repeats):
                await self._others(client)
                await self._row(client, "after others")
            if self._config.kills:
                await asyncio.sleep(SETTLE_S)
                await self._kill(client)
                await self._row(client, "of a killed engine")
        finally:
            await client.close()
        if self._engine.disk_cache_dir is not None:
            await self._start_anew()

    async def _start_anew(self) -> None:
        client = EngineClient(self._engine)
        await client.start()
        try:
            await self._ask(client, self._text(client, 64))
            await self._row(client, "of an earlier service")
        finally:
            await client.close()

    async def _row(self, client: EngineClient, when: str) -> None:
        """The conversation comes back with something new."""
        before = client.stats.num_host_tokens
        prompt = self._conversation + self._text(client, self._config.new_tokens)
        seconds, cached, answer = await self._ask(client, prompt, self._config.answer_tokens)
        self._conversation = prompt + answer
        row = {
            "when": when,
            "ttft_s": round(seconds, 4),
            "prompt_tokens": len(prompt),
            "cached_tokens": cached,
            "brought_back": client.stats.num_host_tokens - before,
            "computed": len(prompt) - cached,
        }
        self.report["rows"].append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        keep(self.report, self._config.out)

    async def _others(self, client: EngineClient) -> None:
        for _ in range(self._config.others):
            await self._ask(client, self._text(client, self._config.prompt_tokens))

    async def _ask(self, client: EngineClient, prompt: list[int], max_tokens: int = 2) -> tuple[float, int, list[int]]:
        """Seconds to the first token, tokens that were not computed, and the answer."""
        self._num_requests += 1
        name = str(self._num_requests)
        began = time.monotonic()
        await client.submit(Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0)))
        first_s, cached, answer = 0.0, 0, []
        async for event in client.stream(name):
            first_s = first_s or time.monotonic() - began
            cached = event.num_cached_tokens
            answer += event.token_ids
        return first_s, cached, answer

    async def _kill(self, client: EngineClient) -> None:
        killed = client.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await _until(lambda: client.state == "ready" and client.pid not in (None, killed))
        await self._ask(client, self._text(client, 64))

    def _text(self, client: EngineClient, count: int) -> list[int]:
        return self._random.choices(range(client.info.vocab_size), k=count)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the client has nothing to wait for
        await asyncio.sleep(0.05)


def main() -> int:
    sections = {"engine": EngineConfig, "returns": ReturnsConfig}
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage("returns.py", sections))
        return 0
    try:
        settings = load(sections, sys.argv[1:])
        returns = Returns(settings["engine"], settings["returns"])
        asyncio.run(returns.measure())
    except (ConfigError, EngineError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(returns.report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
