"""FlashAttention-3's module (the distribution in flash_attn_3/): names, schemas, functions, conventions.

Signatures and schemas are those of FlashAttention-3's hopper/flash_attn_interface.py and flash_api_stable.cpp.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from cases import Case
from flash_attn_3_harness import CASES, DENSE, OPS, as_flash_attn, check_forward_and_gradients, fa3, run, with_leaves
from harness import make_problem
from signatures import plain_signature

import flash_attn
import flash_attn_3
import flash_attn_config
from flash_attn_3 import flash_attn_interface as inner

DESCALES = "q_descale=None, k_descale=None, v_descale=None"
SCORE = "window_size=(-1, -1), attention_chunk=0, softcap=0.0"
TUNING = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
SINKS = "*, sinks=None, s_aux=None, learnable_sink=None"
SIGNATURES = {
    "flash_attn_func": f"(q, k, v, softmax_scale=None, causal=False, qv=None, {DESCALES}, {SCORE}, {TUNING}, {SINKS}, "
    "out=None)",
    "flash_attn_qkvpacked_func": f"(qkv, softmax_scale=None, causal=False, {DESCALES}, {SCORE}, deterministic=False, "
    f"num_heads_q=None, sm_margin=0, return_attn_probs=False, {SINKS})",
    "flash_attn_varlen_func": "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
    f"seqused_k=None, softmax_scale=None, causal=False, qv=None, {DESCALES}, {SCORE}, {TUNING}, {SINKS}, out=None)",
    "flash_attn_with_kvcache": "(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    f"cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {DESCALES}, softmax_scale=None, causal=False, "
    f"{SCORE}, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
    f"return_softmax_lse=False, {SINKS}, out=None)",
    "flash_attn_combine": "(out_partial, lse_partial, out=None, out_dtype=None)",
    "get_scheduler_metadata": "(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
    "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
    "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0)",
}
FORWARD = (
    "q k v k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q "
    "max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale "
    "softmax_scale causal window_size_left window_size_right attention_chunk softcap rotary_interleaved "
    "scheduler_metadata num_splits pack_gqa sm_margin"
).split()
BACKWARD = (
    "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q max_seqlen_k dq dk dv "
    "softmax_scale is_causal window_size_left window_size_right softcap deterministic sm_margin"
).split()


# ---- names, signatures, schemas ----


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert plain_signature(getattr(fa3, name)) == SIGNATURES[name]
    assert getattr(inner, name) is getattr(fa3, name)


def test_private_names_and_modules():
    assert flash_attn_3.__version__ == "3.0.0"
    for name, parameters in (("_flash_attn_forward", FORWARD), ("_flash_attn_backward", BACKWARD)):
        operator = getattr(inner, name)
        assert operator is getattr(fa3, name)
        assert list(inspect.signature(operator._init_fn).parameters) == parameters
        assert hasattr(OPS, name)
    assert (len(FORWARD), len(BACKWARD)) == (34, 22)
    assert fa3.flash_attn_3_gpu is OPS
    flags = flash_attn_config.CONFIG["build_flags"]
    assert "FLASHATTENTION_DISABLE_FP8" in flags and not any(flags.values())


def optional(kind, *names):
    return [f"{kind}? {name}=None" for name in names]


WINDOW = ["bool is_causal=False", "int window_size_left=-1", "int window_size_right=-1"]
SCHEMAS = {
    "fwd": (
        ["Tensor q", "Tensor k", "Tensor v", "Tensor(k_new!)? k_new=None", "Tensor(v_new!)? v_new=None"]
        + ["Tensor? q_v=None", "Tensor(out!)? out=None"]
        + optional("Tensor", *FORWARD[7:12])
        + optional("int", *FORWARD[12:14])
        + optional("Tensor", *FORWARD[14:23])
        + ["float? softmax_scale=None", *WINDOW, "int attention_chunk=0", "float softcap=0.0"]
        + ["bool is_rotary_interleaved=False", "Tensor? scheduler_metadata=None", "int num_splits=0"]
        + ["bool? pack_gqa=None", "int sm_margin=0"],
        "(Tensor(out!), Tensor, Tensor, Tensor)",
    ),
    "bwd": (
        [f"Tensor {name}" for name in BACKWARD[:6]]
        + [f"Tensor({name}!)? {name}=None" for name in ("dq", "dk", "dv")]
        + optional("Tensor", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
        + optional("int", "max_seqlen_q", "max_seqlen_k")
        + ["float? softmax_scale=None", *WINDOW, "float softcap=0.0", "bool deterministic=False", "int sm_margin=0"],
        "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    ),
    "fwd_combine": (
        ["Tensor out_partial", "Tensor lse_partial", "Tensor(out!)? out=None", "ScalarType? out_dtype=None"],
        "(Tensor(out!), Tensor)",
    ),
    "get_scheduler_metadata": (
        [
            f"int {name}"
            for name in "batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim headdim_v".split()
        ]
        + ["ScalarType qkv_dtype", "Tensor seqused_k"]
        + optional("Tensor", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "leftpad_k")
        + ["int? page_size=None", "int max_seqlen_k_new=0", *WINDOW, "int attention_chunk=0", "bool has_softcap=False"]
        + ["int num_splits=0", "bool? pack_gqa=None", "int sm_margin=0"],
        "Tensor",
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(name):
    """xformers 0.0.35 (ops/fmha/flash3.py, _flash_attention3_incompatible_reason) asks this of fwd and bwd."""
    arguments, returns = SCHEMAS[name]
    expected = torch._C.parse_schema(f"flash_attn_3::{name}({', '.join(arguments)}) -> {returns}")
    schema = getattr(OPS, name).default._schema
    assert schema.is_backward_compatible_with(expected) and expected.is_backward_compatible_with(schema)
    assert len(schema.arguments) == {"fwd": 34, "bwd": 22}.get(name, len(arguments))


# ---- results ----


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(device, name):
    problem = make_problem(CASES[name], device)
    out, _ = check_forward_and_gradients(problem)
    assert torch.equal(run(problem, return_attn_probs=False), out)


@pytest.mark.parametrize("name", CASES)
def test_out_is_written(device, name):
    problem = make_problem(CASES[name], device)
    expected, lse = run(problem)
    out = torch.full_like(expected, float("nan"))
    result, same_lse = run(problem, out=out)
    assert result is out and torch.equal(out, expected) and torch.equal(same_lse, lse)
    for wrong in (expected.new_empty(2, *expected.shape), torch.empty_like(expected, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match="^out: expected"):
            run(problem, out=wrong)
    problem.q = problem.q.requires_grad_()
    with pytest.raises(RuntimeError, match="^out: expected None where gradients are recorded"):
        run(problem, out=out)


def in_use(problem, seqused_q, seqused_k):
    """out, LSE and gradients of every sequence by itself, from the rows in use of q, k and v."""
    q, k, v = problem.q, problem.k, problem.v
    out = torch.zeros(*q.shape[:-1], v.shape[-1], device=q.device, dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), -float("inf"), device=q.device)
    starts = zip(problem.cu_seqlens_q.tolist()[:-1], problem.cu_seqlens_k.tolist()[:-1])
    for (q0, k0), n, m in zip(starts, seqused_q, seqused_k):
        if n == 0:
            continue
        one, one_lse, _ = flash_attn.flash_attn_func(
            q[None, q0 : q0 + n], k[None, k0 : k0 + m], v[None, k0 : k0 + m], causal=problem.case.causal,
            return_attn_probs=True,
        )  # fmt: skip
        out = out.index_copy(0, torch.arange(q0, q0 + n, device=q.device), one[0])
        lse = lse.index_copy(1, torch.arange(q0, q0 + n, device=q.device), one_lse[0])
    return out, lse.masked_fill(lse.isposinf(), -float("inf"))


def check_used_rows(problem, seqused_q, seqused_k, out, lse, grads, leaves, dout):
    expected, expected_lse = in_use(problem, seqused_q, seqused_k)
    assert torch.allclose(out.float(), expected.float(), atol=2e-2)
    assert torch.allclose(lse, expected_lse, atol=1e-4)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, leaves, dout)):
        assert torch.allclose(ours.float(), theirs.float(), atol=5e-2)
        assert torch.equal(ours.float().abs().sum((1, 2)) == 0, theirs.float().abs().sum((1, 2)) == 0)


@pytest.mark.parametrize("with_keys", (False, True))
def test_rows_in_use(device, with_keys):
    """Rows of q, and in training of k and v, that are not in use: NaN there reaches nothing, their gradients are 0."""
    problem = make_problem(Case(4, 60, 80, 4, 2, 32, "bfloat16", kind="packed", causal=True), device)
    lengths_q, lengths_k = problem.cu_seqlens_q.diff().tolist(), problem.cu_seqlens_k.diff().tolist()
    seqused_q = [max(n - 7, 0) for n in lengths_q]
    seqused_k = [max(n - 5, 0) for n in lengths_k] if with_keys else lengths_k
    for x, cu, used in ((problem.q, problem.cu_seqlens_q, seqused_q), (problem.k, problem.cu_seqlens_k, seqused_k),
                        (problem.v, problem.cu_seqlens_k, seqused_k)):  # fmt: skip
        for start, stop, n in zip(cu.tolist(), cu.tolist()[1:], used):
            x[start + n : stop] = float("nan")
    used_q = torch.tensor(seqused_q, dtype=torch.int32, device=device)
    used_k = torch.tensor(seqused_k, dtype=torch.int32, device=device) if with_keys else None
    lengths = (problem.cu_seqlens_q, problem.cu_seqlens_k, problem.max_seqlen_q, problem.max_seqlen_k, used_q, used_k)
    options = {"causal": True, "return_attn_probs": True}
    leaves = with_leaves(problem)
    out, lse = fa3.flash_attn_varlen_func(problem.q, problem.k, problem.v, *lengths, **options)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    check_used_rows(problem, seqused_q, seqused_k, out, lse, grads, leaves, dout)
    with torch.no_grad():
        given = torch.empty_like(out)
        assert torch.equal(fa3.flash_attn_varlen_func(*leaves, *lengths, **options)[0], out)
        assert torch.equal(fa3.flash_attn_varlen_func(*leaves, *lengths, out=given, **options)[1], lse)
        assert torch.equal(given, out)


def test_packed_qkv(device):
    qkv = torch.randn(2, 30, 3, 4, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    out, lse = fa3.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    assert torch.equal(out, fa3.flash_attn_func(*qkv.unbind(2), causal=True))
    heads = torch.cat([qkv[:, :, 0], qkv[:, :, 1, :2], qkv[:, :, 2, :2]], 2)
    grouped, same_lse = fa3.flash_attn_qkvpacked_func(heads, causal=True, num_heads_q=4, return_attn_probs=True)
    expected = fa3.flash_attn_func(qkv[:, :, 0], qkv[:, :, 1, :2], qkv[:, :, 2, :2], causal=True)
    assert torch.equal(grouped, expected) and lse.shape == same_lse.shape == (2, 4, 30)
    (grad,) = torch.autograd.grad(grouped.float().sum(), qkv)
    assert (grad[:, :, 0] != 0).any() and (grad[:, :, 1, 2:] == 0).all()
    for num_heads, error in ((None, TypeError), (3, RuntimeError), (9, RuntimeError)):
        with pytest.raises(error, match="^num_heads_q: expected"):
            fa3.flash_attn_qkvpacked_func(heads, num_heads_q=num_heads)


def test_options_without_effect(device):
    problem = make_problem(DENSE, device)
    expected = run(problem)
    scheduled = fa3.get_scheduler_metadata(2, 70, 90, 4, 2, 64, torch.tensor([90, 90], device=device))
    assert scheduled.shape == (0,) and scheduled.dtype == torch.int32 and scheduled.device == problem.q.device
    for options in ({"num_splits": 7}, {"num_splits": 0}, {"pack_gqa": True}, {"pack_gqa": False}):
        assert all(map(torch.equal, run(problem, **options), expected))
    cache = (problem.q, problem.k, problem.v)
    lengths = {"cache_seqlens": torch.tensor([80, 90], dtype=torch.int32, device=device), "causal": True}
    plain = fa3.flash_attn_with_kvcache(*cache, **lengths)
    tuned = {"pack_gqa": True, "scheduler_metadata": scheduled, "max_seqlen_q": 70}
    assert torch.equal(fa3.flash_attn_with_kvcache(*cache, **lengths, **tuned), plain)
    split = fa3.flash_attn_with_kvcache(*cache, **lengths, num_splits=3)
    assert torch.allclose(split.float(), plain.float(), atol=2e-2)


def test_combine(device):
    outs, lses = torch.randn(3, 2, 5, 4, 32, device=device), torch.randn(3, 2, 5, 4, device=device)
    lses[:, 0, 0] = -float("inf")
    out, lse = fa3.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    expected, expected_lse = flash_attn.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    assert torch.equal(out, expected) and torch.equal(as_flash_attn(lse), expected_lse)
    assert lse[0, 0].isneginf().all() and lse.isfinite().sum() == lse.numel() - 4
    given = torch.empty_like(out)
    result, same = OPS.fwd_combine(outs, lses, given, None)
    assert result is given and torch.equal(given, expected) and torch.equal(same, lse)
    assert torch.equal(OPS.fwd_combine(outs, lses, None, torch.bfloat16)[0], expected)
    assert OPS.get_scheduler_metadata(2, 1, 9, 4, 4, 32, 32, torch.bfloat16, lses[0, :, 0, 0].int()).shape == (0,)


# ---- what is not served ----

TENSOR = torch.ones(1)
UNSUPPORTED = {"qv": TENSOR, "attention_chunk": 64}
OF_THE_CACHE = {"cu_seqlens_k_new": TENSOR, "rotary_seqlens": TENSOR}


@pytest.mark.parametrize("argument", [*UNSUPPORTED, *OF_THE_CACHE])
def test_unsupported_arguments_are_named(device, argument):
    q = torch.randn(1, 4, 2, 32, device=device, dtype=torch.bfloat16)
    packed, cu = q[0], torch.tensor([0, 4], dtype=torch.int32, device=device)
    value = {**UNSUPPORTED, **OF_THE_CACHE}[argument]
    calls = [] if argument == "qv" else [lambda **x: fa3.flash_attn_with_kvcache(q, q, q, **x)]
    if argument in UNSUPPORTED:
        calls += [
            lambda **x: fa3.flash_attn_func(q, q, q, **x),
            lambda **x: fa3.flash_attn_varlen_func(packed, packed, packed, cu, cu, 4, 4, **x),
            lambda **x: fa3._flash_attn_forward(q, q, q, **x),
            lambda **x: OPS.fwd(q, q, q, **{"q_v" if name == "qv" else name: y for name, y in x.items()}),
        ]
        if argument != "qv":
            calls.append(lambda **x: fa3.flash_attn_qkvpacked_func(torch.stack([q] * 3, 2), **x))
    for call in calls:
        with pytest.raises(NotImplementedError, match=f"^{argument}: expected (None|0), got"):
            call(**{argument: value})


@pytest.mark.parametrize("argument", ("k_new", "v_new", "out_"))
def test_the_functional_operator_writes_nothing(device, argument):
    q = torch.randn(1, 4, 2, 32, device=device, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=f"^{argument}: expected None in an operator without side effects"):
        fa3._flash_attn_forward(q, q, q, **{argument: q})
