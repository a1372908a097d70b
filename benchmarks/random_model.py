"""Writes a model folder with random weights in the shape of a published one, with few layers.

    python benchmarks/random_model.py deepseek-v2-lite model --layers 4 --experts 16
    python benchmarks/run.py --model model --workload shared-documents --rows 64

For speed alone: what it answers means nothing. The tokenizer is that of the default model, and the
vocabulary as large as its, so that workloads of real text have the same tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    # https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite, config.json
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 27,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
}


def write(name: str, folder: Path, *, num_layers: int, num_experts: int | None) -> None:
    """In bfloat16. Raises ValueError where the folder exists."""
    import torch
    import transformers

    from batchradix.checkpoint.checkpoint import open_checkpoint

    if folder.exists():
        raise ValueError(f"{folder} exists; name another folder, or remove it")
    checkpoint = open_checkpoint("smollm2-135m", notify=print)
    settings = dict(SHAPES[name]) | {
        "num_hidden_layers": num_layers,
        "vocab_size": checkpoint.config.vocab_size,
        "bos_token_id": None,
        "eos_token_id": checkpoint.tokenizer.eos_ids[0],
    }
    if num_experts is not None:
        settings["n_routed_experts"] = num_experts
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(1)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.02)
    model.save_pretrained(folder)
    place, options = checkpoint.path.parent, {"gguf_file": checkpoint.path.name}
    transformers.AutoTokenizer.from_pretrained(place, **options).save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, help="default: as many as the model has")
    options = parser.parse_args()
    try:
        write(options.shape, options.folder, num_layers=options.layers, num_experts=options.experts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in (".", "kernels")]
    sys.exit(main())
