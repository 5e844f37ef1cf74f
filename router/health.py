"""Active checks of the upstreams: is it ready, and which models does it serve."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterable
from typing import Any

import httpx

from config import RouterConfig
from router.errors import GatewayError
from router.guard import beside
from router.metrics import Metrics
from router.transport import Transport
from router.worker import Worker, judge

# asked in this order until one of them exists
CHECK_PATHS = ("/ready", "/health", "/v1/models")
MODELS_EVERY = 15
# between two checks of an upstream that is away, twice as long after each up to the second
SOON_S, LATER_S = 0.25, 1.0
_READ_BYTES = 4 * 1024 * 1024
_log = logging.getLogger("longlane.router")


class CheckError(Exception):
    """The upstream answered, but not that it is well."""


class HealthChecks:
    """Checks every worker in a loop of its own, so that one that hangs delays no other."""

    def __init__(self, config: RouterConfig, transport: Transport, metrics: Metrics) -> None:
        self.config = config
        self._transport = transport
        self._metrics = metrics
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    def follow(self, workers: Iterable[Worker]) -> None:
        """Checks these from now on, and no others."""
        wanted = set(workers)
        for worker in set(self._tasks) - wanted:
            self._tasks.pop(worker).cancel()
        for worker in wanted - set(self._tasks):
            self._tasks[worker] = beside(self._watch(worker))

    async def aclose(self) -> None:
        tasks = list(self._tasks.values())
        self.follow(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def check(self, worker: Worker) -> None:
        was_healthy = worker.health.healthy
        try:
            await self._probe(worker)
        except (GatewayError, CheckError) as error:
            worker.health = judge(worker.health, False, str(error))
        except Exception:
            # the next check may fare better, and without checks an upstream stays as it was for ever
            _log.exception("the check of upstream %s failed inside the gateway", worker.name)
            worker.health = judge(worker.health, False, "its check failed inside the gateway; the log says why")
        else:
            worker.health = judge(worker.health, True, "ready")
        is_healthy = worker.health.healthy
        self._metrics.healthy.labels(worker.name, worker.upstream.lane).set(bool(is_healthy))
        self._metrics.breaker_open.labels(worker.name).set(worker.breaker.state(time.monotonic()) == "open")
        if is_healthy != was_healthy:
            # the next check reads the models anew: what came back may serve others
            worker.num_checks = worker.num_checks if is_healthy else 0
            word = "is ready" if is_healthy else f"is away: {worker.health.reason}"
            _log.info("upstream %s (%s lane) %s", worker.name, worker.upstream.lane, word)

    async def _watch(self, worker: Worker) -> None:
        soon_s = SOON_S
        while True:
            await self.check(worker)
            if worker.healthy:
                soon_s = SOON_S
                await self._pause(worker, self.config.health_interval_s)
            else:
                # what was killed may be back at any moment, and one success is only half of what brings it up
                soon_s = SOON_S if worker.health.streak else soon_s
                await asyncio.sleep(min(soon_s, self.config.health_interval_s))
                soon_s = min(2 * soon_s, LATER_S)

    async def _pause(self, worker: Worker, seconds: float) -> None:
        """Shorter where a request finds the upstream gone in the meantime."""
        least_s = min(SOON_S, seconds)
        await asyncio.sleep(least_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds - least_s):
                await worker.found_gone.wait()
        worker.found_gone.clear()

    async def _probe(self, worker: Worker) -> None:
        path = CHECK_PATHS[worker.check_path]
        status, body = await self._get(worker, path)
        if status == 404 and path != CHECK_PATHS[-1]:
            worker.check_path += 1
            await self._probe(worker)
            return
        if status >= 400:
            raise CheckError(f"answers {status} on {path}{_message(body)}")
        if worker.num_checks % MODELS_EVERY == 0:
            worker.cards = await self._models(worker)
        worker.num_checks += 1

    async def _models(self, worker: Worker) -> dict[str, dict[str, Any]]:
        status, body = await self._get(worker, "/v1/models")
        if status != 200:
            raise CheckError(f"answers {status} on /v1/models{_message(body)}")
        cards = body.get("data") if isinstance(body, dict) else None
        if not isinstance(cards, list):
            raise CheckError("its /v1/models is no list of models")
        return {card["id"]: card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)}

    async def _get(self, worker: Worker, path: str) -> tuple[int, Any]:
        key = worker.upstream.key
        headers = {"accept-encoding": "identity"}
        if key is not None:
            headers["authorization"] = f"Bearer {key.get_secret_value()}"
        timeout_s = self.config.connect_timeout_s
        response = await self._transport.open(worker.name, "GET", worker.upstream.url + path, headers, b"", timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return response.status_code, await self._json(worker, response)
        except TimeoutError as error:
            raise CheckError(f"did not finish its answer on {path}") from error
        finally:
            await self._transport.close(response)

    async def _json(self, worker: Worker, response: httpx.Response) -> Any:
        body = b""
        async for chunk in self._transport.chunks(worker.name, response):
            body += chunk
            if len(body) > _READ_BYTES:
                raise CheckError("its answer is too large")
        try:
            return json.loads(body)
        except ValueError:
            # some answer a health check with an empty or a plain body
            return None
        except RecursionError as error:
            raise CheckError("its answer is nested too deeply") from error


def _message(body: Any) -> str:
    """What an error body says, in whatever of the usual shapes."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error")
    text = error.get("message") if isinstance(error, dict) else body.get("reason") or body.get("status")
    return f": {text}" if isinstance(text, str) else ""
