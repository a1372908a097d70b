"""Reads the JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchradix.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``. Raises `ModelError` naming the file when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; fetch the model again") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply to be read") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text; fetch the model again") from error
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{path} is not valid JSON: {error.msg} in line {error.lineno}; fetch the model again"
        ) from error
    except ValueError:  # Python refuses to read integers of thousands of digits
        raise ModelError(
            f"{path} holds an integer that is too long; fetch the model again"
        ) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; fetch the model again")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As `read_json`, with an empty object for a file that is not there."""
    return read_json(path) if path.is_file() else {}
