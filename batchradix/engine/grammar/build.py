"""From a grammar's source to what xgrammar made of it: the work itself, in whichever process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xgrammar

from batchradix.engine.grammar.endless import endless_rules
from batchradix.engine.grammar.json_grammar import json_grammar
from batchradix.engine.grammar.tool_calls import tool_calls_grammar
from batchradix.types import GrammarSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """``always_ends`` and ``notices`` are those of `CompiledGrammar`."""

    native: xgrammar.CompiledGrammar
    always_ends: bool
    notices: tuple[str, ...] = ()


def tokenizer_info(
    token_bytes: Sequence[bytes], vocab_size: int, stop_ids: Sequence[int]
) -> xgrammar.TokenizerInfo:
    """The vocabulary as xgrammar wants it; ``vocab_size`` is the width of the logits."""
    return xgrammar.TokenizerInfo(
        list(token_bytes[:vocab_size]),
        xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=list(stop_ids),
    )


def native_compiler(info: xgrammar.TokenizerInfo, num_threads: int) -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(info, max_threads=num_threads, cache_enabled=False)


def build(compiler: xgrammar.GrammarCompiler, spec: GrammarSpec) -> Built:
    """Compiles ``spec``; raises whatever xgrammar raises for what it rejects, and `ValueError`
    for a grammar of which no text ever ends."""
    native = compiler.compile_grammar(_grammar(spec))
    # Only what refers to itself can go on for ever.
    may_recur = spec.kind == "ebnf" or (spec.kind != "regex" and "$ref" in spec.source)
    endless = endless_rules(str(native.grammar)) if may_recur else frozenset()
    if "root" in endless:
        raise ValueError("no answer could ever end, it requires itself without a way out")
    return Built(native=native, always_ends=not endless)


def _grammar(spec: GrammarSpec) -> xgrammar.Grammar:
    if spec.kind == "json_schema":
        return json_grammar(spec.source)
    if spec.kind == "regex":
        return xgrammar.Grammar.from_regex(spec.source)
    if spec.kind == "ebnf":
        return xgrammar.Grammar.from_ebnf(spec.source)
    if spec.kind == "tool_calls":
        return tool_calls_grammar(spec.source)
    raise ValueError(f"there is no kind of grammar called {spec.kind!r}")
