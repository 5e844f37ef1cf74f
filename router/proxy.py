"""Sends one request to the workers of its decision until one answers, and passes that answer on."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from config import RouterConfig, Upstream
from router import policy
from router.ask import Ask
from router.counts import body_counts, response_id
from router.errors import GatewayError, UnavailableError, UpstreamError, UpstreamTimeoutError
from router.exchange import Exchange
from router.headers import UNBUFFERED, client_headers, upstream_headers
from router.lane import Decision, LaneMemory, ResponseMemory, TokenRatio, stored_as
from router.metrics import Metrics
from router.relay import Relay
from router.route import Route
from router.transport import BrokenConnectionError, Transport, UnreachableError
from router.usage import ask_for_model, ask_for_usage, without_usage_comment, without_usage_event
from router.worker import Worker, judge

HELD_BYTES = 1024 * 1024
LENGTH_REFUSAL = b"maximum context length"
FAILOVER_STATUS = (502, 503)
# not 503, which is an upstream's own word for being full, and not 500, which a single bad request may cause
BROKEN_STATUS = (502, 504)


@dataclass(frozen=True, slots=True)
class Call:
    """One request with everything that was decided about it.

    tenant, priority  of its key
    number            of the request since the start
    adds_usage        the stream is asked for usage that the client does not get to see
    """

    exchange: Exchange
    route: Route
    ask: Ask
    decision: Decision
    body: bytes
    tenant: str
    priority: int = 0
    adds_usage: bool = False
    number: int = 0


class Proxy:
    """Fails over only before response headers, only for what may be repeated, only within the decision's workers."""

    def __init__(
        self,
        config: RouterConfig,
        workers: Mapping[str, Worker],
        transport: Transport,
        metrics: Metrics,
        memory: LaneMemory,
        ratio: TokenRatio,
        responses: ResponseMemory,
    ) -> None:
        self.config = config
        self._workers = workers
        self._transport = transport
        self._metrics = metrics
        self._memory = memory
        self._ratio = ratio
        self._responses = responses

    @property
    def _secret(self) -> str | None:
        return self.config.gateway_secret.get_secret_value() if self.config.gateway_secret else None

    async def forward(self, call: Call) -> None:
        """Raises GatewayError as long as the client has no headers."""
        queue = self._attempts(call)
        if not queue:
            raise self._nobody(call.decision)
        while queue:
            worker, *rest = queue
            queue = await self._attempt(call, worker, rest)

    def explain(self, call: Call) -> dict[str, Any]:
        """Where the request would go now, and why."""
        decision, attempts = call.decision, self._attempts(call)
        return {
            "lane": decision.lane,
            "reason": decision.reason,
            "is_fallback": decision.is_fallback,
            "estimated_prompt_tokens": decision.prompt_tokens,
            "long_prompt_tokens": self.config.long_prompt_tokens,
            "is_repeatable": call.ask.is_repeatable,
            "upstreams": [worker.name for worker in attempts],
            "models": dict(decision.models),
            "away": self._obstacles(decision),
        }

    def _attempts(self, call: Call) -> list[Worker]:
        now, config = time.monotonic(), self.config
        rule = policy.Rule(config.balance, call.ask.prefix, config.affinity_slack, call.number)
        lane = policy.order(self._among(call.decision.workers), now, rule)
        if not call.ask.is_repeatable:
            return lane[:1]
        return lane + policy.order(self._among(call.decision.spares), now, rule)

    def _among(self, names: Iterable[str]) -> list[Worker]:
        # one of them may have gone since the decision
        return [self._workers[name] for name in names if name in self._workers]

    def _obstacles(self, decision: Decision) -> dict[str, str]:
        now = time.monotonic()
        workers = self._among(decision.workers + decision.spares)
        return {worker.name: reason for worker in workers if (reason := worker.obstacle(now)) is not None}

    def _nobody(self, decision: Decision) -> UnavailableError:
        states = (
            f"{name} ({self._workers[name].upstream.url}): {why}" for name, why in self._obstacles(decision).items()
        )
        return UnavailableError(f"no upstream of the {decision.lane} lane is available: {'; '.join(states)}")

    async def _attempt(self, call: Call, worker: Worker, rest: list[Worker]) -> list[Worker]:
        """The workers to try next; none once the client has its answer."""
        trace = call.exchange.trace
        in_flight = self._metrics.in_flight.labels(worker.name)
        with worker.lease(), in_flight.track_inprogress(), trace.attempt(worker.upstream, call.exchange.method):
            try:
                response = await self._open(call, worker)
            except (UnreachableError, BrokenConnectionError) as error:
                worker.health = judge(worker.health, False, str(error))
                worker.found_gone.set()
                worker.note_failure(time.monotonic())
                if not rest:
                    raise
                trace.note_failure(error)
                return self._fail_over(call, worker, "connection", rest)
            except UpstreamError:
                worker.note_failure(time.monotonic())
                raise
            try:
                return await self._answer(call, worker, response, rest)
            except (BrokenConnectionError, UpstreamTimeoutError):
                worker.note_failure(time.monotonic())
                raise
            finally:
                await self._transport.close(response)

    async def _open(self, call: Call, worker: Worker) -> httpx.Response:
        exchange, upstream = call.exchange, worker.upstream
        query = f"?{exchange.query}" if exchange.query else ""
        exchange.notes["upstream"] = worker.name
        return await self._transport.open(
            worker.name,
            exchange.method,
            f"{upstream.url}{call.route.path}{query}",
            exchange.trace.passed_on(self._headers(call, upstream)),
            self._body(call, worker),
            first_byte_s(self.config, call.ask.is_stream, call.decision.prompt_tokens),
        )

    def _headers(self, call: Call, upstream: Upstream) -> dict[str, str]:
        exchange = call.exchange
        return upstream_headers(
            exchange.headers, upstream, exchange.request_id, call.tenant, call.priority, self._secret
        )

    def _body(self, call: Call, worker: Worker) -> bytes:
        """As the client sent it, but for the model's own name and the wish for usage."""
        model, body = call.decision.models.get(worker.name), call.body
        if model is not None:
            body = ask_for_model(body, model)
        return ask_for_usage(body) if self._edit(call, worker) is without_usage_event else body

    def _edit(self, call: Call, worker: Worker) -> Callable[[bytes], bytes] | None:
        """What has to be taken out of the stream again; None for all that passes as it is."""
        if self._secret is not None and worker.upstream.lane == "long":
            return without_usage_comment
        return without_usage_event if call.adds_usage else None

    async def _answer(self, call: Call, worker: Worker, response: httpx.Response, rest: list[Worker]) -> list[Worker]:
        call.exchange.trace.note_status(response.status_code)
        if response.status_code in BROKEN_STATUS:
            worker.note_failure(time.monotonic())
        if response.status_code in FAILOVER_STATUS and rest:
            return self._fail_over(call, worker, str(response.status_code), rest)
        chunks = self._transport.chunks(worker.name, response)
        if response.status_code < 300:
            self._memory.remember(call.ask.conversation, call.exchange.notes["lane"])
        if _is_event_stream(response):
            await self._pass_events(call, worker, response, chunks)
            return []
        _check(worker, response)
        held, is_whole = await self._hold(worker, response, chunks)
        longer = [one for one in rest if one.upstream.lane == "long" != worker.upstream.lane]
        if longer and response.status_code == 400 and LENGTH_REFUSAL in held:
            call.exchange.notes["lane"] = "long"
            return self._fail_over(call, worker, "length", longer)
        await self._pass_body(call, worker, response, chunks, held, is_whole)
        return []

    async def _pass_events(
        self, call: Call, worker: Worker, response: httpx.Response, chunks: AsyncIterator[bytes]
    ) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise UpstreamError(f"upstream {worker.name} sent a compressed stream though none was asked for")
        await call.exchange.start(response.status_code, UNBUFFERED | client_headers(response.headers.raw))
        edit = self._edit(call, worker)
        keep = partial(self._keep_response, call, worker)
        failure = await Relay(call.exchange, worker.upstream, chunks, self.config, edit, keep).events()
        self._note_end(call, worker, response.status_code, failure)

    async def _pass_body(
        self,
        call: Call,
        worker: Worker,
        response: httpx.Response,
        chunks: AsyncIterator[bytes],
        held: bytes,
        is_whole: bool,
    ) -> None:
        headers = client_headers(response.headers.raw)
        if is_whole:
            call.exchange.counts = body_counts(held)
            if call.route.api == "responses" and response.status_code < 300:
                self._keep_response(call, worker, response_id(held))
            self._note_end(call, worker, response.status_code, None)
            await call.exchange.respond(response.status_code, headers, held)
            return
        if "content-length" in response.headers:
            headers["content-length"] = response.headers["content-length"]
        await call.exchange.start(response.status_code, headers)
        failure = await Relay(call.exchange, worker.upstream, chunks, self.config).body(held, _is_json(response))
        self._note_end(call, worker, response.status_code, failure)

    def _keep_response(self, call: Call, worker: Worker, name: str | None) -> None:
        self._responses.remember(stored_as(call.tenant, name), worker.name)

    async def _hold(self, worker: Worker, response: httpx.Response, chunks: AsyncIterator[bytes]) -> tuple[bytes, bool]:
        """A JSON body is held back while it is small, so that its failure is still an honest status."""
        if not _is_json(response):
            return b"", False
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.config.idle_timeout_s):
                async for chunk in chunks:
                    parts.append(chunk)
                    size += len(chunk)
                    if size > HELD_BYTES:
                        return b"".join(parts), False
        except TimeoutError as error:
            raise UpstreamTimeoutError(f"upstream {worker.name} stopped in the middle of its answer") from error
        return b"".join(parts), True

    def _fail_over(self, call: Call, worker: Worker, reason: str, rest: list[Worker]) -> list[Worker]:
        call.exchange.notes.setdefault("failovers", []).append(f"{worker.name}: {reason}")
        self._metrics.failovers.labels(worker.name, reason).inc()
        return rest

    def _note_end(self, call: Call, worker: Worker, status: int, failure: GatewayError | None) -> None:
        if failure is not None:
            call.exchange.notes["error"] = failure.code
            call.exchange.trace.note_failure(failure)
            self._metrics.broken_streams.labels(worker.name).inc()
            worker.note_failure(time.monotonic())
            return
        if status not in BROKEN_STATUS:
            worker.note_success(time.monotonic())
        model = call.decision.models.get(worker.name, call.ask.model)
        if status < 300 and model in (worker.cards or {}):
            self._ratio.learn(call.ask.text_bytes, model, call.exchange.counts.get("prompt"))


def first_byte_s(config: RouterConfig, is_stream: bool, prompt_tokens: int) -> float:
    """Longest wait for response headers: those of a whole answer come when it is complete."""
    base = config.first_byte_timeout_s if is_stream else config.answer_timeout_s
    return base + prompt_tokens / config.slowest_prefill_tokens_per_s


def _check(worker: Worker, response: httpx.Response) -> None:
    """Refuses to pass on what a client would misread as the gateway's own word."""
    status = response.status_code
    if status == 401:
        raise UpstreamError(f"upstream {worker.name} refuses the gateway's own key: set the key of that upstream")
    if 300 <= status < 400:
        raise UpstreamError(f"upstream {worker.name} answered with a redirect: its url must be the final one")
    if status >= 500 and not _is_json(response):
        text = f"upstream {worker.name} answered {status} without a JSON body"
        raise UnavailableError(text) if status == 503 else UpstreamError(text)


def _is_event_stream(response: httpx.Response) -> bool:
    return _media_type(response) == "text/event-stream"


def _is_json(response: httpx.Response) -> bool:
    return _media_type(response) == "application/json"


def _media_type(response: httpx.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()
