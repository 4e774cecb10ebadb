"""flash_attn.integrations.vllm: the function as vLLM 0.33.0 calls it, and the way it comes to be called.

The signatures and the calls were read in that release: vllm/vllm_flash_attn/flash_attn_interface.py and
vllm/v1/attention/backends/flash_attn.py. The look-up is imposed by stand-ins for these modules.
"""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest
import torch
from serving_harness import HEAD_DIM, HEADS, HEADS_K, LENGTHS_K, LENGTHS_Q, keywords, make_batch, tolerance
from signatures import plain_signature

from flash_attn import flash_attn_varlen_func
from flash_attn.integrations import vllm

PUBLISHED = (
    "(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0, "
    "softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None, "
    "q_descale=None, k_descale=None, v_descale=None, num_splits=0, output_scale=None, fa_version=2, s_aux=None, "
    "cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, "
    "aux_tensor_leading_dims=None, dynamic_causal=None, gather_kv_indices=None, gather_kv_valid_length=None)"
)
PUBLISHED_METADATA = (
    "(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
    "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
    "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), has_softcap=False, num_splits=0, "
    "pack_gqa=None, sm_margin=0)"
)


def test_signatures():
    assert plain_signature(vllm.flash_attn_varlen_func) == PUBLISHED
    assert plain_signature(vllm.get_scheduler_metadata) == PUBLISHED_METADATA


def call(batch, function=vllm.flash_attn_varlen_func, **options):
    """FlashAttentionImpl.forward over a cache, with its keywords."""
    descale = torch.ones((), device=batch.q.device).expand(len(LENGTHS_K), HEADS_K)
    arguments = keywords(
        q=batch.q, k=batch.k, v=batch.v, out=batch.q.new_full((*batch.q.shape[:2], batch.v.shape[-1]), 7.0),
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


REJECTED = ("q_v", "output_scale", "mask_mod", "block_sparse_tensors", "dynamic_causal", "gather_kv_indices")


@pytest.mark.parametrize("name", REJECTED)
def test_what_is_not_served_is_named(device, name):
    with pytest.raises(NotImplementedError, match=f"^{name}: expected None, got Tensor"):
        call(make_batch(device), **{name: torch.zeros(1, device=device)})


def test_8_bit_and_context_parallel_are_named(device):
    batch = make_batch(device)
    with pytest.raises(NotImplementedError, match="^k: expected float16 or bfloat16, got float8_e4m3fn"):
        call(batch, k=batch.k.to(torch.float8_e4m3fn))
    with pytest.raises(NotImplementedError, match="^cp_world_size: expected None, got int"):
        call(batch, cp_world_size=2)
    with pytest.raises(ValueError, match="^cu_seqlens_k: expected a tensor where k is packed, got None"):
        call(batch, k=batch.k.flatten(0, 1), v=batch.v.flatten(0, 1), block_table=None)


def test_scheduler_metadata(device):
    """An empty tensor fits into the buffer that vLLM keeps for a captured graph."""
    lengths = torch.ones(3, dtype=torch.int32, device=device)
    metadata = vllm.get_scheduler_metadata(
        batch_size=3, max_seqlen_q=1, max_seqlen_k=9, num_heads_q=4, num_heads_kv=2, headdim=32, cache_seqlens=lengths,
        qkv_dtype=torch.bfloat16, cu_seqlens_q=None, page_size=16, causal=True, window_size=(-1, -1), num_splits=0,
    )  # fmt: skip
    kept = torch.ones(13, dtype=torch.int32, device=device)
    n = metadata.shape[0]
    kept[:n], kept[n:] = metadata, 0
    assert metadata.dtype == torch.int32 and (kept[n:] == 0).all()
    call(make_batch(device), scheduler_metadata=kept[:n])


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
    return None
"""
MODULES = {
    "vllm/__init__.py": "",
    "vllm/vllm_flash_attn/flash_attn_interface.py": SOURCE,
    "vllm/vllm_flash_attn/__init__.py": "from vllm.vllm_flash_attn.flash_attn_interface import "
    "flash_attn_varlen_func, get_scheduler_metadata",
    "vllm/v1/__init__.py": "",
    "vllm/v1/attention/__init__.py": "",
    "vllm/v1/attention/backends/__init__.py": "",
    "vllm/v1/attention/backends/fa_utils.py": "from vllm.vllm_flash_attn import flash_attn_varlen_func, "
    "get_scheduler_metadata",
    "vllm/v1/attention/backends/flash_attn.py": "from vllm.v1.attention.backends.fa_utils import "
    "flash_attn_varlen_func, get_scheduler_metadata\n"
    "def forward(**options):\n    return flash_attn_varlen_func(**options)",
}
ENTRY_POINT = "[vllm.general_plugins]\nfa_native = flash_attn.integrations.vllm:register\n"


@pytest.fixture
def vllm_stand_in(tmp_path, monkeypatch):
    """Modules that import from each other as vLLM's do, and a distribution that names the plugin."""
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n", encoding="utf-8")
    info = tmp_path / "my_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINT, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def load_plugins():
    """vllm.plugins.load_general_plugins."""
    from importlib.metadata import entry_points

    for plugin in [p for p in entry_points(group="vllm.general_plugins") if p.name == "fa_native"]:
        plugin.load()()


@pytest.mark.skipif(sys.version_info < (3, 10), reason="entry_points(group=...) needs Python 3.10")
@pytest.mark.parametrize("backend_first", (False, True))
def test_the_plugin(device, vllm_stand_in, backend_first):
    """Before the backend is imported, as vLLM loads plugins, or after it; twice changes nothing."""
    name = "vllm.v1.attention.backends.flash_attn"
    if backend_first:
        importlib.import_module(name)
    load_plugins()
    load_plugins()
    backend = importlib.import_module(name)
    theirs = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    batch = make_batch(device)
    result, _ = call(batch, function=backend.forward)
    assert torch.equal(result, call(batch)[0]) and theirs.calls == []
    assert backend.get_scheduler_metadata(*[1] * 6, cache_seqlens=batch.lengths).numel() == 0
    assert call(batch, function=backend.forward, q_v=batch.q)[0] == "theirs"
    assert len(theirs.calls) == 1 and theirs.calls[0]["q_v"] is batch.q
    assert plain_signature(inspect.unwrap(backend.flash_attn_varlen_func)) == PUBLISHED


def test_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError):
        vllm.register()
