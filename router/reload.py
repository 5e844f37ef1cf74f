"""Reads the settings again when their file changes or somebody asks, all of them or none."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from config import ConfigError, RouterConfig
from router.app import Gateway
from router.files import fingerprint

_LOOK_EVERY_S = 1.0
_log = logging.getLogger("longlane.router")


class Reloader:
    """read  the settings from where they come from; raises ConfigError"""

    def __init__(self, gateway: Gateway, read: Callable[[], RouterConfig], file: Path | None) -> None:
        self._gateway = gateway
        self._read = read
        self._file = file
        self._seen = fingerprint(file)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if fingerprint(self._file) != self._seen:
                self.reload()

    def reload(self) -> str | None:
        """Why the old settings stay in force; None when the new ones do."""
        self._seen = fingerprint(self._file)
        try:
            waiting = self._gateway.apply(self._read())
        except ConfigError as error:
            return self._refuse(str(error))
        except Exception:
            # asked for by a signal or the clock, so nobody else would tell
            _log.exception("reading the settings failed inside the gateway")
            return self._refuse("reading them failed inside the gateway; its log says why")
        self._gateway.metrics.reloads.labels("applied").inc()
        _log.info("settings read again%s", f"; only a restart changes {', '.join(waiting)}" if waiting else "")
        return None

    def _refuse(self, reason: str) -> str:
        self._gateway.metrics.reloads.labels("refused").inc()
        _log.error("the old settings stay in force: %s", reason)
        return reason
