"""llama.cpp over token ids, by the C interface that llama-cpp-python brings.

Rows are answered in groups of slots, in the order given, as well as its memory allows: a token
that several rows of a group begin with is computed once for all of them, and the last row of a
group stays for the next one to begin with. (Its server shares only within one slot.)
"""

from __future__ import annotations

import ctypes
import json
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks import Measurement, Task

SLOTS = 32
POOL_TOKENS = 32_768
BATCH_TOKENS = 2048


@dataclass(slots=True)
class Token:
    """One token to compute; ``rows`` are the places in the group of all rows that it is of."""

    id: int
    position: int
    rows: list[int]
    is_last: bool = False


@dataclass(slots=True)
class Group:
    """Rows ``[start, start + len(shared))``; ``shared[i]``: leading tokens that row i has in
    common with the row before it, which for the first is the last row of the group before."""

    start: int
    shared: list[int] = field(default_factory=list)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens in common, but never all of ``b``: its last token must be computed."""
    most = min(len(a), len(b) - 1)
    return next((n for n in range(most) if a[n] != b[n]), most)


def make_groups(
    prompts: Sequence[Sequence[int]], *, slots: int, pool_tokens: int, new_tokens: int
) -> list[Group]:
    """Consecutive rows, at most ``slots``, whose tokens and answers fit the pool together.

    Raises `SystemExit` for a row that does not fit alone.
    """
    groups: list[Group] = []
    used = 0
    for row, prompt in enumerate(prompts):
        shared = common_prefix(prompts[row - 1], prompt) if row else 0
        need = len(prompt) - shared + new_tokens
        if not groups or len(groups[-1].shared) == slots or used + need > pool_tokens:
            # The row before stays in the pool, whole, beside the new group.
            used = len(prompts[row - 1]) if row else 0
            if used + need > pool_tokens:
                used, shared = 0, 0
                need = len(prompt) + new_tokens
            if need > pool_tokens:
                raise SystemExit(f"a row of {need} tokens does not fit a pool of {pool_tokens}")
            groups.append(Group(row))
        groups[-1].shared.append(shared)
        used += need
    return groups


def tokens_to_compute(group: Group, prompts: Sequence[Sequence[int]]) -> list[Token]:
    """Each distinct token of the group once, before all that depend on it; those that the first
    row has in common with the group before are left out."""
    tokens: list[Token] = []
    by_position: dict[int, Token] = {}  # of the row before
    for place, shared in enumerate(group.shared):
        prompt = prompts[group.start + place]
        for position, token in by_position.items():
            if position < shared:
                token.rows.append(place)
        by_position = {n: token for n, token in by_position.items() if n < shared}
        for position in range(shared, len(prompt)):
            by_position[position] = Token(prompt[position], position, [place])
            tokens.append(by_position[position])
        tokens[-1].is_last = True
    return tokens


class LlamaContext:
    """A model with a pool of KV cells that all sequences share."""

    def __init__(self, task: Task, *, pool_tokens: int, slots: int) -> None:
        from llama_cpp import llama_cpp as lib

        self.lib = lib
        self._no_log = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._no_log, None)
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(
            task.model.encode(), lib.llama_model_default_params()
        )
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.num_words = lib.llama_vocab_n_tokens(self.vocab)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch = pool_tokens, BATCH_TOKENS
        params.n_seq_max, params.kv_unified = slots + 1, True
        params.n_threads = params.n_threads_batch = task.threads
        self.context = lib.llama_init_from_model(self.model, params)
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(BATCH_TOKENS, 0, slots + 1)

    def decode(self, tokens: Sequence[Token]) -> Any:
        """Computes at most `BATCH_TOKENS` tokens; float32[last tokens, vocabulary]."""
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(tokens)
        for n, token in enumerate(tokens):
            batch.token[n], batch.pos[n] = token.id, token.position
            batch.n_seq_id[n], batch.logits[n] = len(token.rows), token.is_last
            for place, row in enumerate(token.rows):
                batch.seq_id[n][place] = row
        if code := self.lib.llama_decode(self.context, batch):
            raise SystemExit(f"llama_decode failed with {code}")
        shape = (sum(token.is_last for token in tokens), self.num_words)
        if not shape[0]:
            return np.zeros(shape, np.float32)
        return np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), shape)


class Grammar:
    """One row's place in a grammar. The likeliest token is tried first, all only if it fails."""

    def __init__(self, llama: LlamaContext, text: str) -> None:
        self._llama = llama
        self._sampler = llama.lib.llama_sampler_init_grammar(llama.vocab, text.encode(), b"root")

    def choose(self, logits: Any) -> int:
        best = int(logits.argmax())
        if self._allowed([best], logits) != best:
            best = self._allowed(range(len(logits)), logits)
        if not self._llama.lib.llama_vocab_is_eog(self._llama.vocab, best):
            self._llama.lib.llama_sampler_accept(self._sampler, best)
        return best

    def close(self) -> None:
        self._llama.lib.llama_sampler_free(self._sampler)

    def _allowed(self, ids: Sequence[int], logits: Any) -> int:
        """The likeliest of ``ids`` that the grammar allows, -1 for none."""
        lib = self._llama.lib
        data = (lib.llama_token_data * len(ids))()
        for place, token in enumerate(ids):
            data[place].id, data[place].logit = token, logits[token]
        array = lib.llama_token_data_array(data=data, size=len(ids), selected=-1, sorted=False)
        lib.llama_sampler_apply(self._sampler, ctypes.byref(array))
        best = max(data, key=lambda each: each.logit)
        return -1 if best.logit == float("-inf") else int(best.id)


def run_llama_cpp(task: Task) -> Measurement:
    """All rows in the order given, as many together as there are slots."""
    started_s = time.monotonic()
    slots, pool_tokens = task.batch_size or SLOTS, task.kv_tokens or POOL_TOKENS
    llama = LlamaContext(task, pool_tokens=pool_tokens, slots=slots)
    grammar = _grammar_text(task)
    result = Measurement(system=task.system, rows=len(task.prompt_ids))
    result.load_s = time.monotonic() - started_s

    started_s, started_cpu_s = time.monotonic(), time.process_time()
    groups = make_groups(
        task.prompt_ids, slots=slots, pool_tokens=pool_tokens, new_tokens=task.new_tokens
    )
    for group in groups:
        result.answers += _answer(llama, task, group, slots, grammar, result)
    result.run_s = time.monotonic() - started_s
    result.cpu_s = time.process_time() - started_cpu_s
    result.prompt_tokens = sum(map(len, task.prompt_ids))
    result.output_tokens = sum(map(len, result.answers))
    result.texts = [_text(llama, answer) for answer in result.answers] if task.schema else []
    result.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result.settings = {"slots": slots, "weights": "bfloat16", "kv": "float16", "kv_unified": True}
    return result


def _answer(
    llama: LlamaContext, task: Task, group: Group, slots: int, grammar: str, result: Measurement
) -> list[list[int]]:
    """The answers of a group's rows. Sequence ``slots`` holds the last prompt of the group
    before, and holds this group's when this returns."""
    lib, memory, places = llama.lib, llama.memory, range(len(group.shared))
    most = group.shared[0]
    for place in places:
        most = min(most, group.shared[place])
        lib.llama_memory_seq_cp(memory, slots, place, 0, most)
    lib.llama_memory_seq_rm(memory, slots, -1, -1)
    tokens = tokens_to_compute(group, task.prompt_ids)
    result.computed_tokens += len(tokens)
    grammars = [Grammar(llama, grammar) for _ in places] if grammar else []

    def choose(place: int, logits: Any) -> int:
        return grammars[place].choose(logits) if grammars else int(logits.argmax())

    answers: list[list[int]] = [[] for _ in places]
    for start in range(0, len(tokens), BATCH_TOKENS):
        part = tokens[start : start + BATCH_TOKENS]
        logits = llama.decode(part)
        result.steps += 1
        # A row's last token is its own: of all rows that share it, the first ends there.
        ending = [token.rows[0] for token in part if token.is_last]
        for n, place in enumerate(ending):
            answers[place].append(choose(place, logits[n]))
    last = places[-1]
    lengths = [len(task.prompt_ids[group.start + place]) for place in places]
    lib.llama_memory_seq_cp(memory, last, slots, 0, lengths[last])
    running = [place for place in places if _goes_on(llama, task, answers[place])]
    while running:
        logits = llama.decode(
            [
                Token(answers[place][-1], lengths[place] + len(answers[place]) - 1, [place], True)
                for place in running
            ]
        )
        result.steps += 1
        for n, place in enumerate(running):
            answers[place].append(choose(place, logits[n]))
        running = [place for place in running if _goes_on(llama, task, answers[place])]
    for place in places:
        lib.llama_memory_seq_rm(memory, place, -1, -1)
    for each in grammars:
        each.close()
    return answers


def _goes_on(llama: LlamaContext, task: Task, answer: Sequence[int]) -> bool:
    if len(answer) == task.new_tokens:
        return False
    return task.ignore_eos or not llama.lib.llama_vocab_is_eog(llama.vocab, answer[-1])


def _grammar_text(task: Task) -> str:
    """The schema in llama.cpp's own notation, "" where there is none."""
    if task.schema is None:
        return ""
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    return str(json_schema_to_gbnf(json.dumps(task.schema)))


def _text(llama: LlamaContext, answer: Sequence[int]) -> str:
    """The text of an answer without the token that ends it."""
    raw, buffer = b"", ctypes.create_string_buffer(512)
    for token in answer:
        if not llama.lib.llama_vocab_is_eog(llama.vocab, token):
            size = llama.lib.llama_token_to_piece(llama.vocab, token, buffer, 512, 0, False)
            raw += buffer.raw[:size]
    return raw.decode(errors="replace")
