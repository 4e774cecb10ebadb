"""flash_attn.integrations.sglang: the functions as SGLang 0.5.23 calls them, and the backend that it registers.

The signatures and calls were read in that release: sglang/kernels/ops/attention/flash_attention.py and
sglang/srt/layers/attention/flashattention_backend.py. The registry is imposed by stand-ins for these modules.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch
from serving_harness import HEAD_DIM, HEADS, HEADS_K, LENGTHS_K, LENGTHS_Q, PAGE, keywords, make_batch, tolerance
from signatures import plain_signature

import flash_attn
from flash_attn.integrations import sglang

DESCALES = "q_descale=None, k_descale=None, v_descale=None"
MODS = "score_mod=None, aux_tensors=None, sfq=None, sfk=None, sfv=None, rel_bias=None, rel_bias_prep_cache=None"
PUBLISHED = {
    "flash_attn_with_kvcache": "(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    f"cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {DESCALES}, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), attention_chunk=None, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
    "num_splits=0, pack_gqa=None, only_qv=False, sm_margin=0, return_softmax_lse=False, sinks=None, "
    f"{MODS}, ver=3, out=None, max_seqlen_k=None, mask_mod=None)",
    "flash_attn_varlen_func": "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, "
    f"seqused_q=None, seqused_k=None, page_table=None, softmax_scale=None, causal=False, qv=None, {DESCALES}, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, only_qv=False, sm_margin=0, "
    f"return_softmax_lse=False, sinks=None, {MODS}, ver=3, out=None, mask_mod=None)",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_signatures(name):
    assert plain_signature(getattr(sglang, name)) == PUBLISHED[name]


def call(batch, function=sglang.flash_attn_with_kvcache, **options):
    """FlashAttentionBackend.forward_extend, with its keywords."""
    arguments = keywords(
        q=batch.q, k_cache=batch.k, v_cache=batch.v, page_table=batch.table, cache_seqlens=batch.lengths,
        cu_seqlens_q=batch.cu_q, cu_seqlens_k_new=batch.cu_q, max_seqlen_q=max(LENGTHS_Q),
        softmax_scale=HEAD_DIM**-0.5, causal=True, window_size=(-1, -1), softcap=0.0, return_softmax_lse=False,
        num_splits=0, out=None, ver=3,
    )  # fmt: skip
    return function(**{**arguments, **options})


@pytest.mark.parametrize(
    "options", ({}, {"window_size": (9, 0)}, {"softcap": 2.0}, {"causal": False}, {"num_splits": 1})
)
@pytest.mark.parametrize("with_sinks", (False, True))
@pytest.mark.parametrize("head_dim_v", (HEAD_DIM, 16))
def test_prompts_and_decoding_in_one(device, options, with_sinks, head_dim_v):
    batch = make_batch(device, head_dim_v)
    sinks = torch.linspace(-1, 2, HEADS, device=device, dtype=batch.q.dtype) if with_sinks else None
    given = batch.q.new_full((*batch.q.shape[:2], head_dim_v), 7.0)
    out, lse, *rest = call(batch, sinks=sinks, return_softmax_lse=True, out=given, **options)
    theirs = {name: value for name, value in options.items() if name != "num_splits"}
    expected, expected_lse = batch.by_sequence(sinks, **{"causal": True, **theirs})
    assert out is given and len(rest) == 2
    torch.testing.assert_close(out, expected, **tolerance(device))
    torch.testing.assert_close(lse, expected_lse, **tolerance(device))
    torch.testing.assert_close(call(batch, sinks=sinks, **options), out)


def test_pages_of_one_row(device):
    """SGLang's default page size, and how its cascade reads a cache of larger pages."""
    batch = make_batch(device)
    rows = (batch.table.clamp(min=0).long() * PAGE).unsqueeze(-1) + torch.arange(PAGE, device=device)
    k, v = (x.reshape(-1, 1, HEADS_K, HEAD_DIM) for x in (batch.k, batch.v))
    out = call(batch, k_cache=k, v_cache=v, page_table=rows.flatten(1).int())
    torch.testing.assert_close(out, call(batch), **tolerance(device))


def test_queries_in_a_batch(device):
    """Without cu_seqlens_q; lengths as one int; into a given output of any strides."""
    q, k, v = (
        torch.randn(3, n, h, HEAD_DIM, device=device, dtype=make_batch(device).q.dtype)
        for n, h in ((4, HEADS), (50, HEADS_K), (50, HEADS_K))
    )
    sinks = torch.linspace(-1, 2, HEADS, device=device)
    given = torch.empty(3, 4, HEADS + 1, HEAD_DIM, device=device, dtype=q.dtype)[:, :, 1:]
    out, lse, *_ = sglang.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=31, causal=True, sinks=sinks, return_softmax_lse=True, out=given
    )
    expected, expected_lse, _ = flash_attn.flash_attn_func(
        q, k[:, :31], v[:, :31], causal=True, sinks=sinks, return_attn_probs=True
    )
    assert out is given
    torch.testing.assert_close(out, expected, **tolerance(device))
    torch.testing.assert_close(lse, expected_lse, **tolerance(device))


def test_appending(device):
    """New keys go into the cache, as by flash_attn.flash_attn_with_kvcache."""
    dtype = make_batch(device).q.dtype
    q, k, v = (torch.randn(2, 1, h, HEAD_DIM, device=device, dtype=dtype) for h in (HEADS, HEADS_K, HEADS_K))
    caches = [torch.randn(2, 20, HEADS_K, HEAD_DIM, device=device, dtype=dtype) for _ in range(2)]
    copies = [x.clone() for x in caches]
    lengths = torch.tensor([5, 11], dtype=torch.int32, device=device)
    out = sglang.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)
    expected = flash_attn.flash_attn_with_kvcache(q, *copies, k, v, cache_seqlens=lengths, causal=True)
    assert torch.equal(out, expected) and all(map(torch.equal, caches, copies))
    with pytest.raises(NotImplementedError, match="^cu_seqlens_q: expected None, got Tensor"):
        sglang.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, cu_seqlens_q=lengths)


@pytest.mark.parametrize("paged", (False, True))
def test_varlen(device, paged):
    """Packed keys, or pages with seqused_k; and queries of which only the first rows are in use."""
    batch = make_batch(device, unused=0)
    used = torch.tensor([1, 4, 0, 1, 20], dtype=torch.int32, device=device)
    sinks = torch.linspace(-1, 2, HEADS, device=device)
    if paged:
        options = {"page_table": batch.table, "seqused_k": batch.lengths}
        k, v, cu_k = batch.k, batch.v, None
    else:
        k, v = (torch.cat([batch.keys(x, i)[0] for i in range(len(LENGTHS_K))]) for x in (batch.k, batch.v))
        cu_k, options = torch.tensor([0, *LENGTHS_K], device=device).cumsum(0).int(), {}
    given = torch.full_like(batch.q, 7.0)
    out, lse, *_ = sglang.flash_attn_varlen_func(
        batch.q, k, v, batch.cu_q, cu_k, 20, 41, seqused_q=used, causal=True, sinks=sinks, return_softmax_lse=True,
        out=given, **options,
    )  # fmt: skip
    shorter = batch.q[[0, 1, 2, 3, 4, 8, *range(9, 29)]]
    cu_q = torch.tensor([0, 1, 5, 5, 6, 26], dtype=torch.int32, device=device)
    expected, expected_lse = batch._replace(q=shorter, cu_q=cu_q).by_sequence(sinks, causal=True)
    kept = torch.tensor([0, 1, 2, 3, 4, 8, *range(9, 29)], device=device)
    assert out is given and (out[5:8] == 0).all() and (lse[:, 5:8] == -torch.inf).all()
    torch.testing.assert_close(out[kept], expected, **tolerance(device))
    torch.testing.assert_close(lse[:, kept], expected_lse, **tolerance(device))


REJECTED = ("qv", "k_descale", "score_mod", "mask_mod", "sfq", "rel_bias")


@pytest.mark.parametrize("name", REJECTED)
def test_what_is_not_served_is_named(device, name):
    batch = make_batch(device)
    one = {name: torch.zeros(1, device=device)}
    with pytest.raises(NotImplementedError, match=f"^{name}: expected None, got Tensor"):
        call(batch, **one)
    with pytest.raises(NotImplementedError, match=f"^{name}: expected None, got Tensor"):
        sglang.flash_attn_varlen_func(batch.q, batch.q, batch.q, batch.cu_q, batch.cu_q, **one)


def test_numbers_and_dtypes_that_are_not_served(device):
    batch = make_batch(device)
    with pytest.raises(NotImplementedError, match="^attention_chunk: expected None, got int"):
        call(batch, attention_chunk=64)
    with pytest.raises(NotImplementedError, match="^only_qv: expected None, got bool"):
        call(batch, only_qv=True)
    with pytest.raises(NotImplementedError, match="^v_cache: expected float16 or bfloat16, got float8_e5m2"):
        call(batch, v_cache=batch.v.to(torch.float8_e5m2))


# ---- how SGLang finds it ----


@pytest.fixture
def sglang_stand_in(monkeypatch):
    """attention_registry, flashattention_backend and server_args as far as the backend's creation goes through them."""
    registry, server, backend = (types.ModuleType(name) for name in ("registry", "server_args", "backend"))
    registry.ATTENTION_BACKENDS = {}

    def register_attention_backend(name):
        return lambda function: registry.ATTENTION_BACKENDS.setdefault(name, function)

    class FlashAttentionBackend:
        def __init__(self, runner, fa_impl_ver=3):
            self.runner = runner
            self.flash_attn_with_kvcache = self.flash_attn_varlen_func = "theirs"
            self._get_scheduler_metadata = "theirs"

        def forward(self, **options):
            return backend.flash_attn_with_kvcache(**options)

    registry.register_attention_backend = register_attention_backend
    server.ATTENTION_BACKEND_CHOICES = ["fa3"]
    server.add_attention_backend_choices = server.ATTENTION_BACKEND_CHOICES.extend
    backend.FlashAttentionBackend = FlashAttentionBackend
    backend.flash_attn_with_kvcache = backend.flash_attn_varlen_func = None
    layers = "sglang.srt.layers.attention"
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", layers):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, f"{layers}.attention_registry", registry)
    monkeypatch.setitem(sys.modules, f"{layers}.flashattention_backend", backend)
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", server)
    return registry, server, backend


def test_the_backend(device, sglang_stand_in):
    registry, server, _ = sglang_stand_in
    sglang.register()
    sglang.register()
    assert server.ATTENTION_BACKEND_CHOICES == ["fa3", "fa_native"]
    made = registry.ATTENTION_BACKENDS["fa_native"]("runner")
    batch = make_batch(device)
    assert made.runner == "runner" and made._get_scheduler_metadata is None
    assert made.flash_attn_varlen_func is sglang.flash_attn_varlen_func
    assert torch.equal(call(batch, made.forward), call(batch))


def test_without_sglang(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ImportError):
        sglang.register()
