"""GGUF files whose weights stay in memory as they are: the same numbers, the same answers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.checkpoint.gguf_kept import kept_bytes
from batchradix.engine.model_runner import ModelRunner
from batchradix.engine.models.gguf_groups import read_groups
from batchradix.engine.models.gguf_source import GgufSource
from batchradix.engine.models.lora_source import LoraSource
from batchradix.errors import ModelError
from batchradix.settings import EngineSettings
from batchradix_kernels.grouped_linear import Groups, serves

PROMPT = list(range(3, 30))
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_what_gguf_widens(kind):
    """Random bytes: every bit of a block counts somewhere."""
    number = gguf.GGMLQuantizationType[kind]
    size, num_bytes = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (6, 2 * num_bytes), dtype=np.uint8)
    # scales that are numbers, of a size that weights have
    for block in data.reshape(-1, num_bytes):
        at = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
        for first in at.get(kind, (0,)):
            block[first : first + 2] = np.float16([rng.uniform(-0.1, 0.1)]).view(np.uint8)
    groups = read_groups(data, kind)
    assert groups is not None
    assert groups.shape == (6, 2 * size)
    assert torch.equal(groups.widen(), torch.from_numpy(dequantize(data, number)))


def test_other_kinds_are_left_to_be_widened():
    assert read_groups(np.zeros((2, 64), np.uint8), "IQ4_NL") is None
    assert read_groups(np.zeros((2, 64), np.float32), "F32") is None


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter lays them, for heads of 16."""
    head = np.arange(16).reshape(2, -1).T.ravel()
    return weight[np.concatenate([16 * i + head for i in range(num_heads)])]


def write(path, model, kinds) -> None:
    """All of a Llama's tensors; those of linear layers in the kinds that ``kinds`` names by the
    end of their name, Q8_0 where it names none."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, tensor in model.state_dict().items():
        values = tensor.numpy().astype(np.float32)
        layer = name.removeprefix("model.").removesuffix(".weight")
        if layer.startswith("layers."):
            _, number, part = layer.split(".", 2)
            if part.endswith(("q_proj", "k_proj")):
                values = interleaved(values, len(values) // 16)
            layer = f"blk.{number}.{GGUF_NAMES[part]}"
        else:
            names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
            layer = names[layer]
        kind = "F32" if "norm" in layer else "Q8_0"
        kind = next((kinds[end] for end in kinds if layer.endswith(end)), kind)
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{layer}.weight", gguf.quantize(values, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def settings(quantize: str, dtype: str = "bfloat16") -> EngineSettings:
    return EngineSettings(
        dtype=dtype,
        device="cpu",
        attention="auto",
        batch_size=8,
        prefill_tokens=64,
        kv_tokens=64,
        prefix_cache=True,
        num_threads=1,
        quantize=quantize,
    )


@pytest.fixture
def llama(lab, tmp_path):
    """A folder of settings, and what gives the weights of a GGUF file for them."""
    model = lab.build_model("llama", hidden_size=64, intermediate_size=96, vocab_size=112)
    checkpoint = open_checkpoint(str(lab.save_model(model, tmp_path / "model")))

    def make(**kinds: str) -> GgufSource:
        write(tmp_path / "m.gguf", model, kinds)
        return GgufSource([tmp_path / "m.gguf"], checkpoint.config)

    return checkpoint, make


def logits(lab, runner):
    n = len(PROMPT)
    return lab.run(runner, PROMPT, range(n), range(n), causal=[(0, n, 0, n)], logits=range(n))


def need_kernel() -> None:
    groups = Groups(
        codes=torch.zeros(16, 32, dtype=torch.int8), bits=8, scales=torch.ones(16, 1).half()
    )
    if not serves([groups]):
        pytest.skip("no C kernel for products of bfloat16 here")


def test_a_kept_model_has_the_logits_of_the_widened_one(lab, llama):
    """With kinds that differ within a layer, and a layer in float16, which is not kept."""
    need_kernel()
    checkpoint, make = llama
    source = make(attn_v="Q5_0", ffn_gate="Q4_0", ffn_up="Q4_0", ffn_down="Q4_1", attn_output="F16")
    kept = ModelRunner(checkpoint, settings("keep"), source=source)
    plain = ModelRunner(checkpoint, settings("off"), source=source)
    wanted = logits(lab, plain)
    assert wanted.isfinite().all()
    assert torch.equal(logits(lab, kept), wanted)
    rows = np.array([0, 5])
    few = np.array([7, 100])
    assert torch.equal(kept.collect_few(rows, few), plain.collect_few(rows, few))


def test_memory_is_counted_as_it_is_held(tmp_path, llama):
    _, make = llama
    make(ffn_down="Q4_0", token_embd="Q8_0")
    table, norms = 112 * 64, 7 * 64 * 2  # embeddings are widened for looking up, too
    down, others = 3 * 64 * 96, 3 * (2 * 64 * 96 + 2 * 64 * 64 + 2 * 64 * 32) + table
    assert kept_bytes(tmp_path / "m.gguf") == int(
        table * (8.5 + 16) / 8 + norms + down * 4.5 / 8 + others * 8.5 / 8
    )


def test_what_an_adapter_changes_is_not_kept(llama):
    _, make = llama
    name = "model.layers.0.self_attn.q_proj.weight"

    class Adapted(LoraSource):
        def __init__(self) -> None:
            self._source = make()

        def changes(self, name: str) -> bool:
            return "q_proj" in name

    source = Adapted()
    assert source.read_groups(name) is None
    assert source.read_groups(name.replace("q_proj", "v_proj")) is not None


def test_where_nothing_can_be_kept_it_says_so(lab, llama, saved):
    checkpoint, make = llama
    with pytest.raises(ModelError, match=r"keep found no layer of .*GGUF.*bfloat16"):
        ModelRunner(checkpoint, settings("keep", "float32"), source=make())
    with pytest.raises(ModelError, match="keep found no layer"):
        ModelRunner(open_checkpoint(str(saved("llama")[0])), settings("keep"))
