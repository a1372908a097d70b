"""`GrammarSpec` to a compiled grammar for one model's vocabulary, once per spec."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TypeVar

import numpy as np
import xgrammar
from numpy.typing import NDArray

from batchradix.config import DEFAULT_GRAMMAR_TIMEOUT_S
from batchradix.engine.grammar.build import Built, build, native_compiler, tokenizer_info
from batchradix.engine.grammar.child import CompilerChild, Rejected, Serialised
from batchradix.engine.grammar.choices import CompiledChoices, compile_choices
from batchradix.engine.grammar.compiled import CompiledGrammar
from batchradix.engine.grammar.cost import is_cheap
from batchradix.engine.grammar.disk_cache import GrammarDiskCache, GrammarKeys
from batchradix.engine.grammar.forced import ForcedText, GrammarTokenizer
from batchradix.engine.grammar.notices import NativeNotices, plain_message
from batchradix.engine.grammar.state import AnyGrammar, start
from batchradix.errors import SchemaError
from batchradix.types import GrammarSpec

SLOW_AFTER_S = 3.0
STORED_AFTER_S = 0.2  # what compiles faster than that is not worth a file
MAX_KEPT = 256
MAX_KEPT_BYTES = 512 * 2**20
_START_TIMEOUT_S = 120.0
_MOST_DEFAULT_MEMORY_BYTES = 4 * 2**30
MAX_BRANCHES = 256  # where probabilities are wanted

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def default_memory_bytes() -> int:
    """What compiling one grammar may take: a quarter of the machine's memory, 4 GiB at most."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_MOST_DEFAULT_MEMORY_BYTES, total // 4)


class GrammarCompiler:
    """Compiles grammars for a tokenizer; ``vocab_size`` is the width of the model's logits.

    ``eos_ids`` end an answer and are legal only where the grammar is complete. What `is_cheap`
    compiles in this process, all else in one of its own under ``timeout_s`` and
    ``memory_bytes`` (None: `default_memory_bytes`). With ``cache`` what took long is kept for
    the next run. The `MAX_KEPT` grammars used last are kept here. Safe to share between
    threads. The vocabulary is read at the first `compile`.
    """

    def __init__(
        self,
        tokenizer: GrammarTokenizer,
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        num_threads: int = 2,
        timeout_s: float = DEFAULT_GRAMMAR_TIMEOUT_S,
        memory_bytes: int | None = None,
        cache: GrammarDiskCache | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.stop_ids = tuple(sorted({i for i in eos_ids if 0 <= i < vocab_size}))
        self._tokenizer = tokenizer
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes or default_memory_bytes()
        self._cache = cache
        self._compiled: OrderedDict[GrammarSpec, AnyGrammar] = OrderedDict()
        self._child: CompilerChild | None = None
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> AnyGrammar:
        """The compiled grammar of ``spec``, made on first use and kept.

        Kinds: ``json_schema`` (JSON text), ``regex`` (whole answer), ``ebnf`` (rule ``root``),
        ``choices`` (a JSON list of texts), which becomes a `CompiledChoices`, ``tool_calls``.
        Says so in the log when it takes long. Raises `SchemaError` naming the cause when the
        grammar is rejected, no answer could end, or it takes too much time or memory.
        """
        with self._lock:
            found = self._compiled.get(spec)
            if found is None:
                is_listed = spec.kind == "choices"
                found = self._choices(spec) if is_listed else self._compile(spec)
                self._compiled[spec] = found
                self._forget()
            self._compiled.move_to_end(spec)
            return found

    def close(self) -> None:
        """Ends the process that compiles, which a later `compile` starts anew; idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    @cached_property
    def forced(self) -> ForcedText:
        """The rule by which what a grammar forces becomes tokens."""
        return ForcedText(self._tokenizer, self.vocab_size)

    def opening(self, spec: GrammarSpec) -> tuple[int, ...]:
        """The token ids with which every answer under ``spec`` begins; may be the whole answer.

        Raises `SchemaError` as `compile` does.
        """
        return self.forced.next_ids(start(self.compile(spec)))

    def check_scores(self, spec: GrammarSpec) -> None:
        """Raises `SchemaError` where every choice of ``spec`` cannot be looked at: it has none,
        or they part at more than `MAX_BRANCHES` places, each of which costs a pass."""
        compiled = self.compile(spec)
        if not isinstance(compiled, CompiledChoices):
            raise SchemaError("schema: probabilities need answers out of a few, such as an enum")
        if len(compiled.branches) > MAX_BRANCHES:
            raise SchemaError(
                f"schema: its {len(compiled.texts):,} answers part at {len(compiled.branches):,} "
                f"places, and probabilities take a pass through the model for each; at most "
                f"{MAX_BRANCHES} are allowed, so give fewer choices or leave probabilities out"
            )

    def _forget(self) -> None:
        """Lets go of what was not used for longest; rows that use it keep it alive."""
        num_bytes = sum(map(_num_bytes, self._compiled.values()))
        while len(self._compiled) > 1 and (
            len(self._compiled) > MAX_KEPT or num_bytes > MAX_KEPT_BYTES
        ):
            _, oldest = self._compiled.popitem(last=False)
            num_bytes -= _num_bytes(oldest)

    @cached_property
    def _info(self) -> xgrammar.TokenizerInfo:
        return tokenizer_info(self._tokenizer.token_bytes, self.vocab_size, self.stop_ids)

    @cached_property
    def _native(self) -> xgrammar.GrammarCompiler:
        return native_compiler(self._info, self._num_threads)

    @cached_property
    def _keys(self) -> GrammarKeys | None:
        try:
            return GrammarKeys(self._tokenizer.token_bytes, self.vocab_size, self.stop_ids)
        except OSError:  # no files of this package to be read
            return None

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        started = time.perf_counter()
        cheap = is_cheap(spec)
        key = None if self._cache is None or self._keys is None else self._keys.key(spec)
        built = self._cached(key)
        if built is None:
            built = self._built_here(spec) if cheap else self._built_in_child(spec, key)
            if cheap and time.perf_counter() - started > STORED_AFTER_S:
                self._store(key, _serialised(built))
        return CompiledGrammar(
            spec=spec,
            native=built.native,
            vocab_size=self.vocab_size,
            stop_words=self._stop_words,
            always_ends=built.always_ends,
            notices=built.notices,
            compile_s=time.perf_counter() - started,
        )

    def _choices(self, spec: GrammarSpec) -> CompiledChoices:
        return compile_choices(
            spec,
            spell=self.forced.spell,
            token_bytes=self._tokenizer.token_bytes[: self.vocab_size],
            stop_ids=self.stop_ids,
            stop_words=self._stop_words,
            vocab_size=self.vocab_size,
        )

    @cached_property
    def _stop_words(self) -> NDArray[np.int32]:
        stop_words = np.zeros(-(-self.vocab_size // 32), dtype=np.uint32)
        spare = range(self.vocab_size, 32 * len(stop_words))
        for i in (*self.stop_ids, *spare):
            stop_words[i // 32] |= np.uint32(1 << (i % 32))
        return stop_words.view(np.int32)

    def _cached(self, key: str | None) -> Built | None:
        found = None if self._cache is None or key is None else self._cache.load(key)
        if found is None:
            return None
        try:
            return self._read(found)
        except Exception:  # whatever xgrammar raises for what it did not write
            return None

    def _store(self, key: str | None, grammar: Serialised) -> None:
        if self._cache is not None and key is not None:
            self._cache.store(key, grammar)

    def _read(self, grammar: Serialised) -> Built:
        text = grammar.native.decode()
        return Built(
            native=xgrammar.CompiledGrammar.deserialize_json(text, self._info),
            always_ends=grammar.always_ends,
            notices=grammar.notices,
        )

    def _built_here(self, spec: GrammarSpec) -> Built:
        with NativeNotices() as notices:
            built = _watched(lambda: build(self._native, spec), self._timeout_s, notices.release)
        return Built(
            native=built.native, always_ends=built.always_ends, notices=tuple(notices.messages)
        )

    def _built_in_child(self, spec: GrammarSpec, key: str | None) -> Built:
        # Of two threads one compiles; the other waits for the lock.
        child = self._child
        try:
            if child is None or not child.is_alive:
                child = self._child = CompilerChild(
                    self._tokenizer.token_bytes,
                    self.vocab_size,
                    self.stop_ids,
                    num_threads=self._num_threads,
                    memory_bytes=self._memory_bytes,
                )
                _watched(child.greet, _START_TIMEOUT_S, reports=False)
            compile_ = child.compile
            done = _watched(lambda: compile_(spec, timeout_s=self._timeout_s), self._timeout_s)
        except BaseException as error:
            # It may be at work still, or gone; only after an answer is it of further use.
            if not isinstance(error, Rejected):
                self.close()
            raise
        self._store(key, done)
        return self._read(done)


def _num_bytes(grammar: AnyGrammar) -> int:
    if isinstance(grammar, CompiledChoices):
        return sum(map(len, grammar.texts))  # as good as nothing
    return int(grammar.native.memory_size_bytes)


def _serialised(built: Built) -> Serialised:
    return Serialised(
        native=built.native.serialize_json().encode(),
        always_ends=built.always_ends,
        notices=built.notices,
    )


def _watched(
    work: Callable[[], _Result],
    timeout_s: float,
    on_slow: Callable[[], None] = lambda: None,
    *,
    reports: bool = True,
) -> _Result:
    """Runs ``work`` in a thread of its own (xgrammar lets go of the GIL), so that it can be
    reported, given up and interrupted. A thread given up runs on until its work ends."""
    outcome: list[_Result | Exception] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # whatever the native code throws: its text is the cause
            outcome.append(error)

    thread = threading.Thread(target=run, name="grammar-compiler", daemon=True)
    started = time.perf_counter()
    thread.start()
    patience_s = min(SLOW_AFTER_S, timeout_s)
    thread.join(patience_s)
    if thread.is_alive():
        on_slow()
        if reports and timeout_s > patience_s:
            _log.warning(
                "the grammar of the output schema is still compiling; large enums, "
                "patterns and length bounds take longest"
            )
        thread.join(timeout_s - patience_s)
    if not outcome:
        took_s = time.perf_counter() - started
        raise SchemaError(
            f"the grammar of the output schema was not compiled after {took_s:.0f} s; make the "
            f"schema smaller (large enums, patterns and length bounds take longest) or raise "
            f"--grammar-timeout"
        )
    result = outcome[0]
    if isinstance(result, SchemaError):
        raise result
    if isinstance(result, Exception):
        raise SchemaError(
            f"the output schema cannot be made into a grammar: {plain_message(str(result))}"
        ) from result
    return result
