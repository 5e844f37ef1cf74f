"""`python -m router.keys add|list|revoke --file F [--name N]`: the file of API keys."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from config import ConfigError, Key
from config.keys import digest, generate, read_keys, write_keys
from config.output import while_read

LIMITS = tuple(name for name in Key.model_fields if name not in ("name", "sha256"))


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ConfigError, OSError) as error:
        print(f"longlane keys: {error}", file=sys.stderr)
        return 1


def add(arguments: argparse.Namespace) -> int:
    """Prints the new key, the only time that anyone sees it; the file gets its digest."""
    keys = read_keys(arguments.file) if arguments.file.exists() else []
    if any(key.name == arguments.name for key in keys):
        raise ConfigError(f"{arguments.file} has a key named {arguments.name} already: revoke it first")
    secret = generate()
    write_keys(arguments.file, [*keys, _key(arguments, secret)])
    print(secret)
    print(f"added {arguments.name} to {arguments.file}; this key is not shown again", file=sys.stderr)
    return 0


def list_keys(arguments: argparse.Namespace) -> int:
    for key in read_keys(arguments.file):
        limits = key.model_dump(include=set(LIMITS), exclude_defaults=True)
        told = (f"{name}={','.join(value) if isinstance(value, tuple) else value}" for name, value in limits.items())
        print("\t".join((key.name, f"{key.sha256[:12]}…", *told)))
    return 0


def revoke(arguments: argparse.Namespace) -> int:
    keys = read_keys(arguments.file)
    kept = [key for key in keys if key.name != arguments.name]
    if len(kept) == len(keys):
        names = ", ".join(key.name for key in keys) or "none"
        raise ConfigError(f"{arguments.file} has no key named {arguments.name}; its keys: {names}")
    write_keys(arguments.file, kept)
    print(f"revoked {arguments.name}")
    return 0


def _key(arguments: argparse.Namespace, secret: str) -> Key:
    fields = {"name": arguments.name, "sha256": digest(secret)}
    fields |= {name: value for name in LIMITS if (value := getattr(arguments, name)) is not None}
    try:
        return Key(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--{first['loc'][0]}: {first['msg']}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m router.keys", description="API keys of the gateway.")
    commands = parser.add_subparsers(required=True, metavar="add|list|revoke")
    for word, run, about in (
        ("add", add, "make a key, print it once, store its digest"),
        ("list", list_keys, "names, digests and limits"),
        ("revoke", revoke, "take a key away; a running gateway notices within a second"),
    ):
        command = commands.add_parser(word, help=about)
        command.set_defaults(run=run)
        command.add_argument("--file", type=Path, required=True)
        if run is not list_keys:
            command.add_argument("--name", required=True)
        if run is add:
            for name in LIMITS:
                convert = _words if name in ("lanes", "models") else int
                command.add_argument(
                    f"--{name}".replace("_", "-"), type=convert, help=Key.model_fields[name].description
                )
    return parser


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


if __name__ == "__main__":
    sys.exit(while_read(main, sys.argv[1:]))
