"""flash_attn.integrations.vllm: the function as vLLM 0.33.0 calls it, and the way it comes to be called.

The calls are those of vllm/v1/attention/backends/flash_attn.py in that release. Here stand-ins for its modules impose
the look-up; test_server_packages.py does the same in vLLM itself.
"""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest
import torch
from serving_harness import (
    HEAD_DIM,
    HEADS,
    HEADS_K,
    LENGTHS_K,
    LENGTHS_Q,
    keywords,
    make_8_bit_batch,
    make_batch,
    make_latent_batch,
    tolerance,
)
from signatures import plain_signature

from flash_attn import flash_attn_varlen_func
from flash_attn.integrations import serving, vllm
from flash_attn.ops import latent

PUBLISHED = (
    "(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0, "
    "softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None, "
    "q_descale=None, k_descale=None, v_descale=None, num_splits=0, output_scale=None, fa_version=2, s_aux=None, "
    "cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, "
    "aux_tensor_leading_dims=None, dynamic_causal=None, gather_kv_indices=None, gather_kv_valid_length=None)"
)


def test_signature():
    assert plain_signature(vllm.flash_attn_varlen_func) == PUBLISHED


def call(batch, function=vllm.flash_attn_varlen_func, **options):
    """FlashAttentionImpl.forward over a cache, with its keywords."""
    descale = torch.ones((), device=batch.q.device).expand(len(LENGTHS_K), HEADS_K)
    out = torch.full((*batch.q.shape[:2], batch.v.shape[-1]), 7.0, device=batch.q.device).to(batch.q.dtype)
    arguments = keywords(
        q=batch.q, k=batch.k, v=batch.v, out=out,
        cu_seqlens_q=batch.cu_q, max_seqlen_q=max(LENGTHS_Q), seqused_k=batch.lengths, max_seqlen_k=max(LENGTHS_K),
        softmax_scale=HEAD_DIM**-0.5, causal=True, alibi_slopes=None, window_size=[-1, -1], block_table=batch.table,
        softcap=0, scheduler_metadata=None, fa_version=3, q_descale=None, k_descale=descale, v_descale=descale,
        dynamic_causal=None, num_splits=0, s_aux=None, mask_mod=None, aux_tensors=None,
    )  # fmt: skip
    arguments.update(options)
    return function(**arguments), arguments["out"]


OPTIONS = (
    {},
    {"window_size": [9, 0]},
    {"softcap": 2.0, "softmax_scale": 0.3},
    {"causal": False, "window_size": None},
    {"num_splits": 1},
)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_sinks", (False, True))
@pytest.mark.parametrize("head_dim_v", (HEAD_DIM, 16))
def test_over_a_cache(device, options, with_sinks, head_dim_v):
    batch = make_batch(device, head_dim_v)
    sinks = torch.linspace(-1, 2, HEADS, device=device, dtype=batch.q.dtype) if with_sinks else None
    result, out = call(batch, s_aux=sinks, **options)
    theirs = {name: value for name, value in options.items() if name != "num_splits"}
    if theirs.get("window_size", 0) is None:
        del theirs["window_size"]
    expected, _ = batch.by_sequence(sinks, **{"causal": True, **theirs})
    assert result is out
    torch.testing.assert_close(out, expected, **tolerance(device))


def test_head_dim_512(device):
    """Of Gemma 4's global layers, for which vLLM names the fourth version."""
    batch = make_batch(device, 512, head_dim=512)
    _, out = call(batch, softmax_scale=0.05, fa_version=4)
    torch.testing.assert_close(out, batch.by_sequence(softmax_scale=0.05, causal=True)[0], **tolerance(device))


@pytest.mark.parametrize("with_sinks", (False, True))
def test_lse(device, with_sinks):
    """The context's part of a merge: not causal, with the LSE; -inf where a request has no keys."""
    batch = make_batch(device)
    sinks = torch.linspace(-1, 2, HEADS, device=device) if with_sinks else None
    (out, lse), given = call(batch, causal=False, return_softmax_lse=True, s_aux=sinks)
    expected, expected_lse = batch.by_sequence(sinks)
    torch.testing.assert_close(lse, expected_lse, **tolerance(device))
    assert out is given and (lse == -torch.inf).any() and lse.shape == (HEADS, batch.q.shape[0])


def test_without_a_cache(device):
    """Encoders, and the new tokens' part of a merge: cu_seqlens_k, out or not, no block table."""
    batch = make_batch(device, unused=0)
    k, v = (torch.randn(batch.q.shape[0], HEADS_K, HEAD_DIM, device=device, dtype=batch.q.dtype) for _ in range(2))
    options = keywords(k=k, v=v, cu_seqlens_k=batch.cu_q, max_seqlen_k=max(LENGTHS_Q), seqused_k=None, block_table=None)
    result, out = call(batch, **options)
    lengths = (batch.cu_q, batch.cu_q, max(LENGTHS_Q), max(LENGTHS_Q))
    torch.testing.assert_close(result, flash_attn_varlen_func(batch.q, k, v, *lengths, causal=True))
    assert result is out and torch.equal(call(batch, **options, out=None)[0], out)


def test_alibi(device):
    batch = make_batch(device)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0], device=device)
    expected, _ = batch.by_sequence(causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(call(batch, alibi_slopes=slopes)[0], expected, **tolerance(device))


def test_strided_cache(device):
    """vLLM splits one tensor of keys and values along the head dim, heads before rows."""
    batch = make_batch(device)
    both = torch.cat([batch.k, batch.v], -1).transpose(1, 2).contiguous().transpose(1, 2)
    k, v = both.split(HEAD_DIM, dim=-1)
    assert torch.equal(call(batch, k=k, v=v)[0], call(batch)[0])


REJECTED = ("output_scale", "mask_mod", "block_sparse_tensors", "dynamic_causal", "gather_kv_indices")


@pytest.mark.parametrize("name", REJECTED)
def test_unsupported_arguments_are_named(device, name):
    with pytest.raises(NotImplementedError, match=f"^{name}: expected None, got Tensor"):
        call(make_batch(device), **{name: torch.zeros(1, device=device)})


def test_other_unsupported_calls(device):
    batch = make_batch(device)
    with pytest.raises(NotImplementedError, match="^cp_world_size: expected None, got int"):
        call(batch, cp_world_size=2)
    with pytest.raises(ValueError, match="^cu_seqlens_k: expected a tensor where k is packed, got None"):
        call(batch, k=batch.k.flatten(0, 1), v=batch.v.flatten(0, 1), block_table=None)


# ---- multi-head latent attention ----


def latent_call(batch, **options):
    """FlashAttnMLAImpl.forward_mqa, with its keywords."""
    arguments = keywords(
        q=batch.q, k=batch.k, v=batch.v, q_v=batch.q_v, max_seqlen_q=max(LENGTHS_Q), cu_seqlens_q=batch.batch.cu_q,
        max_seqlen_k=max(LENGTHS_K), seqused_k=batch.batch.lengths, block_table=batch.batch.table,
        softmax_scale=576**-0.5, causal=True, return_softmax_lse=True, fa_version=3, scheduler_metadata=None,
        num_splits=0, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None,
    )  # fmt: skip
    return vllm.flash_attn_varlen_func(**{**arguments, **options})


@pytest.mark.parametrize("num_splits", (0, 1))
def test_latent_attention(device, num_splits):
    batch = make_latent_batch(device)
    batch.check(*latent_call(batch, num_splits=num_splits))
    given = torch.empty_like(batch.q_v)
    assert latent_call(batch, out=given)[0] is given
    batch.check(given, latent_call(batch)[1])


def test_latent_attention_that_no_kernel_computes(device):
    """Falls back, by NotImplementedError."""
    batch, eight = make_latent_batch(device), torch.float8_e4m3fn
    with pytest.raises(NotImplementedError, match="^k: expected float16 or bfloat16, got float8_e4m3fn"):
        latent_call(batch, k=batch.k.to(eight), v=batch.v.to(eight))
    if device == "cuda":
        with pytest.raises(NotImplementedError, match="^q_v: expected None on cuda, got a tensor: .*window"):
            latent_call(batch, window_size=[9, 0])


# ---- 8 bits ----


@pytest.mark.parametrize("options", ({}, {"window_size": [9, 0], "softcap": 2.0}, {"num_splits": 1}))
@pytest.mark.parametrize("wide_queries", (False, True))
def test_eight_bits(device, options, wide_queries):
    """vLLM's kv_cache_dtype="fp8": e4m3 q, k and v, of one scale each or one a head; or q as it was."""
    quantized, descales, values = make_8_bit_batch(device, wide_queries)
    sinks = torch.linspace(-1, 2, HEADS, device=device)
    dtype = quantized.q.dtype if wide_queries else torch.bfloat16
    given = torch.full_like(quantized.q, 7.0, dtype=dtype)
    (out, lse), _ = call(quantized, out=given, s_aux=sinks, return_softmax_lse=True, **descales, **options)
    theirs = {name: value for name, value in options.items() if name != "num_splits"}
    expected, expected_lse = values.by_sequence(sinks.cpu(), causal=True, **theirs)
    assert out is given
    torch.testing.assert_close(out.cpu().double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.cpu(), expected_lse, atol=1e-2, rtol=1e-3)


def test_unsupported_8_bit_tensors(device):
    quantized, descales, _ = make_8_bit_batch(device)
    for name, options, expected in (
        ("k", {"k": quantized.k.view(torch.float8_e5m2)}, "the dtype of q .float8_e4m3fn., got float8_e5m2"),
        ("v", {"v": quantized.v.float()}, "the dtype of k .float8_e4m3fn., got float32"),
        ("v", {"v": quantized.v[..., :16]}, "the head dim of q .32. in 8 bits, got 16"),
    ):
        with pytest.raises(NotImplementedError, match=f"^{name}: expected {expected}"):
            call(quantized, **{"out": None, **descales, **options})
    with pytest.raises(RuntimeError, match="^out: expected dtype float16 or bfloat16, got float32"):
        call(quantized, **descales, out=torch.empty_like(quantized.q, dtype=torch.float32))


@pytest.mark.devices("cuda")
def test_in_a_graph(device):
    """Captured once, replayed with other lengths."""
    batch = make_batch(device)
    call(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, out = call(batch)
    shorter = (batch.lengths - 3).clamp(min=0)
    batch.lengths.copy_(shorter)
    graph.replay()
    assert torch.equal(out, call(batch)[0])


# ---- how vLLM finds it ----

SOURCE = """
calls = []
def flash_attn_varlen_func(**options):
    calls.append(options)
    return "theirs"
def get_scheduler_metadata(**options):
    return "their metadata"
"""
MODULES = {
    "vllm/__init__.py": "",
    "vllm/vllm_flash_attn/flash_attn_interface.py": SOURCE,
    "vllm/vllm_flash_attn/__init__.py": "from vllm.vllm_flash_attn.flash_attn_interface import "
    "flash_attn_varlen_func, get_scheduler_metadata",
    "vllm/backend.py": "from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata\n"
    "def forward(**options):\n    return flash_attn_varlen_func(**options)",
}


@pytest.fixture
def vllm_stand_in(tmp_path, monkeypatch):
    """Modules that import from each other as vLLM's do."""
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.parametrize("backend_first", (False, True))
def test_the_plugin(device, vllm_stand_in, backend_first, caplog):
    """Before the backend is imported, as vLLM loads plugins, or after it; twice changes nothing."""
    if backend_first:
        importlib.import_module("vllm.backend")
    assert vllm.register() and vllm.register()
    backend = importlib.import_module("vllm.backend")
    theirs = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    batch = make_batch(device)
    result, _ = call(batch, function=backend.forward)
    assert torch.equal(result, call(batch)[0]) and theirs.calls == []
    serving.warn_once.cache_clear()
    for _ in range(2):
        assert call(batch, function=backend.forward, mask_mod=batch.q)[0] == "theirs"
    assert len(theirs.calls) == 2 and theirs.calls[0]["mask_mod"] is batch.q
    assert [record.getMessage().count("mask_mod: expected None, got Tensor") for record in caplog.records] == [1]
    assert plain_signature(inspect.unwrap(backend.flash_attn_varlen_func)) == PUBLISHED


def test_metadata_of_fallbacks(vllm_stand_in, monkeypatch):
    """Its own function gets what vLLM's scheduler made or None, for it takes no tensor of another size."""
    vllm.register()
    backend = importlib.import_module("vllm.backend")
    sizes = keywords(batch_size=3, max_seqlen_q=1, max_seqlen_k=9, num_heads_q=4, num_heads_kv=1, headdim=64,
                     cache_seqlens=torch.ones(3, dtype=torch.int32))  # fmt: skip
    assert backend.get_scheduler_metadata(**sizes) is None
    assert backend.get_scheduler_metadata(**sizes, headdim_v=512) is None
    monkeypatch.setattr(latent, "is_computed", lambda *_: False)
    assert backend.get_scheduler_metadata(**sizes, headdim_v=512) == "their metadata"


@pytest.mark.parametrize("missing", ("vllm", "extension", "function"))
def test_what_is_missing_is_said_once(vllm_stand_in, monkeypatch, missing, caplog):
    """vLLM's own flash attention raises ImportError without its extensions: on machines without CUDA."""
    if missing == "vllm":
        monkeypatch.setitem(sys.modules, "vllm", None)
    text = {"extension": "raise ImportError('no extension')", "function": "flash_attn_varlen_func = None"}
    (vllm_stand_in / "vllm/vllm_flash_attn/__init__.py").write_text(text.get(missing, ""), encoding="utf-8")
    serving.warn_once.cache_clear()
    assert not vllm.register() and not vllm.register()
    (record,) = caplog.records
    expected = {"vllm": "vllm", "extension": "no extension", "function": "get_scheduler_metadata"}
    assert record.levelname == "WARNING" and expected[missing] in record.getMessage()
