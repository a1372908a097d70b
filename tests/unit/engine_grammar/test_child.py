"""Compiling in a process of its own: limits, crashes, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from batchradix.engine.grammar import compiler as compiler_module
from batchradix.engine.grammar.child import CompilerChild
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.grammar.disk_cache import GrammarDiskCache
from batchradix.engine.grammar.frames import write_frame
from batchradix.engine.grammar.state import GrammarState
from batchradix.errors import SchemaError
from batchradix.types import GrammarSpec

# Takes more than a second and ten MiB even with a vocabulary of bytes.
COSTLY = GrammarSpec(kind="regex", source="((a{1,200}b){1,200}c){1,200}")
EBNF = GrammarSpec(kind="ebnf", source='root ::= "x" | "y" root')
BYTES = (*(bytes([i]) for i in range(256)), b"")


class ByteTokens:
    token_bytes = BYTES

    def encode_plain(self, texts, at_start):
        return [list(text.encode()) for text in texts]


def new_compiler(**options) -> GrammarCompiler:
    return GrammarCompiler(ByteTokens(), 257, [256], num_threads=1, **options)


def masks(compiled, text: bytes) -> list[np.ndarray]:
    """The masks before each byte of a text and after the last."""
    state = GrammarState(compiled)
    found = [state.allowed()]
    for byte in text:
        assert state.accept(byte)
        found.append(state.allowed())
    return found


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = new_compiler()
    yield made
    made.close()


def pid_of(compiler: GrammarCompiler) -> int:
    assert compiler._child is not None
    return compiler._child.pid


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_grammar_of_the_child_masks_as_one_made_here(compiler, monkeypatch):
    spec = GrammarSpec(
        kind="json_schema",
        source=json.dumps({"$ref": "#/$defs/n", "$defs": {"n": {
            "type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}},
            "s": {"type": "string", "pattern": "^é{1,3}$"}}, "required": ["c", "s"],
            "additionalProperties": False}}}, ensure_ascii=False),
    )  # fmt: skip
    there = compiler.compile(spec)
    assert compiler._child is not None
    monkeypatch.setattr(compiler_module, "is_cheap", lambda spec: True)
    made_here = new_compiler()
    here = made_here.compile(spec)
    assert made_here._child is None
    text = '{"c":[{"c":[],"s":"éé"}],"s":"é"}'.encode()
    for a, b in zip(masks(there, text), masks(here, text), strict=True):
        assert np.array_equal(a, b)
    assert there.always_ends == here.always_ends


def test_several_grammars_compile_in_one_child_and_a_rejected_one_does_not_end_it(compiler):
    compiler.compile(EBNF)
    before = pid_of(compiler)
    with pytest.raises(SchemaError, match=r"cannot be made into a grammar: .*line 1"):
        compiler.compile(GrammarSpec(kind="ebnf", source="root := 1"))
    with pytest.raises(SchemaError, match="no answer could ever end"):
        compiler.compile(GrammarSpec(kind="ebnf", source='root ::= "ab" root'))
    pattern = GrammarSpec(
        kind="json_schema",
        source=json.dumps({"type": "string", "pattern": "a{3,200}", "maxLength": 5}),
    )
    notices = compiler.compile(pattern).notices
    assert "pattern combined with minLength/maxLength is not supported" in notices[0]
    assert pid_of(compiler) == before


def test_what_was_compiled_in_the_child_is_read_from_disk_the_next_time(tmp_path, compiler):
    first = new_compiler(cache=GrammarDiskCache(tmp_path))
    first._child = compiler._child
    compiled = first.compile(EBNF)
    first._child = None
    second = new_compiler(cache=GrammarDiskCache(tmp_path))
    again = second.compile(EBNF)
    assert second._child is None
    for a, b in zip(masks(compiled, b"yyx"), masks(again, b"yyx"), strict=True):
        assert np.array_equal(a, b)
    assert again.always_ends


def test_a_grammar_that_takes_too_much_time_memory_or_crashes_is_a_schema_error(capfd):
    compiler = new_compiler(memory_bytes=2**20)
    with pytest.raises(SchemaError, match="more than 1 MiB of memory to compile; make the schema"):
        compiler.compile(COSTLY)
    assert compiler._child is None
    compiler = new_compiler(timeout_s=0.2)
    with pytest.raises(SchemaError, match=r"not compiled after 0 s; .* raise --grammar-timeout"):
        compiler.compile(COSTLY)
    assert compiler._child is None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGSEGV, r"crashed \(SIGSEGV\)"),
        (signal.SIGKILL, "was killed, most likely because the machine ran out of memory"),
    ],
)
def test_a_crash_is_named(compiler, number, said):
    compiler.compile(GrammarSpec(kind="ebnf", source=f'root ::= "{number:d}"'))
    pid = pid_of(compiler)
    threading.Timer(0.2, os.kill, (pid, number)).start()
    with pytest.raises(SchemaError, match=said):
        compiler.compile(COSTLY)
    assert is_gone(pid)


def test_after_a_crash_there_is_a_new_child_and_an_interrupt_ends_it(compiler, monkeypatch):
    compiler.compile(GrammarSpec(kind="ebnf", source='root ::= "i"'))
    pid = pid_of(compiler)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler_module, "_watched", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compiler.compile(COSTLY)
    assert is_gone(pid)
    compiler.close()


def test_the_child_ends_when_its_owner_is_collected():
    child = CompilerChild(BYTES, 257, [256], num_threads=1, memory_bytes=2**30)
    pid = child.pid
    del child
    assert is_gone(pid)


def test_the_child_ends_with_its_parent():
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-m", "batchradix.engine.grammar.child_main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}"},
    )
    assert process.stdin is not None
    # As if that process had been the parent and were gone; the input stays open.
    setup = {"parent_pid": 1, "memory_bytes": 2**30, "num_threads": 1}
    vocabulary = {"tokens": ["a"], "vocab_size": 1, "stop_ids": []}
    with process, process.stdin as requests:
        write_frame(requests, json.dumps({**setup, **vocabulary}).encode())
        assert process.wait(60) == 0
