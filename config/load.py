"""Reads settings: defaults < TOML file < environment < flags. The only place that looks at any of the three."""

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from config.section import Section

ENV_PREFIX = "LONGLANE_"
CONFIG_ENV = "LONGLANE_CONFIG"
ALL_SECTIONS = ("engine", "server", "router")

Origins = dict[tuple[str, str], str]


class ConfigError(Exception):
    """A setting is wrong; the text names it, where it stands and what to write instead."""


def load(
    sections: Mapping[str, type[Section]],
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Settings of the named sections, validated, by section name.

    sections  name -> its class, as in ``{"engine": EngineConfig, "server": ServerConfig}``
    argv      flags: ``--config FILE``, ``--max-model-len 8192`` or ``--engine-max-model-len=8192``
    raises    ConfigError
    """
    environ = os.environ if environ is None else environ
    flags = _parse_flags(sections, argv)
    file = flags.pop("config", None) or environ.get(CONFIG_ENV)
    # every later source overwrites the earlier ones; `origin` remembers who spoke last, for the error text
    values: dict[str, dict[str, Any]] = {name: {} for name in sections}
    origin: Origins = {}
    for source, settings in (
        (f"file {file}", _read_file(sections, Path(file)) if file else {}),
        ("environment", _read_environment(sections, environ)),
        ("flags", flags),
    ):
        for (section, field), value in settings.items():
            values[section][field] = value
            origin[section, field] = source
    return {name: _validate(name, cls, values[name], origin) for name, cls in sections.items()}


def flag_names(sections: Mapping[str, type[Section]]) -> dict[str, tuple[str, str]]:
    """Flag without its dashes -> (section, field): the full form always, the short one where it is unambiguous."""
    fields = [(section, field) for section, cls in sections.items() for field in cls.model_fields]
    short = [field for _, field in fields]
    names = {f"{section}-{field}".replace("_", "-"): (section, field) for section, field in fields}
    names |= {field.replace("_", "-"): (section, field) for section, field in fields if short.count(field) == 1}
    return names


def usage(program: str, sections: Mapping[str, type[Section]]) -> str:
    """The text of `--help`: each flag with its default and meaning."""
    short = {target: name for name, target in flag_names(sections).items()}
    lines = [f"usage: python -m {program} [--config FILE] [flags]", ""]
    lines.append(
        f"Each flag is also a key of its [section] in the file and {ENV_PREFIX}SECTION_KEY in the environment."
    )
    for section, cls in sections.items():
        lines += ["", f"[{section}]"]
        for field, info in cls.model_fields.items():
            default = "" if info.default is None else f" (default {info.default})"
            about = (info.description or "").replace("\n", " ")
            lines.append(f"  --{short[section, field]}{default}".ljust(46) + about)
    return "\n".join(lines)


def nearest(word: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {match[0]}?" if match else f"known: {', '.join(sorted(known))}"


def _parse_flags(sections: Mapping[str, type[Section]], argv: Sequence[str]) -> dict[Any, Any]:
    names = flag_names(sections)
    flags: dict[Any, Any] = {}
    words = iter(argv)
    for word in words:
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} is not a flag: write --name value")
        name, equals, value = word[2:].partition("=")
        if name != "config" and name not in names:
            known = [f"--{known}" for known in ("config", *names)]
            raise ConfigError(f"--{name} is not a flag; {nearest('--' + name, known)}")
        if not equals and (value := next(words, None)) is None:
            raise ConfigError(f"--{name} needs a value")
        flags["config" if name == "config" else names[name]] = value
    return {key: value if key == "config" else _from_text(sections, key, value) for key, value in flags.items()}


def _read_environment(sections: Mapping[str, type[Section]], environ: Mapping[str, str]) -> dict[tuple[str, str], Any]:
    names = {
        f"{ENV_PREFIX}{section}_{field}".upper(): (section, field)
        for section, cls in sections.items()
        for field in cls.model_fields
    }
    found: dict[tuple[str, str], Any] = {}
    for variable, value in environ.items():
        # a variable of a section that this program does not read belongs to another program
        ours = variable.startswith(tuple(f"{ENV_PREFIX}{section}_".upper() for section in sections))
        if not ours or variable == CONFIG_ENV:
            continue
        if variable not in names:
            raise ConfigError(f"environment: {variable} is not a setting; {nearest(variable, list(names))}")
        found[names[variable]] = _from_text(sections, names[variable], value)
    return found


def _from_text(sections: Mapping[str, type[Section]], key: tuple[str, str], value: str) -> Any:
    """Flags and variables are text: lists are split at commas, an empty word means not set."""
    section, field = key
    info = sections[section].model_fields[field]
    if get_origin(info.annotation) is tuple:
        return [word.strip() for word in value.split(",") if word.strip()]
    return None if value == "" and info.default is None else value


def _read_file(sections: Mapping[str, type[Section]], path: Path) -> dict[tuple[str, str], Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"file {path}: not TOML: {error}") from error
    found: dict[tuple[str, str], Any] = {}
    for section, table in tables.items():
        if section in ALL_SECTIONS and section not in sections:
            continue  # one file may serve several programs
        if section not in sections:
            raise ConfigError(f"file {path}: [{section}] is not a section; {nearest(section, ALL_SECTIONS)}")
        if not isinstance(table, dict):
            raise ConfigError(f"file {path}: {section} must be a table: write [{section}]")
        for field, value in table.items():
            if field not in (known := list(sections[section].model_fields)):
                raise ConfigError(f"file {path}: [{section}] {field} is not a setting; {nearest(field, known)}")
            found[section, field] = value
    return found


def _validate(
    section: str, cls: type[Section], values: dict[str, Any], origin: Mapping[tuple[str, str], str]
) -> Section:
    try:
        return cls(**values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(section, cls, item, origin) for item in error.errors())) from error


def _explain(section: str, cls: type[Section], item: Any, origin: Origins) -> str:
    where = [str(part) for part in item["loc"]]
    message = item["msg"].removeprefix("Value error, ")
    if not where:
        return f"[{section}] {message}"
    source = origin.get((section, where[0]), "default")
    if item["type"] == "extra_forbidden" and len(where) > 1:
        known = _nested_fields(cls, where[0])
        message = f"is not a setting; {nearest(where[-1], known)}" if known else "is not a setting"
    return f"{source}: [{section}] {'.'.join(where)}: {message}"


def _nested_fields(cls: type[Section], field: str) -> list[str]:
    for part in getattr(cls.model_fields[field].annotation, "__args__", ()):
        if isinstance(part, type) and issubclass(part, Section):
            return list(part.model_fields)
    return []
