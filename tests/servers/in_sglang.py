"""The adapter inside SGLang 0.5.23 itself, on the CPU: test_server_packages.py runs this file in a separate process.

SGLang takes the machine for one with a Hopper GPU; sgl-kernel, which has no part in these calls, is a stand-in.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from serving_harness import (
    HEAD_DIM,
    HEADS,
    HEADS_K,
    LENGTHS_Q,
    PAGE,
    install_plugin,
    make_8_bit_batch,
    make_batch,
)
from signatures import plain_signature

from flash_attn.integrations import sglang as adapter

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
HOPPER = {
    "is_cuda": True,
    "is_sm90": True,
    "is_sm100": False,
    "is_sm120": False,
    "is_blackwell": False,
    "is_hopper_with_cuda_12_3": True,
    "device_sm": 90,
    "device_capability": (9, 0),
    "has_flashinfer": False,
}


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    """The plugin under its own name, as SGLang loads it, on a Hopper GPU."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import override_platform

    folder = tmp_path_factory.mktemp("plugin")
    install_plugin(folder, "sglang.srt.plugins", "flash_attn.integrations.sglang:register")
    with override_platform(**HOPPER), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        load_plugins()
        yield


def resolved(folder, config, *options):
    """SGLang's server arguments after all of its checks, as `sglang serve` makes them."""
    from sglang.srt.server_args import prepare_server_args

    (folder / "config.json").write_text(json.dumps({**SIZES, **config}), encoding="utf-8")
    arguments = ("--model-path", str(folder), "--device", "cuda", "--mem-fraction-static", "0.5")
    server = prepare_server_args([*arguments, "--skip-tokenizer-init", *options])
    server.resolve_once()
    return server.resolved_dict()


def test_deterministic_inference_keeps_the_radix_cache(plugins, tmp_path):
    options = ("--attention-backend", "fa_native", "--enable-deterministic-inference")
    arguments = resolved(tmp_path, LLAMA, *options)
    assert arguments["attention_backend"] == "fa_native" and not arguments["disable_radix_cache"]


def test_lists_of_backends(plugins):
    """Read as they are now, by what draws up draft workers and decides on chunked prefixes."""
    server = importlib.import_module("sglang.srt.server_args")
    assert all("fa_native" in getattr(server, name) for name in (*adapter._CHOICES, adapter._CHUNKED_PREFIX[0]))


def test_models_that_ask_for_fa3(plugins, tmp_path):
    """gpt-oss has a list of names that nothing extends: there the backend takes the name fa3."""
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    with pytest.raises(AssertionError, match="GptOssForCausalLM requires one of"):
        resolved(tmp_path, GPT_OSS, "--attention-backend", "fa_native")
    assert registry.ATTENTION_BACKENDS["fa3"] is not adapter._create_backend
    assert adapter.replace_fa3() and registry.ATTENTION_BACKENDS["fa3"] is adapter._create_backend
    assert resolved(tmp_path, GPT_OSS)["attention_backend"] == "fa3"  # SGLang's choice on Hopper


def test_signatures(plugins):
    theirs = importlib.import_module("sglang.kernels.ops.attention.flash_attention")
    for name in adapter._FUNCTIONS:
        assert plain_signature(getattr(adapter, name)) == plain_signature(getattr(theirs, name))


# ---- the backend ----


@pytest.fixture
def create(plugins, monkeypatch, tmp_path):
    """create(batch, kv_cache_dtype): SGLang's FlashAttention backend for a model runner over a batch's cache."""
    kernels = {name: types.ModuleType(name) for name in ("sgl_kernel", "sgl_kernel.flash_attn")}
    kernels["sgl_kernel"].merge_state_v2 = None
    for name in (*adapter._FUNCTIONS, "get_scheduler_metadata"):
        setattr(kernels["sgl_kernel.flash_attn"], name, lambda *args, **options: "theirs")
    for name, module in kernels.items():
        monkeypatch.setitem(sys.modules, name, module)
    context = importlib.import_module("sglang.srt.runtime_context")
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    backend = importlib.import_module("sglang.srt.layers.attention.flashattention_backend")
    flat = SimpleNamespace(enable_deterministic_inference=False)
    for name, value in {
        "get_parallel": SimpleNamespace(attn_cp_size=1, attn_tp_size=1, dcp_enabled=False),
        "get_spec": SimpleNamespace(speculative_eagle_topk=None, speculative_num_draft_tokens=None),
        "get_exec": SimpleNamespace(deterministic=flat),
        "get_model": SimpleNamespace(is_embedding=False),
        "get_schedule": SimpleNamespace(chunked_prefill_size=-1),
        "get_memory": SimpleNamespace(disable_radix_cache=False),
    }.items():
        assert hasattr(context, name)
        monkeypatch.setattr(backend, name, lambda value=value: value)
    monkeypatch.setattr(backend, "get_device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(backend, "_should_disable_scheduler_metadata_precompute", lambda: False)

    def create(batch, kv_cache_dtype):
        pool = SimpleNamespace(get_kv_buffer=lambda layer: (batch.k.flatten(0, 1), batch.v.flatten(0, 1)))
        model = SimpleNamespace(
            is_encoder_decoder=False, context_len=128, attention_arch=None, is_local_attention_model=False,
            head_dim=HEAD_DIM, hf_text_config=SimpleNamespace(num_attention_heads=HEADS),
            get_num_kv_heads=lambda tp: HEADS_K,
        )  # fmt: skip
        runner = SimpleNamespace(
            sliding_window_size=None, model_config=model, device="cpu", kv_cache_dtype=batch.k.dtype,
            req_to_token_pool=SimpleNamespace(req_to_token=None), token_to_kv_pool=pool, page_size=PAGE,
            kv_cache_dtype_str=kv_cache_dtype, kv_index_translator=None, is_draft_worker=False,
        )  # fmt: skip
        return registry.ATTENTION_BACKENDS["fa_native"](runner)

    return create


def extend(made, batch, scales=(None, None)):
    """FlashAttentionBackend.forward_extend of the batch over its cache."""
    module = importlib.import_module("sglang.srt.layers.attention.flashattention_backend")
    n = sum(LENGTHS_Q)
    made.forward_metadata = module.FlashAttentionMetadata(
        cache_seqlens_int32=batch.lengths, max_seq_len_q=max(LENGTHS_Q), cu_seqlens_q=batch.cu_q,
        cu_seqlens_k=batch.cu_q, page_table=batch.table,
    )  # fmt: skip
    mode = module.ForwardMode.EXTEND
    forward_batch = SimpleNamespace(forward_mode=mode, batch_size=len(LENGTHS_Q), attn_cp_metadata=None)
    layer = SimpleNamespace(
        layer_id=0, is_cross_attention=False, attn_type=None, sliding_window_size=-1, head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM, tp_q_head_num=HEADS, tp_k_head_num=HEADS_K, tp_v_head_num=HEADS_K,
        scaling=HEAD_DIM**-0.5, logit_cap=0.0, k_scale=scales[0], v_scale=scales[1], qk_head_dim=HEAD_DIM,
    )  # fmt: skip
    out = made.forward_extend(batch.q[:n].flatten(1), None, None, layer, forward_batch, save_kv_cache=False)
    return out.view(n, HEADS, HEAD_DIM)


def test_forward(create):
    batch = make_batch("cpu")
    made = create(batch, "auto")
    exact = batch._replace(q=batch.q.double(), k=batch.k.double(), v=batch.v.double())
    expected, _ = exact.by_sequence(causal=True)
    out = extend(made, batch)
    torch.testing.assert_close(out.double(), expected[: len(out)], atol=1e-5, rtol=1e-5)


def test_forward_over_an_fp8_cache(create):
    """SGLang converts q without a scale."""
    quantized, _, values = make_8_bit_batch("cpu", v_descale=(0.25, 0.25))
    made = create(quantized, "fp8_e4m3")
    expected, _ = values._replace(q=values.q / 0.25).by_sequence(causal=True)
    out = extend(made, quantized, (torch.tensor(0.125), torch.tensor(0.25)))
    torch.testing.assert_close(out.double(), expected[: len(out)], atol=2e-2, rtol=2e-2)
