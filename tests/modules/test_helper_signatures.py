"""Names and signatures of the helpers around attention: those of flash_attn 2.8.3, which clients call by position."""

import importlib
import inspect

import pytest
from signatures import plain_signature

NORM = "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, rowscale=None, "
SUM = "prenorm=False, residual_in_fp32=False, zero_centered_weight=False"
TARGETS = "return_dropout_mask=False, out_dtype=None, out=None, residual_out=None"
REFERENCE = f"({NORM}prenorm=False, zero_centered_weight=False, dropout_mask=None, dropout_mask1=None, upcast=False)"
FLASH = "causal=False, softmax_scale=None, attention_dropout=0.0"
ADD_NORM = "(x0, residual, weight, bias, dropout_p, epsilon, rowscale=None, layerscale=None, prenorm=False, "
ADD_TWO_NORMS = (
    "(x0, x1, residual, weight0, bias0, weight1, bias1, dropout_p, epsilon, prenorm=False, residual_in_fp32=False, "
    "return_dropout_mask=False)"
)
ADD_NORM_MODULE = "(hidden_size, prenorm=False, p=0.0, eps=1e-05, residual_in_fp32=False, device=None, dtype=None)"
BLOCK_CLASSES = (
    "norm_cls=<class 'torch.nn.modules.normalization.LayerNorm'>, "
    "dropout_cls=<class 'torch.nn.modules.dropout.Dropout'>, "
)
FACTORY = "device=None, dtype=None)"
TIMED = "repeats=10, desc='', verbose=True, amp=False, amp_dtype=torch.float16, **kwinputs)"
SIGNATURES = {
    "ops.rms_norm.rms_norm": "(x, weight, epsilon)",
    "ops.rms_norm.RMSNorm": f"(hidden_size, eps=1e-05, {FACTORY}",
    "ops.rms_norm.dropout_add_rms_norm": f"{ADD_NORM}residual_in_fp32=False, return_dropout_mask=False)",
    "ops.rms_norm.dropout_add_rms_norm_parallel_residual": ADD_TWO_NORMS,
    "ops.rms_norm.DropoutAddRMSNorm": ADD_NORM_MODULE,
    "ops.rms_norm.DropoutAddRMSNorm.forward": "(self, x0, residual=None)",
    "ops.layer_norm.layer_norm": "(x, weight, bias, epsilon)",
    "ops.layer_norm.dropout_add_layer_norm": f"{ADD_NORM}residual_in_fp32=False, return_dropout_mask=False)",
    "ops.layer_norm.dropout_add_layer_norm_parallel_residual": ADD_TWO_NORMS,
    "ops.layer_norm.DropoutAddLayerNorm": ADD_NORM_MODULE,
    "ops.activations.bias_gelu": "(y, bias)",
    "ops.activations.swiglu_bwd": "(x, y, g)",
    "ops.fused_dense.fused_dense_func": "(x, weight, bias=None, return_residual=False, process_group=None, "
    "sequence_parallel=True)",
    "ops.fused_dense.FusedDense": f"(in_features, out_features, bias=True, return_residual=False, {FACTORY}",
    "ops.fused_dense.fused_mlp_func": "(x, weight1, weight2, bias1=None, bias2=None, activation='gelu_approx', "
    "save_pre_act=True, return_residual=False, checkpoint_lvl=0, heuristic=0, process_group=None, "
    "sequence_parallel=True)",
    "ops.fused_dense.FusedMLP": "(in_features, hidden_features=None, out_features=None, bias1=True, bias2=True, "
    f"activation='gelu_approx', return_residual=False, checkpoint_lvl=0, heuristic='auto', {FACTORY}",
    "modules.block.Block": f"(dim, mixer_cls=None, mlp_cls=None, {BLOCK_CLASSES}"
    "prenorm=True, resid_dropout1=0.0, resid_dropout2=0.0, drop_path1=0.0, drop_path2=0.0, "
    "fused_dropout_add_ln=False, return_residual=False, residual_in_fp32=False, sequence_parallel=False, "
    "mark_shared_params=False)",
    "modules.block.Block.forward": "(self, hidden_states, residual=None, mixer_subset=None, mixer_kwargs=None)",
    "modules.block.ParallelBlock": f"(dim, mixer_cls=None, mlp_cls=None, {BLOCK_CLASSES}"
    "resid_dropout1=0.0, resid_dropout2=0.0, tied_norm=False, fused_dropout_add_ln=False, residual_in_fp32=False, "
    "sequence_parallel=False, mark_shared_params=False)",
    "modules.block.ParallelBlock.forward": "(self, hidden_states1, hidden_states2=None, residual=None, "
    "mixer_kwargs=None)",
    "modules.embedding.GPT2Embeddings": "(embed_dim, vocab_size, max_position_embeddings, padding_idx=None, "
    f"word_embed_proj_dim=None, {FACTORY}",
    "modules.embedding.BertEmbeddings": "(embed_dim, vocab_size, max_position_embeddings, type_vocab_size, "
    f"padding_idx=None, {FACTORY}",
    "modules.embedding.BertEmbeddings.forward": "(self, input_ids, position_ids=None, token_type_ids=None)",
    "utils.benchmark.benchmark_forward": f"(fn, *inputs, {TIMED}",
    "utils.benchmark.benchmark_backward": f"(fn, *inputs, grad=None, {TIMED}",
    "utils.distributed.all_gather_raw": "(input_, process_group, async_op=False)",
    "utils.distributed.get_dim_for_local_rank": "(dim, world_size, local_rank, multiple_of=1)",
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
    "modules.mha.FlashSelfAttention.forward": "(self, qkv, causal=None, cu_seqlens=None, max_seqlen=None, *, "
    "mask=None, attn_bias=None, rel_bias=None)",
    "modules.mha.FlashCrossAttention": f"({FLASH}, alibi_slopes=None, window_size=(-1, -1), deterministic=False)",
    "modules.mha.FlashCrossAttention.forward": "(self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, "
    "cu_seqlens_k=None, max_seqlen_k=None, *, mask=None, attn_bias=None, rel_bias=None)",
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
