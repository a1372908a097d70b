"""The official JSON Schema test suite, and what batchradix makes of each of its schemas.

The suite comes with the source distribution of the package jsonschema (not with its wheel), so
pip fetches that; nothing of it is installed or run. ``JSON_SCHEMA_TEST_SUITE`` may name a
folder with ``tests/draft2020-12`` in it instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs

from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.grammar.state import GrammarState
from batchradix.errors import RowErrorCode, SchemaError
from batchradix.schema.answers import InvalidAnswer
from batchradix.schema.load import load_schema
from batchradix.schema.output_schema import OutputSchema

PACKAGE = "jsonschema==4.26.0"
VARIABLE = "JSON_SCHEMA_TEST_SUITE"


class SuiteMissing(Exception):
    """The suite is not here and cannot be fetched; the message says why."""


def suite_folder(cache: Path) -> Path:
    """The folder ``tests`` of the suite, fetched into ``cache`` where it is not yet there."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given) / "tests"
    kept = cache / PACKAGE
    if not kept.is_dir():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            _fetched(Path(scratch)).rename(kept)
    return kept / "tests"


def _fetched(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-binary", PACKAGE.partition("==")[0], PACKAGE]
    try:
        done = subprocess.run(
            command,
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
    except subprocess.TimeoutExpired:
        raise SuiteMissing(f"{PACKAGE} cannot be fetched: pip took more than 4 minutes") from None
    found = list(scratch.glob("*.tar.gz"))
    if done.returncode or not found:
        lines = done.stderr.strip().splitlines() or ["pip left no file"]
        raise SuiteMissing(f"{PACKAGE} cannot be fetched: {lines[-1]}")
    with tarfile.open(found[0]) as archive:
        archive.extractall(scratch, filter="data")
    return next(scratch.glob("*/json"))


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of the suite under one schema.

    ``error``: why its answer was not taken. ``grammar_takes_it``: None where it cannot be spelt
    in UTF-8. ``unlisted``: keywords that it breaks, that the grammar lets pass and that
    ``validated_keywords`` does not name: these would be ignored in silence.
    """

    description: str
    text: str
    is_valid: bool
    error: InvalidAnswer | None
    grammar_takes_it: bool | None
    unlisted: tuple[str, ...]

    @property
    def is_narrower(self) -> bool:
        """Valid for the suite, and not for us: a documented narrower reading."""
        return self.is_valid and self.error is not None

    @property
    def misfits_column(self) -> bool:
        return self.error is not None and self.error.code == RowErrorCode.NOT_REPRESENTABLE


@dataclass(frozen=True, slots=True)
class Group:
    """One schema of the suite. ``refusal``: the sentence with which it was refused."""

    file: str
    description: str
    schema: Any
    refusal: str | None
    loaded: OutputSchema | None
    instances: tuple[Instance, ...]


def byte_compiler() -> GrammarCompiler:
    """Grammars over bytes: token id = byte value, then the end of the answer."""

    class Bytes:
        token_bytes = (*(bytes([value]) for value in range(256)), b"")

    return GrammarCompiler(Bytes(), 257, {256})


def judged(folder: Path, draft: str = "draft2020-12") -> list[Group]:
    """Every schema of a draft, with every instance tried. Takes a few seconds."""
    compiler = byte_compiler()
    root = folder / draft
    groups = []
    for path in sorted(root.rglob("*.json")):
        for entry in json.loads(path.read_text("utf-8")):
            name = path.relative_to(root).with_suffix("").as_posix()
            groups.append(_judge(name, _of_draft(entry, draft), compiler))
    return groups


def _of_draft(entry: dict[str, Any], draft: str) -> dict[str, Any]:
    """Older drafts of the suite leave ``$schema`` to the runner."""
    schema = entry["schema"]
    if draft != "draft7" or not isinstance(schema, dict):
        return entry
    return {**entry, "schema": {"$schema": "http://json-schema.org/draft-07/schema#", **schema}}


def _judge(file: str, entry: dict[str, Any], compiler: GrammarCompiler) -> Group:
    schema = entry["schema"]
    try:
        loaded = load_schema(schema)
    except SchemaError as error:
        return Group(file, entry["description"], schema, str(error), None, ())
    state = GrammarState(compiler.compile(loaded.json_grammar))
    instances = tuple(_tried(test, loaded, state) for test in entry["tests"])
    return Group(file, entry["description"], schema, None, loaded, instances)


def _tried(test: dict[str, Any], loaded: OutputSchema, state: GrammarState) -> Instance:
    text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
    error = None
    try:
        loaded.parse(text)
    except InvalidAnswer as failure:
        error = failure
    takes = _takes(state, text)
    unlisted: tuple[str, ...] = ()
    if takes and not test["valid"]:
        unlisted = tuple(sorted(set(_unlisted(loaded, json.loads(text)))))
    return Instance(test["description"], text, test["valid"], error, takes, unlisted)


def _takes(state: GrammarState, text: str) -> bool | None:
    state.reset()
    try:
        # Token by token, since xgrammar prints a warning for each text it does not accept.
        return all(map(state.accept, text.encode())) and state.can_stop
    except UnicodeEncodeError:
        return None


def _unlisted(loaded: OutputSchema, value: Any) -> Iterator[str]:
    validator = jsonschema_rs.validator_for(loaded.json, validate_formats=True, offline=True)
    for error in validator.iter_errors(value):
        place = "/".join(["#", *(_step(step) for step in error.schema_path)])
        way = "/".join(["#", *(_step(step) for step in error.evaluation_path)])
        if not any(
            f"{place}/".startswith(f"{pointer}/{_step(keyword)}/")  # the keyword, or inside it
            or pointer.startswith(f"{place}/")  # anyOf and the like, for what is in a branch
            or f"{way}/".startswith(f"{pointer}/{_step(keyword)}/")  # through a reference inside it
            for pointer, keyword in loaded.validated_keywords
        ):
            yield place


def _step(step: str | int) -> str:
    return str(step).replace("~", "~0").replace("/", "~1")


def batches(groups: list[Group]) -> Iterator[tuple[str, list[Group]]]:
    """``(file, its groups)`` in order."""
    for name in dict.fromkeys(group.file for group in groups):
        yield name, [group for group in groups if group.file == name]
