"""The servers behind the gateway's sockets."""

from contextlib import nullcontext

import uvicorn

from config import RouterConfig
from config.listen import KEEP_ALIVE_S, deadline_protocol


class QuietServer(uvicorn.Server):
    """Leaves signals to its owner, who stops several servers with one."""

    def capture_signals(self) -> nullcontext[None]:
        return nullcontext()


def http_server(config: RouterConfig, app: object, lifespan: str) -> QuietServer:
    return QuietServer(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=deadline_protocol(config.request_timeout_s),
            ws="none",
            lifespan=lifespan,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(config.drain_s)),
        )
    )
