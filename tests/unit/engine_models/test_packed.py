"""Quantised checkpoints: packed by the formats' own definitions, they are the model of the numbers
that they stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.checkpoint.stored_weights import StoredWeights
from batchradix.engine.models.load import open_source
from batchradix.engine.models.packed_source import PackedSource
from batchradix.engine.models.safetensors_source import SafetensorsSource
from batchradix.errors import ModelError
from batchradix_kernels.grouped_linear import Groups, serves

PROMPT = list(range(3, 30))
ORACLE = Path(__file__).parents[2] / "oracle" / "compressed_tensors.safetensors"
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ: which of 8 outputs each nibble of a word holds
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
EXPERTS = {"moe_intermediate_size": 32, "mlp_only_layers": []}


def words_of(numbers: list[int], bits: int) -> list[int]:
    """Numbers one behind the other from the lowest bit on, in words of int32."""
    whole = sum(number << bits * i for i, number in enumerate(numbers))
    count = len(numbers) * bits // 32
    words = [whole >> 32 * i & 0xFFFFFFFF for i in range(count)]
    return [word - (word >> 31 << 32) for word in words]


def packed_rows(values: torch.Tensor, bits: int) -> torch.Tensor:
    """int[N, K] to int32[N, K · bits / 32]."""
    return torch.tensor([words_of(row, bits) for row in values.tolist()], dtype=torch.int32)


def quantised(weight: torch.Tensor, bits: int, groups: torch.Tensor):
    """Numbers [N, K], scales and zero points [N, G] (the nearest ones), and what they stand for."""
    num_groups = int(groups.max()) + 1
    parts = [weight[:, groups == group] for group in range(num_groups)]
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    numbers = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, 2**bits - 1)
    values = (numbers - zeros[:, groups]) * scales[:, groups]
    return numbers.int(), scales.half(), zeros.int(), values


def awq_parts(weight: torch.Tensor):
    numbers, scales, zeros, values = quantised(weight, 4, torch.arange(weight.shape[1]) // GROUP)

    def packed(rows: torch.Tensor) -> torch.Tensor:
        places = torch.tensor([8 * word + i for word in range(len(rows) // 8) for i in AWQ_ORDER])
        return packed_rows(rows[places].T, 4)

    parts = {"qweight": packed(numbers), "qzeros": packed(zeros), "scales": scales.T.contiguous()}
    return parts, values


def gptq_parts(weight: torch.Tensor, bits: int, zero_offset: int, *, shuffled: bool):
    groups = torch.arange(weight.shape[1]) // GROUP
    if shuffled:
        groups = groups[torch.randperm(len(groups))]
    numbers, scales, zeros, values = quantised(weight, bits, groups)
    return {
        "qweight": packed_rows(numbers, bits).T.contiguous(),
        "qzeros": packed_rows(zeros.T - zero_offset, bits),
        "scales": scales.T.contiguous(),
        "g_idx": groups.int(),
    }, values


def rewrite_layers(folder: Path, pack, settings, *, keep: str = "none") -> Path:
    """Packs all linear layers of a folder but those whose names hold ``keep``; returns a copy of
    the folder with the numbers that they stand for."""
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight") and keep not in n]:
        parts, plain[name] = pack(tensors.pop(name))
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{part}": value for part, value in parts.items()}
    twin = shutil.copytree(folder, folder.with_name(f"{folder.name}-plain"))
    save_file(plain, twin / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    return twin


def logits(lab, folder: Path) -> torch.Tensor:
    n = len(PROMPT)
    runner = lab.open_runner(folder)
    return lab.run(runner, PROMPT, range(n), range(n), causal=[(0, n, 0, n)], logits=range(n))


def theirs(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": True, "sym": False}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe", "phi3-partial-longrope", "gemma2"])
def test_an_awq_model_is_that_of_its_numbers(lab, tmp_path, kind):
    changes = SIZES | (EXPERTS if kind == "qwen3-moe" else {})
    folder = lab.save_model(lab.build_model(kind, **changes), tmp_path / "model")
    twin = rewrite_layers(folder, awq_parts, AWQ, keep="layers.1.self_attn.k_proj")
    assert (logits(lab, folder) - theirs(twin)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["qwen2", "phi3", "phi3-partial-longrope", "gemma2", "gemma3"])
def test_a_kept_awq_model_has_the_logits_of_the_widened_one(lab, tmp_path, kind):
    scales = torch.ones(16, 1).half()
    if not serves([Groups(codes=torch.zeros(16, 32, dtype=torch.int8), bits=4, scales=scales)]):
        pytest.skip("no C kernel for products of bfloat16 here")
    changes = SIZES | ({"num_hidden_layers": 3} if kind == "gemma3" else {})
    folder = lab.save_model(lab.build_model(kind, **changes), tmp_path / "model")
    rewrite_layers(folder, awq_parts, AWQ, keep="layers.1.self_attn.k_proj")
    n = len(PROMPT)
    kept, plain = (
        lab.run(runner, PROMPT, range(n), range(n), causal=[(0, n, 0, n)], logits=range(n))
        for runner in (
            lab.open_runner(folder, "bfloat16", quantize="keep"),
            lab.open_runner(folder, "bfloat16"),
        )
    )
    assert kept.isfinite().all()
    assert torch.equal(kept, plain)


@pytest.mark.parametrize(
    ("kind", "bits", "version", "shuffled"),
    [
        ("llama", 4, "gptq", False),
        ("llama", 4, "gptq_v2", True),
        ("llama", 8, "gptq", True),
        ("llama", 3, "gptq", False),
        ("llama", 2, "gptq_v2", False),
        ("qwen3-moe", 4, "gptq", True),
    ],
)
def test_a_gptq_model_is_that_of_its_numbers(lab, tmp_path, kind, bits, version, shuffled):
    changes = SIZES | (EXPERTS if kind == "qwen3-moe" else {})
    folder = lab.save_model(lab.build_model(kind, **changes), tmp_path / "model")
    twin = rewrite_layers(
        folder,
        lambda weight: gptq_parts(weight, bits, int(version == "gptq"), shuffled=shuffled),
        GPTQ | {"bits": bits, "checkpoint_format": version},
    )
    assert (logits(lab, folder) - theirs(twin)).abs().max() < 1e-4


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_integers_may_be_kept_with_the_numbers_that_they_stand_for(tmp_path, bits):
    torch.manual_seed(bits)
    parts, values = gptq_parts(torch.randn(32, 64), bits, 1, shuffled=False)
    shuffled, _ = gptq_parts(torch.randn(32, 64), bits, 1, shuffled=True)
    tensors = {f"a.{name}": tensor for name, tensor in parts.items()}
    tensors |= {f"b.{name}": tensor for name, tensor in shuffled.items()}
    save_file(tensors | {"c.weight": values}, tmp_path / "model.safetensors")
    stored = StoredWeights(layout="gptq", zero_offset=1)
    source = PackedSource(SafetensorsSource([tmp_path / "model.safetensors"]), stored)
    kept = source.read_groups("a.weight")
    assert kept is not None
    assert kept.bits == max(4, bits)
    assert torch.equal(kept.widen(), values)
    assert source.read_groups("b.weight") is None  # no kernel for groups of any order
    assert source.read_groups("c.weight") is None


def test_zero_points_of_0_that_were_borrowed_from_come_back(tmp_path):
    """GPTQModel takes 1 off every number of a word by one subtraction."""
    zeros = torch.tensor([[0, 3, 0, 0, 15, 1, 7, 0]])
    word = (words_of(zeros[0].tolist(), 4)[0] - 0x11111111) & 0xFFFFFFFF
    tensors = {
        "a.qweight": torch.zeros(4, 8, dtype=torch.int32),
        "a.qzeros": torch.tensor([[word - (word >> 31 << 32)]], dtype=torch.int32),
        "a.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource([tmp_path / "model.safetensors"])
    read = PackedSource(source, StoredWeights(layout="gptq", zero_offset=1)).read("a.weight")
    assert torch.equal(read, -zeros.T.float().expand(8, 32))


def test_each_format_of_compressed_tensors_reads_as_its_library_does():
    stored = load_file(ORACLE)
    names = sorted({name.rpartition(".")[0] for name in stored})
    assert len(names) == 11
    for name in names:
        is_packed = f"{name}.weight_packed" in stored
        block = (4, 16) if name.endswith("block") else None
        layout = StoredWeights(layout="packed" if is_packed else "scaled", block=block)
        source = PackedSource(SafetensorsSource([ORACLE]), layout)
        assert torch.equal(source.read(f"{name}.weight"), stored[f"{name}.expected"]), name
        rows = source.read_rows(f"{name}.weight", [5, 0])
        assert torch.equal(rows, stored[f"{name}.expected"][[5, 0]]), name


def test_packed_inputs_may_be_in_groups_of_any_order(tmp_path):
    """What compressed-tensors wrote until 0.20 with actorder group."""
    torch.manual_seed(0)
    groups = (torch.arange(64) // GROUP)[torch.randperm(64)]
    numbers, scales, zeros, values = quantised(torch.randn(8, 64), 4, groups)
    tensors = {
        "a.weight_packed": packed_rows(numbers, 4),
        "a.weight_scale": scales,
        "a.weight_zero_point": (zeros - 8).to(torch.int8),  # as it was not packed yet
        "a.weight_shape": torch.tensor([8, 64]),
        "a.weight_g_idx": groups.int(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource([tmp_path / "model.safetensors"])
    read = PackedSource(source, StoredWeights(layout="packed")).read("a.weight")
    assert torch.equal(read, values)


def fp8_parts(weight: torch.Tensor):
    scale = (weight.abs().max() / 448).view(1)
    stored = (weight / scale).to(torch.float8_e4m3fn)
    beside = {"input_scale": torch.ones(1), "k_scale": torch.ones(1)}
    return {"weight": stored, "weight_scale": scale, **beside}, stored.float() * scale


def int8_parts(weight: torch.Tensor):
    scales = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scales).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scales}, stored.float() * scales


def compressed(format_: str, **weights) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "format": format_}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("pack", "settings"),
    [
        (fp8_parts, compressed("float-quantized", num_bits=8, type="float", strategy="tensor")),
        (
            fp8_parts,
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        ),
        (int8_parts, compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    ],
)
def test_a_model_in_8_bits_with_scales_is_that_of_its_numbers(lab, tmp_path, pack, settings):
    folder = lab.save_model(lab.build_model("llama", **SIZES), tmp_path / "model")
    twin = rewrite_layers(folder, pack, settings, keep="down_proj")
    assert (logits(lab, folder) - theirs(twin)).abs().max() < 1e-4


def shorter(tensors, name, part):
    tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"][:-1].contiguous()


def recast(tensors, name, part, dtype):
    tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"].to(dtype)


def flatten(tensors, name, part):
    tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"].flatten()


def halve(tensors, name, part):
    tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"].chunk(2, dim=1)[0].contiguous()


def empty(tensors, name, part):
    tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"][:0].contiguous()


def regroup(tensors, name, num_groups):
    for part in ("scales", "qzeros"):
        tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"][[0] * num_groups].contiguous()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, n: t.pop(f"{n}.qzeros"), r"no tensor .*o_proj\.qzeros beside"),
        (lambda t, n: shorter(t, n, "scales"), r"qzeros has shape \[2, 8\]"),
        (lambda t, n: shorter(t, n, "g_idx"), r"g_idx has shape \[63\]"),
        (lambda t, n: t[f"{n}.g_idx"].fill_(2), "g_idx names groups beyond 2"),
        (lambda t, n: recast(t, n, "qweight", torch.int64), "qweight is stored as int64"),
        (lambda t, n: recast(t, n, "scales", torch.int32), "scales is stored as int32"),
        (lambda t, n: flatten(t, n, "scales"), r"scales has shape \[128\]"),
        (lambda t, n: flatten(t, n, "qzeros"), r"qzeros has shape \[16\]"),
        (lambda t, n: halve(t, n, "qzeros"), r"qzeros tells of 2 bits|g_idx has shape"),
        (lambda t, n: empty(t, n, "qweight"), r"qweight has shape \[0, 64\]"),
        (lambda t, n: (t.pop(f"{n}.g_idx"), regroup(t, n, 3)), "3 groups, which do not divide 64"),
    ],
)
def test_parts_that_do_not_fit_together_are_named(lab, tmp_path, change, says):
    folder = lab.save_model(lab.build_model("llama", **SIZES), tmp_path / "model")
    rewrite_layers(
        folder,
        lambda weight: gptq_parts(weight, 4, 1, shuffled=True),
        GPTQ | {"bits": 4},
    )
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj"
    change(tensors, name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=says):
        open_source(open_checkpoint(str(folder))).read(f"{name}.weight")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight_shape": torch.tensor([8])}, r"weight_shape has shape \[1\]"),
        ({"weight_shape": torch.tensor([8, 0])}, "weight_packed does not hold 0 inputs"),
        ({"weight_packed": torch.zeros(8, 6, dtype=torch.int32)}, "does not hold 64 inputs"),
        ({"weight_packed": torch.zeros(8, 8)}, "weight_packed is stored as float32"),
        ({"weight_scale": torch.ones(8, 3)}, "3 groups, which do not divide 64"),
        ({"weight_scale": torch.ones(8, 0)}, r"weight_scale has shape \[8, 0\]"),
        ({"weight_zero_point": torch.zeros(2, dtype=torch.int8)}, "weight_zero_point has shape"),
        (
            {"weight_zero_point": torch.zeros(8, 2, dtype=torch.int32)},
            "weight_zero_point has shape",
        ),
    ],
)
def test_packed_parts_that_do_not_fit_together_are_named(tmp_path, change, says):
    parts = {
        "weight_packed": torch.zeros(8, 8, dtype=torch.int32),
        "weight_scale": torch.ones(8, 2),
        "weight_shape": torch.tensor([8, 64]),
    } | change
    tensors = {f"a.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    source = PackedSource(
        SafetensorsSource([tmp_path / "model.safetensors"]), StoredWeights(layout="packed")
    )
    with pytest.raises(ModelError, match=says):
        source.read("a.weight")


@pytest.mark.parametrize("block", [None, (4, 4)])
def test_a_vector_in_8_bits_is_refused(tmp_path, block):
    tensors = {"a.weight": torch.zeros(8, dtype=torch.int8), "a.weight_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource([tmp_path / "model.safetensors"])
    with pytest.raises(ModelError, match=r"a\.weight has shape \[8\]"):
        PackedSource(source, StoredWeights(layout="scaled", block=block)).read("a.weight")
