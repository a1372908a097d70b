from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from batchradix.checkpoint.gguf_header import read_gguf_header
from batchradix.checkpoint.gguf_model import gguf_config
from batchradix.checkpoint.gguf_tokenizer import gguf_tokenizer
from batchradix.checkpoint.model_config import ModelConfig, RopeConfig
from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.errors import ModelError

Make = Callable[..., Path]


def config_of(path: Path) -> ModelConfig:
    return gguf_config(path, read_gguf_header(path))


def tokenizer_of(path: Path) -> Tokenizer:
    metadata = read_gguf_header(path).metadata
    definition, specials, _ = gguf_tokenizer(path, metadata)
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    return Tokenizer(definition, specials, num_embeddings=num_tokens)


def test_the_header_says_what_the_gguf_package_reads(make_gguf: Make) -> None:
    quantised = gguf.quants.quantize(
        np.ones((6, 32), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    path = make_gguf(tensors={"odd": np.arange(3, dtype=np.float32), "q8": quantised})
    theirs, ours = gguf.GGUFReader(path), read_gguf_header(path)
    assert set(ours.tensors) == {"token_embd.weight", "odd", "q8"}
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.offset_bytes == tensor.data_offset
        assert mine.num_bytes == tensor.n_bytes
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
    for key, value in ours.metadata.items():
        assert theirs.fields[key].contents() == value


def test_the_architecture_comes_from_metadata_and_tensors(make_gguf: Make) -> None:
    assert config_of(make_gguf()) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        context_length=128,
        rms_norm_eps=pytest.approx(1e-5),
        rope=RopeConfig(theta=10000.0),
        tie_embeddings=True,
    )


def test_tensors_that_are_there_switch_on_what_they_belong_to(make_gguf: Make) -> None:
    one = np.zeros(8, dtype=np.float32)
    names = ["blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias"]
    names += ["blk.0.attn_q_norm.weight", "output.weight"]
    config = config_of(make_gguf(tensors=dict.fromkeys(names, one)))
    flags = (config.attention_bias, config.output_bias, config.mlp_bias, config.qk_norm)
    assert flags == (True, True, True, True)
    assert not config.tie_embeddings


def test_linear_scaling_is_read_in_both_spellings(make_gguf: Make) -> None:
    new = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    for changes in (new, {"llama.rope.scale_linear": 2.0}):
        rope = config_of(make_gguf(changes)).rope
        assert (rope.kind, rope.factor) == ("linear", 2.0)


def llama3_factors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """The frequencies' divisors by `transformers`."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": factor, "rope_theta": theta}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=scaling,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled.numpy()).astype(np.float32)


def test_llama3_scaling_is_recovered_from_its_frequencies(make_gguf: Make) -> None:
    changes = {"llama.rope.freq_base": 500000.0, "llama.embedding_length": 256}
    factors = llama3_factors(32.0, 500000.0, 64)
    config = config_of(make_gguf(changes, {"rope_freqs.weight": factors}))
    assert config.rope.kind == "llama3"
    assert config.rope.factor == pytest.approx(32.0)
    assert config.rope.original_context_length == 8192
    factors[10] *= 1.01
    with pytest.raises(ModelError, match="rope_freqs"):
        config_of(make_gguf(changes, {"rope_freqs.weight": factors}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general.architecture": "gptneox"}, "gptneox.*supported as GGUF; supported are llama"),
        ({"general.architecture": "bert"}, "embedding model"),
        ({"general.architecture": "clip"}, "vision"),
        ({"general.type": "adapter"}, "adapter"),
        ({"split.count": 3}, "one part of 3"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.pooling_type": 1}, "embedding model"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.block_count": 0}, "llama.block_count"),
        ({"llama.block_count": "two"}, "llama.block_count"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs between layers"),
        ({"llama.rope.dimension_count": 4}, "part of a head"),
        ({"llama.attention.value_length": 4}, "different sizes"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"general.architecture": "llama", "general.alignment": 0}, "alignment"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    make_gguf: Make, changes: dict[str, Any], says: str
) -> None:
    path = make_gguf(changes)
    with pytest.raises(ModelError, match=says) as caught:
        config_of(path)
    assert str(path) in str(caught.value)


def test_a_quantisation_that_cannot_be_read_is_refused(make_gguf: Make) -> None:
    path = make_gguf(tensors={"blk.0.x": np.zeros((4, 4), dtype=np.int32)})
    with pytest.raises(ModelError, match=r"I32.*Q8_0"):
        config_of(path)


def test_a_tensor_without_elements_is_damage(make_gguf: Make) -> None:
    path = make_gguf(tensors={"blk.0.x": np.zeros((0, 4), dtype=np.float32)})
    with pytest.raises(ModelError, match=r"is damaged: tensor blk\.0\.x has no elements"):
        config_of(path)


def test_a_file_cut_short_anywhere_is_damaged(make_gguf: Make, tmp_path: Path) -> None:
    content = make_gguf().read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [5, 20, 23, *range(24, len(content), 97), len(content) - 1]:
        cut.write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf is damaged"):
            read_gguf_header(cut)


def test_garbled_headers_never_crash(make_gguf: Make, tmp_path: Path) -> None:
    content = bytearray(make_gguf().read_bytes()[:1500])
    rng = np.random.default_rng(0)
    file = tmp_path / "garbled.gguf"
    for _ in range(300):
        garbled = bytearray(content)
        for at in rng.integers(4, 600, size=3):
            garbled[at] = rng.integers(256)
        file.write_bytes(garbled)
        with pytest.raises(ModelError, match=r"garbled\.gguf"):
            config_of(file)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 and more", b"GGUF"])
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"x\.gguf"):
        read_gguf_header(path)


def test_big_endian_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(64))
    with pytest.raises(ModelError, match="big-endian"):
        read_gguf_header(path)


def test_a_byte_level_tokenizer_is_built(make_gguf: Make) -> None:
    tokenizer = tokenizer_of(make_gguf({"tokenizer.ggml.eot_token_id": 2}))
    assert tokenizer.encode_plain(["ab a"], [True]) == [[5, 7]]
    assert tokenizer.token_bytes[7] == b" a"
    assert tokenizer.added_token_id("<think>") == 2
    assert tokenizer.special_ids == {0, 1}
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1, 2))
    assert tokenizer.prefix_ids == ()
    assert tokenizer_of(make_gguf({"tokenizer.ggml.add_bos_token": True})).prefix_ids == (0,)


SPM_TOKENS = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "c", "a", "t", "at", "▁c", "cat", "▁cat"]
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": None,
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.tokens": SPM_TOKENS,
    "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -4.0],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def test_a_sentencepiece_tokenizer_is_built_from_scores(make_gguf: Make) -> None:
    tokenizer = tokenizer_of(make_gguf(SPM))
    assert tokenizer.prefix_ids == (1,)
    rows = tokenizer.encode_plain(["cat cat\n", "cat"], [True, False])
    assert rows == [[11, 11, 3], [10]]
    assert tokenizer.token_bytes[3] == b"\n"


def test_gemma_puts_no_space_before_a_text(make_gguf: Make) -> None:
    path = make_gguf({**SPM, "tokenizer.ggml.add_space_prefix": False})
    tokenizer = tokenizer_of(path)
    with_space = tokenizer.encode_plain([" cat"], [True])
    assert with_space == tokenizer_of(make_gguf(SPM)).encode_plain(["cat"], [True])
    assert tokenizer.encode_plain(["cat"], [True]) != with_space


@pytest.mark.parametrize("changes", [{}, {"tokenizer.ggml.pre": "llama-bpe"}, SPM])
def test_both_kinds_give_the_ids_of_transformers(make_gguf: Make, changes: Any) -> None:
    transformers = pytest.importorskip("transformers")
    path = make_gguf(changes)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = tokenizer_of(path)
    for text in ["ab a", "cat cat", " a  b\n", "tac"]:
        expected = theirs(text).input_ids
        assert [*ours.prefix_ids, *ours.encode_plain([text], [True])[0]] == expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.model": "t5"}, "t5"),
        ({"tokenizer.ggml.model": None}, "None"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
        ({"tokenizer.ggml.merges": None}, "no merges"),
        ({"tokenizer.ggml.merges": ["abc"]}, "not a pair"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "unheard-of"),
        ({"tokenizer.ggml.eos_token_id": 99}, "eos_token_id is 99"),
        ({**SPM, "tokenizer.ggml.scores": None}, "neither merges nor scores"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_exactly_is_refused(
    make_gguf: Make, changes: dict[str, Any], says: str
) -> None:
    path = make_gguf(changes)
    with pytest.raises(ModelError, match=says):
        tokenizer_of(path)
