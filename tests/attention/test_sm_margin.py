"""sm_margin: grids of fewer multiprocessors, and the results of others; what leaves none is in tests/cpp."""

from __future__ import annotations

import functools

import pytest
import torch
from flash_attn_3_harness import CASES, OPS, check_forward_and_gradients, fa3, run
from harness import make_problem

import flash_attn
from flash_attn import KvCachePlan, backends, cpu
from flash_attn.context_parallel import CpPlan, LocalGroup, flash_attn_cp_func
from flash_attn.context_parallel.plan.steps import METHODS
from flash_attn.fp8 import quantize_qkv
from flash_attn.integrations import sglang
from flash_attn.ops.attention_args import AttentionArgs, KvCacheArgs, saved_for_backward

GRADIENTS = ("dq", "dk", "dv")
MARGINS = (0, 16, 120, 10**6)  # the last leaves one multiprocessor to attention


def random(device, *shape, grad=False, dtype=torch.bfloat16):
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)


def close(ours, theirs, name):
    """Rounded to bfloat16 differently; gradients are made of probabilities that are."""
    most = 2**-5 if name in GRADIENTS else 2**-8
    difference = (ours.double() - theirs.double()).norm().item()
    assert difference <= most * theirs.double().norm().item(), name


# ---- results ----


@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("name", CASES)
def test_small_problems_are_within_the_criterion(device, name, margin):
    """Of these a GPU may take other kernels, splits and grids than without a margin."""
    problem = make_problem(CASES[name], device)
    out, lse = check_forward_and_gradients(problem, sm_margin=margin)
    written, same_lse = run(problem, sm_margin=margin, out=torch.empty_like(out))
    assert torch.equal(written, out) and torch.equal(same_lse, lse)
    if device == "cpu":
        assert all(map(torch.equal, run(problem), (out, lse)))


# More row tiles and n_blocks than an H200 has multiprocessors: one kernel whatever the margin.
LARGE = {
    "d 64": (64, {}),
    "d 64, causal": (64, {"causal": True}),
    "d 128": (128, {}),
    "d 128, causal": (128, {"causal": True}),
    "d 128, window": (128, {"window_size": (300, 10)}),
    "d 256, causal": (256, {"causal": True}),
    "softcap": (128, {"softcap": 15.0, "causal": True}),
}


def large_call(device, head_dim, is_packed):
    """(function of the options, leaves): dense, or packed with documents of unequal lengths."""
    shape = (2, 2048, 10, head_dim)
    leaves = [random(device, *(shape[:2] if not is_packed else (4096,)), 10, head_dim, grad=True) for _ in range(3)]
    if not is_packed:
        return lambda **options: fa3.flash_attn_func(*leaves, return_attn_probs=True, **options), leaves
    cu_seqlens = torch.tensor([0, 7, 2000, 2000, 3001, 4096], dtype=torch.int32, device=device)

    def packed(**options):
        lengths = (cu_seqlens, cu_seqlens, 1993, 1993)
        return fa3.flash_attn_varlen_func(*leaves, *lengths, return_attn_probs=True, **options)

    return packed, leaves


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", LARGE)
def test_large_problems_have_the_bits_of_no_margin(device, name, is_packed):
    """The forward, dk, dv and, in deterministic mode, dq; elsewhere dq is added up in any order."""
    head_dim, options = LARGE[name]
    call, leaves = large_call(device, head_dim, is_packed)
    weights = None
    expected = {}
    for margin in MARGINS:
        for deterministic in (False, True, True):
            out, lse = call(sm_margin=margin, deterministic=deterministic, **options)
            weights = torch.randn_like(out) if weights is None else weights
            dq, dk, dv = torch.autograd.grad(out, leaves, weights)
            first = expected.setdefault(deterministic, (out.detach(), lse.detach(), dk, dv, dq))
            assert all(map(torch.equal, (out, lse, dk, dv), first[:4])), (margin, deterministic)
            if deterministic:
                assert torch.equal(dq, first[4]), margin
            close(dq, first[4], (margin, deterministic))


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("margin", MARGINS)
def test_short_heads_add_up_dq_in_shared_memory(device, margin):
    """More heads than multiprocessors, and fewer."""
    for batch in (5, 60):
        leaves = [random(device, batch, 300, 4, 64, grad=True) for _ in range(3)]
        dout, results = random(device, batch, 300, 4, 64), []
        for own in (0, margin):
            out = fa3.flash_attn_func(*leaves, causal=True, deterministic=True, sm_margin=own)
            results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
        for ours, theirs, name in zip(*results[::-1], ("out", *GRADIENTS)):
            close(ours, theirs, name)


@pytest.mark.parametrize("batch, heads, capacity", [(1, 8, 9000), (3, 16, 5000), (40, 4, 700)])
def test_decode(device, batch, heads, capacity):
    """Splits follow the multiprocessors, batch-invariant results do not. A plan brings its margin."""
    q = random(device, batch, 1, heads, 128)
    k, v = (random(device, batch, capacity, heads // 4, 128) for _ in range(2))
    lengths = torch.randint(1, capacity, (batch,), dtype=torch.int32, device=device)
    options = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    expected, lse, *_ = fa3.flash_attn_with_kvcache(q, k, v, **options)
    for margin in MARGINS:
        ours, our_lse, *_ = fa3.flash_attn_with_kvcache(q, k, v, sm_margin=margin, **options)
        close(ours, expected, margin)
        torch.testing.assert_close(our_lse, lse, atol=1e-4, rtol=1e-4)
        plan = KvCachePlan(lengths, 1, heads, heads // 4, 128, capacity, causal=True, sm_margin=margin)
        for _ in range(2):
            planned = flash_attn.flash_attn_with_kvcache(q, k, v, plan=plan, **options)
            assert torch.equal(planned[0], ours)
        plan.update(lengths.clamp(max=9))
        few = {**options, "cache_seqlens": lengths.clamp(max=9)}
        ours = flash_attn.flash_attn_with_kvcache(q, k, v, plan=plan, **few)[0]
        close(ours, flash_attn.flash_attn_with_kvcache(q, k, v, **few)[0], margin)
    whole = [sglang.flash_attn_with_kvcache(q, k, v, num_splits=1, sm_margin=margin, **options) for margin in MARGINS]
    assert all(torch.equal(x[0], whole[0][0]) and torch.equal(x[1], whole[0][1]) for x in whole)


def test_chunks_of_prompts_over_a_cache(device):
    q, (k, v) = random(device, 2, 130, 8, 128), (random(device, 2, 900, 2, 128) for _ in range(2))
    options = {"cache_seqlens": torch.tensor([900, 470], dtype=torch.int32, device=device), "causal": True}
    expected = fa3.flash_attn_with_kvcache(q, k, v, **options)
    packed, cu_seqlens = q.flatten(0, 1), torch.tensor([0, 130, 260], dtype=torch.int32, device=device)
    for margin in MARGINS:
        close(fa3.flash_attn_with_kvcache(q, k, v, sm_margin=margin, **options), expected, margin)
        ours = fa3.flash_attn_with_kvcache(packed, k, v, cu_seqlens_q=cu_seqlens, sm_margin=margin, **options)
        close(ours, expected.flatten(0, 1), margin)


def test_the_operators_of_flash_attention_3(device):
    q, k, v = (random(device, 2, 40, 4, 64, grad=True) for _ in range(3))
    for margin in MARGINS:
        out, lse, *_ = fa3._flash_attn_forward(q, k, v, causal=True, sm_margin=margin)
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, (q, k, v), dout)
        with torch.no_grad():
            close(OPS.fwd(q, k, v, is_causal=True, sm_margin=margin)[0], out, "out")
            given = [torch.empty_like(x) for x in (q, k, v)]
            OPS.bwd(dout, q, k, v, out, lse, *given, is_causal=True, deterministic=True, sm_margin=margin)
            fa3._flash_attn_backward(dout, q, k, v, out, lse, is_causal=True, sm_margin=margin)
        for ours, theirs, name in zip(given, grads, GRADIENTS):
            close(ours, theirs, name)


# ---- grids ----


def multiprocessors(margin):
    return max(torch.cuda.get_device_properties("cuda").multi_processor_count - margin, 1)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_persistent_grids_shrink(hopper, head_dim, is_packed, margin):
    options = {"causal": True, "sm_margin": margin}
    q = random(hopper, *((4096,) if is_packed else (2, 2048)), 20, head_dim, grad=True)
    lengths, function = (), fa3.flash_attn_func
    if is_packed:
        function, cu_seqlens = fa3.flash_attn_varlen_func, torch.tensor([0, 1000, 4096], device=hopper)
        lengths = (cu_seqlens.int(), cu_seqlens.int(), 3096, 3096)
    for deterministic in (False, True):
        plans = flash_attn.explain(function, q, q, q, *lengths, deterministic=deterministic, **options)
        for plan in plans.values():
            assert plan["kernel"] == "wgmma" and plan["grid"] == multiprocessors(margin)
    written = torch.empty_like(q)
    with torch.no_grad():
        plan = flash_attn.explain(function, q, q, q, *lengths, out=written, **options)["forward"]
    assert plan["grid"] == multiprocessors(margin)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_grids_of_8_bits_shrink_and_bits_stay(hopper, head_dim):
    x = quantize_qkv(*(random(hopper, 2, 2048, 10, head_dim) for _ in range(3)))
    options = {"q_descale": x.q_descale, "k_descale": x.k_descale, "v_descale": x.v_descale, "causal": True}
    whole = fa3.flash_attn_func(x.q, x.k, x.v, **options)
    for margin in MARGINS:
        plan = flash_attn.explain(fa3.flash_attn_func, x.q, x.k, x.v, sm_margin=margin, **options)["forward"]
        assert plan["qkv_dtype"] == "e4m3" and plan["grid"] == multiprocessors(margin)
        assert torch.equal(fa3.flash_attn_func(x.q, x.k, x.v, sm_margin=margin, **options), whole)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("margin", MARGINS)
def test_grids_of_decode_shrink(device, margin):
    q, k = random(device, 64, 1, 32, 128), random(device, 64, 3000, 8, 128)
    explained = [
        flash_attn.explain(fa3.flash_attn_with_kvcache, q, k, k, sm_margin=own)["forward"] for own in (0, margin)
    ]
    whole, plan = explained
    assert plan["kernel"] == "split_kv"
    resident = -(-whole["grid"] // multiprocessors(0))
    assert 1 <= plan["grid"] <= resident * multiprocessors(margin)


@pytest.mark.devices("cuda")
def test_grids_of_mma_sync_do_not(device, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "mma_sync")
    q = random(device, 2, 2048, 20, 128, grad=True)
    explained = [flash_attn.explain(fa3.flash_attn_func, q, q, q, causal=True, sm_margin=own) for own in (0, 16)]
    for direction in ("forward", "backward"):
        assert explained[0][direction]["grid"] == explained[1][direction]["grid"]


@pytest.mark.parametrize("margin", [0, 16])
def test_backends_are_asked_with_the_margin(monkeypatch, margin):
    """Every call of a backend has it, by name."""
    seen = []

    class Spy:
        def __getattr__(self, name):
            def call(*args, sm_margin=0, **named):
                seen.append((name.replace("explain_", ""), sm_margin))
                if name.startswith("explain_"):
                    return {"direction": name, "kernel": "stub"}
                return getattr(cpu, name)(*args, **named)

            return call

    monkeypatch.setattr(backends, "get", lambda device_type, name="q": Spy())
    q = random("cpu", 2, 9, 2, 16, grad=True)
    cu_seqlens = torch.tensor([0, 4, 18], dtype=torch.int32)
    packed = q.detach().flatten(0, 1).requires_grad_()
    fa3.flash_attn_func(q, q, q, sm_margin=margin).sum().backward()
    fa3.flash_attn_func(*[q.detach()] * 3, out=torch.empty_like(q), sm_margin=margin)
    fa3.flash_attn_varlen_func(*[packed] * 3, *[cu_seqlens] * 2, 14, 14, sm_margin=margin).sum().backward()
    fa3.flash_attn_varlen_func(
        *[packed.detach()] * 3, *[cu_seqlens] * 2, 14, 14, out=torch.empty_like(packed), sm_margin=margin
    )
    fa3.flash_attn_qkvpacked_func(q.detach()[:, :, None].expand(-1, -1, 3, -1, -1), sm_margin=margin)
    fa3._flash_attn_forward(q, q, q, sm_margin=margin)[0].sum().backward()
    with torch.no_grad():
        fa3.flash_attn_with_kvcache(q, q, q, sm_margin=margin)
        fa3.flash_attn_with_kvcache(packed, q, q, cu_seqlens_q=cu_seqlens, sm_margin=margin)
        OPS.fwd(q, q, q, seqused_k=torch.tensor([3, 4], dtype=torch.int32), sm_margin=margin)
        sglang.flash_attn_with_kvcache(q, q, q, sm_margin=margin)
        sglang.flash_attn_varlen_func(*[packed] * 3, *[cu_seqlens] * 2, sm_margin=margin)
    flash_attn.explain(fa3.flash_attn_func, q, q, q, sm_margin=margin)
    LocalGroup(2).run(lambda rank: cp_step(rank, margin))
    assert {name for name, _ in seen} == {"fwd", "bwd", "varlen_fwd", "varlen_bwd", "fwd_kvcache", "combine"}
    assert {own for name, own in seen if name != "combine"} == {margin}


def cp_step(rank, margin, device="cpu"):
    plan = CpPlan.dense(18, group=rank)
    q = random(device, 1, plan.num_tokens, 2, 16, grad=True)
    flash_attn_cp_func(q, q, q, plan=plan, causal=True, sm_margin=margin).sum().backward()


@pytest.mark.parametrize("method", METHODS)
def test_context_parallel(device, method):
    *whole, dout = (random(device, 1, 300, 4, 64) for _ in range(4))

    def step(rank, margin):
        plan = CpPlan.dense(300, group=rank, method=method)
        own = [plan.shard(x, 1).requires_grad_() for x in whole]
        out = flash_attn_cp_func(*own, plan=plan, causal=True, deterministic=True, sm_margin=margin)
        return out.detach(), *torch.autograd.grad(out, own, plan.shard(dout, 1))

    expected = LocalGroup(2).run(functools.partial(step, margin=0))
    for margin in MARGINS:
        for ours, theirs in zip(LocalGroup(2).run(functools.partial(step, margin=margin)), expected):
            for a, b, name in zip(ours, theirs, ("out", *GRADIENTS)):
                close(a, b, name)


# ---- arguments ----

BAD = [(-1, RuntimeError, ">= 0, got -1"), (1.5, TypeError, "an int, got 1.5"), ("16", TypeError, "an int, got '16'")]


@pytest.mark.parametrize("value, error, message", BAD)
def test_bad_margins(device, value, error, message):
    q = random(device, 1, 8, 2, 16)
    lengths = torch.tensor([4], dtype=torch.int32, device=device)
    calls = (
        lambda: fa3.flash_attn_func(q, q, q, sm_margin=value),
        lambda: fa3.flash_attn_func(q, q, q, out=torch.empty_like(q), sm_margin=value),
        lambda: fa3.flash_attn_qkvpacked_func(torch.stack([q, q, q], 2), sm_margin=value),
        lambda: fa3.flash_attn_with_kvcache(q, q, q, cache_seqlens=lengths, sm_margin=value),
        lambda: sglang.flash_attn_with_kvcache(q, q, q, cache_seqlens=lengths, sm_margin=value),
        lambda: KvCachePlan(lengths, 8, 2, 2, 16, 8, sm_margin=value),
    )
    for call in calls:
        with pytest.raises(error, match=f"^sm_margin: expected .*{message}"):
            call()


def test_a_plan_of_another_margin_is_refused(device):
    q = random(device, 1, 8, 2, 16)
    lengths = torch.tensor([4], dtype=torch.int32, device=device)
    plan = KvCachePlan(lengths, 8, 2, 2, 16, 8, sm_margin=16)
    with pytest.raises(RuntimeError, match="^plan: expected one made for sm_margin 8, got one for 16"):
        plan.check(q, q, None, None, False, (-1, -1), 0, False, 8)


def test_backends_check_it_too(device):
    q = random(device, 1, 8, 2, 16)
    backend = backends.of(q)
    dense = (None, None, 0.0, 1.0, False, -1, -1, 0.0, False, None)
    for margin in (0, 3, 10**6):
        assert len(backend.fwd(q, q, q, *dense, sm_margin=margin)) == 4
    with pytest.raises(RuntimeError, match="^sm_margin: expected a value >= 0, got -2"):
        backend.fwd(q, q, q, *dense, sm_margin=-2)
    out, lse, *_ = backend.fwd(q, q, q, *dense)
    with pytest.raises(RuntimeError, match="^sm_margin: expected a value >= 0, got -2"):
        backend.bwd(out, q, q, q, out, lse, *[None] * 4, 0.0, 1.0, False, -1, -1, 0.0, False, None, None, sm_margin=-2)


# ---- compilers ----


def test_compiled(device):
    q, k, v = (random(device, 2, 40, 4, 64, grad=True) for _ in range(3))

    def step(q, k, v):
        return fa3.flash_attn_func(q * 2, k, v, causal=True, deterministic=True, sm_margin=16)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for function in (step, compiled):
        out = function(q, k, v)
        results = (out.detach(), *torch.autograd.grad(out.sum(), (q, k, v)))
        expected = results if function is step else expected  # noqa: F821
        assert all(map(torch.equal, results, expected))


def test_operators_of_any_margin(device):
    """opcheck: schemas, fakes, autograd."""
    q = random(device, 1, 8, 2, 16)
    core, options = torch.ops.flash_attn_core, (0.0, 1.0, True, -1, -1, 0.0, True)
    args = AttentionArgs(q, q, q, *[None] * 7, 0, 0, *options, False, False, sm_margin=16)
    torch.library.opcheck(core.fwd.default, tuple(args))
    out, lse, _, rng_state, _ = core.fwd(*args)
    tensors, saved = saved_for_backward(args, out, lse, rng_state)
    torch.library.opcheck(core.bwd.default, (out, None, *tensors, *saved))
    cache = KvCacheArgs(q, q, q, *[None] * 13, 1.0, True, -1, -1, 0.0, True, 0, False, sm_margin=16)
    torch.library.opcheck(core.kvcache_fwd.default, tuple(cache))
