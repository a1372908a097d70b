"""Which class runs which architecture: one line a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.checkpoint.model_config import ModelConfig
from batchradix.config import Quantize
from batchradix.engine.models.batch import Batch
from batchradix.engine.models.deepseek import Deepseek
from batchradix.engine.models.gemma import Gemma, Gemma2, Gemma3
from batchradix.engine.models.gpt_oss import GptOss
from batchradix.engine.models.granite import Granite
from batchradix.engine.models.llama import Llama
from batchradix.engine.models.load import Weights, open_source
from batchradix.engine.models.olmo import Olmo2
from batchradix.engine.models.qwen import Qwen2, Qwen3
from batchradix.engine.models.source import TensorSource
from batchradix.errors import ModelError


class CausalLM(Protocol):
    """A decoder. ``is_recordable``: `forward` never waits for
    the device, so that a graph of it can be recorded."""

    @property
    def is_recordable(self) -> bool: ...

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, hidden] of the batch's tokens, before the last norm."""
        ...

    def logits(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Rows of hidden states to [R, vocab_size], in the model's dtype or float32."""
        ...

    def logits_of(self, x_RD: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """float32[R, len(token_ids)]: the logits of these tokens alone."""
        ...


FAMILIES: Mapping[str, Callable[[ModelConfig, Weights], CausalLM]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "MixtralForCausalLM": Llama,
    "Qwen2MoeForCausalLM": Qwen2,
    "Qwen3MoeForCausalLM": Qwen3,
    "DeepseekV2ForCausalLM": Deepseek,
    "DeepseekV3ForCausalLM": Deepseek,
    "GemmaForCausalLM": Gemma,
    "Gemma2ForCausalLM": Gemma2,
    "Gemma3ForCausalLM": Gemma3,
    "Phi3ForCausalLM": Llama,
    "GptOssForCausalLM": GptOss,
    "SmolLM3ForCausalLM": Llama,
    "Olmo2ForCausalLM": Olmo2,
    "Olmo3ForCausalLM": Olmo2,
    "GraniteForCausalLM": Granite,
}


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantize: Quantize = "off",
    batch_invariant: bool = False,
    source: TensorSource | None = None,
) -> CausalLM:
    """Builds the model and reads its weights; ``quantize`` says what its linear layers keep.
    ``batch_invariant``: no row's result depends, to the last bit, on the rows beside it.
    ``source``: where the weights come from; None for the checkpoint's files.

    Raises `ModelError` for an architecture that is not in `FAMILIES`, and for tensors that are
    missing, left over, mis-shaped or unreadable.
    """
    config = checkpoint.config
    if config.architecture not in FAMILIES:
        raise ModelError(
            f"the model's architecture {config.architecture} is not supported; "
            f"supported are {', '.join(FAMILIES)}"
        )
    weights = Weights(
        source or open_source(checkpoint),
        dtype,
        device,
        quantize=quantize,
        batch_invariant=batch_invariant,
    )
    model = FAMILIES[config.architecture](config, weights)
    if quantize == "keep" and weights.num_kept == 0:
        raise ModelError(
            f"`quantize` keep found no layer of {checkpoint.name} to keep as it is: it takes GGUF "
            f"files of Q4_0 to Q8_0 and Q4_K to Q6_K, AWQ, GPTQ and packed integers, in bfloat16, "
            f"on a CPU that multiplies it (AVX512-BF16, AMX), with the C kernels built; leave it "
            f"out"
        )
    return model
