"""Bad arguments, in a table: the error names the argument and what was expected, on CPU and GPU alike, and nothing is
written. And the forms of numbers that clients pass, which must go on working."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from flash_attn import (
    KvCachePlan,
    dropout_mask,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    sdpa,
)
from flash_attn.bert_padding import index_first_axis, index_put_first_axis, pad_input
from flash_attn.fp8 import flash_attn_straight_through_func, quantize, quantize_qkv
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_
from flash_attn.modules.mha import CrossAttention, SelfAttention
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import layer_norm_fn, layer_norm_linear_fn
from flash_attn.ops.triton.rotary import apply_rotary

pytestmark = pytest.mark.by_both_paths

BATCH, ROWS, HEADS, HEAD_DIM, CAPACITY = 2, 5, 2, 16, 24
BIG = 2**32 + 3


def randn(device, *shape):
    return torch.randn(*shape, device=device, dtype=torch.float16)


def ints(device, *values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def sdpa_scope(devices):
    with sdpa.use(devices):
        pass


def good_arguments(device):
    """name -> (function, arguments that it accepts)."""
    x, packed = randn(device, BATCH, ROWS, HEADS, HEAD_DIM), randn(device, BATCH * ROWS, HEADS, HEAD_DIM)
    cu = ints(device, 0, 4, 10)
    cos, sin = torch.randn(2, CAPACITY, HEAD_DIM // 2, device=device)
    lengths = ints(device, 3, 4)
    caches = {name: randn(device, BATCH, CAPACITY, HEADS, HEAD_DIM) for name in ("k_cache", "v_cache")}
    qkv = randn(device, BATCH, ROWS, 3, HEADS, HEAD_DIM)
    logits, labels = torch.randn(6, 11, device=device), torch.randint(11, (6,), device=device)
    sizes = {"seqlen_q": ROWS, "nheads": HEADS, "nheads_k": HEADS, "head_dim": HEAD_DIM, "seqlen_cache": CAPACITY}
    mask_sizes = {"batch_size": BATCH, "nheads": HEADS, "seqlen_q": ROWS, "seqlen_k": ROWS}
    rows = ints(device, 1, 3)
    rotary = {"x": x.clone(), "cos": cos, "sin": sin}
    varlen = {"q": packed, "k": packed, "v": packed, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    parts = {"out_partial": randn(device, 3, BATCH, ROWS, HEADS, HEAD_DIM),
             "lse_partial": torch.randn(3, BATCH, ROWS, HEADS, device=device)}  # fmt: skip
    return {
        "dense": (flash_attn_func, {"q": x, "k": x, "v": x}),
        "qkv": (flash_attn_qkvpacked_func, {"qkv": qkv}),
        "kv": (flash_attn_kvpacked_func, {"q": x, "kv": qkv[:, :, 1:]}),
        "varlen": (flash_attn_varlen_func, {**varlen, "max_seqlen_q": 6, "max_seqlen_k": 6}),
        "cache": (flash_attn_with_kvcache, {"q": x, **caches, "k": x, "v": x, "cache_seqlens": lengths}),
        "varlen qkv": (
            flash_attn_varlen_qkvpacked_func,
            {"qkv": qkv.flatten(0, 1), "cu_seqlens": cu, "max_seqlen": 6},
        ),
        "fp8": (flash_attn_func, dict.fromkeys("qkv", x.to(torch.float8_e4m3fn))),
        "mask": (dropout_mask, {"rng_state": ints(device, 0, 0, dtype=torch.int64), "dropout_p": 0.5, **mask_sizes}),
        "quantize": (quantize, {"x": x}),
        "quantize qkv": (quantize_qkv, dict.fromkeys("qkv", x)),
        "sdpa": (sdpa_scope, {"devices": device}),
        "rows": (index_first_axis, {"input": packed, "indices": rows}),
        "put rows": (index_put_first_axis, {"values": packed[:2], "indices": rows, "first_axis_dim": 10}),
        "pad": (pad_input, {"hidden_states": packed[:2], "indices": rows, "batch": BATCH, "seqlen": ROWS}),
        "combine": (flash_attn_combine, parts),
        "plan": (KvCachePlan, {"cache_seqlens": lengths, **sizes}),
        "rotary": (apply_rotary_emb, rotary),
        "raw rotary": (apply_rotary, rotary),
        "rotary qkv": (apply_rotary_emb_qkv_, {"qkv": qkv, "cos": cos, "sin": sin}),
        "rotary kv": (apply_rotary_emb_kv_, {"kv": qkv[:, :, 1:], "cos": cos, "sin": sin}),
        "rotary module": (RotaryEmbedding(HEAD_DIM, device=device), {"qkv": qkv}),
        "norm": (layer_norm_fn, {"x": x, "weight": torch.ones(HEAD_DIM, device=device), "bias": None}),
        "norm linear": (
            layer_norm_linear_fn,
            {
                "x": x,
                "norm_weight": torch.ones(HEAD_DIM, device=device),
                "norm_bias": None,
                "linear_weight": randn(device, 8, HEAD_DIM),
                "linear_bias": None,
            },
        ),
        "loss": (cross_entropy_loss, {"logits": logits, "labels": labels}),
        "straight through": (flash_attn_straight_through_func, dict.fromkeys("qkv", x)),
        "self": (SelfAttention(), {"qkv": qkv}),
        "cross": (CrossAttention(), {"q": x, "kv": qkv[:, :, 1:]}),
    }


# ---- bad values, made from the device and the good value (None if the argument is optional) ----


def const(*values):
    """Values that depend on neither."""
    return [lambda device, good, value=value: value for value in values]


def tensors(*values, **options):
    """Tensors of these values on the device."""
    return [lambda device, good, value=value: torch.tensor(value, device=device, **options) for value in values]


def sparse(device, good):
    return good.to_sparse()


def nested(device, good):
    return torch.nested.nested_tensor(list(good.unbind(0)))


def jagged(device, good):
    return torch.nested.nested_tensor(list(good.unbind(0)), layout=torch.jagged)


def meta(device, good):
    return good.to("meta")


def without_head_dim(device, good):
    return good[..., :0]


def integral(device, good):
    return good.int()


def floating(device, good):
    return good.float()


def eight_bit_float(device, good):
    return good.float().to(torch.float8_e5m2)


def eight_bit_int(device, good):
    return good.to(torch.int8)


def first_of_batch(device, good):
    return good[:1]


def first_number(device, good):
    return good.flatten()[0]


def one_more(device, good):
    return torch.ones(HEADS + 1, device=device)


def window_on_meta(device, good):
    return torch.empty(2, dtype=torch.int64, device="meta")


def short(device, good):
    return good.short()


def trainable(device, good):
    return good.clone().requires_grad_()


NO_TENSORS = const([1.0], np.zeros(3), 3, True)
NO_NUMBERS = [*const("x", [0.1], 1j, 10**400), *tensors([0.5, 0.5])]
NO_FLAGS = [*const("no", 2, 0.5, [1], np.ones(2)), *tensors([1, 1])]
NO_INTS = const(2.5, 2.0, "x", [6])
NONE = const(None)
LEARNED_NUMBER = tensors(0.5, requires_grad=True)
LEARNED_SLOPES = tensors([1.0] * HEADS, requires_grad=True)

NOT_A_TENSOR = "expected a Tensor, got (NoneType|list|ndarray|int|bool)$"
NOT_DENSE = "expected a strided Tensor, got a (sparse_coo|nested) one$"
NOT_A_NUMBER = "expected a number, got "
NOT_A_FLAG = "expected a bool, got "
NOT_AN_INT = "expected an int, got "
NOT_INTEGRAL = "expected an int or an integer tensor, got "
NOT_CONSTANT = "expected a value that requires no gradient, for it gets none"
ON_META = "expected (a tensor on .*|a (CPU|CUDA) tensor), got one on meta$"
NOT_FLOATING = (
    "expected a floating point tensor of at least 16 bits, got a tensor of dtype (int32|float8_e5m2) and shape "
)
NOT_WIDE = "expected a floating point dtype of at least 16 bits, got "
NOT_A_PROBABILITY = r"expected a value in \[0, 1\), got "

ATTENTION = "dense, qkv, kv, varlen"
PROBABILITIES = const(1.0, -0.5, float("nan"))
SIZES = "seqlen_q nheads nheads_k head_dim seqlen_cache seqlen_new"

# functions | arguments | bad values | error | message after the name of the argument
TABLE = (
    ("dense", "q k v", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("dense", "alibi_slopes sinks", NO_TENSORS, TypeError, NOT_A_TENSOR),
    ("qkv", "qkv", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("kv", "q kv", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("varlen", "q k v cu_seqlens_q cu_seqlens_k", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("varlen", "alibi_slopes seqused_k leftpad_k block_table", NO_TENSORS, TypeError, NOT_A_TENSOR),
    ("cache", "q k_cache v_cache", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("cache", "k v alibi_slopes sinks cache_batch_idx cache_leftpad block_table", NO_TENSORS, TypeError, NOT_A_TENSOR),
    ("cache", "rotary_cos rotary_sin out", NO_TENSORS, TypeError, NOT_A_TENSOR),
    ("cache", "plan", const([1], 3, True, "x"), TypeError, "expected a KvCachePlan, got (list|int|bool|str)$"),
    ("combine", "out_partial lse_partial", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("combine", "out", NO_TENSORS, TypeError, NOT_A_TENSOR),
    ("plan", "cache_seqlens", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("plan", "cache_leftpad", NO_TENSORS, TypeError, NOT_A_TENSOR),
    ("rotary, raw rotary", "x cos sin", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("rotary, raw rotary", "cu_seqlens", NO_TENSORS, TypeError, NOT_A_TENSOR),
    ("rotary qkv", "qkv cos sin", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("rotary qkv", "cos_k sin_k", NO_TENSORS, TypeError, NOT_A_TENSOR),
    ("rotary kv", "kv cos sin", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("rotary module", "qkv", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("norm", "x", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("norm", "weight bias residual x1 rowscale out residual_out", NO_TENSORS, TypeError, NOT_A_TENSOR),
    ("loss", "logits labels", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("loss", "precomputed_lse", NO_TENSORS, TypeError, NOT_A_TENSOR),
    # layouts, devices, dtypes
    ("dense", "q k v", [sparse, nested, jagged], TypeError, NOT_DENSE),
    ("cache", "q k_cache v_cache k v", [sparse, nested, jagged], TypeError, NOT_DENSE),
    ("varlen", "q k v cu_seqlens_q cu_seqlens_k", [sparse], TypeError, NOT_DENSE),
    ("rotary, raw rotary", "x cos sin", [sparse], TypeError, NOT_DENSE),
    ("norm", "x weight", [sparse], TypeError, NOT_DENSE),
    ("loss", "logits labels", [sparse], TypeError, NOT_DENSE),
    ("dense", "q k v", [meta], RuntimeError, ON_META),
    ("varlen", "cu_seqlens_q cu_seqlens_k", [meta], RuntimeError, ON_META),
    ("cache", "q k_cache v_cache k v cache_seqlens", [meta], RuntimeError, ON_META),
    ("combine", "out_partial lse_partial", [meta], RuntimeError, ON_META),
    ("plan", "cache_seqlens", [meta], RuntimeError, ON_META),
    ("rotary, raw rotary", "cos sin", [meta], RuntimeError, ON_META),
    ("dense, varlen, cache", "q", [integral], RuntimeError, "expected dtype .*, got int32$"),
    ("cache", "cache_seqlens", [floating, short], RuntimeError, "expected dtype int32, got (float32|int16)$"),
    ("varlen", "cu_seqlens_k", [floating, short], RuntimeError, "expected dtype int32, got (float32|int16)$"),
    ("rotary, raw rotary", "x cos sin", [integral, eight_bit_float], RuntimeError, NOT_FLOATING),
    ("rotary qkv", "qkv", [integral, eight_bit_float], RuntimeError, NOT_FLOATING),
    ("rotary kv", "kv", [integral, eight_bit_float], RuntimeError, NOT_FLOATING),
    ("norm", "x", [integral, eight_bit_float], RuntimeError, NOT_FLOATING),
    ("loss", "logits", [integral, eight_bit_float], RuntimeError, NOT_FLOATING),
    ("quantize", "x", [integral, eight_bit_int, eight_bit_float], RuntimeError, NOT_WIDE),
    ("quantize qkv", "q k v", [integral, eight_bit_int, eight_bit_float], RuntimeError, NOT_WIDE),
    ("quantize qkv", "k v", [first_of_batch], RuntimeError, r"expected shape \[2, 5, 2, 16\], got \[1, 5, 2, 16\]$"),
    ("quantize qkv", "k v", [meta], RuntimeError, "expected a tensor on q's device .*, got one on meta$"),
    # the public function's name where the backends have another
    ("qkv, varlen qkv", "qkv", [integral], RuntimeError, "expected dtype .*, got int32$"),
    ("qkv, varlen qkv", "qkv", [meta], RuntimeError, "expected a tensor on cuda or cpu, got one on meta$"),
    ("varlen qkv", "cu_seqlens", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("varlen qkv", "cu_seqlens", [meta], RuntimeError, ON_META),
    ("varlen qkv", "max_seqlen", [*NONE, *NO_INTS], TypeError, NOT_INTEGRAL),
    ("kv", "kv", [integral], RuntimeError, r"its k\): expected the dtype of q \(float16\), got int32$"),
    ("dense, kv, varlen, cache", "s_aux learnable_sink", [one_more], RuntimeError, r"expected shape \[2\], got \[3\]$"),
    ("combine, norm", "out_dtype", const("x", float, 3), TypeError, "expected a torch.dtype or None, got "),
    ("dense, varlen, cache", "q", [without_head_dim], RuntimeError, "expected a head dim of at least 1, got 0$"),
    ("qkv", "qkv", [without_head_dim], RuntimeError, "expected a head dim of at least 1, got 0$"),
    # numbers
    (f"{ATTENTION}, mask", "dropout_p", PROBABILITIES, RuntimeError, NOT_A_PROBABILITY),
    ("mask", "dropout_p", [*NONE, *NO_NUMBERS], TypeError, NOT_A_NUMBER),
    ("fp8", "q_descale k_descale v_descale", const(1e39, -1e39), RuntimeError, "expected a number of at most 3.4"),
    ("dense, fp8, cache", "v_descale_axis", const("channel"), RuntimeError, "expected None without v_descale, got 'ch"),
    ("dense, fp8", "v_descale_axis", const("row", 3, np.ones(2)), RuntimeError, "expected None or 'channel'"),
    ("cache", "v_descale_axis", const("col", 3, np.ones(2)), RuntimeError, "expected None, 'channel', 'page' or 'row'"),
    (ATTENTION, "dropout_p softcap", [*NONE, *NO_NUMBERS], TypeError, NOT_A_NUMBER),
    (f"{ATTENTION}, cache", "softmax_scale", NO_NUMBERS, TypeError, NOT_A_NUMBER),
    ("cache", "softcap", [*NONE, *NO_NUMBERS], TypeError, NOT_A_NUMBER),
    ("norm", "eps dropout_p", [*NONE, *NO_NUMBERS], TypeError, NOT_A_NUMBER),
    ("loss", "label_smoothing logit_scale lse_square_scale", [*NONE, *NO_NUMBERS], TypeError, NOT_A_NUMBER),
    (ATTENTION, "softmax_scale dropout_p softcap", LEARNED_NUMBER, RuntimeError, NOT_CONSTANT),
    ("cache", "softmax_scale softcap", LEARNED_NUMBER, RuntimeError, NOT_CONSTANT),
    ("loss", "logit_scale", LEARNED_NUMBER, RuntimeError, NOT_CONSTANT),
    (f"{ATTENTION}, cache", "alibi_slopes", LEARNED_SLOPES, RuntimeError, NOT_CONSTANT),
    ("cache", "rotary_cos rotary_sin", LEARNED_SLOPES, RuntimeError, NOT_CONSTANT),
    ("rotary, rotary qkv, rotary kv", "cos sin", [trainable], RuntimeError, NOT_CONSTANT),
    # flags
    (ATTENTION, "return_attn_probs return_max_logit", NO_FLAGS, TypeError, NOT_A_FLAG),
    ("cache", "return_softmax_lse", NO_FLAGS, TypeError, NOT_A_FLAG),
    ("norm", "prenorm residual_in_fp32 return_dropout_mask", NO_FLAGS, TypeError, NOT_A_FLAG),
    (ATTENTION, "causal deterministic", NO_FLAGS, TypeError, NOT_A_FLAG),
    ("cache", "causal rotary_interleaved batch_invariant", NO_FLAGS, TypeError, NOT_A_FLAG),
    ("plan", "causal batch_invariant", NO_FLAGS, TypeError, NOT_A_FLAG),
    ("rotary, raw rotary", "interleaved inplace", NO_FLAGS, TypeError, NOT_A_FLAG),
    ("norm", "is_rms_norm zero_centered_weight", NO_FLAGS, TypeError, NOT_A_FLAG),
    ("loss", "inplace_backward", NO_FLAGS, TypeError, NOT_A_FLAG),
    # ints
    (f"{ATTENTION}, cache, plan", "window_size",
     [*const(None, 4, (1, 2, 3), (1,), "ab", {1: 2, 3: 4}), *tensors(3), window_on_meta],
     TypeError, r"expected a pair \(left, right\), got "),
    (f"{ATTENTION}, cache, plan", "window_size",
     [*const((None, 0), (2.5, 0), (-1.0, -1), (0, "x"), [0, None], np.ones(2), (2**70, 0)), *tensors([1.0, 2.0])],
     TypeError, r"expected a pair of ints \(left, right\), -1 for unbounded, got "),
    ("varlen", "max_seqlen_q max_seqlen_k", [*NONE, *NO_INTS, *tensors(6.0)], TypeError, NOT_INTEGRAL),
    ("varlen", "max_seqlen_q max_seqlen_k", tensors([6, 6], []), TypeError,
     "expected an int or a tensor of one element, got a tensor of dtype "),
    ("varlen", "max_seqlen_q max_seqlen_k", const(-1), RuntimeError, "expected a value >= 0, got -1$"),
    ("cache", "cache_seqlens", NO_INTS, TypeError, NOT_INTEGRAL),
    ("cache, plan", "num_splits", [*NONE, *NO_INTS], TypeError, NOT_AN_INT),
    ("cache, plan", "num_splits", const(-1), RuntimeError, "expected a value >= 0, got -1$"),
    ("cache, plan", "num_splits", const(2**63), RuntimeError, "expected an int of at most 64 bits, got "),
    ("plan", SIZES, [*NONE, *NO_INTS], TypeError, NOT_AN_INT),
    ("plan", SIZES, const(-1), RuntimeError, r"expected a value >= \d, got -1$"),
    ("plan", "head_dim", const(0), RuntimeError, "expected a value >= 1, got 0$"),
    ("plan", "head_dim", const(520), RuntimeError, "expected a head dim of at most (256|512), got 520"),
    ("plan", "nheads", const(3), RuntimeError, r"expected a multiple of nheads_k \(2\), got 3$"),
    ("rotary, raw rotary", "seqlen_offsets", [*NONE, *NO_INTS, *tensors([1.0, 2.0])], TypeError, NOT_INTEGRAL),
    ("rotary qkv, rotary kv", "seqlen_offsets", [*NONE, *NO_INTS], TypeError, NOT_INTEGRAL),
    ("rotary qkv", "num_heads_q", NO_INTS, TypeError, NOT_AN_INT),
    ("rotary module", "seqlen_offset", [*NONE, *NO_INTS], TypeError, NOT_INTEGRAL),
    ("rotary module", "max_seqlen", NO_INTS, TypeError, NOT_AN_INT),
    ("loss", "ignore_index", [*NONE, *NO_INTS], TypeError, NOT_AN_INT),
    ("mask", "batch_size nheads seqlen_q seqlen_k", [*NONE, *NO_INTS], TypeError, NOT_AN_INT),
    ("mask", "batch_size nheads seqlen_q seqlen_k", const(-1), RuntimeError, "expected a value >= 0, got -1$"),
    ("mask", "rng_state", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("mask", "rng_state", [meta], RuntimeError, "expected a tensor with values, got one on meta$"),
    ("mask", "device", const("x", 2.5, [1]), TypeError, "expected a device or its name, got "),
    # others
    ("sdpa", "devices", const(None, 3, [3], torch.device("cpu")), TypeError, "expected 'cuda', 'cpu' or several"),
    ("sdpa", "devices", const("tpu", ("cuda:0",)), RuntimeError, "expected 'cuda', 'cpu' or several of them, got '"),
    ("rows", "input indices", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("put rows", "values indices", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("pad", "hidden_states indices", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("rows, put rows, pad", "indices", [floating], RuntimeError, r"expected int32 or int64 of shape \(m,\), got "),
    ("put rows, pad", "indices", [first_of_batch], RuntimeError, "expected one for each row of values, "),
    ("pad", "batch seqlen", [*NONE, *NO_INTS], TypeError, NOT_AN_INT),
    ("norm linear", "linear_weight", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("norm linear", "norm_weight norm_bias linear_bias", NO_TENSORS, TypeError, NOT_A_TENSOR),
    ("norm linear", "norm_weight linear_weight linear_bias", [one_more], RuntimeError, "expected shape "),
    ("straight through", "return_attn_probs", NO_FLAGS, TypeError, NOT_A_FLAG),
    ("rotary module", "qkv", [first_number], RuntimeError, r"expected 4 or 5 dimensions \(batch, seqlen, "),
    ("self", "qkv", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("cross", "q kv", [*NONE, *NO_TENSORS], TypeError, NOT_A_TENSOR),
    ("self", "qkv", [first_number], RuntimeError, r"expected shape \(batch, seqlen, 3, nheads, head_dim\), got \[\]$"),
    ("cross", "q kv", [first_number], RuntimeError, r"expected shape \(.*\), got \[\]$"),
    ("self, cross", "key_padding_mask", NO_TENSORS, TypeError, NOT_A_TENSOR),
    ("self, cross", "key_padding_mask", [one_more], RuntimeError, r"expected bool of shape \[2, 5\], got "),
    ("pad", "batch seqlen", const(-1), RuntimeError, "expected a value >= 0, got -1$"),
)  # fmt: skip

CALLS = [
    pytest.param(function, name, *rest, id=f"{function}-{name}-{index}")
    for index, (functions, names, *rest) in enumerate(TABLE)
    for function in functions.split(", ")
    for name in names.split()
]


@pytest.mark.parametrize("function,name,makers,error,message", CALLS)
def test_bad_argument_is_named(device, function, name, makers, error, message):
    call, good = good_arguments(device)[function]
    held = [x for x in good.values() if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in held]
    for make in makers:
        with pytest.raises(error) as caught:
            call(**{**good, name: make(device, good.get(name))})
        assert re.match(rf"{name}(: | \(){message}", str(caught.value).splitlines()[0]), str(caught.value)
    assert all(torch.equal(of_bytes(x), of_bytes(y)) for x, y in zip(held, before))


def of_bytes(x):
    """x, or its bytes if it is e4m3, which torch 2.4 does not compare."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def test_meta_tensors_alone(device):
    """There is no backend for them."""
    x = torch.empty(BATCH, ROWS, 3, HEADS, HEAD_DIM, device="meta")
    for dtype in (torch.float16, torch.float32):
        for name, call in (("qkv", flash_attn_qkvpacked_func), ("q", lambda x: flash_attn_func(*x.unbind(2)))):
            with pytest.raises(RuntimeError, match=f"^{name}: expected a tensor on cuda or cpu, got one on meta$"):
                call(x.to(dtype))


def test_windows_without_end_are_equal_for_a_plan(device):
    """2^31 - 1 and more is unbounded to the kernels."""
    call, good = good_arguments(device)["cache"]
    sizes = {"nheads": HEADS, "nheads_k": HEADS, "head_dim": HEAD_DIM, "seqlen_cache": CAPACITY, "seqlen_new": ROWS}
    plan = KvCachePlan(good["cache_seqlens"], ROWS, **sizes)
    expected = call(**good)
    for window in ((2**31 - 1, 2**31 - 1), (-1, 2**40), (-7, -1)):
        assert torch.equal(call(**good, plan=plan, window_size=window), expected)
    with pytest.raises(RuntimeError, match=r"^plan: expected one made for the window \(9, -1\), got one for "):
        call(**good, plan=plan, window_size=(9, -1))


INDICES = {
    "varlen": "cu_seqlens_q cu_seqlens_k seqused_k leftpad_k block_table",
    "cache": "cache_seqlens cache_batch_idx cache_leftpad block_table",
    "plan": "cache_seqlens cache_leftpad",
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("function,name", [(f, name) for f, names in INDICES.items() for name in names.split()])
def test_values_beyond_32_bits(device, function, name):
    """They were served as their lower 32 bits."""
    call, arguments = good_arguments(device)[function]
    if name == "block_table":
        pages = randn(device, 4, 8, HEADS, HEAD_DIM)
        arguments.update(dict.fromkeys(("k", "v") if function == "varlen" else ("k_cache", "v_cache"), pages))
    good = ints(device, [0], [1]) if name == "block_table" else arguments.get(name, ints(device, 0, 1))
    for value in (BIG, -BIG):
        wrong = good.long()
        wrong.view(-1)[-1] = value
        with pytest.raises(RuntimeError, match=f"^{name}: expected values of at most 32 bits, got {value}$"):
            call(**{**arguments, name: wrong})


@pytest.mark.devices("cuda")
def test_values_beyond_32_bits_on_the_device(device):
    """They count as the largest int32: an inactive request, cu_seqlens that end with the rows there are."""
    call, arguments = good_arguments(device)["cache"]
    arguments["cache_seqlens"] = ints(device, 3, BIG, dtype=torch.int64)
    before = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    out, lse = call(**arguments, return_softmax_lse=True)
    assert not out[1].any() and (lse[1] == float("inf")).all() and lse[0].isfinite().all()
    for name, cache in before.items():
        assert torch.equal(cache[1], arguments[name][1]) and not torch.equal(cache[0], arguments[name][0])
    call, arguments = good_arguments(device)["varlen"]
    expected = call(**arguments)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        arguments[name] = ints(device, 0, 4, BIG, dtype=torch.int64)
    assert torch.equal(call(**arguments), expected)


ONE = torch.tensor(1)
PAIR = torch.tensor([2, 1])
NUMBER_FORMS = (
    (f"{ATTENTION}, cache", "softmax_scale", (1.0, 1, True, np.float32(1), np.int64(1), ONE, ONE.float()[None])),
    (f"{ATTENTION}, cache", "softcap", (1.0, 1, np.float64(1), ONE)),
    (f"{ATTENTION}, cache", "causal", (True, 1, np.bool_(True), ONE, ONE.bool())),
    (f"{ATTENTION}, cache", "causal", (False, 0, None, np.bool_(False))),
    (f"{ATTENTION}, cache", "window_size", ((2, 1), [2, 1], PAIR, PAIR.int(), PAIR.numpy(), (np.int32(2), ONE))),
    ("varlen", "max_seqlen_q", (6, np.int64(6), torch.tensor(6), torch.tensor([6]), 2**31, True)),
    ("cache", "num_splits", (1, True, np.int32(1), ONE)),
    ("cache", "cache_seqlens", (3, np.int64(3), torch.tensor([3, 3]))),
    ("rotary, raw rotary", "seqlen_offsets", (1, True, np.int64(1), torch.tensor([1, 1]))),
)


@pytest.mark.parametrize("functions,name,forms", NUMBER_FORMS)
def test_numbers_in_the_forms_that_clients_use(device, functions, name, forms):
    for function in functions.split(", "):
        call, good = good_arguments(device)[function]
        results = []
        for form in forms:
            form = form.to(device) if isinstance(form, torch.Tensor) else form
            arguments = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in good.items()}
            results.append(call(**{**arguments, name: form}))
        assert all(torch.equal(result, results[0]) for result in results[1:])


def test_constants_may_require_a_gradient_where_none_is_recorded(device):
    call, arguments = good_arguments(device)["dense"]
    slopes = torch.ones(HEADS, device=device, requires_grad=True)
    with torch.no_grad():
        expected = call(**arguments, alibi_slopes=slopes.detach(), softmax_scale=0.5)
        assert torch.equal(call(**arguments, alibi_slopes=slopes, softmax_scale=slopes[0] / 2), expected)
