"""Large models with random weights over rows that share prefixes: rows a second.

A Llama in the shape of 8B and a DeepSeek-V2-Lite, with the prefix tree and without, on each
attention, with CUDA graphs and overlap on and off where they serve, and beside ``generate`` of
transformers, which has the same weights and is given batches. Answers are counted and not compared:
in 16 bits the likeliest tokens of random weights all but tie.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gpu_engine import Options, Run, Started, missing_option, refusal_of
from gpu_measure import Found, Record, Setting, Skipped, Timed, raised, wait
from gpu_models import Model, random_model
from gpu_rows import Rows
from random_model import SHAPES

from batchradix.errors import OptionError

DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Settings of a model, and what rows are asked of it: tokens of the shared root, of each
    document, of a question, of an answer."""

    model: Mapping[str, Any]
    root: int
    num_documents: int
    document: int
    question: int
    answer: int
    options: Options  # of the engine, in every variant

    def rows(self, num_rows: int) -> Rows:
        """Questions about documents in turn, all answered to the last token."""
        draw = random.Random(5)
        most = self.model["vocab_size"]

        def tokens(count: int) -> list[int]:
            return [draw.randrange(2, most) for _ in range(count)]

        root = tokens(self.root)
        documents = [root + tokens(self.document) for _ in range(self.num_documents)]
        prompts = [
            documents[row % self.num_documents] + tokens(self.question) for row in range(num_rows)
        ]
        return Rows(prompts, [self.answer] * num_rows)


_FULL_ROWS: dict[str, Any] = {
    "root": 256,
    "num_documents": 20,
    "document": 512,
    "question": 32,
    "answer": 32,
    "options": {"batch_size": 256, "prefill_tokens": 2048},
}
_TINY_ROWS: dict[str, Any] = {
    "root": 16,
    "num_documents": 3,
    "document": 20,
    "question": 5,
    "answer": 4,
    "options": {"batch_size": 8},
}
_LLAMA_SIZES: Mapping[str, Size] = {
    "full": Size(
        model={
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "tie_word_embeddings": False,
        },
        **_FULL_ROWS,
    ),
    "tiny": Size(
        model={
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        },
        **_TINY_ROWS,
    ),
}


_V2_LITE = dict(SHAPES["deepseek-v2-lite"])
del _V2_LITE["model_type"]
_DEEPSEEK_SIZES: Mapping[str, Size] = {
    "full": Size(model={**_V2_LITE, "vocab_size": 102_400}, **_FULL_ROWS),
    "tiny": Size(
        model={
            **_V2_LITE,
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
        **_TINY_ROWS,
    ),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """Options of the engine, and the share of the rows that it is given: where little is shared
    some are enough to know how many a second there are."""

    label: str
    options: Options
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Large:
    """A model by its size (full, or tiny for a CPU), and what of it is timed. The first variant has
    graphs and overlap where they serve."""

    family: str
    sizes: Mapping[str, Size]
    variants: tuple[Variant, ...]


_LLAMA_VARIANTS = (
    Variant("with tree", {}),
    Variant("without tree", {"prefix_cache": False}, share=0.25),
    Variant("graphs off", {"cuda_graphs": "off"}),
    Variant("overlap off", {"overlap": "off"}),
    Variant("both off", {"cuda_graphs": "off", "overlap": "off"}),
    Variant("FP8 keys and values", {"kv_dtype": "fp8"}),
    Variant("torch attention", {"attention": "torch"}),
    Variant("flashinfer", {"attention": "flashinfer"}),
)
_DEEPSEEK_VARIANTS = (
    Variant("with tree", {}),
    Variant("without tree", {"prefix_cache": False}, share=0.25),
    Variant("overlap off", {"overlap": "off"}, share=0.5),
    Variant("torch attention", {"attention": "torch"}, share=0.25),
    Variant("flashinfer", {"attention": "flashinfer"}, share=0.5),
)
LARGE: Mapping[str, Large] = {
    "llama": Large("Llama", _LLAMA_SIZES, _LLAMA_VARIANTS),
    "deepseek": Large("DeepseekV2", _DEEPSEEK_SIZES, _DEEPSEEK_VARIANTS),
}
PEER_SHARE = 0.125
PEER_BATCH = 64


def compare(setting: Setting, name: str) -> Iterator[Record]:
    """The engine's variants of one of `LARGE` and transformers; one that fails does not end the
    others."""
    large, device = LARGE[name], setting.device
    size = large.sizes[setting.size]
    model = random_model(large.family, size.model, getattr(torch, DTYPE), device)
    attention = "auto" if _refusal("triton", model, device) else "triton"
    peer_rows = size.rows(max(1, int(setting.num_rows * PEER_SHARE)))
    for number, variant in enumerate(large.variants):
        if number == 2:
            yield from _guarded("transformers", lambda: _try_peer(model, peer_rows, device))
        rows = size.rows(max(1, int(setting.num_rows * variant.share)))
        options = {"attention": attention, **size.options, **variant.options}
        yield from _guarded(
            variant.label,
            lambda rows=rows, options=options, variant=variant: _try_engine(
                model, rows, options, variant.label, device
            ),
        )


def _refusal(attention: str, model: Model, device: torch.device) -> str | None:
    return refusal_of(attention, model.checkpoint.config, DTYPE, device)


def _guarded(label: str, work: Callable[[], Iterator[Record]]) -> Iterator[Record]:
    """What a variant yields; a `Found` that failed where it raises, memory given back."""
    try:
        yield from work()
    except OptionError as error:
        yield Skipped(label, str(error))
    except Exception as error:  # of any kind: it is what is to be reported
        yield raised(label, error)
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _try_engine(
    model: Model, rows: Rows, options: Options, label: str, device: torch.device
) -> Iterator[Record]:
    name = options["attention"]
    reason = missing_option(options)
    if reason is None and name != "auto":
        reason = _refusal(name, model, device)
    if reason is not None:
        yield Skipped(label, reason)
        return
    tree = options.get("prefix_cache", True)
    demand = rows.job(tree=tree).tree.distinct_tokens + sum(rows.max_tokens)
    options = {"dtype": DTYPE, **options}
    began_s = time.perf_counter()
    with Started(model, options, device=device, demand_tokens=demand) as started:
        load_s = time.perf_counter() - began_s
        some = slice(0, max(2, len(rows.prompts) // 16))
        started.run(Rows(rows.prompts[some], rows.max_tokens[some]), tree=tree)  # warms up
        run = started.run(rows, tree=tree)
    yield from _engine_records(run, rows, label, load_s)


def _engine_records(run: Run, rows: Rows, label: str, load_s: float) -> Iterator[Record]:
    usage, num_rows = run.usage, len(rows.prompts)
    wrong = [
        row
        for row, most in enumerate(rows.max_tokens)
        if row not in run.completions or len(run.completions[row].token_ids) != most
    ]
    error = f"{len(wrong)} of {num_rows} rows have no whole answer" if wrong else None
    if usage.computed_tokens != run.distinct_tokens:
        error = f"{usage.computed_tokens} tokens computed, the tree has {run.distinct_tokens}"
    yield Found(label, error is None, error, "; ".join(run.notices))
    prompt_tokens = sum(map(len, rows.prompts))
    yield Timed.of(
        label,
        run.seconds,
        num_rows,
        "rows/s",
        f"{num_rows} rows, {prompt_tokens:,} prompt tokens, {usage.computed_tokens:,} computed, "
        f"{usage.recomputed_tokens:,} again, {usage.completion_tokens:,} answer tokens, "
        f"{usage.forward_steps} steps, {load_s:.1f} s to start; {_where(run)}",
    )


def _where(run: Run) -> str:
    """What the host did, and the most memory of a GPU that this process has had so far."""
    parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in run.parts_s.items())
    if not torch.cuda.is_available():
        return parts
    return f"{parts}; {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"


def _try_peer(model: Model, rows: Rows, device: torch.device) -> Iterator[Record]:
    """``generate`` over batches of equally long prompts, so that nothing is padded."""
    answer = rows.max_tokens[0]

    def generate(prompts: Any) -> torch.Tensor:
        ids = torch.tensor(prompts, device=device)
        with torch.inference_mode():
            return model.peer.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=answer,
                pad_token_id=0,
            )

    generate(rows.prompts[:1])  # warms up
    wait(device)
    began_s = time.perf_counter()
    short = 0
    for first in range(0, len(rows.prompts), PEER_BATCH):
        prompts = rows.prompts[first : first + PEER_BATCH]
        short += int(generate(prompts).shape[1] != len(prompts[0]) + answer)
    wait(device)
    seconds = time.perf_counter() - began_s
    yield Found("transformers", short == 0, f"{short} batches are short" if short else None)
    detail = f"{len(rows.prompts)} rows in batches of {PEER_BATCH}"
    yield Timed.of("transformers", seconds, len(rows.prompts), "rows/s", detail)
