"""Job files: the options of a command in TOML, beside the files that they name.

The keys are the options of ``batchradix run`` without their dashes (``max_tokens`` or
``max-tokens``); ``input`` is its argument. What stands on the command line goes first. Names of
files are relative to the job file, and places such as ``{date}`` in them are filled.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import typer

from batchradix.errors import InputError, OptionError

_PATHS = frozenset({"input", "output", "errors", "metrics", "kv_store", "lora", "questions"})
# Options that are text, or the name of a file or folder when there is one of that name.
_MAY_NAME_A_FILE = frozenset(
    {
        "template",
        "chat_template",
        "instruction",
        "system",
        "schema",
        "model",
        "choices",
        "grammar",
        "tools",
    }
)
_DATE = re.compile(r"\{(date|yesterday)([+-]\d{1,4})?(?::([^{}]+))?\}")


def read_job_file(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """The input that a job file names; its other options become the command's defaults.

    A callback of the INPUT argument, which is processed before the options are. Anything but a
    ``.toml`` file is an input itself. Raises `InputError` or `OptionError`.
    """
    if not value.lower().endswith(".toml"):
        return value
    path = Path(value)
    options = _options(context)
    defaults: dict[str, Any] = {}
    for key, given in _read(path).items():
        name = key.replace("-", "_")
        option = options.get(name)
        if option is None:
            raise OptionError(f"{path}: there is no option {key!r}{_closest(name, options)}")
        defaults[str(option.name)] = _value(path, key, given, option)
    source = defaults.pop(str(parameter.name), None)
    if source is None:
        raise OptionError(f"{path}: it names no input; add a line such as input = 'jobs.parquet'")
    mine = {str(parameter.name) for parameter in context.command.params}
    context.default_map = {name: given for name, given in defaults.items() if name in mine}
    return str(source)


def today() -> str:
    """The date here as ``2026-11-30``."""
    return datetime.now().astimezone().date().isoformat()


def fill_dates(text: str, day: str | None) -> str:
    """``text`` with the places of a date filled: ``{date}``, ``{yesterday}``, ``{date-7}`` (days),
    ``{date:%Y/%m}`` (as strftime).

    ``day`` is the date as ``2026-11-30``, today when None. Raises `OptionError` for any other.
    """
    if _DATE.search(text) is None:
        return text
    try:
        begin = date.fromisoformat(today() if day is None else day)
    except ValueError:
        raise OptionError(f"--date must be a date such as 2026-11-30, not {day!r}") from None

    def fill(match: re.Match[str]) -> str:
        days = int(match[2] or 0) - (match[1] == "yesterday")
        try:
            return (begin + timedelta(days=days)).strftime(match[3] or "%Y-%m-%d")
        except OverflowError:
            raise OptionError(f"{match[0]} is no date of the calendar") from None

    return _DATE.sub(fill, text)


def _options(context: typer.Context) -> dict[str, Any]:
    """What a job file may hold: the argument and options of ``run``, by key.

    They are click's parameters, of whichever click typer brings along.
    """
    command: Any = context.find_root().command
    command = getattr(command, "commands", {}).get("run", context.command)
    found: dict[str, Any] = {}
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            found[parameter.name] = parameter
        for spelling in parameter.opts:
            if spelling.startswith("--"):
                found[spelling.removeprefix("--").replace("-", "_")] = parameter
    found.pop("help", None)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise InputError(f"there is no job file {path}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def _closest(name: str, options: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, options, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; see batchradix run --help"


def _value(path: Path, key: str, given: Any, option: Any) -> Any:
    """What the option takes on a command line, from the value of a key."""
    is_flag = bool(getattr(option, "is_flag", False))
    if is_flag != isinstance(given, bool):
        kind = "true or false" if is_flag else "a text or a number"
        raise OptionError(f"{path}: {key} must be {kind}, not {given!r}")
    if is_flag:
        return given
    if isinstance(given, list):
        if option.name == "tools":
            return json.dumps(given, default=str, ensure_ascii=False)
        if any(isinstance(one, dict | list | bool) for one in given):
            raise OptionError(f"{path}: {key} must be a list of texts, not {given!r}")
        texts = [_text(path, key, one, option) for one in given]
        return texts if getattr(option, "multiple", False) else ",".join(texts)
    if isinstance(given, dict):
        if option.name not in ("schema", "chat_template_kwargs"):
            raise OptionError(f"{path}: {key} must be a text or a number, not a table")
        return json.dumps(given, default=str, ensure_ascii=False)
    text = _text(path, key, given, option)
    return [text] if getattr(option, "multiple", False) else text


def _text(path: Path, key: str, given: Any, option: Any) -> str:
    text = str(given)
    is_elsewhere = text == "-" or "://" in text or (option.name == "input" and text[:1] == "~")
    if option.name in _PATHS and text and not is_elsewhere:
        return str(path.parent / text)
    if option.name in _MAY_NAME_A_FILE and 0 < len(text) <= 1024 and "\n" not in text:
        try:
            if (path.parent / text).exists():
                return str(path.parent / text)
        except (OSError, ValueError):
            return text
    return text
