"""How long short requests wait for their first token alone, and beside one long prompt that is being computed.

    python tests/bench/beside.py --model DIR --long-tokens 200000 --short-tokens 1000 --max-num-requests 12

All at once, and one after another. Prints JSON: seconds from submission to the first token as a reader of the streams
sees them. The long request is aborted once the short ones have their answers, and says how far it had come.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from pydantic import Field

sys.path.insert(0, str(Path(__file__).parents[2]))

from config import ConfigError, EngineConfig, load, usage
from config.section import Section
from engine import EngineClient, EngineError, Request, SamplingParams
from engine.bench import about, keep

# of the long prompt before the first short one comes
HEAD_START_S = 0.3


class BesideConfig(Section):
    """The long prompt and the short ones."""

    long_tokens: int = Field(default=8000, ge=64)
    short_tokens: int = Field(default=100, ge=1)
    shorts: int = Field(default=10, ge=1)
    every_s: float = Field(default=0.3, gt=0)
    answer_tokens: int = Field(default=16, ge=1)
    out: Path | None = None


class Beside:
    """One service, and what was measured so far."""

    def __init__(self, client: EngineClient, config: BesideConfig) -> None:
        self._client = client
        self._config = config
        self._random = Random(0)
        self._num_requests = 0
        self.report: dict[str, Any] = {}

    async def measure(self, engine: EngineConfig) -> None:
        self.report = about(engine, self._client) | self._config.model_dump(mode="json") | {"rows": []}
        await self._shorts(0.0)
        for every_s in (0.0, self._config.every_s):
            alone = await self._shorts(every_s)
            beside, computed = await self._beside(every_s)
            p95 = [percentile(times, 0.95) for times in (alone, beside)]
            row = {
                "every_s": every_s,
                "alone_p50_s": percentile(alone, 0.5),
                "beside_p50_s": percentile(beside, 0.5),
                "alone_p95_s": p95[0],
                "beside_p95_s": p95[1],
                "times": round(p95[1] / p95[0], 2),
                "long_computed": computed,
            }
            self.report["rows"].append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            keep(self.report, self._config.out)

    async def _beside(self, every_s: float) -> tuple[list[float], int]:
        """Times of the short ones, and tokens of the long prompt that were computed meanwhile."""
        before = self._client.stats.num_prompt_tokens
        name = await self._submit(self._config.long_tokens)
        long = asyncio.create_task(self._first(name, time.monotonic()))
        await asyncio.sleep(HEAD_START_S)
        times = await self._shorts(every_s)
        assert not long.done(), "the long prompt ended before the short ones did: make it longer"
        await self._client.abort(name)
        await long
        return times, self._client.stats.num_prompt_tokens - before - self._config.shorts * self._config.short_tokens

    async def _shorts(self, every_s: float) -> list[float]:
        """Seconds to their first tokens."""
        return await asyncio.gather(*(self._short(number * every_s) for number in range(self._config.shorts)))

    async def _short(self, wait_s: float) -> float:
        await asyncio.sleep(wait_s)
        began = time.monotonic()
        return await self._first(await self._submit(self._config.short_tokens), began)

    async def _submit(self, num_tokens: int) -> str:
        self._num_requests += 1
        name = str(self._num_requests)
        prompt = tuple(self._random.choices(range(self._client.info.vocab_size), k=num_tokens))
        sampling = SamplingParams(max_tokens=self._config.answer_tokens, temperature=0.0)
        await self._client.submit(Request(name, prompt, sampling))
        return name

    async def _first(self, name: str, began: float) -> float:
        """Follows a request to its end; seconds to its first event."""
        first_s = None
        async for _ in self._client.stream(name):
            first_s = time.monotonic() - began if first_s is None else first_s
        assert first_s is not None
        return first_s


def percentile(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 4)


async def run(engine: EngineConfig, config: BesideConfig) -> dict[str, Any]:
    client = EngineClient(engine)
    await client.start()
    try:
        beside = Beside(client, config)
        await beside.measure(engine)
    finally:
        await client.close()
    return beside.report


def main() -> int:
    sections = {"engine": EngineConfig, "beside": BesideConfig}
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage("beside.py", sections))
        return 0
    try:
        settings = load(sections, sys.argv[1:])
        report = asyncio.run(run(settings["engine"], settings["beside"]))
    except (ConfigError, EngineError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
