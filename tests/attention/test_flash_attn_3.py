"""FlashAttention-3's module (the distribution in flash_attn_3/): functions, operators, conventions, and its clients.

Signatures and schemas are those of FlashAttention-3's hopper/flash_attn_interface.py and flash_api_stable.cpp.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
from cases import Case
from harness import check_forward, check_gradients, make_problem
from reference import assert_accurate, attention
from signatures import plain_signature

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "flash_attn_3"))

import flash_attn
import flash_attn_3
import flash_attn_config
import flash_attn_interface as fa3
from flash_attn_3 import _C  # noqa: F401
from flash_attn_3 import flash_attn_interface as inner

OPS = torch.ops.flash_attn_3
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
    assert [name for name, value in flags.items() if value] == ["FLASHATTENTION_DISABLE_FP8"]


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


def as_flash_attn(lse):
    """The LSE in flash_attn's convention, after the check that it is in FlashAttention-3's."""
    assert not lse.isposinf().any()
    return lse.masked_fill(lse.isneginf(), float("inf"))


DENSE = Case(2, 70, 90, 4, 2, 64, "bfloat16", causal=True)
CASES = {
    "causal": DENSE,
    "masked rows": Case(2, 90, 70, 4, 2, 64, "bfloat16", causal=True),
    "window, softcap": Case(2, 70, 90, 4, 4, 32, "bfloat16", window=(20, 3), softcap=2.0),
    "head dim of v": Case(1, 70, 90, 4, 2, 96, "bfloat16", head_dim_v=64),
    "sinks": Case(2, 70, 90, 4, 2, 64, "bfloat16", causal=True, sinks=True),
    "varlen": Case(4, 70, 90, 4, 2, 64, "bfloat16", kind="packed", causal=True),
    "varlen, rows of no sequence": Case(4, 70, 90, 4, 2, 64, "bfloat16", kind="padded", window=(9, 5)),
    "varlen, keys in use": Case(4, 70, 90, 4, 2, 64, "bfloat16", kind="seqused", causal=True),
}


def run(problem, **options):
    c = problem.case
    options = {"causal": c.causal, "window_size": c.window, "softcap": c.softcap, "return_attn_probs": True, **options}
    if problem.sinks is not None:
        options["s_aux"] = problem.sinks
    if problem.layout is None:
        return fa3.flash_attn_func(problem.q, problem.k, problem.v, **options)
    lengths = (problem.cu_seqlens_q, problem.cu_seqlens_k, problem.max_seqlen_q, problem.max_seqlen_k)
    return fa3.flash_attn_varlen_func(
        problem.q, problem.k, problem.v, *lengths, seqused_k=problem.seqused_k, **options
    )  # fmt: skip


def with_leaves(problem):
    for name, x in problem.inputs.items():
        setattr(problem, name, x.detach().requires_grad_())
    return list(problem.inputs.values())


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(device, name):
    problem = make_problem(CASES[name], device)
    leaves = with_leaves(problem)
    out, lse = run(problem)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    for key, x in list(problem.inputs.items()):
        setattr(problem, key, x.detach())
    check_forward(problem, out.detach(), as_flash_attn(lse.detach()))
    check_gradients(problem, dout, grads, dlse=dlse)
    assert torch.equal(run(problem, return_attn_probs=False), out)


@pytest.mark.parametrize("name", CASES)
def test_out_is_written(device, name):
    problem = make_problem(CASES[name], device)
    expected, lse = run(problem)
    out = torch.full_like(expected, float("nan"))
    result, same_lse = run(problem, out=out)
    assert result is out and torch.equal(out, expected) and torch.equal(same_lse, lse)
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
    for options in ({"num_splits": 7}, {"num_splits": 0}, {"pack_gqa": True}, {"pack_gqa": False}, {"sm_margin": 16}):
        assert all(map(torch.equal, run(problem, **options), expected))
    cache = (problem.q, problem.k, problem.v)
    lengths = {"cache_seqlens": torch.tensor([80, 90], dtype=torch.int32, device=device), "causal": True}
    plain = fa3.flash_attn_with_kvcache(*cache, **lengths)
    tuned = {"pack_gqa": True, "sm_margin": 3, "scheduler_metadata": scheduled, "max_seqlen_q": 70}
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
UNSUPPORTED = {"qv": TENSOR, "q_descale": TENSOR, "k_descale": TENSOR, "v_descale": TENSOR, "attention_chunk": 64}
OF_THE_CACHE = {"cu_seqlens_k_new": TENSOR, "rotary_seqlens": TENSOR}


@pytest.mark.parametrize("argument", [*UNSUPPORTED, *OF_THE_CACHE])
def test_unsupported_arguments_are_named(device, argument):
    q = torch.randn(1, 4, 2, 32, device=device, dtype=torch.bfloat16)
    packed, cu = q[0], torch.tensor([0, 4], dtype=torch.int32, device=device)
    value = {**UNSUPPORTED, **OF_THE_CACHE}[argument]
    calls = [lambda **x: fa3.flash_attn_with_kvcache(q, q, q, **x)]
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


# ---- caches ----


def cache_problem(device, value_dim=32, pages=9, page_size=16):
    """Queries of three sequences, packed, and a cache in pages with random lengths and NaN beyond them."""
    lengths_q, lengths_k = [5, 1, 12], [30, 48, 20]
    q = torch.randn(sum(lengths_q), 4, 32, device=device, dtype=torch.bfloat16)
    k = torch.full((pages, page_size, 2, 32), float("nan"), device=device, dtype=torch.bfloat16)
    v = torch.full((pages, page_size, 2, value_dim), float("nan"), device=device, dtype=torch.bfloat16)
    table = torch.randperm(pages)[: 3 * 3].view(3, 3).int().to(device)
    for row, n in zip(table.long(), lengths_k):
        for x in (k, v):
            rows = torch.full((48, *x.shape[2:]), float("nan"), device=device, dtype=x.dtype)
            rows[:n] = torch.randn(n, *x.shape[2:], device=device, dtype=x.dtype)
            x[row] = rows.view(3, page_size, *x.shape[2:])
    cu = torch.tensor([0, 5, 6, 18], dtype=torch.int32, device=device)
    return q, k, v, table, cu, torch.tensor(lengths_k, dtype=torch.int32, device=device)


def by_sequence(q, k, v, table, cu, lengths, sinks=None):
    """out and LSE of each sequence alone in float64, and in bfloat16, with FlashAttention-3's -inf."""
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        outs, lses = [], []
        for i, n in enumerate(lengths.tolist()):
            keys, values = (x[table[i].long()].flatten(0, 1)[None, :n] for x in (k, v))
            one = attention(q[None, cu[i] : cu[i + 1]], keys, values, causal=True, sinks=sinks, dtype=dtype)
            outs.append(one.out[0])
            lses.append(one.lse[0])
        results.append((torch.cat(outs), torch.cat(lses, 1)))
    return results


@pytest.mark.parametrize("value_dim", (32, 16))
@pytest.mark.parametrize("sinks", (None, (0.5, -1.0, 3.0, 0.0)))
@pytest.mark.parametrize("form", ("pages", "rows", "rows by index"))
def test_packed_queries_over_a_cache(device, form, sinks, value_dim):
    """Prefill and decode in one call: FlashAttention-3's cu_seqlens_q with page_table, and with a cache in rows."""
    q, k, v, table, cu, lengths = cache_problem(device, value_dim)
    sinks = None if sinks is None else torch.tensor(sinks, device=device)
    (exact, exact_lse), (plain, plain_lse) = by_sequence(q, k, v, table, cu, lengths, sinks)
    where = {"page_table": table}
    if form != "pages":
        k, v = (x[table.long()].flatten(1, 2) for x in (k, v))
        where = {}
    if form == "rows by index":
        index = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
        k, v = (torch.empty_like(x).index_copy(0, index.long(), x) for x in (k, v))
        where = {"cache_batch_idx": index}
    options = {
        "cache_seqlens": lengths,
        "cu_seqlens_q": cu,
        "max_seqlen_q": 12,
        "causal": True,
        "sinks": sinks,
        **where,
    }
    out, lse, *scratch = fa3.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
    assert_accurate(out, exact, plain, "out")
    assert_accurate(lse, exact_lse, plain_lse, "lse")
    assert [x.shape for x in scratch] == [(0,), (0,)]
    given = torch.empty_like(out)
    assert fa3.flash_attn_with_kvcache(q, k, v, out=given, **options) is given
    assert torch.equal(given, out)
    if sinks is None:
        options = (None, None, None, None, cu, None, None, None, lengths, 12, None, where.get("page_table"))
        result = OPS.fwd(q, k, v, *options, where.get("cache_batch_idx"), is_causal=True)
        assert torch.equal(result[0], out) and torch.equal(result[1], lse)


def test_batches_over_a_cache(device):
    """The same rows as a batch: flash_attn's own KV cache function, and with sinks or a length for all."""
    q, k, v, table, *_, lengths = cache_problem(device)
    q = q[:9].view(3, 3, 4, 32)
    options = {"cache_seqlens": lengths, "causal": True}
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, k, v, page_table=table, return_softmax_lse=True, **options)
    expected, expected_lse = flash_attn.flash_attn_with_kvcache(
        q, k, v, block_table=table, return_softmax_lse=True, **options
    )
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    arguments = (None, None, None, None, None, None, None, None, lengths, None, None, table)
    result = OPS.fwd(q, k, v, *arguments, is_causal=True)
    assert torch.equal(result[0], out) and torch.equal(result[1], lse)
    none = torch.full((4,), -float("inf"), device=device)
    sunk, sunk_lse, *_ = fa3.flash_attn_with_kvcache(
        q, k, v, page_table=table, return_softmax_lse=True, learnable_sink=none, **options
    )
    assert torch.allclose(sunk.float(), out.float(), atol=2e-2) and torch.allclose(sunk_lse, lse, atol=1e-4)
    one = fa3.flash_attn_with_kvcache(q, k, v, page_table=table, causal=True, cache_seqlens=20)
    same = fa3.flash_attn_with_kvcache(q, k, v, page_table=table, causal=True, cache_seqlens=20, sinks=none)
    assert torch.allclose(one.float(), same.float(), atol=2e-2)


@pytest.mark.parametrize("through", ("function", "operator"))
def test_new_keys_are_appended(device, through):
    q = torch.randn(2, 3, 4, 32, device=device, dtype=torch.bfloat16)
    caches = [torch.randn(2, 40, 2, 32, device=device, dtype=torch.bfloat16) for _ in range(2)]
    copies = [x.clone() for x in caches]
    new = [torch.randn(2, 3, 2, 32, device=device, dtype=torch.bfloat16) for _ in range(2)]
    angles = [torch.randn(40, 8, device=device, dtype=torch.bfloat16) for _ in range(2)]
    lengths = torch.tensor([11, 37], dtype=torch.int32, device=device)
    options = {"cache_seqlens": lengths, "causal": True, "rotary_interleaved": True}
    expected = flash_attn.flash_attn_with_kvcache(
        q, *copies, *new, *angles, return_softmax_lse=True, **options
    )  # fmt: skip
    versions = [x._version for x in caches]
    if through == "function":
        result = fa3.flash_attn_with_kvcache(q, *caches, *new, None, *angles, return_softmax_lse=True, **options)
    else:
        middle = [None] * 5 + [lengths, None, None, None, None, None]
        result = OPS.fwd(q, *caches, *new, None, *middle, *angles, is_causal=True, is_rotary_interleaved=True)
    assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
    assert all(map(torch.equal, caches, copies))
    assert all(x._version > version for x, version in zip(caches, versions))
    with pytest.raises(NotImplementedError, match="^cu_seqlens_q: expected None with new keys"):
        cu = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
        fa3.flash_attn_with_kvcache(q.flatten(0, 1), *caches, *new, cu_seqlens_q=cu, cache_seqlens=lengths)


# ---- operators in training ----

TRAINING = {name: CASES[name] for name in ("causal", "masked rows", "head dim of v", "varlen", "varlen, keys in use")}


def lengths_of(problem):
    """cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k of a problem."""
    return problem.cu_seqlens_q, problem.cu_seqlens_k, None, problem.seqused_k


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("strided", (False, True))
def test_backward_operators(device, name, strided):
    """fwd, then bwd and _flash_attn_backward into given gradients, as clients with an autograd of their own do it."""
    problem = make_problem(TRAINING[name], device)
    c, lengths, (q, k, v) = problem.case, lengths_of(problem), (problem.q, problem.k, problem.v)
    out, lse, *scratch = OPS.fwd(q, k, v, None, None, None, None, *lengths[:2], None, *lengths[2:], is_causal=c.causal)
    check_forward(problem, out, as_flash_attn(lse))
    assert [x.shape for x in scratch] == [(0,), (0,)]
    dout, grads = torch.randn_like(out), []
    for x in (q, k, v):
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), device=device, dtype=x.dtype)
        grads.append(wide[..., ::2] if strided else wide[..., : x.shape[-1]])
    results = OPS.bwd(dout, q, k, v, out, lse, *grads, *lengths, None, None, None, c.causal)
    assert len(results) == 5 and results[0].dtype == torch.float32
    check_gradients(problem, dout, grads)
    same = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    softmax_d = fa3._flash_attn_backward(
        dout, q, k, v, out, lse, *lengths, problem.max_seqlen_q, problem.max_seqlen_k, *same, is_causal=c.causal,
        deterministic=True,
    )  # fmt: skip
    assert softmax_d.shape == results[0].shape
    check_gradients(problem, dout, same)


@pytest.mark.parametrize("name", TRAINING)
def test_the_forward_operator_is_differentiable(device, name):
    problem = make_problem(TRAINING[name], device)
    leaves = with_leaves(problem)
    cu_q, cu_k, used_q, used_k = lengths_of(problem)
    out, lse, *_ = fa3._flash_attn_forward(
        *leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_q=used_q, seqused_k=used_k,
        max_seqlen_q=problem.max_seqlen_q, max_seqlen_k=problem.max_seqlen_k, causal=problem.case.causal,
    )  # fmt: skip
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    problem.q, problem.k, problem.v = (x.detach() for x in leaves)
    check_forward(problem, out.detach(), as_flash_attn(lse.detach()))
    check_gradients(problem, dout, grads, dlse=dlse)


@pytest.mark.parametrize("packed", ("queries", "keys", "neither"))
def test_one_side_packed(device, packed):
    """A batch of queries over packed keys and the reverse, and batches of which the first rows are in use."""
    q = torch.randn(3, 10, 4, 32, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(3, 12, 2, 32, device=device, dtype=torch.bfloat16) for _ in range(2))
    used_q, used_k = [10, 4, 0], [12, 7, 5]
    as_int = {"dtype": torch.int32, "device": device}
    options = {"causal": True, "seqused_q": torch.tensor(used_q, **as_int), "seqused_k": torch.tensor(used_k, **as_int)}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    inputs = list(leaves)
    if packed == "queries":
        inputs[0], options["cu_seqlens_q"] = q.flatten(0, 1), torch.arange(0, 40, 10, **as_int)
    if packed == "keys":
        inputs[1:], options["cu_seqlens_k"] = [k.flatten(0, 1), v.flatten(0, 1)], torch.arange(0, 48, 12, **as_int)
    out, lse, *_ = fa3._flash_attn_forward(*inputs, **options)
    assert lse.shape == ((4, 30) if packed == "queries" else (3, 4, 10))
    rows = [
        torch.nn.functional.pad(flash_attn.flash_attn_func(
            q[i : i + 1, :n], k[i : i + 1, :m], v[i : i + 1, :m], causal=True
        ), (0, 0, 0, 0, 0, 10 - n)) if n else q[i : i + 1] * 0
        for i, (n, m) in enumerate(zip(used_q, used_k))
    ]  # fmt: skip
    expected = torch.cat(rows)
    assert torch.allclose(out.view_as(expected).float(), expected.float(), atol=2e-2)
    dout = torch.randn_like(expected)
    grads = torch.autograd.grad(out, leaves, dout.view_as(out))
    for ours, theirs in zip(grads, torch.autograd.grad(expected, leaves, dout)):
        assert torch.allclose(ours.float(), theirs.float(), atol=5e-2)


def test_caches_have_no_backward(device):
    q, k, v, table, cu, lengths = cache_problem(device)
    out, *_ = fa3._flash_attn_forward(
        q.requires_grad_(), k, v, cu_seqlens_q=cu, seqused_k=lengths, page_table=table, causal=True
    )
    with pytest.raises(NotImplementedError, match="^page_table: expected None in training"):
        out.sum().backward()


def test_forward_mode_is_rejected(device):
    q = torch.randn(1, 4, 2, 32, device=device, dtype=torch.bfloat16)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            OPS.fwd(dual, q, q)


def test_operators_are_sound(device):
    """torch's own check of schemas, fakes, autograd registration and tracing."""
    q, k, v = (torch.randn(2, 7, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.library.opcheck(fa3._flash_attn_forward, (q, k, v), {"causal": True})
    cu = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)
    packed = tuple(x.detach()[0].requires_grad_() for x in (q, k, v))
    torch.library.opcheck(fa3._flash_attn_forward, packed, {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 4})
    out, lse, *_ = OPS.fwd(q.detach(), k.detach(), v.detach())
    arguments = tuple(x.detach() for x in (out, q, k, v, out, lse))
    grads = {name: torch.empty_like(q, requires_grad=False) for name in ("dq", "dk", "dv")}
    torch.library.opcheck(fa3._flash_attn_backward, arguments, grads)


def test_compiled(device):
    """The functions trace whole, rows in use included."""
    q, k, v = (torch.randn(20, 4, 32, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 8, 20], dtype=torch.int32, device=device)
    used = torch.tensor([5, 12], dtype=torch.int32, device=device)

    def step(q, k, v):
        dense = fa3.flash_attn_func(q[None], k[None], v[None], causal=True, return_attn_probs=True)
        packed = fa3.flash_attn_varlen_func(q, k, v, cu, cu, 12, 12, used, used, causal=True)
        direct = fa3._flash_attn_forward(q[None], k[None], v[None])[0]
        return dense[0][0] + packed + direct[0], dense[1]

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        out, lse = function(q, k, v)
        results.append((out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), (q, k, v))))
    for eager, compiled in zip(*results):
        assert torch.allclose(eager.float(), compiled.float(), atol=5e-2)


# ---- clients ----


@pytest.fixture
def torch_fa3():
    """torch's own client, from 2.10 on: it imports flash_attn_interface and calls the operators by position."""
    module = pytest.importorskip("torch.nn.attention._fa3")
    module._fa3_import_module("flash_attn_interface")
    return module


@pytest.mark.parametrize("packed", (False, True))
def test_torch_calls_the_operators(device, torch_fa3, packed):
    problem = make_problem(CASES["varlen" if packed else "causal"], device)
    q, k, v = problem.q, problem.k, problem.v
    lengths = (problem.cu_seqlens_q, problem.cu_seqlens_k, problem.max_seqlen_q, problem.max_seqlen_k)
    lengths = lengths if packed else (None, None, q.shape[1], k.shape[1])
    given = None if packed else torch.empty_like(q.transpose(1, 2)).transpose(1, 2)  # as SDPA wants its output
    out, lse = torch_fa3._fa3_run_forward(q, k, v, *lengths, None, True, None, None, None, given)
    assert packed or out.data_ptr() == given.data_ptr()
    check_forward(problem, out, as_flash_attn(lse))
    dout = torch.randn_like(out)
    grads = torch_fa3._fa3_run_backward(dout, q, k, v, out, lse, *lengths, None, True, -1, -1)
    check_gradients(problem, dout, grads)


@pytest.mark.devices("cuda")
def test_torch_routes_sdpa_here(hopper, torch_fa3):
    """activate_flash_attention_impl("FA3"): scaled_dot_product_attention's flash backend, which wants sm_90."""
    from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
    from torch.nn.attention._registry import restore_flash_attention_impl

    leaves = [torch.randn(2, 4, 130, 64, device=hopper, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    activate_flash_attention_impl("FA3")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
            grads = torch.autograd.grad(out, leaves, out.detach())
    finally:
        restore_flash_attention_impl()
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out.transpose(1, 2), expected)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, leaves, expected.detach())):
        assert torch.allclose(ours, theirs, atol=2e-2)


def test_transformer_engine_imports_and_calls(device):
    """Transformer Engine (d0067d0d) attention/dot_product_attention/backends.py:147-164 and context_parallel.py."""
    from flash_attn_3.flash_attn_interface import (  # noqa: F401
        _flash_attn_backward,
        _flash_attn_forward,
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
    )

    problem = make_problem(CASES["varlen"], device)
    q, k, v, cu_q, cu_k = problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k
    options = {"softmax_scale": 0.2, "window_size_left": -1, "window_size_right": 0}
    forward = (*[None] * 4, cu_q, cu_k, *[None] * 3, problem.max_seqlen_q, problem.max_seqlen_k, *[None] * 9)
    out, lse, *_ = _flash_attn_forward(q, k, v, *forward, causal=True, **options)
    check_forward(problem, out, as_flash_attn(lse), scale=0.2)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    dout = torch.randn_like(out)
    backward = (cu_q, cu_k, None, None, problem.max_seqlen_q, problem.max_seqlen_k, *grads)
    _flash_attn_backward(dout, q, k, v, out, lse, *backward, is_causal=True, deterministic=True, **options)
    check_gradients(problem, dout, grads, scale=0.2)


def test_diffusers_call(device):
    """diffusers 0.42.1 models/attention_dispatch.py:788: all by keyword, always with the LSE."""
    problem = make_problem(DENSE, device)
    unused = dict.fromkeys(("qv", "q_descale", "k_descale", "v_descale", "softmax_scale", "pack_gqa"))
    out, lse, *_ = fa3.flash_attn_func(
        q=problem.q, k=problem.k, v=problem.v, **unused, causal=True, window_size=(-1, -1), attention_chunk=0,
        softcap=0.0, num_splits=1, deterministic=False, sm_margin=0, return_attn_probs=True,
    )  # fmt: skip
    check_forward(problem, out, as_flash_attn(lse))
    assert lse.permute(0, 2, 1).shape == problem.q.shape[:3]


def test_xformers_call(device):
    """xformers 0.0.35 ops/fmha/flash3.py: keys in pages, their lengths in seqused_k, queries packed or a batch."""
    q, k, v, table, cu, lengths = cache_problem(device)
    tail = (12, 48, table, None, None, None, None, None, None, None, None, 32**-0.5, True, -1, -1, 0, 0.0)
    for queries, cu_q in ((q, cu), (q[:9].view(3, 3, 4, 32), None)):
        head = (None, None, None, None, cu_q, None, None, None, lengths)
        out, lse, *_ = OPS.fwd(queries, k, v, *head, *tail, cu_q is not None, None, 1, None, 0)
        assert out.shape == queries.shape
        bounds = cu if cu_q is not None else torch.arange(0, 12, 3, dtype=torch.int32)
        (exact, exact_lse), (plain, _) = by_sequence(queries.reshape(-1, 4, 32), k, v, table, bounds, lengths)
        assert_accurate(out.flatten(0, -3), exact, plain, "out")
        lse = lse if cu_q is not None else lse.transpose(0, 1).flatten(1)
        assert torch.allclose(lse.double(), exact_lse, atol=1e-4)
