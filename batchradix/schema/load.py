"""Where an output schema comes from: a file, JSON text, a dictionary, a pydantic model."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from batchradix.errors import SchemaError
from batchradix.schema.answers import InvalidAnswer
from batchradix.schema.output_schema import OutputSchema

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["InvalidAnswer", "OutputSchema", "load_schema"]

_MODEL_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def load_schema(spec: str | Path | Mapping[str, Any] | bool | type[BaseModel]) -> OutputSchema:
    """The schema that ``spec`` names.

    ``spec``: the path of a JSON Schema file, JSON text that begins with ``{``, a mapping,
    true (any JSON), a pydantic model class, or ``module:Model`` (modules of the current folder
    included). Raises `SchemaError` when it cannot be had, is malformed, or matches nothing.
    """
    if isinstance(spec, bool):
        return OutputSchema(spec)
    if isinstance(spec, Mapping):
        return OutputSchema(_copied(spec))
    if isinstance(spec, type):
        return OutputSchema(_model_schema(spec, spec.__name__))
    if isinstance(spec, str):
        if spec.lstrip().startswith("{"):
            return OutputSchema(_parsed(spec, "the schema text"))
        if _MODEL_NAME.fullmatch(spec) and not Path(spec).exists():
            return OutputSchema(_model_schema(_imported(spec), spec))
        return OutputSchema(_read(Path(spec)))
    if isinstance(spec, Path):
        return OutputSchema(_read(spec))
    raise SchemaError(
        f"schema: expected a path, JSON text, a mapping, a pydantic model or module:Model, "
        f"not {type(spec).__name__}"
    )


def _read(path: Path) -> dict[str, Any] | bool:
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise SchemaError(
            f"schema: the file {path} does not exist; give a JSON Schema file, JSON text or "
            f"module:Model"
        ) from None
    except UnicodeDecodeError as error:
        raise SchemaError(f"schema: {path} is not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SchemaError(f"schema: {path} cannot be read: {reason}") from None
    return _parsed(text, str(path))


def _parsed(text: str, source: str) -> dict[str, Any] | bool:
    def refuse(name: str) -> NoReturn:
        raise SchemaError(f"schema: {source} is not JSON: {name} is not a JSON number")

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise SchemaError(f"schema: {source} has the key {repeated!r} twice in one object")
        return found

    try:
        schema = json.loads(text, parse_constant=refuse, object_pairs_hook=distinct)
    except json.JSONDecodeError as error:
        raise SchemaError(
            f"schema: {source} is not JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}"
        ) from None
    except (RecursionError, ValueError):
        raise SchemaError(f"schema: {source} nests too deeply or holds too long a number") from None
    if not isinstance(schema, dict | bool):
        raise SchemaError(
            f"schema: {source} holds a JSON {type(schema).__name__}, but a schema is an object"
        )
    return schema


def _copied(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of plain JSON, so that later changes to the caller's mapping do not reach it."""
    try:
        text = json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"schema: the mapping is not JSON: {error}") from None
    copied: dict[str, Any] = json.loads(text)
    return copied


def _imported(spec: str) -> Any:
    module_name, _, attribute = spec.partition(":")
    with _current_folder_importable():
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise SchemaError(
                f"schema: {spec} cannot be loaded: there is no module {error.name!r} here or "
                f"among the installed packages"
            ) from None
        except Exception as error:  # whatever a user's module raises while it is imported
            raise SchemaError(
                f"schema: importing {module_name} failed: {type(error).__name__}: {error}"
            ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise SchemaError(
                f"schema: {module_name} has no {attribute!r}; give the name of a pydantic model "
                f"or of a schema in it"
            )
        found = getattr(found, name)
    return found


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)


def _model_schema(model: Any, name: str) -> dict[str, Any]:
    from pydantic import BaseModel
    from pydantic.errors import PydanticUserError

    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise SchemaError(f"schema: {name} is no pydantic model class")
    try:
        schema = model.model_json_schema()
    except PydanticUserError as error:
        reason = str(error).splitlines()[0]
        raise SchemaError(f"schema: {name} has no JSON Schema: {reason}") from None
    return _copied(schema)
