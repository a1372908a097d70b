"""The part of FlashInfer 0.6.6 that batchradix calls, in plain torch, with the wrappers' contract.

Page tables, alignment of causal entries, entries without slots, log-sum-exps to the base of 2, and
what the kernels refuse or get wrong, are FlashInfer's; the arithmetic is done in float32.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

NOTHING = -5e4  # the log-sum-exp of no slot, as the kernels begin with it


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout in ("NHD", "HND")
        self.kv_layout, self.backend = kv_layout, backend
        self.num_plans = 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(table.dtype == torch.int32 and table.dim() == 1 for table in tables)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        num_queries, num_pages = qo_indptr.diff(), paged_kv_indptr.diff()
        assert qo_indptr[0] == 0
        assert paged_kv_indptr[0] == 0
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        assert (num_queries >= 0).all()
        assert (num_pages >= 0).all()
        # one kernel has the host count the slots, the other the device
        by_host = (num_pages - 1).clamp(min=0) * page_size + paged_kv_last_page_len
        by_device = torch.where(num_pages > 0, by_host, 0)
        assert torch.equal(by_host, by_device)
        assert not causal or (num_queries <= by_host)[by_host > 0].all(), "unseen rows go wrong"
        assert num_qo_heads % num_kv_heads == 0
        self.tables, self.num_slots = tables, by_host.tolist()
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.causal, self.sm_scale = causal, sm_scale
        self.dtypes = (q_data_type, kv_data_type or q_data_type)
        self.num_plans += 1

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor] | torch.Tensor,
        *,
        return_lse: bool = False,
    ) -> Any:
        num_qo_heads, num_kv_heads, head_dim, page_size = self.heads
        k, v = paged_kv_cache if isinstance(paged_kv_cache, tuple) else paged_kv_cache.unbind(1)
        assert (q.dtype, k.dtype) == self.dtypes
        assert k.stride() == v.stride()
        assert k.stride(-1) == q.stride(-1) == 1
        if self.kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        assert k.shape[1:] == v.shape[1:] == (page_size, num_kv_heads, head_dim)
        qo_indptr, kv_indptr, kv_indices, _ = (table.tolist() for table in self.tables)
        assert q.shape == (qo_indptr[-1], num_qo_heads, head_dim)
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:2], NOTHING, dtype=torch.float32)
        for entry, num_slots in enumerate(self.num_slots):
            if num_slots == 0:
                continue
            rows = slice(qo_indptr[entry], qo_indptr[entry + 1])
            pages = kv_indices[kv_indptr[entry] : kv_indptr[entry + 1]]
            keys, values = (side[pages].flatten(0, 1)[:num_slots] for side in (k, v))
            out[rows], lse[rows] = self._attend(q[rows], keys, values)
        return (out, lse) if return_lse else out

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, H, E] and [s, K, E] to [n, H, E] and [n, H]; the last query sees all where causal."""
        group, scale = q.shape[1] // k.shape[1], self.sm_scale or q.shape[2] ** -0.5
        k, v = (side.float().repeat_interleave(group, dim=1) for side in (k, v))
        scores = torch.einsum("nhe,she->hns", q.float(), k) * scale
        if self.causal:
            scores = hide(scores)
        out = torch.einsum("hns,she->nhe", scores.softmax(dim=2), v)
        return out.to(q.dtype), (scores.logsumexp(dim=2) / math.log(2)).T


class MultiLevelCascadeAttentionWrapper:
    def __init__(
        self, num_levels: int, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD"
    ) -> None:
        self.wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
            for _ in range(num_levels)
        ]

    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        *,
        sm_scale: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        tables = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        for wrapper, *level in zip(self.wrappers, *tables, strict=True):
            wrapper.plan(
                *level,
                *(num_qo_heads, num_kv_heads, head_dim, page_size),
                causal=causal and wrapper is self.wrappers[-1],
                sm_scale=sm_scale,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor] | torch.Tensor
    ) -> torch.Tensor:
        out, lse = self.wrappers[-1].run(q, paged_kv_cache, return_lse=True)
        for wrapper in self.wrappers[:-1]:
            merge_state_in_place(out, lse, *wrapper.run(q, paged_kv_cache, return_lse=True))
        return out


class BatchMLAPagedAttentionWrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer.element_size() == 1

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        tables = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert all(table.dtype == torch.int32 and table.dim() == 1 for table in tables)
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
        assert qo_indptr[0] == kv_indptr[0] == 0
        num_queries, num_pages = qo_indptr.diff(), kv_indptr.diff()
        assert (num_queries > 0).all()
        assert (kv_len_arr > 0).all(), "one kernel writes outside of its memory"
        assert torch.equal(num_pages, (kv_len_arr + page_size - 1) // page_size)
        assert not causal or (num_queries <= kv_len_arr).all()
        rows = num_queries * num_heads
        tile = 128 if rows.sum() // len(rows) > 64 else 64
        assert not causal or tile % num_heads == 0, "a tile's end is rounded down"
        assert ((rows + tile - 1) // tile).sum() <= 16384
        self.tables, self.causal, self.sm_scale = tables, causal, sm_scale
        self.sizes = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        self.dtypes = (q_data_type, q_data_type, kv_data_type, kv_data_type)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        *,
        return_lse: bool = False,
    ) -> Any:
        num_heads, head_dim_ckv, head_dim_kpe, page_size = self.sizes
        given = (q_nope, q_pe, ckv_cache, kpe_cache)
        assert tuple(tensor.dtype for tensor in given) == self.dtypes
        qo_indptr, kv_indptr, kv_indices, kv_lens = (table.tolist() for table in self.tables)
        assert q_nope.shape == (qo_indptr[-1], num_heads, head_dim_ckv)
        assert q_pe.shape == (qo_indptr[-1], num_heads, head_dim_kpe)
        assert ckv_cache.shape[1:] == (page_size, head_dim_ckv)
        assert kpe_cache.shape[1:] == (page_size, head_dim_kpe)
        out = torch.full_like(q_nope, math.nan)  # the wrapper leaves it empty
        lse = torch.full(q_nope.shape[:2], math.nan, dtype=torch.float32)
        for entry, num_slots in enumerate(kv_lens):
            rows = slice(qo_indptr[entry], qo_indptr[entry + 1])
            pages = kv_indices[kv_indptr[entry] : kv_indptr[entry + 1]]
            ckv, kpe = (
                side[pages].flatten(0, 1)[:num_slots].float() for side in (ckv_cache, kpe_cache)
            )
            scores = torch.einsum("nhc,sc->hns", q_nope[rows].float(), ckv)
            scores += torch.einsum("nhr,sr->hns", q_pe[rows].float(), kpe)
            scores = hide(scores * self.sm_scale) if self.causal else scores * self.sm_scale
            out[rows] = torch.einsum("hns,sc->nhc", scores.softmax(dim=2), ckv).to(out.dtype)
            lse[rows] = (scores.logsumexp(dim=2) / math.log(2)).T
        return (out, lse) if return_lse else out


def hide(scores: torch.Tensor) -> torch.Tensor:
    """[H, n, s] without what a query does not see where the last one sees all."""
    num_queries, num_slots = scores.shape[1:]
    hidden = torch.ones(num_queries, num_slots, dtype=torch.bool)
    return scores.masked_fill(hidden.triu(num_slots - num_queries + 1), -math.inf)


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    num_rows, num_heads, head_dim = v.shape
    assert v.shape == v_other.shape
    assert v.dtype == v_other.dtype
    assert s.shape == s_other.shape == (num_rows, num_heads)
    assert s.dtype == s_other.dtype == torch.float32
    assert all(tensor.is_contiguous() for tensor in (v, s, v_other, s_other))
    assert num_heads * head_dim <= 8192, "more threads than a block has"
    merges = torch.ones(num_rows, dtype=torch.bool) if mask is None else mask.bool()
    assert merges.shape == (num_rows,)
    top = torch.maximum(s, s_other)
    mine, others = (s - top).exp2(), (s_other - top).exp2()
    total = mine + others
    merged = (mine / total)[..., None] * v.float() + (others / total)[..., None] * v_other.float()
    v[merges] = merged.to(v.dtype)[merges]
    s[merges] = (total.log2() + top)[merges]


def install(patch: pytest.MonkeyPatch, *, min_saved_slots: int = 1) -> None:
    """Lets `flashinfer` serve on the CPU, in any dtype, and share whatever can be shared."""
    from batchradix.engine.attention import flashinfer_backend, flashinfer_mla

    patch.setitem(sys.modules, "flashinfer", sys.modules[__name__])
    patch.setattr(flashinfer_backend.FlashInferAttention, "missing", lambda shape: None)
    patch.setattr(flashinfer_mla.FlashInferMla, "missing", lambda shape: None)
    for module in (flashinfer_backend, flashinfer_mla):
        patch.setattr(module, "MIN_SAVED_SLOTS", min_saved_slots)
