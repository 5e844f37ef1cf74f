"""Reads settings: defaults < TOML file < environment < flags. The only place that looks at any of the three."""

import difflib
import os
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

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
    file = settings_file(sections, argv, environ)
    flags.pop("config", None)
    # every later source overwrites the earlier ones; `origin` remembers who spoke last, for the error text
    values: dict[str, dict[str, Any]] = {name: {} for name in sections}
    origin: Origins = {}
    for source, settings in (
        (f"file {file}", _read_file(sections, file) if file else {}),
        ("environment", _read_environment(sections, environ)),
        ("flags", flags),
    ):
        for (section, field), value in settings.items():
            values[section][field] = value
            origin[section, field] = source
    return {name: _validate(name, cls, values[name], origin) for name, cls in sections.items()}


def settings_file(
    sections: Mapping[str, type[Section]], argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> Path | None:
    """The TOML file that `load` reads; raises ConfigError."""
    environ = os.environ if environ is None else environ
    file = _parse_flags(sections, argv).get("config") or environ.get(CONFIG_ENV)
    return Path(file) if file else None


def flag_names(sections: Mapping[str, type[Section]]) -> dict[str, tuple[str, str]]:
    """Flag without its dashes -> (section, field): the full form always, the short one where it is unambiguous."""
    fields = [(section, field) for section, cls in sections.items() for field in cls.model_fields]
    short = [field for _, field in fields]
    names = {f"{section}-{field}".replace("_", "-"): (section, field) for section, field in fields}
    names |= {field.replace("_", "-"): (section, field) for section, field in fields if short.count(field) == 1}
    return names


def usage(program: str, sections: Mapping[str, type[Section]]) -> str:
    """The text of `--help`: each flag with its default and meaning."""
    lines = [
        f"usage: python -m {program} [--config FILE] [flags]",
        "",
        "Settings: defaults < file < environment < flags. A flag is also a key of its [section] in the TOML file",
        f"and {ENV_PREFIX}SECTION_KEY in the environment.",
    ]
    short = {target: name for name, target in flag_names(sections).items()}
    for section, cls in sections.items():
        lines += ["", f"[{section}]"]
        for field in cls.model_fields:
            lines += _flag_help(cls, field, f"--{short[section, field]}")
    return "\n".join(lines)


def _flag_help(cls: type[Section], field: str, flag: str) -> list[str]:
    info = cls.model_fields[field]
    if _nested(cls, field) is not None:
        flag = f"[[{field}]], in a file only"
    notes = [str(choice) for choice in get_args(info.annotation) if isinstance(choice, str)]
    about = (info.description or "").replace("\n", " ")
    words = [about, f"One of: {', '.join(notes)}." if notes else "", _default_help(info.default)]
    text = " ".join(word for word in words if word)
    indent = " " * 6
    wrapped = textwrap.wrap(text, 110, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return [f"  {flag}", *wrapped]


def _default_help(default: Any) -> str:
    return "" if default in (None, (), "") else f"[{default}]"


def split_flags(sections: Mapping[str, type[Section]], argv: Sequence[str]) -> dict[str, list[str]]:
    """The flags of each section in their full form, `--config` for all, to hand on to programs of single sections."""
    split: dict[str, list[str]] = {section: [] for section in sections}
    for name, value in _words(sections, argv):
        if name == "config":
            for words in split.values():
                words.append(f"--config={value}")
        else:
            section, field = flag_names(sections)[name]
            split[section].append("--" + f"{section}-{field}".replace("_", "-") + f"={value}")
    return split


def nearest(word: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {match[0]}?" if match else f"known: {', '.join(sorted(known))}"


def _parse_flags(sections: Mapping[str, type[Section]], argv: Sequence[str]) -> dict[Any, Any]:
    names = flag_names(sections)
    flags: dict[Any, Any] = {}
    for name, value in _words(sections, argv):
        if name == "config":
            flags[name] = value
        else:
            flags[names[name]] = _from_text(sections, names[name], value, f"--{name}")
    return flags


def _words(sections: Mapping[str, type[Section]], argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flag and value pairs of a command line; raises ConfigError."""
    names = flag_names(sections)
    words = iter(argv)
    for word in words:
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} is not a flag: write --name value")
        name, equals, value = word[2:].partition("=")
        if name != "config" and name not in names:
            raise ConfigError(_unknown_flag(sections, name))
        if not equals:
            value = "true" if _is_switch(sections, names.get(name)) else _value_after(name, words)
        yield name, value


def _is_switch(sections: Mapping[str, type[Section]], key: tuple[str, str] | None) -> bool:
    return key is not None and sections[key[0]].model_fields[key[1]].annotation is bool


def _value_after(name: str, words: Iterator[str]) -> str:
    value = next(words, None)
    if value is None:
        raise ConfigError(f"--{name} needs a value")
    if value.startswith("--"):
        raise ConfigError(f"--{name} needs a value, but {value} follows; write --{name}={value} if that is meant")
    return value


def _unknown_flag(sections: Mapping[str, type[Section]], name: str) -> str:
    owners = [section for section, cls in sections.items() if name.replace("-", "_") in cls.model_fields]
    if owners:
        return f"--{name} belongs to several parts: write " + " or ".join(f"--{owner}-{name}" for owner in owners)
    known = [f"--{known}" for known in ("config", *flag_names(sections))]
    return f"--{name} is not a flag; {nearest('--' + name, known)}"


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
        found[names[variable]] = _from_text(sections, names[variable], value, f"environment: {variable}")
    return found


def _from_text(sections: Mapping[str, type[Section]], key: tuple[str, str], value: str, source: str) -> Any:
    """Flags and variables are text: lists are split at commas, an empty word means not set."""
    section, field = key
    info = sections[section].model_fields[field]
    if _nested(sections[section], field) is not None:
        raise ConfigError(f"{source}: tables are set in a file only: write [[{section}.{field}]]")
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
    if item["type"] in ("byte_size", "byte_size_unit"):
        message = "is no size: write a number of bytes, or one with a unit, like 8GiB"
    if item["type"] == "extra_forbidden" and (nested := _nested(cls, where[0])):
        message = f"is not a setting; {nearest(where[-1], list(nested.model_fields))}"
    return f"{source}: [{section}] {'.'.join(where)}: {message}"


def _nested(cls: type[Section], field: str) -> type[Section] | None:
    """The class of the tables in a list of tables."""
    parts = getattr(cls.model_fields[field].annotation, "__args__", ())
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)
