"""flash_attn.integrations.sglang: the functions as SGLang 0.5.23 calls them, and the backend that it registers.

The calls are those of sglang/srt/layers/attention/flashattention_backend.py in that release. Here stand-ins for its
modules impose the registry; test_server_packages.py does the same in SGLang itself.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch
from serving_harness import (
    HEAD_DIM,
    HEADS,
    HEADS_K,
    LENGTHS_K,
    LENGTHS_Q,
    PAGE,
    keywords,
    make_8_bit_batch,
    make_batch,
    make_latent_batch,
    tolerance,
)
from signatures import plain_signature

import flash_attn
from flash_attn.integrations import serving, sglang

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


def test_head_dim_512(device):
    """Of Gemma 4's global layers."""
    batch = make_batch(device, 512, head_dim=512)
    expected, _ = batch.by_sequence(softmax_scale=0.05, causal=True)
    torch.testing.assert_close(call(batch, softmax_scale=0.05), expected, **tolerance(device))


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


@pytest.mark.parametrize("with_sinks", (False, True))
def test_latent_attention(device, with_sinks):
    """MLA's calls: queries packed, in a batch, and by flash_attn_varlen_func; over pages of one row too."""
    latent_batch = make_latent_batch(device)
    batch, sinks = latent_batch.batch, torch.linspace(-1, 2, 8, device=device) if with_sinks else None
    options = keywords(qv=latent_batch.q_v, softmax_scale=None, sinks=sinks, return_softmax_lse=True)
    over_pages = batch._replace(q=latent_batch.q, k=latent_batch.k, v=latent_batch.v)
    out, lse, *_ = call(over_pages, **options)
    latent_batch.check(out, lse, sinks)
    table = (batch.table.clamp(min=0).long() * PAGE).unsqueeze(-1) + torch.arange(PAGE, device=device)
    k, v = (x.flatten(0, 1).unsqueeze(1) for x in (latent_batch.k, latent_batch.v))
    latent_batch.check(*call(over_pages, k_cache=k, v_cache=v, page_table=table.flatten(1).int(), **options)[:2], sinks)
    packed = sglang.flash_attn_varlen_func(
        latent_batch.q, latent_batch.k, latent_batch.v, batch.cu_q, None, seqused_k=batch.lengths,
        page_table=batch.table, causal=True, **options,
    )  # fmt: skip
    latent_batch.check(*packed[:2], sinks)
    cu_q = torch.arange(len(LENGTHS_K) + 1, dtype=torch.int32, device=device)
    rows = slice(0, len(LENGTHS_K))
    decoding = latent_batch._replace(
        q=latent_batch.q[rows], q_v=latent_batch.q_v[rows], batch=batch._replace(cu_q=cu_q)
    )
    in_a_batch = {**options, "qv": decoding.q_v.unsqueeze(1), "q": decoding.q.unsqueeze(1), "cu_seqlens_q": None}
    out, lse, *_ = call(over_pages, **in_a_batch)
    decoding.check(out.squeeze(1), lse.squeeze(2).t(), sinks)


@pytest.mark.parametrize("without_scales", (False, True))
def test_eight_bits(device, without_scales):
    """kv_cache_dtype="fp8_e4m3": q converted as it is, scales where the checkpoint has some; both functions."""
    quantized, descales, values = make_8_bit_batch(device)
    if without_scales:
        quantized, descales = quantized._replace(k=quantized.v), {}
        v = values.v / torch.tensor([0.0625, 0.5], dtype=torch.float64).unsqueeze(-1)
        values = values._replace(q=values.q / 0.25, k=v, v=v)
    scale = 0.02 if without_scales else HEAD_DIM**-0.5
    expected, expected_lse = values.by_sequence(causal=True, softmax_scale=scale)
    given = torch.empty_like(quantized.q, dtype=torch.bfloat16)
    out, lse, *_ = call(quantized, out=given, return_softmax_lse=True, softmax_scale=scale, **descales)
    packed = sglang.flash_attn_varlen_func(
        *quantized[:3], quantized.cu_q, None, seqused_k=quantized.lengths, page_table=quantized.table, causal=True,
        softmax_scale=scale, **descales,
    )  # fmt: skip
    assert out is given
    torch.testing.assert_close(out.cpu().double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.cpu(), expected_lse, atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(packed, out)


REJECTED = ("score_mod", "mask_mod", "sfq", "rel_bias")


@pytest.mark.parametrize("name", REJECTED)
def test_unsupported_arguments_are_named(device, name):
    batch = make_batch(device)
    one = {name: torch.zeros(1, device=device)}
    with pytest.raises(NotImplementedError, match=f"^{name}: expected None, got Tensor"):
        call(batch, **one)
    with pytest.raises(NotImplementedError, match=f"^{name}: expected None, got Tensor"):
        sglang.flash_attn_varlen_func(batch.q, batch.q, batch.q, batch.cu_q, batch.cu_q, **one)


def test_unsupported_numbers_and_dtypes(device):
    batch = make_batch(device)
    with pytest.raises(NotImplementedError, match="^attention_chunk: expected None, got int"):
        call(batch, attention_chunk=64)
    with pytest.raises(NotImplementedError, match="^only_qv: expected None, got bool"):
        call(batch, only_qv=True)
    with pytest.raises(NotImplementedError, match="^ver: expected 3, got 4"):
        call(batch, ver=4)
    with pytest.raises(NotImplementedError, match="^k_cache: expected float8_e4m3fn or int8, got float8_e5m2"):
        call(batch, k_cache=batch.k.to(torch.float8_e5m2))
    with pytest.raises(NotImplementedError, match="^v_cache: expected the dtype of k_cache"):
        call(batch, k_cache=batch.k.to(torch.float8_e4m3fn))


# ---- how SGLang finds it ----


@pytest.fixture
def sglang_stand_in(monkeypatch):
    """attention_registry, flashattention_backend and server_args as far as the backend's creation goes through them."""
    registry, server, backend = (types.ModuleType(name) for name in ("registry", "server_args", "backend"))
    registry.ATTENTION_BACKENDS = {}

    def register_attention_backend(name):
        return lambda function: registry.ATTENTION_BACKENDS.update({name: function})

    def theirs(**options):
        return "theirs"

    class FlashAttentionBackend:
        def __init__(self, runner, fa_impl_ver=3):
            self.runner = runner
            self.flash_attn_with_kvcache = self.flash_attn_varlen_func = theirs
            self._get_scheduler_metadata = theirs

        def forward(self, **options):
            return backend.flash_attn_with_kvcache(**options)

    registry.register_attention_backend = register_attention_backend
    for listed, add in sglang._CHOICES.items():
        setattr(server, listed, ["fa3"])
        setattr(server, add, getattr(server, listed).extend)
    listed, add = sglang._CHUNKED_PREFIX
    setattr(server, listed, ["fa3"])
    setattr(server, add, getattr(server, listed).append)
    backend.FlashAttentionBackend = FlashAttentionBackend
    backend.flash_attn_with_kvcache = backend.flash_attn_varlen_func = theirs
    layers = "sglang.srt.layers.attention"
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", layers):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, f"{layers}.attention_registry", registry)
    monkeypatch.setitem(sys.modules, f"{layers}.flashattention_backend", backend)
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", server)
    return registry, server


@pytest.mark.parametrize("name", ("fa_native", "fa3"))
def test_the_backend(device, sglang_stand_in, name, caplog):
    registry, server = sglang_stand_in
    register = sglang.replace_fa3 if name == "fa3" else sglang.register
    assert register() and register()
    expected = ["fa3"] if name == "fa3" else ["fa3", "fa_native"]
    assert all(getattr(server, listed) == expected for listed in (*sglang._CHOICES, sglang._CHUNKED_PREFIX[0]))
    batch = make_batch(device)
    for _ in range(2):  # of a model and of its draft
        made = registry.ATTENTION_BACKENDS[name]("runner")
        assert made.runner == "runner" and made._get_scheduler_metadata is None
        assert torch.equal(call(batch, made.forward), call(batch))
    serving.warn_once.cache_clear()
    for options in ({"sfq": batch.q}, {"ver": 4}, {"sfq": batch.q}):
        assert call(batch, made.forward, **options) == "theirs"
    assert len(caplog.records) == 2 and "sfq: expected None, got Tensor" in caplog.records[0].getMessage()
    k = batch.keys(batch.k, 0)[0]
    cu = torch.tensor([0, k.shape[0]], dtype=torch.int32, device=device)
    packed = keywords(q=k, k=k, v=k, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert torch.equal(made.flash_attn_varlen_func(**packed), sglang.flash_attn_varlen_func(**packed))
    assert made.flash_attn_varlen_func(**packed, score_mod=len) == "theirs"


@pytest.mark.parametrize("missing", ("sglang", "list"))
def test_what_is_missing_is_said_once(sglang_stand_in, monkeypatch, missing, caplog):
    if missing == "sglang":
        monkeypatch.setitem(sys.modules, "sglang.srt.server_args", None)
    else:
        monkeypatch.delattr(sglang_stand_in[1], "add_draft_attention_backend_choices")
    serving.warn_once.cache_clear()
    assert not sglang.register() and not sglang.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "fa_native is not registered" in record.getMessage()
