"""The adapter inside vLLM 0.33.0 itself, on the CPU: test_server_packages.py runs this file in a separate process.

vLLM takes the machine for one with a Hopper GPU and its compiled extensions for loaded: nothing here calls them.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from serving_harness import (
    HEAD_DIM,
    HEADS,
    HEADS_K,
    LENGTHS_K,
    LENGTHS_Q,
    PAGE,
    install_plugin,
    make_8_bit_batch,
    make_batch,
    make_latent_batch,
)
from signatures import plain_signature

from flash_attn.integrations import vllm as adapter
from flash_attn.ops import latent

PLUGIN = ("vllm.general_plugins", "flash_attn.integrations.vllm:register")
EXTENSIONS = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa3_C")
ENGINE_ARGS = 'from vllm.engine.arg_utils import EngineArgs\nprint(EngineArgs(model="none").kv_cache_dtype)'


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    """vLLM's flash attention backend, with the plugin as vLLM loads it."""
    for name in EXTENSIONS:
        sys.modules[name] = types.ModuleType(name)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(9, 0)

    vllm.platforms._current_platform = Hopper()
    import vllm.plugins

    folder = tmp_path_factory.mktemp("plugin")
    install_plugin(folder, *PLUGIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        vllm.plugins.load_general_plugins()
    return importlib.import_module("vllm.v1.attention.backends.flash_attn")


def test_registration(backend):
    """Modules that were imported before and after call ours, whose signature is that of vLLM."""
    ours = backend.flash_attn_varlen_func
    mla = importlib.import_module("vllm.v1.attention.backends.mla.flashattn_mla")
    interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    assert ours.__wrapped__ is adapter.flash_attn_varlen_func
    assert ours is mla.flash_attn_varlen_func is interface.flash_attn_varlen_func
    (theirs,) = {cell.cell_contents for cell in ours.__closure__ if callable(cell.cell_contents)} - {ours.__wrapped__}
    assert plain_signature(adapter.flash_attn_varlen_func) == plain_signature(theirs)


def make_builder(backend, kv_cache_dtype="auto"):
    """vLLM's metadata builder, for full CUDA graphs."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: HEADS,
            rswa_window=None,
            is_mm_prefix_lm=False,
            hf_config=SimpleNamespace(model_type="llama"),
        ),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1, decode_context_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype=kv_cache_dtype),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True),
            max_cudagraph_capture_size=64,
            static_forward_context={},
        ),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32, flash_attn_version=None),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
    )
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=HEADS_K, head_size=HEAD_DIM, dtype=torch.bfloat16)
    return backend.FlashAttentionMetadataBuilder(spec, [], config, torch.device("cpu"))


def build(builder, batch):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    common = CommonAttentionMetadata(
        query_start_loc=batch.cu_q,
        query_start_loc_cpu=batch.cu_q,
        seq_lens=batch.lengths,
        num_reqs=len(LENGTHS_Q),
        num_actual_tokens=sum(LENGTHS_Q),
        max_query_len=max(LENGTHS_Q),
        max_seq_len=max(LENGTHS_K),
        block_table_tensor=batch.table,
        slot_mapping=torch.zeros(sum(LENGTHS_Q), dtype=torch.int64),
    )
    return builder.build(0, common)


def forward(backend, batch, kv_cache_dtype, descales=(1.0, 1.0, 1.0), **options):
    """FlashAttentionImpl.forward over vLLM's cache (num_blocks, num_kv_heads, block_size, 2 * head_size)."""
    head_dim = batch.q.shape[-1]
    implementation = backend.FlashAttentionImpl(
        HEADS, head_dim, head_dim**-0.5, HEADS_K, alibi_slopes=None, kv_cache_dtype=kv_cache_dtype, **options
    )
    scales = dict(zip(("_q_scale", "_k_scale", "_v_scale"), map(torch.tensor, descales)))
    cache = torch.cat([batch.k, batch.v], -1).transpose(1, 2).contiguous()
    dtype = torch.bfloat16 if batch.q.element_size() == 1 else batch.q.dtype
    out = torch.full_like(batch.q, 7.0, dtype=dtype)
    metadata = build(make_builder(backend, kv_cache_dtype), batch)
    implementation.forward(SimpleNamespace(**scales), batch.q, None, None, cache, metadata, out)
    return out[: sum(LENGTHS_Q)]


def test_builders(backend, monkeypatch):
    """Nothing is scheduled for our kernels; the metadata of an MLA without one comes from vLLM."""
    builder = make_builder(backend)
    assert builder.aot_schedule and builder.use_full_cuda_graph
    assert build(builder, make_batch("cpu")).scheduler_metadata is None
    sizes = (3, 1, 9, 4, 1, 64, torch.ones(3, dtype=torch.int32))
    assert backend.get_scheduler_metadata(*sizes, headdim_v=512) is None
    monkeypatch.setattr(latent, "is_computed", lambda *_: False)
    with pytest.raises(AttributeError, match="_vllm_fa3_C"):
        backend.get_scheduler_metadata(*sizes, headdim_v=512)


@pytest.mark.parametrize("options", ({}, {"sliding_window": 10, "logits_soft_cap": 2.0}, {"sinks": True}))
def test_forward(backend, options):
    batch = make_batch("cpu")
    exact = batch._replace(q=batch.q.double(), k=batch.k.double(), v=batch.v.double())
    sinks = torch.linspace(-1, 2, HEADS) if options.get("sinks") else None
    window = (options["sliding_window"] - 1, 0) if "sliding_window" in options else (-1, -1)
    options = {**{"sliding_window": None}, **options, "sinks": sinks}
    out = forward(backend, batch, "auto", **options)
    softcap = options.get("logits_soft_cap", 0.0)
    expected, _ = exact.by_sequence(sinks, causal=True, window_size=window, softcap=softcap)
    torch.testing.assert_close(out.double(), expected[: len(out)], atol=1e-5, rtol=1e-5)


def test_forward_over_an_fp8_cache(backend):
    quantized, _, values = make_8_bit_batch("cpu", v_descale=(0.25, 0.25))
    out = forward(backend, quantized, "fp8", descales=(0.25, 0.125, 0.25), sliding_window=None)
    expected, _ = values.by_sequence(causal=True)
    torch.testing.assert_close(out.double(), expected[: len(out)], atol=2e-2, rtol=2e-2)


def test_fallback(backend):
    """Context parallelism reaches vLLM's own function, here without its extension."""
    batch = make_batch("cpu")
    with pytest.raises(AttributeError, match="_vllm_fa3_C"):
        backend.flash_attn_varlen_func(
            batch.q, batch.k, batch.v, 20, batch.cu_q, 41, seqused_k=batch.lengths, block_table=batch.table,
            cp_world_size=2, causal=True, fa_version=3, scheduler_metadata=None,
        )  # fmt: skip


def latent_implementation(module, name, **attributes):
    """vLLM's own class with what its forward reads; its constructor wants a model."""
    cls = getattr(importlib.import_module(f"vllm.v1.attention.backends.mla.{module}"), name)
    implementation = object.__new__(cls)
    vars(implementation).update(kv_lora_rank=512, qk_rope_head_dim=64, scale=576**-0.5, kv_cache_dtype="auto")
    vars(implementation).update(need_to_return_lse_for_decode=True, dcp_world_size=1, dcp_rank=0, **attributes)
    return implementation


def latent_cache(batch):
    """The tensor that K and V are views of: (num_blocks, block_size, 576)."""
    return torch.cat([batch.v, batch.k], -1).squeeze(2)


def test_latent_attention(backend):
    """MLA's decoding, by vLLM's backend for it."""
    module = importlib.import_module("vllm.v1.attention.backends.mla.flashattn_mla")
    batch = make_latent_batch("cpu")
    decode = module.FlashAttnMLADecodeMetadata(
        block_table=batch.batch.table,
        seq_lens=batch.batch.lengths,
        dcp_tot_seq_lens=None,
        query_start_loc=batch.batch.cu_q,
        max_query_len=max(LENGTHS_Q),
        max_seq_len=max(LENGTHS_K),
    )
    implementation = latent_implementation("flashattn_mla", "FlashAttnMLAImpl")
    out, lse = implementation.forward_mqa(
        (batch.q_v, batch.q), latent_cache(batch), SimpleNamespace(decode=decode), SimpleNamespace()
    )
    batch.check(out, lse.transpose(0, 1))


def test_sparse_latent_attention(backend):
    """Keys by indices: pages of one row, a sequence for each token; indices end at -1."""
    batch = make_latent_batch("cpu")
    cache, page, count = latent_cache(batch), batch.k.shape[1], 5
    row = int(batch.batch.table[4, 0]) * page
    indices = torch.full((3, 8), -1, dtype=torch.int32)
    indices[:, :count] = torch.stack([row + torch.randperm(page)[:count] for _ in indices])
    valid = torch.tensor([count, 1, 0], dtype=torch.int32)
    implementation = latent_implementation(
        "flashattn_mla_sparse", "FlashAttnMLASparseImpl", cu_seqlens_q_buffer=torch.arange(9, dtype=torch.int32)
    )
    q, q_v = batch.q[:3], batch.q_v[:3]
    out, _ = implementation._forward_mqa_kernel(
        (q_v, q), cache, indices, valid, layer=None, block_size=page, is_decode=True
    )
    for token, used in enumerate(valid.tolist()):
        rows = cache.flatten(0, 1)[indices[token, :used].long()]
        scores = torch.cat([q_v[token], q[token]], -1) @ rows.T * implementation.scale
        torch.testing.assert_close(out[token], scores.softmax(-1) @ rows[:, :512], atol=1e-5, rtol=1e-5)


def test_head_dim_512(backend):
    """Gemma 4's global layers, for which vLLM takes the fourth version of its function on Hopper."""
    supported, version = backend.FlashAttentionBackend.supports_head_size, backend.get_flash_attn_version
    assert supported(512) and version(head_size=512) == 4
    batch = make_batch("cpu", 512, head_dim=512)
    exact = batch._replace(q=batch.q.double(), k=batch.k.double(), v=batch.v.double())
    out = forward(backend, batch, "auto", sliding_window=None)
    expected, _ = exact.by_sequence(causal=True)
    torch.testing.assert_close(out.double(), expected[: len(out)], atol=1e-5, rtol=1e-5)


def test_engine_args_without_cuda(tmp_path):
    install_plugin(tmp_path, *PLUGIN)
    path = os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))
    result = subprocess.run(
        [sys.executable, "-c", ENGINE_ARGS],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0 and result.stdout.splitlines()[-1] == "auto", result.stderr
