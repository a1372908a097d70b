"""What all tests share: tiny checkpoints, a byte tokenizer, and the I3 comparison.

In the tiny checkpoints a token is a byte (id = byte value), then come eight special tokens; see
`SPECIALS`. Test modules cannot import each other, so everything here is handed out by fixtures.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

# Before anything imports torch or huggingface_hub. Tiny models are slower on several threads, and
# on a busy machine threads that spin while they wait make each operation take 20 times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["BATCHRADIX_HISTORY"] = "off"

import pytest

MakeTinyModel = Callable[..., Path]

SPECIALS = (
    "<pad>",
    "<bos>",
    "<eos>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
)
PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL, END = range(256, 264)
VOCAB_SIZE = 264
THINK, THINK_END = PAD, TOOL  # of models that think
# Writes <bos> although the tokenizer puts one too, as some real models do.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'system' and not %(system)s %}"
    "{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{{ '<|' + message.role + '|>' }}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments if call.function.arguments is string"
    " else call.function.arguments | tojson }})"
    "{% endfor %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_TURNS = (
    "{{ bos_token }}{% for message in messages %}{% set text = message.content or '' %}"
    "{% if message.role == 'assistant' and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|' + message.role + '|>' + text + '<|end|>' }}{% endfor %}"
)
THINKING_TEMPLATES = {
    # On unless the variable says otherwise; the model opens the block itself.
    "switch": _TURNS + "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
    # Always on: the prompt ends in an open block.
    "opens": _TURNS + "{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}",
    # Off unless the variable says otherwise, and each kind of block is the template's.
    "toggle": _TURNS + "{% if add_generation_prompt %}<|assistant|>"
    "{% if thinking is defined and thinking %}<think>{% else %}</think>{% endif %}{% endif %}",
    # Says nothing but what becomes of earlier turns.
    "mentions": _TURNS + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
}


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeTinyModel:
    """Builds a tiny float32 checkpoint and returns its folder; the same one for the same call.

    ``make("const", prefer="ab")``: logits never depend on the prompt. Greedily 'a' comes
    first, then 'b' where 'a' is forbidden, then all other bytes by value, the special tokens,
    and last of all ``<eos>`` and ``<|end|>``: it never stops by itself.

    ``make("markov", text="yes")``: the last token alone decides the next: a→b … z→a, A→B …
    Z→A, 0→1 … 9→0, ``<|assistant|>`` → 'a', all others → ``<eos>``. The bytes of ``text``,
    which must differ, replace that: ``<|assistant|>`` → 'y' → 'e' → 's' → ``<eos>``, and so do
    ``steps``, pairs of a token and the next.

    ``make("random", family="llama", seed=7)``: two random layers of a Llama, Mistral, Qwen2 or
    Qwen3, or of another family (`_RANDOM`). All but Qwen2, whose embeddings are tied,
    answer in printable ASCII or end.

    Beside these: ``context_length=512``; ``prepend_bos=True``, whether the tokenizer begins a raw
    text with ``<bos>``; ``system_role=True``, whether the chat template takes a system message.
    """
    built: dict[tuple[Any, ...], Path] = {}

    def make(kind: str, **options: Any) -> Path:
        key = (kind, *sorted(options.items()))
        if key not in built:
            folder = tmp_path_factory.mktemp(f"{kind}-model")
            _build(folder, kind, **options)
            built[key] = folder
        return built[key]

    return make


@pytest.fixture(scope="session")
def thinker_folder(
    tiny_model_folder: MakeTinyModel, tmp_path_factory: pytest.TempPathFactory
) -> MakeTinyModel:
    """Builds a markov model that thinks, and returns its folder.

    ``make("switch", text="um", answer="42")``: behind a line break (or ``<think>``, where that is
    a token) it writes ``text``, then its end marker, then ``answer``, then ``<eos>``; their bytes
    must differ. ``markers``: "added" or "special" tokens, or "text". Kinds: `THINKING_TEMPLATES`.
    ``ends=False``: nothing special follows ``text``. ``base``: a model to be given these tokens and
    this template instead.
    """

    def make(
        kind: str,
        *,
        text: str = "um",
        answer: str = "42",
        markers: str = "added",
        ends: bool = True,
        base: Path | None = None,
    ) -> Path:
        end = [THINK_END] if markers != "text" else list(b"</think>")
        chain = [ord("\n"), *text.encode(), *end, *answer.encode(), EOS]
        if not ends:
            chain = [ord("\n"), *text.encode()]
        assert len(set(chain)) == len(chain), "a byte can have one successor only"
        steps = (*pairwise(chain), (THINK, ord(text[0])))
        folder = tmp_path_factory.mktemp("thinker")
        model = base or tiny_model_folder("markov", steps=steps)
        shutil.copytree(model, folder, dirs_exist_ok=True)
        if markers != "text":
            _rename_tokens(folder, {"<pad>": "<think>", "<|tool|>": "</think>"}, markers)
        (folder / "chat_template.jinja").write_text(THINKING_TEMPLATES[kind])
        return folder

    return make


def _rename_tokens(folder: Path, names: dict[str, str], markers: str) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "special": markers == "special"}
    path.write_text(json.dumps(tokenizer))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for name in ("pad_token", "additional_special_tokens", "extra_special_tokens"):
        config.pop(name, None)
    config.pop("added_tokens_decoder", None)
    path.write_text(json.dumps(config))


@pytest.fixture(scope="session")
def native() -> Callable[[], None]:
    """Called by a test that needs the C kernels: skips it where they were not built."""
    from batchradix_kernels.native import library

    def need() -> None:
        if library() is None:
            pytest.skip("the C kernels were not built")

    return need


@pytest.fixture(scope="session")
def i3() -> ModuleType:
    """The module ``tests/oracle/i3.py``: greedy answers compared with those of an oracle."""
    return _load("i3", Path(__file__).parent / "oracle" / "i3.py")


@pytest.fixture(scope="session")
def constrained() -> ModuleType:
    """The module ``tests/oracle/constrained.py``: answers under a grammar, the plain way."""
    return _load("constrained", Path(__file__).parent / "oracle" / "constrained.py")


@pytest.fixture(scope="session")
def lockstep() -> ModuleType:
    """The module ``tests/oracle/lockstep.py``: many rows of the plain loop at once."""
    return _load("lockstep", Path(__file__).parent / "oracle" / "lockstep.py")


@pytest.fixture(scope="session")
def first_logits() -> Callable[..., Any]:
    """``first_logits(folder, ids)``: float32[V] behind a prompt that goes through the model in one
    step, in float32 on the CPU; ``quantize`` as in `EngineSettings`."""
    import numpy as np

    from batchradix.checkpoint.checkpoint import open_checkpoint
    from batchradix.engine.model_runner import ModelRunner
    from batchradix.engine.step import Step, empty_i64, i64_table
    from batchradix.settings import EngineSettings

    def get(folder: Path, ids: Sequence[int], quantize: Any = "off") -> Any:
        settings = EngineSettings(
            dtype="float32",
            device="cpu",
            attention="auto",
            batch_size=1,
            prefill_tokens=256,
            kv_tokens=len(ids),
            prefix_cache=True,
            num_threads=1,
            quantize=quantize,
        )
        runner = ModelRunner(open_checkpoint(str(folder)), settings)
        places = np.arange(len(ids), dtype=np.int64)
        step = Step(
            token_ids=np.array(ids, dtype=np.int64),
            positions=places,
            slots=places,
            context=empty_i64(0, 4),
            causal=i64_table([(0, len(ids), 0, len(ids))], 4),
            moves=empty_i64(0, 3),
            logit_sources=places[-1:],
            hold_queries=empty_i64(0),
            hold_ids=empty_i64(0),
            free_holds=empty_i64(0),
        )
        runner.launch(step)
        logits = runner.collect()[0]
        runner.close()
        return logits

    return get


def _load(name: str, path: Path) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]


def _build(
    folder: Path,
    kind: str,
    *,
    context_length: int = 512,
    prepend_bos: bool = True,
    system_role: bool = True,
    **options: Any,
) -> None:
    from transformers import GenerationConfig

    makers = {"const": _const_model, "markov": _markov_model, "random": _random_model}
    model = makers[kind](context_length, **options)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=[EOS, END], pad_token_id=PAD
    )
    model.save_pretrained(folder)
    _save_tokenizer(folder, context_length, prepend_bos=prepend_bos, system_role=system_role)


def _save_tokenizer(
    folder: Path, context_length: int, *, prepend_bos: bool, system_role: bool
) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.BPE(vocab={spelt: byte for byte, spelt in _byte_spelling().items()}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIALS]
    )
    if prepend_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=list(SPECIALS[3:]),
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE.replace("%(system)s", "true" if system_role else "false")
    fast.save_pretrained(folder)


def _byte_spelling() -> dict[int, str]:
    """How byte-level tokenizers spell each byte: printable ones as themselves, the others with
    characters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }


def _blank_llama(context_length: int, hidden_size: int) -> Any:
    """A one-layer Llama whose layer adds nothing and whose norms are plain."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=context_length,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=[EOS, END],
        pad_token_id=PAD,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float().eval()
    layer = model.model.layers[0]
    for weight in (
        layer.self_attn.o_proj.weight,
        layer.mlp.down_proj.weight,
        model.model.embed_tokens.weight,
        model.lm_head.weight,
    ):
        weight.data.zero_()
    return model


def _const_model(context_length: int, *, prefer: str = "") -> Any:
    import torch

    wanted = list(dict.fromkeys(prefer.encode()))
    others = [byte for byte in range(256) if byte not in wanted]
    specials = [PAD, BOS, SYSTEM, USER, ASSISTANT, TOOL]
    # Small whole numbers, which bfloat16 holds exactly.
    logits = torch.zeros(VOCAB_SIZE)
    for place, byte in enumerate(wanted):
        logits[byte] = 136 + 8 * (len(wanted) - 1 - place)
    for place, token in enumerate([*others, *specials, EOS, END]):
        logits[token] = 128 - place
    model = _blank_llama(context_length, 64)
    model.model.embed_tokens.weight.data.fill_(1.0)  # and so is the hidden state
    model.lm_head.weight.data[:] = logits[:, None] / 64
    return model


def _markov_model(
    context_length: int, *, text: str = "", steps: tuple[tuple[int, int], ...] = ()
) -> Any:
    following = dict.fromkeys(range(VOCAB_SIZE), EOS)
    for first, last in (b"az", b"AZ", b"09"):
        following |= {byte: byte + 1 for byte in range(first, last)} | {last: first}
    following[ASSISTANT] = ord("a")
    following |= dict(steps)
    chain = [ASSISTANT, *text.encode(), EOS]
    assert len(set(chain)) == len(chain), "a byte can have one successor only"
    if text:
        following |= dict(pairwise(chain))
    model = _blank_llama(context_length, 288)  # a place of its own for every token
    for token, successor in following.items():
        model.model.embed_tokens.weight.data[token, token] = 1.0
        # The norm scales a one-hot state by the root of the hidden size.
        model.lm_head.weight.data[successor, token] = 40.0 / 288**0.5
    return model


_RANDOM: dict[str, dict[str, Any]] = {
    "llama": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"head_dim": 16, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
_V2 = _LATENT | {"q_lora_rank": 24, "rope_parameters": _YARN, "routed_scaling_factor": 1.5}
_V3 = _LATENT | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "rope_parameters": _YARN}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}
_RANDOM |= {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2-moe": _EXPERTS | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    "qwen3-moe": _EXPERTS | {"head_dim": 32, "norm_topk_prob": True},
    "deepseek-v2": _V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "deepseek-v2-lite": _V2 | {"q_lora_rank": None},
    "deepseek-v3": _V3,
    "deepseek-v3-no-groups": _V3
    | {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        "rms_norm_eps": 1e-5,
    },
    "deepseek-v3-plain": _V3
    | {"rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 2},
}
# Windows and original contexts are far shorter than the prompts of tests.
_SLIDING = {"head_dim": 16, "sliding_window": 9}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [8.0] * 6,
}
_RANDOM |= {
    "llama-dynamic": {
        "head_dim": 16,
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 16.0},
    },
    "qwen3-sliding": _SLIDING
    | {"head_dim": 32, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3},
    "gemma2": _SLIDING
    | {
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 6.0,
        "query_pre_attn_scalar": 20,
    },
    "gemma3": _SLIDING
    | {
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    "phi3": {
        "rope_parameters": _LONGROPE,
        "original_max_position_embeddings": 256,
        "sliding_window": 24,
    },
    "gpt-oss": _SLIDING
    | {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.5,
        "rope_parameters": _YARN | {"truncate": False},
    },
    "smollm3": {
        "no_rope_layers": [0, 1, 1],
        "num_hidden_layers": 3,
        "sliding_window": 9,
        "use_sliding_window": True,
    },
    "olmo3": _SLIDING
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": _YARN, "sliding_attention": None},
    },
    "granite": {
        "attention_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
}
_FAMILY_NAMES = {
    "llama-dynamic": "Llama",
    "qwen3-sliding": "Qwen3",
    "gpt-oss": "GptOss",
    "smollm3": "SmolLM3",
    "qwen2-moe": "Qwen2Moe",
    "qwen3-moe": "Qwen3Moe",
    "deepseek-v2": "DeepseekV2",
    "deepseek-v2-lite": "DeepseekV2",
    "deepseek-v3": "DeepseekV3",
    "deepseek-v3-no-groups": "DeepseekV3",
    "deepseek-v3-plain": "DeepseekV3",
}


def _random_model(context_length: int, *, family: str = "llama", seed: int = 7) -> Any:
    import torch
    import transformers

    name, own = _FAMILY_NAMES.get(family, family.capitalize()), _RANDOM[family]
    kind_of_config = "Gemma3TextConfig" if family == "gemma3" else f"{name}Config"
    config = getattr(transformers, kind_of_config)(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": context_length,
            "tie_word_embeddings": False,
            "bos_token_id": BOS,
            "eos_token_id": [EOS, END],
            "pad_token_id": PAD,
            "dtype": "float32",
        }
        | own
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    for path, weight in model.named_parameters():
        if "embed" in path or "lm_head" in path:
            weight.data.normal_(0, 0.5)
        elif weight.dim() >= 2:
            weight.data.normal_(0, 0.25)
        elif path.endswith("bias"):
            weight.data.normal_(0, 0.5)
        else:  # norms; to those of Gemma 1 is added
            weight.data.normal_(0 if family.startswith("gemma") else 1, 0.2)
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.3)
    if not config.tie_word_embeddings:
        silent = [*range(32), *range(127, VOCAB_SIZE)]
        silent.remove(EOS)
        model.lm_head.weight.data[silent] = 0.0
        model.lm_head.weight.data[EOS] *= 2.0  # so that one row in a few ends by itself
    return model
