"""Counts the prompt tokens that a map in batches computes, beside a map that is planned whole.

    python benchmarks/dataset_map.py

The rows are those of the workload shared-documents: questions on documents. They come sorted by
document, shuffled, or with the documents in turns, and the pool holds all distinct prompt tokens
or a part of them. What is counted does not depend on weights, so the model is a random one of one
small layer with the tokenizer of ``--model``. Writes `results/dataset-map.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from measure import machine  # noqa: E402
from workloads import shared_documents  # noqa: E402

import batchradix  # noqa: E402
from batchradix.checkpoint.checkpoint import open_checkpoint  # noqa: E402

RESULT = Path(__file__).with_name("results") / "dataset-map.json"
ORDERS = ("sorted by document", "shuffled", "documents in turns")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--batch-rows", type=int, default=64)
    parser.add_argument("--pools", default="1,0.5,0.125", help="shares of the distinct tokens; a,b")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args()


def small_model(name: str, folder: Path) -> Path:
    """A random Llama with the tokenizer of a model, and its context."""
    import torch
    import transformers

    checkpoint = open_checkpoint(name)
    source, options = checkpoint.path, {}
    if checkpoint.format == "gguf":
        source, options = checkpoint.path.parent, {"gguf_file": checkpoint.path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    config = transformers.LlamaConfig(
        vocab_size=checkpoint.config.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=checkpoint.config.context_length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def in_order(prompts: list[str], order: str) -> list[str]:
    """The prompts of the workload, which are shuffled."""
    if order == "shuffled":
        return prompts
    by_document: dict[str, list[str]] = {}
    for prompt in prompts:
        by_document.setdefault(prompt.rpartition("\n\nReader ")[0], []).append(prompt)
    documents = list(by_document.values())
    random.Random(1).shuffle(documents)
    if order == "sorted by document":
        return [prompt for document in documents for prompt in document]
    most = max(map(len, documents))
    return [d[turn] for turn in range(most) for d in documents if turn < len(d)]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    import datasets

    datasets.disable_progress_bars()
    job = shared_documents(options.rows, num_documents=options.documents)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(options.model, Path(folder))
        rows = [{"prompt": prompt} for prompt in job.prompts]
        plan = batchradix.plan(rows, model=model)
        for share in map(float, options.pools.split(",")):
            # Beside the shared prompts each running row needs room for its own answer.
            pool = int(share * plan.distinct_tokens) + options.batch_rows
            settings: dict[str, Any] = {"model": model, "max_tokens": 1, "dtype": "float32"}
            settings |= {"kv_tokens": pool, "num_threads": 1}
            for order in ORDERS:
                prompts = in_order(list(job.prompts), order)
                data = datasets.Dataset.from_dict({"prompt": prompts})
                counts = {}
                extractor = batchradix.Extractor(**settings)
                data.map(extractor, batched=True, batch_size=options.batch_rows)
                counts["map"] = extractor.usage
                extractor.close()
                extractor = batchradix.Extractor(**settings)
                batchradix.map_dataset(data, extractor, load_from_cache_file=False)
                counts["map_dataset"] = extractor.usage
                went = {k: u.computed_tokens + u.recomputed_tokens for k, u in counts.items()}
                line = {
                    "pool_share": share,
                    "order": order,
                    **went,
                    "more": round(went["map"] / went["map_dataset"] - 1, 4),
                    **{f"{k}_hits": round(1 - n / plan.prompt_tokens, 4) for k, n in went.items()},
                }
                print(line, flush=True)
                found.append(line)
    return [{"prompt_tokens": plan.prompt_tokens, "distinct_tokens": plan.distinct_tokens}, *found]


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HF_DATASETS_CACHE"] = cache
        totals, *results = measure(options)
    report = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": {k: v for k, v in vars(options).items() if isinstance(v, str | int)},
        **totals,
        "results": results,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
