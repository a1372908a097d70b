"""A runner without a model: it checks what every query would read, and answers by prefix.

Each slot holds (position, hash of the tokens up to there) or poison. A query must see exactly
the positions before it and itself, once each, with the hashes of its own sequence. Its
"logits" are the hash of the whole prefix, so any wrong read changes the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.engine.cache.pool import Extent
from batchradix.engine.cache.spill import SpillSpace
from batchradix.engine.cache.store import KVStore
from batchradix.engine.cache.tiers import Tiers
from batchradix.engine.draft import Draft
from batchradix.engine.memory import Retreat
from batchradix.engine.row import RunningRow
from batchradix.engine.scheduler import Scheduler
from batchradix.engine.step import KVBlock, Step
from batchradix.errors import RowError
from batchradix.plan.order import make_plan
from batchradix.plan.tree import build_tree
from batchradix.types import I64, EngineJob, RequestTable, RowSettings, TokenTable, Usage

EOS = 0


def chain(previous: int, token: int) -> int:
    """The hash of a prefix one token longer."""
    return hash((previous, token))


def prefix_hash(tokens: Sequence[int]) -> int:
    value = 0
    for token in tokens:
        value = chain(value, int(token))
    return value


def next_token(value: int, vocab_size: int) -> int:
    """The token that greedily follows a prefix; with a large vocabulary answers are longer."""
    draw = hash((value, 17))
    return (
        EOS if draw % (12 if vocab_size < 100 else 60) == 0 else 1 + (draw >> 8) % (vocab_size - 1)
    )


def answer_alone(prompt: Sequence[int], max_tokens: int, vocab_size: int) -> list[int]:
    """What the row answers when nothing else runs, the end of sequence included."""
    value = prefix_hash(prompt)
    answer: list[int] = []
    while len(answer) < max_tokens:
        token = next_token(value, vocab_size)
        answer.append(token)
        if token == EOS:
            break
        value = chain(value, token)
    return answer


def pairs(table: I64) -> list[Extent]:
    return [(int(start), int(length)) for start, length in table]


class FakeRunner:
    """``used`` gives the slots that have an owner; all others are poisoned before a step.

    ``room`` is how many tokens there is memory for; a pass over more writes some, then fails.
    """

    def __init__(
        self,
        num_slots: int,
        used: Callable[[], Sequence[Extent]],
        store: KVStore | None = None,
        space: SpillSpace | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.store = store
        self.space = space
        self.slots: list[tuple[int, int] | None] = [None] * num_slots
        self.holds: dict[int, int] = {}
        self.steps: list[Step] = []
        self.room: int | None = None
        self.retreat = Retreat("in a test", "tokens", "--batch-size")
        self._used = used
        self._before: dict[int, int] = {0: 0}  # of each prefix, the one a token shorter

    def run(self, step: Step) -> list[int]:
        """The prefix hash behind each logit source."""
        self.steps.append(step)
        self._spill(step)
        self._move(step)
        self._poison()
        self._reload(step)
        self._load(step)
        parts = self.retreat.in_parts(step.num_tokens, partial(self._forward, step))
        final = [value for part in parts for value in part]
        assert len(set(step.slots.tolist())) == step.num_tokens, "two queries write one slot"
        self._save(step)
        for query, hold in zip(step.hold_queries, step.hold_ids, strict=True):
            assert int(hold) not in self.holds, "a hold id is used twice"
            self.holds[int(hold)] = final[int(query)]
        sources = [int(s) for s in step.logit_sources]
        out = [final[s] if s >= 0 else self.holds[-1 - s] for s in sources]
        for hold in step.free_holds:
            del self.holds[int(hold)]
        return out

    def _spill(self, step: Step) -> None:
        for spill in step.spills:
            assert self.space is not None
            held = [self.slots[s] for start, n in spill.extents for s in range(start, start + n)]
            content = []
            for one in held:
                assert one is not None, "a slot without content is spilled"
                content.append((*one, self._before[one[1]], 0))
            self.space.write(pairs(spill.places), memoryview(np.array(content, np.int64).tobytes()))

    def _reload(self, step: Step) -> None:
        for reload in step.reloads:
            assert self.space is not None
            data = np.frombuffer(self.space.read(pairs(reload.places)), np.int64)
            content = iter(data.reshape(-1, 4).tolist())
            for start, length in reload.extents.tolist():
                for slot in range(start, start + length):
                    position, value, before, _ = next(content)
                    self.slots[slot] = (position, value)
                    self._before[value] = before
            assert next(content, None) is None, "more comes back than there is room for"

    def _load(self, step: Step) -> None:
        for load in step.loads:
            content = np.frombuffer(load.block.k, dtype=np.int64).reshape(-1, 2).tolist()
            before = np.frombuffer(load.block.v, dtype=np.int64).reshape(-1, 2).tolist()
            place = load.first
            for start, length in load.extents.tolist():
                for slot in range(start, start + length):
                    position, value = content[place]
                    assert position == load.block.start + place
                    self.slots[slot] = (position, value)
                    self._before[value] = before[place][0]
                    place += 1
            assert place == len(content), "a block is not loaded to its end"

    def _save(self, step: Step) -> None:
        for save in step.saves:
            assert self.store is not None
            content, before = [], []
            for place, slot in enumerate(save.slots.tolist()):
                held = self.slots[slot]
                assert held is not None, "a slot without content is kept"
                assert held[0] == save.start + place, "another position is kept"
                content.append(held)
                before.append((self._before[held[1]], 0))
            k, v = (memoryview(np.array(s, np.int64).tobytes()) for s in (content, before))
            self.store.write(save.key, KVBlock(start=save.start, k=k, v=v))

    def _move(self, step: Step) -> None:
        moves = step.moves.tolist()
        read = [self.slots[s : s + n] for s, _, n in moves]
        for source, _, n in moves:
            self.slots[source : source + n] = [None] * n
        written: set[int] = set()
        for (_, target, n), content in zip(moves, read, strict=True):
            assert 0 <= target <= target + n <= self.num_slots
            assert written.isdisjoint(range(target, target + n)), "two moves meet"
            written.update(range(target, target + n))
            self.slots[target : target + n] = content

    def _poison(self) -> None:
        owned: set[int] = set()
        for start, length in self._used():
            assert owned.isdisjoint(range(start, start + length)), "a slot has two owners"
            owned.update(range(start, start + length))
        for slot in range(self.num_slots):
            if slot not in owned:
                self.slots[slot] = None

    def _forward(self, step: Step, first: int, last: int) -> list[int]:
        part = step if last - first == step.num_tokens else step.part(first, last)
        final = self._attend(part)
        if self.room is not None and last - first > self.room:
            for slot in part.slots.tolist()[::2]:
                self.slots[slot] = None
            raise MemoryError
        return final

    def _attend(self, step: Step) -> list[int]:
        final: list[int] = []
        read = self._slots_read(step)
        for query in range(step.num_tokens):
            token = int(step.token_ids[query])
            position = int(step.positions[query])
            own = int(step.slots[query])
            assert own in read[query], "a query does not see itself"
            by_position: dict[int, int] = {}
            for slot in read[query]:
                if slot == own:
                    continue
                content = self.slots[slot]
                assert content is not None, "a query reads a slot without content"
                assert content[0] not in by_position, "a position is read twice"
                by_position[content[0]] = content[1]
            assert sorted(by_position) == list(range(position)), "positions are missing"
            value = 0
            for place in range(position):
                before, value = value, by_position[place]
                assert self._before[value] == before, "a query reads another sequence"
            before, value = value, chain(value, token)
            self._before[value] = before
            self.slots[own] = (position, value)
            final.append(value)
        return final

    def _slots_read(self, step: Step) -> list[list[int]]:
        """Slots of each query, by pieces; a slot in two pieces of one query is an error."""
        read: list[list[int]] = [[] for _ in range(step.num_tokens)]
        for start, length, first, last in step.context.tolist():
            assert 0 <= start < start + length <= self.num_slots
            assert 0 <= first < last <= step.num_tokens, "an empty or foreign query range"
            self._check_order(step, start, length)
            for query in range(first, last):
                read[query].extend(range(start, start + length))
        for start, length, first, last in step.causal.tolist():
            assert length == last - first > 0
            self._check_order(step, start, length)
            for i, query in enumerate(range(first, last)):
                read[query].extend(range(start, start + i + 1))
        for slots in read:
            assert len(slots) == len(set(slots)), "pieces of a query overlap"
        return read

    def _check_order(self, step: Step, start: int, length: int) -> None:
        """Slots of a piece stand in order of position (after this step's writes)."""
        writes = {int(s): int(p) for s, p in zip(step.slots, step.positions, strict=True)}
        positions = []
        for slot in range(start, start + length):
            content = self.slots[slot]
            position = writes.get(slot, content[0] if content else None)
            assert position is not None, "a piece holds a slot without content"
            positions.append(position)
        assert positions == list(range(positions[0], positions[0] + length))


@dataclass
class Outcome:
    """What a run gave: answers and errors by (job id, row), and the counters."""

    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    errors: dict[tuple[int, int], RowError] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    steps: list[Step] = field(default_factory=list)


def make_job(
    rows: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    *,
    settings: Sequence[RowSettings] = (RowSettings(),),
    settings_id: Sequence[int] | None = None,
    retain: bool = False,
) -> EngineJob:
    tokens = TokenTable.from_rows(rows)
    plan = make_plan(tokens)
    return EngineJob(
        tokens=tokens,
        plan=plan,
        tree=build_tree(plan, tokens.lengths),
        requests=RequestTable(
            settings=tuple(settings),
            settings_id=np.array(settings_id or [0] * len(rows), np.int32),
            max_tokens=np.array(max_tokens, np.int32),
            rng_key=np.arange(len(rows), dtype=np.uint64),
        ),
        retain=retain,
    )


class Simulation:
    """A `Scheduler` with a `FakeRunner`, driven as the engine drives them."""

    def __init__(
        self,
        *,
        num_slots: int,
        batch_size: int = 8,
        prefill_tokens: int = 64,
        prefix_cache: bool = True,
        vocab_size: int = 5,
        forced: Callable[[RunningRow], Sequence[int]] = lambda row: (),
        max_node_extents: int = 4,
        speculate: bool = False,
        store: KVStore | None = None,
        space: SpillSpace | None = None,
    ) -> None:
        self.outcome = Outcome()
        self.scheduler = Scheduler(
            num_slots=num_slots,
            batch_size=batch_size,
            prefill_tokens=prefill_tokens,
            prefix_cache=prefix_cache,
            usage=self.outcome.usage,
            tiers=Tiers(store, space),
            max_node_extents=max_node_extents,
        )
        self.runner = FakeRunner(num_slots, self.used, store, space)
        self.prefill_tokens = prefill_tokens
        self.batch_size = batch_size
        self.vocab_size = vocab_size
        self.speculate = speculate
        self._forced = forced
        self._num_jobs = 0

    def used(self) -> list[Extent]:
        scheduler = self.scheduler
        extents = [e for node in scheduler.cache.nodes() for e in node.extents]
        return extents + [e for row in scheduler.running for e in row.tail]

    def submit(
        self, rows: Sequence[Sequence[int]], max_tokens: Sequence[int], *, retain: bool = False
    ) -> int:
        self._num_jobs += 1
        self.scheduler.submit(self._num_jobs - 1, make_job(rows, max_tokens, retain=retain))
        return self._num_jobs - 1

    def guess(self, row: RunningRow) -> Draft | None:
        """What the row goes on with, here and there something else; too long at its end."""
        if not row.answer:
            return None
        length = 1 + hash((row.seq, len(row.answer))) % 5
        known = len(row.answer)
        right = answer_alone(row.prompt, known + length, self.vocab_size)[known:]
        ids = [3 if hash((token, known + i)) % 4 == 0 else token for i, token in enumerate(right)]
        ids = [token for token in ids if token != EOS] or [2]
        return Draft(num_matched=1, pieces=[(i,) for i in ids], states=[None] * len(ids))

    def step(self) -> None:
        if self.speculate:
            for row in self.scheduler.running:
                row.draft = self.guess(row)
        decision = self.scheduler.schedule()
        assert decision.step is not None or decision.refused, "a step without any progress"
        for refused in decision.refused:
            key = (refused.job_id, refused.row)
            assert key not in self.outcome.answers
            assert key not in self.outcome.errors
            self.outcome.errors[key] = refused.error
        assert len(self.scheduler.running) <= self.batch_size
        self.scheduler.check()
        if decision.step is None:
            return
        self.outcome.steps.append(decision.step)
        values = self.runner.run(decision.step)
        for row, places in groupby(range(len(values)), key=decision.rows.__getitem__):
            self._take(row, [next_token(values[i], self.vocab_size) for i in places])

    def _take(self, row: RunningRow, chosen: Sequence[int]) -> None:
        """Takes what was chosen, as far as the row's draft came true and one token further."""
        guessed = [] if row.draft is None else row.draft.token_ids
        assert len(chosen) == len(guessed) + 1
        taken: list[int] = []
        for token, guess in zip(chosen, [*guessed, None], strict=True):
            taken.append(token)
            if token == EOS or len(row.answer) + len(taken) == row.max_tokens:
                key = (row.job_id, row.row)
                assert key not in self.outcome.answers
                assert key not in self.outcome.errors
                self.outcome.answers[key] = [*row.answer, *taken]
                self.outcome.usage.accepted_tokens += len(taken) - 1
                self.scheduler.finish(row)
                return
            if token != guess:
                break
        self.outcome.usage.accepted_tokens += len(taken) - 1
        self.scheduler.append(row, taken, num_drafted=len(taken) - 1)
        room = row.max_tokens - 1 - len(row.answer)
        self.scheduler.append(row, list(self._forced(row))[:room])

    def drain(self) -> Outcome:
        while self.scheduler.has_work:
            self.step()
        self.scheduler.check()
        return self.outcome


class HashRunner:
    """A `FakeRunner` with logits, as the engine wants them: one token far above the rest."""

    def __init__(self, num_slots: int, vocab_size: int, num_choices: int) -> None:
        self.used: Callable[[], Sequence[Extent]] = list
        self.fake = FakeRunner(num_slots, lambda: self.used())
        self.vocab_size = vocab_size
        self.num_choices = num_choices
        self.broken: set[int] = set()  # tokens before which logits are NaN
        self.num_closed = 0
        self.notices: list[str] = []
        self._values: list[int] | None = None

    @property
    def num_slots(self) -> int:
        return self.fake.num_slots

    def launch(self, step: Step, chosen: torch.Tensor | None = None) -> None:
        token_ids = step.token_ids.copy()
        for query in np.flatnonzero(token_ids < 0):
            assert chosen is not None, "a step waits for tokens that nobody chooses"
            token_ids[query] = int(chosen[-1 - token_ids[query]])
        self._values = self.fake.run(replace(step, token_ids=token_ids))

    def collect(self, rows: I64 | None = None) -> torch.Tensor:
        assert self._values is not None
        values = self._values if rows is None else [self._values[int(r)] for r in rows]
        logits = torch.zeros((len(values), self.vocab_size))
        for row, value in enumerate(values):
            token = next_token(value, self.num_choices)
            logits[row, token] = float("nan") if token in self.broken else 5.0
        return logits

    def collect_few(self, rows: I64, token_ids: I64) -> torch.Tensor:
        return self.collect(rows)[:, torch.from_numpy(token_ids)]

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


EOS_IDS = (258, *range(40, 46))  # bytes too, so that random answers end now and then


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama over bytes in float32, with a tokenizer, as a model folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=list(EOS_IDS),
        pad_token_id=257,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0, 0.25)
    model.lm_head.weight.data[259:] = 0  # no token of the tokenizer's: never the largest
    model.save_pretrained(folder)
    # Byte-level tokenizers spell the bytes that cannot be printed with other characters.
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in kept]
    spelling = {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(moved)}
    assert set(spelling.values()) == set(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: b for b, c in spelling.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<pad>", "<eos>"])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tiny_folder: Path) -> Checkpoint:
    return open_checkpoint(str(tiny_folder))


@pytest.fixture(scope="session")
def sim() -> ModuleType:
    """This module: simulation and reference answers."""
    return sys.modules[__name__]
