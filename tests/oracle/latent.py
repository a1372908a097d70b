"""DeepSeek-V2 and V3 in float64, one prompt at a time, read from a folder without transformers.

Every ``mistake`` is one that a program of this kind is known to have made; a test can ask what it
would give.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu

MISTAKES = (
    "no-mscale",  # the softmax scale without YaRN's
    "latent-scale",  # the softmax scale of the latent's width
    "mscale-on-rope",  # rotated parts multiplied by what should cancel
    "half-rope",  # pairs half a head apart where they are adjacent, or the other way round
    "bias-in-weight",  # the correction bias in the weights of the experts
    "ungrouped",  # the best experts of all groups
    "latent-norm-epsilon",  # the model's epsilon in the norms of the latents
)


def mscale(factor: float, value: float) -> float:
    return 0.1 * value * math.log(factor) + 1 if factor > 1 else 1.0


class Reference:
    """The checkpoint in ``folder``, with one of `MISTAKES` or none."""

    def __init__(self, folder: Path, mistake: str = "") -> None:
        assert mistake in ("", *MISTAKES)
        self.mistake = mistake
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights = {
            name: tensor.double() for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }  # fmt: skip
        self._rope()

    def _rope(self) -> None:
        config = self.config
        rope = (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
        size = config["qk_rope_head_dim"]
        theta = config.get("rope_theta") or rope.get("rope_theta", 10000.0)
        rates = theta ** -(torch.arange(0, size, 2).double() / size)
        self.scale = (config["qk_nope_head_dim"] + size) ** -0.5
        self.amplitude = 1.0
        if rope.get("rope_type", rope.get("type")) == "yarn":
            factor, length = rope["factor"], rope["original_max_position_embeddings"]

            def place(turns: float) -> float:
                return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

            low = max(math.floor(place(rope.get("beta_fast", 32))), 0)
            high = min(math.ceil(place(rope.get("beta_slow", 1))), size - 1)
            ramp = ((torch.arange(size // 2) - low) / max(high - low, 1e-3)).clamp(0, 1).double()
            rates = rates / factor * ramp + rates * (1 - ramp)
            all_dim = mscale(factor, rope["mscale_all_dim"])
            self.amplitude = mscale(factor, rope["mscale"]) / all_dim
            if self.mistake == "mscale-on-rope":
                self.amplitude = all_dim
            if self.mistake != "no-mscale":
                self.scale *= all_dim**2
        if self.mistake == "latent-scale":
            width = config["qk_nope_head_dim"] + size
            self.scale *= (width / (config["kv_lora_rank"] + size)) ** 0.5
        self.rates = rates

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float64[len(ids), V]."""
        x = self.weights["model.embed_tokens.weight"][list(ids)]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self._attention(f"{name}.self_attn", self._norm(x, f"{name}.input_layernorm"))
            rows = self._norm(x, f"{name}.post_attention_layernorm")
            first, step = self.config["first_k_dense_replace"], self.config.get("moe_layer_freq", 1)
            mixed = layer >= first and layer % step == 0
            x = x + (self._mixture if mixed else self._mlp)(rows, f"{name}.mlp")
        return self._linear(self._norm(x, "model.norm"), "lm_head")

    def says(self, ids: Sequence[int], answer: Sequence[int]) -> bool:
        """Whether ``answer`` is what it answers greedily."""
        logits = self.logits([*ids, *answer[:-1]])[len(ids) - 1 :]
        return logits.argmax(dim=-1).tolist() == list(answer)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = x @ self.weights[f"{name}.weight"].T
        return out + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else out

    def _norm(self, x: torch.Tensor, name: str, epsilon: float | None = None) -> torch.Tensor:
        if epsilon is None or self.mistake == "latent-norm-epsilon":
            epsilon = self.config["rms_norm_eps"]
        size = x.pow(2).mean(dim=-1, keepdim=True).add(epsilon).sqrt()
        return x / size * self.weights[f"{name}.weight"]

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, R], every pair by its angle; the pairs may come out in any one order."""
        adjacent = self.config["model_type"] == "deepseek_v2" or self.config["rope_interleave"]
        if adjacent != (self.mistake == "half-rope"):
            first, second = x[..., 0::2], x[..., 1::2]
        else:
            first, second = x.chunk(2, dim=-1)
        angles = torch.arange(len(x))[:, None, None] * self.rates
        cos, sin = angles.cos() * self.amplitude, angles.sin() * self.amplitude
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        config, num = self.config, len(x)
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        if config["q_lora_rank"] is None:
            q = self._linear(x, f"{name}.q_proj")
        else:
            narrow = self._linear(x, f"{name}.q_a_proj")
            q = self._linear(self._norm(narrow, f"{name}.q_a_layernorm", 1e-6), f"{name}.q_b_proj")
        q = q.view(num, config["num_attention_heads"], -1)
        kv = self._linear(x, f"{name}.kv_a_proj_with_mqa")
        rank = config["kv_lora_rank"]
        latent = self._norm(kv[:, :rank], f"{name}.kv_a_layernorm", 1e-6)
        heads = self._linear(latent, f"{name}.kv_b_proj").view(num, -1, nope + value)
        k_rope = self._rotated(kv[:, None, rank:])[:, 0]
        scores = torch.einsum("qhp,khp->hqk", q[..., :nope], heads[..., :nope])
        scores += torch.einsum("qhr,kr->hqk", self._rotated(q[..., nope:]), k_rope)
        seen = torch.ones(num, num, dtype=torch.bool).tril()
        weights = (scores * self.scale).masked_fill(~seen, -math.inf).softmax(dim=-1)
        out = torch.einsum("hqk,khv->qhv", weights, heads[..., nope:])
        return self._linear(out.reshape(num, -1), f"{name}.o_proj")

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gated = silu(self._linear(x, f"{name}.gate_proj")) * self._linear(x, f"{name}.up_proj")
        return self._linear(gated, f"{name}.down_proj")

    def _mixture(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = self._mlp(x, f"{name}.shared_experts")
        for token, (experts, weights) in enumerate(zip(*self._route(x, name), strict=True)):
            for expert, weight in zip(experts.tolist(), weights, strict=True):
                one = self._mlp(x[token : token + 1], f"{name}.experts.{expert}")
                out[token] += weight * one[0]
        return out

    def _route(self, x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        is_v3 = config["model_type"] == "deepseek_v3"
        logits = self._linear(x, f"{name}.gate")
        scores = logits.sigmoid() if is_v3 else logits.softmax(dim=-1)
        choice = scores
        if is_v3:
            choice = scores + self.weights[f"{name}.gate.e_score_correction_bias"]
        grouped = is_v3 or config.get("topk_method") == "group_limited_greedy"
        if grouped and self.mistake != "ungrouped":
            groups = choice.view(len(x), config["n_group"], -1)
            best = groups.topk(2)[0].sum(-1) if is_v3 else groups.max(-1)[0]
            for token, kept in enumerate(best.topk(config["topk_group"])[1].tolist()):
                lost = [group for group in range(config["n_group"]) if group not in kept]
                groups = groups.clone()
                groups[token, lost] = -math.inf
            choice = groups.view_as(choice)
        experts = choice.topk(config["num_experts_per_tok"])[1]
        source = choice if self.mistake == "bias-in-weight" else scores
        weights = source.gather(1, experts)
        if is_v3 and config["norm_topk_prob"]:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return experts, weights * config["routed_scaling_factor"]
