"""Settings: defaults < TOML file < environment < flags, checked before anything else starts."""

from config.engine import EngineConfig
from config.keys import Key, KeyRing, load_keys
from config.load import ConfigError, load, settings_file, split_flags, usage
from config.router import Alias, Balance, Lane, RouterConfig, Upstream, read_upstreams
from config.server import ServerConfig

__all__ = [
    "Alias",
    "Balance",
    "ConfigError",
    "EngineConfig",
    "Key",
    "KeyRing",
    "Lane",
    "RouterConfig",
    "ServerConfig",
    "Upstream",
    "load",
    "load_keys",
    "read_upstreams",
    "settings_file",
    "split_flags",
    "usage",
]
