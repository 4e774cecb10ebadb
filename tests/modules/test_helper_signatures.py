"""Names and signatures of the helpers beside attention: those of flash_attn 2.8.3, which clients call by position."""

import importlib
import inspect

import pytest
from signatures import plain_signature

NORM = "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, rowscale=None, "
SUM = "prenorm=False, residual_in_fp32=False, zero_centered_weight=False"
TARGETS = "return_dropout_mask=False, out_dtype=None, out=None, residual_out=None"
REFERENCE = f"({NORM}prenorm=False, zero_centered_weight=False, dropout_mask=None, dropout_mask1=None, upcast=False)"
FLASH = "causal=False, softmax_scale=None, attention_dropout=0.0"
SIGNATURES = {
    "ops.triton.cross_entropy.cross_entropy_loss": "(logits, labels, precomputed_lse=None, label_smoothing=0.0, "
    "logit_scale=1.0, lse_square_scale=0.0, ignore_index=-100, inplace_backward=False, process_group=None)",
    "losses.cross_entropy.CrossEntropyLoss": "(ignore_index=-100, reduction='mean', label_smoothing=0.0, "
    "logit_scale=1.0, lse_square_scale=0.0, inplace_backward=False, process_group=None, return_z_loss=False)",
    "losses.cross_entropy.CrossEntropyLoss.forward": "(self, input, target, precomputed_lse=None)",
    "ops.triton.layer_norm.layer_norm_fn": f"({NORM}{SUM}, is_rms_norm=False, {TARGETS})",
    "ops.triton.layer_norm.rms_norm_fn": f"({NORM}{SUM}, {TARGETS})",
    "ops.triton.layer_norm.layer_norm_linear_fn": "(x, norm_weight, norm_bias, linear_weight, linear_bias, "
    "residual=None, eps=1e-06, prenorm=False, residual_in_fp32=False, is_rms_norm=False)",
    "ops.triton.layer_norm.layer_norm_ref": REFERENCE,
    "ops.triton.layer_norm.rms_norm_ref": REFERENCE,
    "ops.triton.layer_norm.RMSNorm": "(hidden_size, eps=1e-05, dropout_p=0.0, zero_centered_weight=False, "
    "device=None, dtype=None)",
    "ops.triton.layer_norm.RMSNorm.forward": "(self, x, residual=None, prenorm=False, residual_in_fp32=False)",
    "modules.mha.FlashSelfAttention": f"({FLASH}, window_size=(-1, -1), alibi_slopes=None, deterministic=False)",
    "modules.mha.FlashSelfAttention.forward": "(self, qkv, causal=None, cu_seqlens=None, max_seqlen=None)",
    "modules.mha.FlashCrossAttention": f"({FLASH}, alibi_slopes=None, window_size=(-1, -1), deterministic=False)",
    "modules.mha.FlashCrossAttention.forward": "(self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, "
    "cu_seqlens_k=None, max_seqlen_k=None)",
    "modules.mha.SelfAttention": f"({FLASH})",
    "modules.mha.SelfAttention.forward": "(self, qkv, causal=None, key_padding_mask=None)",
    "modules.mha.CrossAttention": f"({FLASH})",
    "modules.mha.CrossAttention.forward": "(self, q, kv, causal=None, key_padding_mask=None)",
    "modules.mha.MHA": "(embed_dim, num_heads, num_heads_kv=None, cross_attn=False, qkv_proj_bias=True, "
    "out_proj_bias=True, dropout=0.0, softmax_scale=None, causal=False, layer_idx=None, dwconv=False, "
    "rotary_emb_dim=0, rotary_emb_base=10000.0, rotary_emb_scale_base=None, rotary_emb_interleaved=False, "
    "use_alibi=False, window_size=(-1, -1), fused_bias_fc=False, use_flash_attn=False, return_residual=False, "
    "checkpointing=False, device=None, dtype=None)",
    "modules.mha.MHA.forward": "(self, x, x_kv=None, key_padding_mask=None, cu_seqlens=None, max_seqlen=None, "
    "mixer_subset=None, inference_params=None, **kwargs)",
    "modules.mha.MHA.allocate_inference_cache": "(self, batch_size, max_seqlen, dtype=None)",
    "modules.mha.get_alibi_slopes": "(nheads)",
    "utils.generation.InferenceParams.reset": "(self, max_seqlen, max_batch_size)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    modules, _, rest = name.rpartition(".")
    while modules[modules.rfind(".") + 1].isupper():  # a method: the class belongs to the attributes
        modules, _, outer = modules.rpartition(".")
        rest = f"{outer}.{rest}"
    value = importlib.import_module(f"flash_attn.{modules}")
    for attribute in rest.split("."):
        value = getattr(value, attribute)
    assert plain_signature(value) == SIGNATURES[name]


def test_inference_params_fields():
    from flash_attn.utils.generation import InferenceParams

    assert list(inspect.signature(InferenceParams).parameters) == [
        "max_seqlen", "max_batch_size", "seqlen_offset", "batch_size_offset", "key_value_memory_dict",
        "lengths_per_sample",
    ]  # fmt: skip
