"""Models with latent attention answer as a float64 reference that shares no code with anyone.

Each case holds what a known mistake would answer; an engine that is made to make it says so.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.engine.attention import registry
from batchradix.engine.attention.mla_torch import TorchMla
from batchradix.engine.layers.moe import Router

Make = Callable[..., Path]
PAD, BOS, EOS = 256, 257, 258
YARN = {
    "type": "yarn",
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
ML_01: dict[str, Any] = {"arch": "V3", "yarn": YARN}
ML_03: dict[str, Any] = {"arch": "V3", "bias": 4.0, "seed": 13}
DIGESTS = {
    "ml-01": "774224703ff0df83c7a6a285b51c93bfaeb8c5eed402d433b3e67719590bd7a3",
    "ml-03": "13dc699f9170ec1c28dc47e1b22571553d5b85f2229c32b1742e8414b09bd63a",
}
UNSEEN: dict[str, dict[str, Any]] = {
    "v2 without q_lora": {"arch": "V2", "yarn": YARN, "q_lora_rank": None},
    "v2 with groups": {
        "arch": "V2",
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
    },
    "v3 whose mscales do not cancel": {
        "arch": "V3",
        "yarn": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "v3 with a blend of no width": {
        "arch": "V3",
        "yarn": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "v3 by halves": {"arch": "V3", "rope_interleave": False, "rope_theta": 50000.0},
    "v3 of one group, epsilon 1e-3": {
        "arch": "V3",
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-3,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "bias": 2.0,
    },
    "v3 with biases and dense layers between": {
        "arch": "V3",
        "attention_bias": True,
        "moe_layer_freq": 2,
        "first_k_dense_replace": 0,
    },
}
PROMPTS = [
    "count the boats",
    "count the boats in the second harbour",
    "Past the original window of yarn and far: " + "the heron waits by the mill pond. " * 4,
]


@pytest.fixture(scope="session")
def latent() -> ModuleType:
    """The module ``tests/oracle/latent.py``."""
    path = Path(__file__).parent.parent / "oracle" / "latent.py"
    spec = importlib.util.spec_from_file_location("latent", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(
    folder: Path,
    *,
    arch: str,
    yarn: dict[str, Any] | None = None,
    bias: float = 1.0,
    seed: int = 11,
    moe_layer_freq: int = 1,
    **changes: Any,
) -> None:
    """Three layers, width 128, four heads; every matrix drawn anew, in the order of the model's
    parameters. The config spells the rotary embedding the published way."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 128,
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5 if arch == "V3" else 1.0,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "attention_bias": False,
        "dtype": "float32",
    }
    groups = (4, 2) if arch == "V3" else (1, 1)
    sizes |= {"n_group": groups[0], "topk_group": groups[1]} | changes
    torch.manual_seed(seed)
    config = getattr(transformers, f"Deepseek{arch}Config")(**sizes)
    model = getattr(transformers, f"Deepseek{arch}ForCausalLM")(config)
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            in_gate = 0.3 if "gate.weight" in name else 0.13
            weight.data.normal_(0, 1.0 if "embed" in name else in_gate)
        elif "norm" in name:
            weight.data.uniform_(0.7, 1.3)
        else:
            weight.data.normal_(0, 0.3)
    model.lm_head.weight.data[:32] = 0
    model.lm_head.weight.data[127:] = 0
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            values = torch.tensor([0.9, -0.6, 0.3, 0.0, -0.9, 0.75, -0.3, 0.45])
            buffer.copy_(values * bias)
    for layer in range(sizes["first_k_dense_replace"], 3):
        if layer % moe_layer_freq:  # transformers has experts there whatever the config says
            dense = type(model.model.layers[layer].mlp.shared_experts)(config)
            for weight in dense.parameters():
                weight.data.normal_(0, 0.13)
            model.model.layers[layer].mlp = dense
    model.float().eval().save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written.pop("rope_parameters", None)
    written |= {"rope_theta": changes.get("rope_theta", 10000.0), "rope_scaling": yarn}
    written |= {"moe_layer_freq": moe_layer_freq, "q_lora_rank": sizes["q_lora_rank"]}
    (folder / "config.json").write_text(json.dumps(written))


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Any) -> Make:
    """``make(**options)`` of `build`, once each: the folder with a byte tokenizer beside."""
    made: dict[str, Path] = {}

    def get(**options: Any) -> Path:
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp("latent-model")
            markov = tiny_model_folder("markov", context_length=1024)
            shutil.copytree(markov, folder, dirs_exist_ok=True)
            build(folder, **options)
            made[key] = folder
        return made[key]

    return get


@pytest.fixture
def case(enter: Any, make: Make) -> Callable[[str], Path]:
    """Goes into a case's folder; gives its model."""

    def go(name: str) -> Path:
        enter(name)
        folder = make(**{"ml-01": ML_01, "ml-03": ML_03}[name])
        weights = (folder / "model.safetensors").read_bytes()
        start = 8 + int.from_bytes(weights[:8], "little")
        if hashlib.sha256(weights[start:]).hexdigest() != DIGESTS[name]:
            pytest.skip("this version of torch or transformers draws other weights")
        return folder

    return go


def answers(cli: Any, files: ModuleType, model: Path, *options: object) -> dict[str, str]:
    """Text by id; every row must be ok."""
    ran = cli("run", "jobs.jsonl", "--model", model, "--dtype", "float32", "--temperature", 0,
              "-o", "out.jsonl", "--restart", *options)  # fmt: skip
    assert ran.code == 0, ran.err
    return {row["id"]: row["text"] for row in files.read_rows("out.jsonl")}


def texts(files: ModuleType, path: str) -> dict[str, str]:
    return {row["id"]: row["text"] for row in files.read_rows(path)}


def ids_of(text: str) -> list[int]:
    return [BOS, *text.encode()]


WAYS = [
    [], ["--batch-size", 1], ["--batch-size", 3, "--prefill-tokens", 5], ["--no-prefix-cache"],
    ["--kv-tokens", 145],
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "options"),
    [*((None, options) for options in WAYS), ("absorbed", WAYS[0]), ("expanded", WAYS[2])],
    ids=str,
)
@pytest.mark.parametrize("name", ["ml-01", "ml-03"])
def test_answers_are_the_expected_ones_however_they_are_computed(
    case: Callable[[str], Path],
    cli: Any,
    files: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: list[Any],
    form: Any,
) -> None:
    monkeypatch.setitem(registry.MLA_BACKENDS, "torch", partial(TorchMla, form=form))
    model = case(name)
    assert answers(cli, files, model, *options) == texts(files, "expected.jsonl")


@pytest.mark.parametrize("name", ["ml-01", "ml-03"])
def test_the_first_logits_are_the_expected_ones(
    case: Callable[[str], Path],
    files: ModuleType,
    latent: ModuleType,
    first_logits: Any,
    name: str,
) -> None:
    model = case(name)
    reference = latent.Reference(model)
    prompts = {row["id"]: row["prompt"] for row in files.read_rows("jobs.jsonl")}
    for row in files.read_rows("expected.jsonl"):
        ids = ids_of(prompts[row["id"]])
        assert len(ids) == row["n_prompt"]
        logits = first_logits(model, ids)
        for token, expected in row["top5"]:
            assert abs(logits[token].item() - expected) < 1e-3
        assert (logits - reference.logits(ids)[-1]).abs().max() < 1e-4
        assert reference.says(ids, row["ids"])


def break_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchradix.checkpoint.hf_latent._sharpening", lambda fields: 1.0)


def break_amplitude(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchradix.engine.layers import rotary

    def angles(self: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = positions.float()[:, None] * self._frequencies
        return 1.2608 * turned.cos(), 1.2608 * turned.sin()

    monkeypatch.setattr(rotary.Rotary, "angles", angles)


def break_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Router):
        def __call__(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            expert_ids, _ = super().__call__(x_TD)
            scores = self.linear(x_TD).sigmoid() + self.bias
            weights = scores.gather(1, expert_ids)
            return expert_ids, weights / weights.sum(dim=-1, keepdim=True) * self.config.scaling

    monkeypatch.setattr("batchradix.engine.models.feed_forward.Router", Wrong)


@pytest.mark.parametrize(
    ("name", "mistake", "break_it"),
    [
        ("ml-01", "no-mscale", break_scale),
        ("ml-01", "mscale-on-rope", break_amplitude),
        ("ml-03", "bias-in-weight", break_weights),
    ],
)
def test_an_engine_with_a_known_mistake_gives_the_wrong_answers_of_the_case(
    case: Callable[[str], Path],
    cli: Any,
    files: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mistake: str,
    break_it: Callable[[pytest.MonkeyPatch], None],
) -> None:
    model = case(name)
    wrong = texts(files, f"wrong_{mistake}.jsonl")
    right = texts(files, "expected.jsonl")
    assert all(wrong[row] != right[row] for row in right)
    break_it(monkeypatch)
    assert answers(cli, files, model) == wrong


def test_both_spellings_of_the_rotary_embedding_are_one_config(
    case: Callable[[str], Path], cli: Any, files: ModuleType, tmp_path: Path
) -> None:
    model = case("ml-01")
    newer = tmp_path / "newer"
    shutil.copytree(model, newer)
    config = json.loads((newer / "config.json").read_text())
    rope = config.pop("rope_scaling") | {"rope_theta": config.pop("rope_theta")}
    rope["rope_type"] = rope.pop("type")
    (newer / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    older = open_checkpoint(str(model)).config
    assert older == open_checkpoint(str(newer)).config
    assert older.mla is not None
    assert older.mla.scale == pytest.approx(0.229443, abs=1e-6)
    assert older.rope.amplitude == 1.0
    assert answers(cli, files, newer) == texts(files, "expected.jsonl")


@pytest.mark.parametrize("kind", list(UNSEEN))
def test_models_of_the_same_kind_answer_as_the_reference(
    folder: Path,
    make: Make,
    cli: Any,
    files: ModuleType,
    latent: ModuleType,
    first_logits: Any,
    kind: str,
) -> None:
    model = make(**UNSEEN[kind])
    reference = latent.Reference(model)
    rows = [{"id": str(i), "prompt": text, "max_tokens": 6} for i, text in enumerate(PROMPTS)]
    files.write_jsonl("jobs.jsonl", rows)
    found = answers(cli, files, model, "--prefill-tokens", 50)
    for number, text in enumerate(PROMPTS):
        logits = reference.logits(ids_of(text))[-1]
        assert (first_logits(model, ids_of(text)) - logits).abs().max() < 1e-4
        assert reference.says(ids_of(text), list(found[str(number)].encode()))


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        ("v2 without q_lora", "latent-scale"),
        ("v2 without q_lora", "half-rope"),
        ("v2 with groups", "ungrouped"),
        ("v3 whose mscales do not cancel", "no-mscale"),
        ("v3 by halves", "half-rope"),
        ("v3 of one group, epsilon 1e-3", "latent-norm-epsilon"),
        ("v3 of one group, epsilon 1e-3", "bias-in-weight"),
    ],
)
def test_mistakes_of_these_kinds_would_be_seen(
    make: Make, latent: ModuleType, first_logits: Any, kind: str, mistake: str
) -> None:
    model = make(**UNSEEN[kind])
    ids = ids_of(PROMPTS[2])
    wrong = latent.Reference(model, mistake).logits(ids)[-1]
    assert (first_logits(model, ids) - wrong).abs().max() > 1e-3


def test_the_summary_says_what_a_token_takes_and_what_all_heads_would(
    case: Callable[[str], Path], cli: Any
) -> None:
    model = case("ml-01")
    run = ("run", "jobs.jsonl", "--model", model, "--dtype", "bfloat16", "-o", "out.jsonl")
    shown = "480 bytes (keys and values of all heads: 2,688)"
    checked = cli("check", *run[1:])
    assert shown in checked.out + checked.err
    ran = cli(*run, "--restart")
    assert shown in ran.out + ran.err
    summary = cli(*run, "--restart", "--json").summary
    assert summary["kv_token_bytes"] == 2 * (64 + 16) * 3
    assert summary["expanded_kv_token_bytes"] == 2 * 4 * (32 + 16 + 64) * 3
