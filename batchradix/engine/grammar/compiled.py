"""A grammar that is ready to be walked, for one model's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xgrammar
from numpy.typing import NDArray

from batchradix.types import GrammarSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGrammar:
    """A grammar ready for one vocabulary; shared by all rows with that ``spec``.

    ``stop_words``: int32[ceil(vocab_size / 32)], the mask of the end-of-sequence tokens, with
    the spare bits after the last token set too (xgrammar leaves anything in them).
    ``always_ends``: whether every text that it allows to begin can also end; what must follow
    has no end otherwise. ``notices``: what the compiler warned of, one sentence each.
    ``compile_s``: seconds.
    """

    spec: GrammarSpec
    native: xgrammar.CompiledGrammar
    vocab_size: int
    stop_words: NDArray[np.int32]
    always_ends: bool
    notices: tuple[str, ...]
    compile_s: float
