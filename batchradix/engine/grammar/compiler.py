"""`GrammarSpec` to a compiled grammar for one model's vocabulary, once per spec."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np
import xgrammar
from numpy.typing import NDArray

from batchradix.engine.grammar.choices import CompiledChoices, compile_choices
from batchradix.engine.grammar.compiled import CompiledGrammar
from batchradix.engine.grammar.endless import always_ends
from batchradix.engine.grammar.forced import ForcedText, GrammarTokenizer
from batchradix.engine.grammar.json_grammar import json_grammar
from batchradix.engine.grammar.notices import NativeNotices, plain_message
from batchradix.engine.grammar.state import AnyGrammar, start
from batchradix.errors import SchemaError
from batchradix.types import GrammarSpec

SLOW_AFTER_S = 3.0
MAX_BRANCHES = 256  # where probabilities are wanted

_log = logging.getLogger(__name__)


class GrammarCompiler:
    """Compiles grammars for a tokenizer; ``vocab_size`` is the width of the model's logits.

    ``eos_ids`` end an answer and are legal only where the grammar is complete. Safe to share
    between threads. The vocabulary is read at the first `compile`.
    """

    def __init__(
        self,
        tokenizer: GrammarTokenizer,
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        num_threads: int = 2,
    ) -> None:
        self.vocab_size = vocab_size
        self.stop_ids = tuple(sorted({i for i in eos_ids if 0 <= i < vocab_size}))
        self._tokenizer = tokenizer
        self._num_threads = num_threads
        self._compiled: dict[GrammarSpec, AnyGrammar] = {}
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec, *, timeout_s: float | None = None) -> AnyGrammar:
        """The compiled grammar of ``spec``, made on first use and kept.

        Kinds: ``json_schema`` (JSON text), ``regex`` (whole answer), ``ebnf`` (rule ``root``),
        ``choices`` (a JSON list of texts), which becomes a `CompiledChoices`.
        Says so in the log when it takes long. Raises `SchemaError` naming the cause when the
        grammar is rejected or is not ready after ``timeout_s``.
        """
        with self._lock:
            if spec not in self._compiled:
                if spec.kind == "choices":
                    self._compiled[spec] = self._choices(spec)
                else:
                    self._compiled[spec] = self._compile(spec, timeout_s)
            return self._compiled[spec]

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

    @cached_property
    def _native(self) -> xgrammar.GrammarCompiler:
        info = xgrammar.TokenizerInfo(
            list(self._tokenizer.token_bytes[: self.vocab_size]),
            xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=list(self.stop_ids),
        )
        return xgrammar.GrammarCompiler(info, max_threads=self._num_threads, cache_enabled=False)

    def _compile(self, spec: GrammarSpec, timeout_s: float | None) -> CompiledGrammar:
        started = time.perf_counter()
        with NativeNotices() as notices:
            native = _watched(
                lambda: self._native.compile_grammar(_grammar(spec)), timeout_s, notices.release
            )
        # Only what refers to itself can go on for ever.
        may_recur = spec.kind == "ebnf" or (spec.kind == "json_schema" and '"$ref"' in spec.source)
        return CompiledGrammar(
            spec=spec,
            native=native,
            vocab_size=self.vocab_size,
            stop_words=self._stop_words,
            always_ends=not may_recur or always_ends(str(native.grammar)),
            notices=tuple(notices.messages),
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


def _grammar(spec: GrammarSpec) -> xgrammar.Grammar:
    if spec.kind == "json_schema":
        return json_grammar(spec.source)
    if spec.kind == "regex":
        return xgrammar.Grammar.from_regex(spec.source)
    if spec.kind == "ebnf":
        return xgrammar.Grammar.from_ebnf(spec.source)
    raise ValueError(f"there is no kind of grammar called {spec.kind!r}")


def _watched(
    work: Callable[[], xgrammar.CompiledGrammar],
    timeout_s: float | None,
    on_slow: Callable[[], None],
) -> xgrammar.CompiledGrammar:
    """Runs ``work`` in a thread of its own (xgrammar lets go of the GIL), so that it can be
    reported, given up and interrupted. A thread given up runs on until the process ends."""
    outcome: list[xgrammar.CompiledGrammar | Exception] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # whatever the native code throws: its text is the cause
            outcome.append(error)

    thread = threading.Thread(target=run, name="grammar-compiler", daemon=True)
    started = time.perf_counter()
    thread.start()
    patience_s = SLOW_AFTER_S if timeout_s is None else min(SLOW_AFTER_S, timeout_s)
    thread.join(patience_s)
    if thread.is_alive():
        on_slow()
        if timeout_s is None or timeout_s > patience_s:
            _log.warning(
                "the grammar of the output schema is still compiling; large enums, "
                "patterns and length bounds take longest"
            )
        thread.join(None if timeout_s is None else timeout_s - patience_s)
    if not outcome:
        took_s = time.perf_counter() - started
        raise SchemaError(
            f"the grammar of the output schema was not compiled after {took_s:.0f} s; make the "
            f"schema smaller (large enums, patterns and length bounds take longest)"
        )
    if isinstance(outcome[0], Exception):
        raise SchemaError(
            f"the output schema cannot be made into a grammar: {plain_message(str(outcome[0]))}"
        ) from outcome[0]
    return outcome[0]
