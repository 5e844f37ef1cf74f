"""The gateway as an ASGI application: who calls, what is asked, which lane, then the answer passes through."""

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from config import Key, Lane, RouterConfig, Upstream
from router import lane, route
from router.ask import Ask, read_ask, text_bytes
from router.auth import ANYONE, Auth
from router.cors import is_preflight, origin_headers, preflight_headers
from router.discovery import Discovery
from router.errors import (
    ClientGoneError,
    ForbiddenError,
    GatewayError,
    MediaTypeError,
    MethodError,
    ModelNotFoundError,
    RequestError,
    WebsocketError,
)
from router.exchange import Exchange, HeldBodies
from router.guard import beside, guarded
from router.health import HealthChecks
from router.lane import Decision, LaneMemory, ResponseMemory, TokenRatio, Wish
from router.limits import Limits
from router.metrics import Metrics
from router.models import allowed_lanes, list_models
from router.names import resolve
from router.proxy import Call, Proxy
from router.quota import Usage, limit_headers
from router.retries import OpenRequests, is_retry
from router.route import Route
from router.trace import Tracing
from router.tracing import start_tracing
from router.transport import Transport
from router.worker import Worker

# what is built from these at the start stays until the end
FIXED = (
    "host",
    "port",
    "admin_host",
    "admin_port",
    "admin_token",
    "keys_file",
    "redis_url",
    "limits_without_redis",
    "request_timeout_s",
    "connect_timeout_s",
    "pool_timeout_s",
    "pool_idle_s",
    "max_connections",
    "drain_s",
    "log_level",
    "log_format",
    "otlp_endpoint",
)
# before any path: tells where the request would go, and sends it nowhere
EXPLAIN = "/explain"
HEALTH_PATHS = ("/health", "/ready")
# where a stream tells its usage only when asked
USAGE_PATHS = ("/v1/chat/completions", "/v1/completions")
_log = logging.getLogger("longlane.router")
_access = logging.getLogger("longlane.router.access")


class Gateway:
    """Everything it needs is built here and started by the server's lifespan."""

    def __init__(self, config: RouterConfig, tracing: Tracing | None = None) -> None:
        self.config = config
        self._tracing = tracing or start_tracing(config)
        self.workers: dict[str, Worker] = {}
        self.metrics = Metrics()
        self._auth = Auth(config.keys_file)
        self._numbers = itertools.count()
        self._open = OpenRequests()
        self._bodies = HeldBodies()
        self._memory = LaneMemory()
        self._ratio = TokenRatio()
        self._responses = ResponseMemory()
        self._limits = Limits(config, self.metrics)
        self._transport = Transport(config)
        self._health = HealthChecks(config, self._transport, self.metrics)
        self._proxy = Proxy(
            config, self.workers, self._transport, self.metrics, self._memory, self._ratio, self._responses
        )
        self._discovery = Discovery(config)
        self._replace_workers(self._discovery.upstreams())

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._serve(Exchange(scope, receive, send))

    def is_ready(self) -> bool:
        return any(worker.health.healthy for worker in self.workers.values())

    def apply(self, config: RouterConfig) -> list[str]:
        """Takes new settings, all or none; returns the names of changed ones that only a restart can change.

        raises  ConfigError
        """
        waiting = [name for name in FIXED if getattr(config, name) != getattr(self.config, name)]
        # as a whole: half of a setting in force would be neither the old one nor the new one
        config = config.model_copy(update={name: getattr(self.config, name) for name in FIXED})
        self._discovery.use(config)
        self.config = self._proxy.config = self._health.config = config
        self._use_upstreams(self._discovery.upstreams())
        return waiting

    def _use_upstreams(self, upstreams: Iterable[Upstream]) -> None:
        for worker in self._replace_workers(upstreams):
            self.metrics.forget(worker.name, worker.upstream.lane)
        self._health.follow(self.workers.values())

    def _replace_workers(self, upstreams: Iterable[Upstream]) -> list[Worker]:
        """The workers that are gone. What is known of an upstream stays while its address does; requests in flight keep
        a worker that went."""
        old = dict(self.workers)
        self.workers.clear()
        for upstream in upstreams:
            worker = old.get(upstream.name)
            if worker is None or (worker.upstream.url, worker.upstream.lane) != (upstream.url, upstream.lane):
                worker = Worker(upstream)
            worker.upstream = upstream
            self.workers[upstream.name] = worker
        return [worker for name, worker in old.items() if self.workers.get(name) is not worker]

    async def _lifespan(self, receive: Any, send: Any) -> None:
        await receive()
        self._say_start()
        self._health.follow(self.workers.values())
        tasks = [beside(work) for work in (self._discovery.run(self._use_upstreams), self._limits.run())]
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._health.aclose()
        await self._transport.aclose()
        await self._limits.aclose()
        await self._tracing.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    def _say_start(self) -> None:
        candidates = [worker.candidate() for worker in self.workers.values()]
        for one in lane.LANES:
            if lane.is_fallback(one, candidates):
                names = ", ".join(self.workers) or "none that is known yet"
                hint = " (--vllm-url names a vLLM for it)" if one == "short" else ""
                _log.info("the %s lane has no upstream of its own and falls back to: %s%s", one, names, hint)
        if self.config.keys_file is None:
            _log.info("no keys are configured: loopback only, any key is accepted")
        else:
            _log.info("keys are read from %s", self.config.keys_file)
            self._warn_of_one_tenant()

    def _warn_of_one_tenant(self) -> None:
        if self.config.gateway_secret is None and any(one.upstream.lane == "long" for one in self.workers.values()):
            _log.warning(
                "keys_file is set without gateway_secret: the engine's server takes the callers of all keys for one, "
                "which shares its cache and stored responses and has no priorities; set the same gateway_secret on both"
            )

    async def _serve(self, exchange: Exchange) -> None:
        exchange.extra_headers = origin_headers(exchange.headers, self.config.cors_origins)
        if exchange.path not in HEALTH_PATHS:
            exchange.trace = self._tracing.begin(exchange.method, exchange.api, exchange.headers)
        with self.metrics.open_requests.track_inprogress():
            try:
                await self._answer_or_refuse(exchange)
            except ClientGoneError:
                # some close as soon as they have read the end marker
                if not exchange.is_answered:
                    exchange.notes["client_gone"] = True
                    self.metrics.client_gone.inc()
            except asyncio.CancelledError:
                # the drain time is over; a stream was told so, and ended
                if not exchange.has_ended:
                    raise
            finally:
                await exchange.finish()
                if exchange.opened is not None:
                    self._open.end(exchange.opened)
                self._note(exchange)

    async def _answer_or_refuse(self, exchange: Exchange) -> None:
        try:
            await self._answer(exchange)
        except GatewayError as error:
            # failures after the head are told by the relay, in the stream itself
            assert exchange.status is None, error
            await exchange.refuse(error)
        except ClientGoneError:
            raise
        except Exception:
            _log.exception("request %s failed inside the gateway", exchange.request_id)
            if exchange.status is None:
                await exchange.refuse(GatewayError("the gateway failed on this request; its log says why"))

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.method == "GET" and exchange.path in HEALTH_PATHS:
            await self._tell_health(exchange)
            return
        if exchange.headers.get("upgrade", "").lower() == "websocket":
            raise WebsocketError("websockets are not served here: POST with `stream: true` and read the events")
        if exchange.extra_headers and is_preflight(exchange.method, exchange.headers):
            await exchange.respond(204, preflight_headers(exchange.headers), b"")
            return
        key = self._auth.identify(exchange.headers)
        exchange.notes["key"] = key.name if key else ANYONE
        path = exchange.path.removeprefix(EXPLAIN)
        asked = route.parse(path)
        if asked.api == "models":
            await self._tell_models(exchange, asked, key)
            return
        if exchange.method != "POST":
            raise MethodError(f"{exchange.path} takes POST, not {exchange.method}")
        call = await self._read_call(exchange, asked, key)
        if path != exchange.path:
            await _respond_json(exchange, 200, self._proxy.explain(call))
            return
        await self._let_older_end(call)
        if key is not None:
            await self._take_grant(call, key)
        self.metrics.decisions.labels(call.decision.lane, call.decision.reason).inc()
        await guarded(self._proxy.forward(call), _leave_with(exchange))

    async def _read_call(self, exchange: Exchange, asked: Route, key: Key | None) -> Call:
        has_json = _check_media_type(exchange, asked, key)
        body = await exchange.read_body(self.config, self._bodies)
        tenant = key.name if key else ANYONE
        if has_json:
            ask = read_ask(body, exchange.headers.get("x-session-id"), tenant)
        else:
            ask = Ask(text_bytes=text_bytes(body))
        exchange.model = ask.model
        decision = self._decide(ask, asked, key)
        exchange.notes |= {"lane": decision.lane, "reason": decision.reason, "stream": ask.is_stream}
        priority = key.priority if key else 0
        return Call(
            exchange, asked, ask, decision, body, tenant, priority, _adds_usage(asked, ask, key), next(self._numbers)
        )

    async def _let_older_end(self, call: Call) -> None:
        """A retry finds its key's place free and its upstream rid of the request that its client gave up."""
        exchange = call.exchange
        exchange.opened = self._open.begin(call.tenant, exchange.path, call.body)
        if is_retry(exchange.headers) and (count := await self._open.older_ended(exchange.opened)):
            exchange.notes["replaced"] = count
            self.metrics.replaced.inc(count)

    async def _take_grant(self, call: Call, key: Key) -> None:
        """Takes a place within the key's limits; what the request turns out to cost is charged when it finishes."""
        exchange = call.exchange
        grant = await self._limits.admit(key, call.decision.prompt_tokens, call.ask.conversation)
        exchange.extra_headers |= limit_headers(key, grant.balance)

        async def settle() -> None:
            # a client that left before the answer may have cost its whole prompt
            is_refused = exchange.status is not None and exchange.status >= 400
            await self._limits.settle(grant, _usage(exchange.counts), is_refused)

        exchange.on_finish = settle

    def _decide(self, ask: Ask, asked: Route, key: Key | None) -> Decision:
        if key and key.models and ask.model is None:
            raise RequestError(f"model is required; this key may use: {', '.join(key.models)}", "model")
        candidates = [worker.candidate() for worker in self.workers.values()]
        lanes = allowed_lanes(key.lanes) if key else lane.LANES
        owner = self._owner(ask, [one for one in lanes if asked.lane in (None, one)], key, candidates)
        served = {name for one in candidates for name in one.models or ()}
        target = resolve(ask.model, self.config.aliases, served) if ask.model is not None else None
        wish = Wish(
            model=ask.model,
            prompt_tokens=self._ratio.estimate(ask.text_bytes, target),
            lane=asked.lane,
            lanes=lanes,
            models=key.models if key else (),
            last_lane=self._memory.recall(ask.conversation),
            target=target,
            auto_models=self.config.auto_models,
        )
        if owner is None:
            return lane.choose(wish, candidates, self.config.long_prompt_tokens)
        kept = replace(wish, lane=None, lanes=(owner.lane,))
        return replace(lane.choose(kept, [owner], self.config.long_prompt_tokens), reason="conversation")

    def _owner(
        self, ask: Ask, lanes: Iterable[Lane], key: Key | None, candidates: list[lane.Candidate]
    ) -> lane.Candidate | None:
        """The upstream that keeps the response which the request goes on from, where that is known."""
        name = self._responses.recall(lane.stored_as(key.name if key else ANYONE, ask.previous))
        reached = (one for asked in lanes for one in lane.lane_members(asked, candidates))
        return next((one for one in reached if one.name == name), None) if name is not None else None

    async def _tell_health(self, exchange: Exchange) -> None:
        if exchange.path == "/health":
            await _respond_json(exchange, 200, {"status": "ok"})
        elif self.is_ready():
            await _respond_json(exchange, 200, {"status": "ready"})
        else:
            away = {worker.name: worker.health.reason for worker in self.workers.values()}
            await _respond_json(exchange, 503, {"status": "not ready", "upstreams": away})

    async def _tell_models(self, exchange: Exchange, asked: Route, key: Key | None) -> None:
        if exchange.method != "GET":
            raise MethodError(f"{exchange.path} takes GET, not {exchange.method}")
        lanes = allowed_lanes(key.lanes) if key else lane.LANES
        if asked.lane and asked.lane not in lanes:
            raise ForbiddenError(f"this key may not use the {asked.lane} lane; it may use: {', '.join(lanes)}")
        names = self.config.aliases, self.config.auto_models
        cards = list_models(self.workers.values(), asked.lane, lanes, key.models if key else (), *names)
        if asked.path == "/v1/models":
            await _respond_json(exchange, 200, {"object": "list", "data": cards})
            return
        name = asked.path.removeprefix("/v1/models/")
        found = next((card for card in cards if card["id"] == name), None)
        if found is None:
            raise ModelNotFoundError(name, tuple(card["id"] for card in cards))
        await _respond_json(exchange, 200, found)

    def _note(self, exchange: Exchange) -> None:
        seconds = time.perf_counter() - exchange.started_at
        chosen = exchange.notes.get("lane", "none")
        self.metrics.requests.labels(chosen, exchange.api, str(exchange.status or 0)).inc()
        if chosen != "none":
            self.metrics.duration.labels(chosen).observe(seconds)
            if exchange.first_byte_at is not None:
                self.metrics.first_byte.labels(chosen).observe(exchange.first_byte_at - exchange.started_at)
        if exchange.path not in HEALTH_PATHS:
            _access.info("request", extra={"fields": _access_fields(exchange, seconds)})
        exchange.trace.end(_span_attributes(exchange), exchange.status)


def _check_media_type(exchange: Exchange, asked: Route, key: Key | None) -> bool:
    """True for JSON. A foreign web page cannot send JSON unasked, and a model limit can be kept only in JSON."""
    encoding = exchange.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise MediaTypeError(f"content-encoding {encoding} is not accepted: send the body as it is")
    given = exchange.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given == "application/json":
        return True
    if asked.path.startswith("/v1/audio/") and key is not None and not key.models:
        return False
    raise MediaTypeError(f"content-type {given!r} is not accepted: send application/json")


def _adds_usage(asked: Route, ask: Ask, key: Key | None) -> bool:
    """Only where a limit needs the truth: without one every body goes on untouched."""
    is_limited = key is not None and (key.prompt_tokens_per_minute or key.tokens_per_day)
    return bool(is_limited) and asked.path in USAGE_PATHS and ask.is_stream and not ask.wants_usage


def _usage(counts: Mapping[str, int]) -> Usage | None:
    return Usage(counts["prompt"], counts.get("cached"), counts.get("output", 0)) if "prompt" in counts else None


async def _leave_with(exchange: Exchange) -> None:
    await exchange.disconnected()
    if exchange.has_ended:
        # the answer is out, and what is left of the work is cleaning up
        await asyncio.Future()
    raise ClientGoneError


async def _respond_json(exchange: Exchange, status: int, value: Any) -> None:
    await exchange.respond(status, {"content-type": "application/json"}, json.dumps(value).encode())


def _access_fields(exchange: Exchange, seconds: float) -> dict[str, Any]:
    first = exchange.first_byte_at
    return {
        "request_id": exchange.request_id,
        "method": exchange.method,
        "path": exchange.path[:200],
        "status": exchange.status,
        "first_byte_ms": round(1000 * (first - exchange.started_at), 1) if first else None,
        "duration_ms": round(1000 * seconds, 1),
        "bytes_in": exchange.bytes_in,
        "bytes_out": exchange.bytes_out,
    } | exchange.notes


def _span_attributes(exchange: Exchange) -> dict[str, Any]:
    """Never content. None where there is nothing to tell."""
    notes, counts = exchange.notes, exchange.counts
    return {
        "url.path": exchange.path[:200],
        "http.response.status_code": exchange.status,
        "error.type": notes.get("error"),
        "gen_ai.request.model": exchange.model[:200] if exchange.model is not None else None,
        "gen_ai.usage.input_tokens": counts.get("prompt"),
        "gen_ai.usage.cache_read.input_tokens": counts.get("cached"),
        "gen_ai.usage.output_tokens": counts.get("output"),
        "longlane.request_id": exchange.request_id,
        "longlane.key": notes.get("key"),
        "longlane.lane": notes.get("lane"),
        "longlane.reason": notes.get("reason"),
        "longlane.upstream": notes.get("upstream"),
        "longlane.client_gone": notes.get("client_gone"),
    }
