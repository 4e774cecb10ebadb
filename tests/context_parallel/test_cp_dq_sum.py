"""Backwards in stages: several calls, each over some keys, add to one sum of dq and share softmax_d."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from cp_harness import check_result, run_local, self_attention
from dq_stage_harness import FEATURES, Chunks

from flash_attn import backends
from flash_attn.context_parallel import CpPlan, LocalGroup, flash_attn_cp_func
from flash_attn.context_parallel.compute import kernel_calls, sums
from flash_attn.context_parallel.plan.steps import KEY_METHODS, Kind


@pytest.fixture(params=("wgmma", "mma_sync"))
def family(request, device, monkeypatch):
    if device == "cpu" and request.param != "wgmma":
        pytest.skip("the CPU backend has one family")
    monkeypatch.setenv("FLASH_ATTN_FAMILY", request.param)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["any", "deterministic"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("heads, head_dims", [((4, 2), (64, 64)), ((3, 3), (128, 128)), ((2, 1), (40, 24))])
def test_calls_over_chunks_of_keys_equal_one_call(device, family, heads, head_dims, features, deterministic, is_packed):
    """Within twice the error of the call with all keys."""
    chunks = Chunks(device, is_packed, heads, head_dims, features)
    if not chunks.has_sum:
        pytest.skip("these kernels have no sum of dq")
    expected, one = chunks.reference().backward(), chunks.backward(deterministic=deterministic)
    ours = chunks.in_stages((0, 64, 192), deterministic=deterministic)
    for name, a, b, exact in zip(("dq", "dk", "dv"), ours, one, expected):
        errors = [(x.cpu().double() - exact).abs().max().item() for x in (a, b)]
        assert a.dtype == b.dtype and errors[0] <= 2 * errors[1] + 1e-5, (name, errors)
    if deterministic:
        assert all(map(torch.equal, ours, chunks.in_stages((0, 64, 192), deterministic=True)))


@pytest.mark.each
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("heads, head_dims", [((4, 2), (64, 64)), ((2, 1), (128, 128))])
def test_one_chunk_equals_one_call(device, family, heads, head_dims, features, is_packed):
    chunks = Chunks(device, is_packed, heads, head_dims, features)
    if not chunks.has_sum:
        pytest.skip("these kernels have no sum of dq")
    for ours, one in zip(chunks.in_stages((0,), deterministic=True), chunks.backward(deterministic=True)):
        assert torch.equal(ours, one)


def test_results_of_each_stage(device):
    """The sum is updated in place; only begin makes softmax_d, for all rows."""
    chunks = Chunks(device, True, (4, 2), (64, 64), FEATURES["causal"])
    dq_sum, dk, dv, softmax_d = chunks.backward(dq_stage="begin")
    assert dk is None and dv is None and not dq_sum.any()
    whole = chunks.backward(results=4)[3]
    torch.testing.assert_close(softmax_d, whole)
    kept = {"dq_sum": dq_sum, "softmax_d": softmax_d}
    again, dk, dv, _ = chunks.backward(dq_stage="add", **kept)
    assert again.data_ptr() == dq_sum.data_ptr() and dq_sum.any() and dk.shape == chunks.k.shape == dv.shape
    given = torch.full_like(chunks.q, 7.0)
    dq, *others = chunks.backward(dq_stage="end", dq_sum=dq_sum, grads=(given, None, None))
    assert dq.data_ptr() == given.data_ptr() and others == [None] * 3
    assert (dq.double() - chunks.backward()[0].double()).abs().max() < 1e-2


BAD = [
    ({"dq_stage": "first"}, "dq_stage: expected '', 'begin', 'add' or 'end', got 'first'"),
    ({"dq_stage": "add"}, "dq_sum: expected a tensor at dq_stage 'add', got None"),
    ({"dq_stage": "add", "dq_sum": ()}, "softmax_d: expected a tensor at dq_stage 'add'"),
    ({"dq_stage": "begin", "dq_sum": ()}, "dq_sum: expected None at dq_stage 'begin'"),
    ({"dq_sum": ()}, "dq_sum: expected None at dq_stage ''"),
    ({"dq_stage": "end", "dq_sum": "half"}, "dq_sum: expected dtype"),
    ({"dq_stage": "end", "dq_sum": "rows"}, "dq_sum: expected that of dq_stage 'begin' over the same rows"),
    ({"dq_stage": "begin", "grads": (0, None, None)}, "dq: expected None at dq_stage 'begin'"),
    ({"dq_stage": "end", "dq_sum": (), "grads": (None, 1, None)}, "dk: expected None at dq_stage 'end'"),
]


@pytest.mark.parametrize("named, message", BAD, ids=[message[:40] for _, message in BAD])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_bad_stages(device, is_packed, named, message):
    chunks = Chunks(device, is_packed, (2, 2), (64, 64), {})
    named = dict(named)
    kept = chunks.backward(dq_stage="begin")[0]
    if "dq_sum" in named:
        named["dq_sum"] = {(): kept, "half": kept.half(), "rows": kept[:-1]}[named["dq_sum"]]
    if "grads" in named:
        like = (chunks.q, chunks.k, chunks.v)
        named["grads"] = tuple(None if i is None else torch.zeros_like(like[i]) for i in named["grads"])
    with pytest.raises(RuntimeError, match=message):
        chunks.backward(**named)


def test_softmax_d_of_other_rows_raises(device):
    chunks = Chunks(device, True, (2, 2), (64, 64), {})
    dq_sum, _, _, softmax_d = chunks.backward(dq_stage="begin")
    with pytest.raises(RuntimeError, match="softmax_d: expected that of dq_stage 'begin' over the same rows"):
        chunks.backward(dq_stage="add", dq_sum=dq_sum, softmax_d=softmax_d[:, 128:].contiguous())


def test_fully_masked_rows_are_not_read(device):
    """dout is NaN in rows with an infinite LSE."""
    chunks = Chunks(device, False, (2, 2), (64, 64), {"window": (-1, 0)}, lengths=((320, 256),) * 3)
    chunks.dout[:, :64] = float("nan")
    for x in chunks.in_stages((0, 64)):
        assert x.isfinite().all()


def sequences(call):
    """(number, rows, keys) of the sequences that have both."""
    rows, keys = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    (q0, _), (k0, k1) = call.rows, call.keys
    assert len(rows) == len(keys) == len(call.origins) + 1 and keys[-1] == k1 - k0
    found = enumerate(zip(zip(rows, rows[1:]), zip(keys, keys[1:])))
    moved = [(i, (a + q0, b + q0), (c + k0, d + k0)) for i, ((a, b), (c, d)) in found]
    return [(i, own, keys) for i, own, keys in moved if own[0] < own[1] and keys[0] < keys[1]]


@pytest.mark.parametrize("lengths", [(4096,), (1000,), (1500, 3, 0, 700, 1893), (128, 640, 1280)], ids=str)
@pytest.mark.parametrize("window", [(None, 0), (600, 0), (300, 200)], ids=str)
@pytest.mark.parametrize("method", KEY_METHODS)
@pytest.mark.parametrize("exact", [False, True], ids=["any", "exact"])
def test_calls_over_all_rows_have_the_same_pairs(lengths, window, method, exact):
    """Kernels find a sequence's dq and softmax_d by its number and first row, so these are equal in all calls."""
    cu, kept = torch.tensor([0, *lengths]).cumsum(0), 0

    def calls(rank):
        plan = CpPlan.varlen(cu, group=rank, method=method, layout="zigzag", check="none")
        kind = Kind(method, window, exact), torch.device("cpu"), True
        return plan.num_tokens, plan.key_ranks.calls(*kind), plan.key_ranks.calls(*kind, keeps_dq=True)

    for num_tokens, plain, whole in LocalGroup(3).run(calls):
        if whole.all_rows is None:
            continue
        kept += 1
        starts = whole.all_rows.cu_seqlens_q.tolist()
        both = [[*(call for step in found.steps for call in step), *found.late] for found in (plain, whole)]
        assert len(both[0]) == len(both[1])
        for a, b in zip(*both):
            assert [x[1:] for x in sequences(a)] == [x[1:] for x in sequences(b)]
            assert b.rows == (0, num_tokens) and len(b.origins) == len(starts) - 1
            origins = [x.origins[[i for i, *_ in sequences(x)]] for x in (a, b)]
            assert torch.equal(*origins)
            for i, rows, _ in sequences(b):
                assert starts[i] <= rows[0] and rows[1] <= starts[i + 1] and (rows[0] - starts[i]) % 64 == 0
    assert kept or lengths != (4096,) or window != (None, 0)


CP = [
    ("ring", 3, Case(1, 768, 768, 4, 2, 64, "bfloat16", causal=True)),
    ("ring", 2, Case(2, 512, 512, 2, 1, 128, "bfloat16", causal=True)),
    ("all_gather", 3, Case(1, 768, 768, 2, 2, 128, "float16", window=(300, 0))),
    ("all_gather", 2, Case(1, 512, 512, 4, 2, 64, "bfloat16", causal=True, dropout=0.2)),
    ("ring", 2, Case(4, 0, 0, 4, 2, 64, "bfloat16", causal=True, alibi="heads", kind="packed")),
]


@pytest.mark.each
@pytest.mark.parametrize("method, ranks, shape", CP, ids=[f"{method}-{ranks}-{case.id}" for method, ranks, case in CP])
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "added"])
def test_ranks_with_and_without_the_sum(device, monkeypatch, method, ranks, shape, keeps):
    """Without a sum in the kernels, parts of dq are added."""
    used = []
    monkeypatch.setattr(sums.KernelDqSum, "add", _recorded(sums.KernelDqSum.add, used))
    if not keeps:
        monkeypatch.setattr(kernel_calls, "has_dq_sum", lambda *given: False)
    problem, weights = self_attention(shape, device, (250, 1, 150, 0, 111))
    check_result(problem, weights, run_local(problem, weights, ranks, method=method, layout="zigzag"))
    assert bool(used) == keeps


def _recorded(function, calls):
    def recorded(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return recorded


def test_backwards_of_one_plan_are_independent(device):
    """The second backward has the bits of the first one."""

    def work(rank):
        plan = CpPlan.dense(512, group=rank, method="ring")
        x = torch.randn(1, plan.num_tokens, 2, 64, dtype=torch.float16, device=device)

        def grads():
            leaves = [x.clone().requires_grad_() for _ in "qkv"]
            out = flash_attn_cp_func(*leaves, plan=plan, causal=True, deterministic=True)
            return torch.autograd.grad(out, leaves, x)

        return all(map(torch.equal, grads(), grads()))

    assert all(LocalGroup(2).run(work))


def test_explain_says_whether_there_is_a_sum(device):
    if device == "cpu":
        pytest.skip("the CPU backend always has one")
    q = torch.empty(1, 256, 8, 64, dtype=torch.float16, device=device)
    lse = torch.empty(1, 8, 256, device=device)
    rest = (None, None, None, None, 0.0, 1.0, False, -1, -1, 0.0, False, None, None)
    explain = backends.of(q).explain_bwd
    fields = explain(q, q, q, q, q, lse, *rest)
    assert fields["has_dq_sum"] == (not fields["dq_in_smem"])
    assert explain(q, q, q, q, q, lse, *rest, dq_stage="begin")["has_dq_sum"]
