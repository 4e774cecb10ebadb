"""NaN and infinities: they reach the rows that they belong to, in every kernel family, and no other ones."""

from __future__ import annotations

import dataclasses
import math

import kvcache_harness as kv
import pytest
import torch
from cases import Case
from harness import check_forward, make_problem, run

from flash_attn import backends, flash_attn_func, flash_attn_varlen_func

NAN, INF = math.nan, math.inf
DTYPE = "bfloat16"
FAMILIES = ("", "mma_sync", "wgmma", "wgmma:1", "wgmma:3", "split_kv")  # the first one: the plan's choice
BACKWARD_FAMILIES = ("", "mma_sync", "wgmma")
FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (90, 40)},
    "softcap": {"softcap": 15.0},
    "alibi": {"alibi": "batch", "causal": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.2},
}


@pytest.fixture
def each_family(device, monkeypatch):
    """each_family(call, families) -> the results of call() by each of them; the CPU has one."""

    def results(call, families=FAMILIES):
        for family in families if device == "cuda" else families[:1]:
            with monkeypatch.context() as patch:
                patch.setenv("FLASH_ATTN_FAMILY", family)
                torch.manual_seed(11)
                result = call()
            yield result

    return results


def check_with_nan(problem, results):
    for out, lse, dmask in results:
        check_forward(problem, out, lse, keep=dmask >= 0 if problem.case.dropout else None)


@pytest.mark.each
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("seqlen_k", (1, 7, 15, 16, 40, 700))
def test_nan_in_a_query(device, each_family, seqlen_k, features):
    """NaN in the row's out and LSE, and nowhere else: with few keys, and with keys split over thread blocks."""
    for seqlen_q, row in ((1, 0), (70, 69)):
        problem = make_problem(Case(2, seqlen_q, seqlen_k, 4, 2, 64, DTYPE, **features), device)
        clean = dataclasses.replace(problem, q=problem.q.clone())
        problem.q[1, row, 2, 5] = NAN
        both = zip(each_family(lambda problem=problem: run(problem)), each_family(lambda clean=clean: run(clean)))
        for (out, lse, _), (clean_out, clean_lse, dmask) in both:
            assert out[1, row, 2].isnan().all() and lse[1, 2, row].isnan()
            out[1, row, 2], lse[1, 2, row] = clean_out[1, row, 2], clean_lse[1, 2, row]
            check_forward(clean, out, lse, keep=dmask >= 0 if problem.case.dropout else None)


@pytest.mark.parametrize("dtype", ("float16", DTYPE))
@pytest.mark.parametrize("head_dim", (32, 128, 256))
def test_nan_in_all_queries_of_a_head(device, each_family, head_dim, dtype):
    problem = make_problem(Case(1, 100, 900, 4, 2, head_dim, dtype, causal=True), device)
    problem.q[:, :, 1] = NAN
    check_with_nan(problem, each_family(lambda: run(problem)))


@pytest.mark.parametrize("page_size", (0, 16))
def test_nan_in_a_packed_query(device, each_family, page_size):
    lengths = [(70, 300), (1, 900), (3, 5), (33, 0), (0, 10)]
    case = Case(len(lengths), 0, 0, 4, 2, 64, DTYPE, kind="packed", page_size=page_size, causal=True)
    problem = make_problem(case, device, lengths)
    problem.q[[5, 70, 72], 3] = NAN
    check_with_nan(problem, each_family(lambda: run(problem)))


CACHES = (
    kv.KvCase(),
    kv.KvCase(lengths=(700, 9, 0), capacity=800, seqlen_q=5, causal=True),
    kv.KvCase(lengths=(700, 90), capacity=800, page_size=16, seqlen_new=2, seqlen_q=2),
    kv.KvCase(lengths=(700, 90), capacity=800, seqlen_q=60, causal=True),
)


@pytest.mark.parametrize("options", ({}, {"num_splits": 1}, {"num_splits": 3}, {"batch_invariant": True}), ids=str)
@pytest.mark.parametrize("kv_case", CACHES, ids=str)
def test_nan_in_a_query_of_a_cache(device, kv_case, options):
    problem = kv.make_problem(kv_case, device)
    problem.q[0, -1, 1, 3] = NAN
    out, lse = kv.run(problem, **options)
    assert out[0, -1, 1].isnan().all() and lse[0, 1, -1].isnan()
    kv.check_attention(problem, out, lse)


@pytest.mark.parametrize("seqlen_k", (3, 20, 700))
@pytest.mark.parametrize("features", ({}, {"causal": True}, {"dropout": 0.2}, {"sinks": True}), ids=str)
def test_nan_in_a_key(device, each_family, seqlen_k, features):
    """Every row that sees it is NaN."""
    problem = make_problem(Case(1, 3, seqlen_k, 2, 2, 64, DTYPE, **features), device)
    problem.k[0, seqlen_k - 2, 1, 7] = NAN
    for out, lse, _ in each_family(lambda: run(problem)):
        sees = torch.tensor([not features.get("causal"), True, True])
        assert out[0, sees, 1].isnan().all() and lse[0, 1, sees.to(device)].isnan().all()
        assert out[0, ~sees].isfinite().all() and out[0, :, 0].isfinite().all()
        assert lse[0, :, ~sees.to(device)].isfinite().all() and lse[0, 0].isfinite().all()


@pytest.mark.parametrize("first", (INF, 1.0, -1.0))
@pytest.mark.parametrize("seqlen_k", (5, 40, 700))
def test_a_score_of_plus_infinity(device, each_family, seqlen_k, first):
    """As in torch.softmax, NaN: all scores, or one among others that are -inf or finite."""
    problem = make_problem(Case(1, 3, seqlen_k, 2, 2, 64, DTYPE), device)
    problem.q[..., 0], problem.k[..., 0] = 0.0, first if first < INF else 1.0
    problem.k[0, seqlen_k // 2, 1, 0] = 1.0
    problem.q[0, 1, 1, 0] = INF
    for out, lse, _ in each_family(lambda: run(problem)):
        assert out[0, 1, 1].isnan().all() and lse[0, 1, 1].isnan()
        assert out[0, 0].isfinite().all() and lse[0, 0].isfinite().all()


@pytest.mark.parametrize("name", [name for name in FEATURES if name != "softcap"])  # which leaves no score infinite
@pytest.mark.parametrize("hidden", ((0, 20), (0, 600), (300, 700), (0, 700)), ids=str)
def test_a_score_of_minus_infinity_hides_its_key(device, each_family, hidden, name):
    """Rows all whose scores are -inf see no key, however many key blocks that takes."""
    problem = make_problem(Case(1, 70, 700, 4, 2, 64, DTYPE, **FEATURES[name]), device)
    problem.q[..., 0], problem.k[..., 0] = 1.0, 0.0
    far = dataclasses.replace(problem, k=problem.k.clone())
    problem.k[:, slice(*hidden), :, 0], far.k[:, slice(*hidden), :, 0] = -INF, -1e30
    for out, lse, dmask in each_family(lambda: run(problem)):
        keep = dmask >= 0 if problem.case.dropout else None
        if hidden == (0, 700):
            sink = problem.sinks[None, :, None] if problem.sinks is not None else torch.tensor(INF, device=device)
            assert (out == 0).all() and torch.allclose(lse, sink.expand_as(lse))
        elif problem.case.causal or problem.case.window != (-1, -1):
            seen = lse.isfinite()
            assert not out.isnan().any() and (lse[~seen] == INF).all()
        else:
            check_forward(far, out, lse, keep=keep)


@pytest.mark.parametrize("options", ({}, {"num_splits": 3}, {"batch_invariant": True}), ids=str)
@pytest.mark.parametrize("seqlen_q", (1, 40))
def test_a_score_of_minus_infinity_in_a_cache(device, seqlen_q, options):
    problem = kv.make_problem(kv.KvCase(lengths=(700, 90), capacity=800, page_size=16, seqlen_q=seqlen_q), device)
    problem.q[..., 0] = 1.0
    far = problem.clone()
    for x, value in ((problem, -INF), (far, -1e30)):
        x.k_cache[..., 0] = 0.0
        for i, hidden in enumerate((slice(0, 500), slice(0, 90))):
            x.k_cache[(*kv.places(x, i, hidden.start, hidden.stop), ..., 0)] = value
    out, lse = kv.run(problem, **options)
    kv.check_attention(far, out, lse, takes_part=(True, False))  # the second one sees no key


@pytest.mark.parametrize("row", (0, 99))
@pytest.mark.parametrize("value", (NAN, INF))
def test_max_logit(device, each_family, row, value):
    """NaN in the head that has NaN or +inf among its logits; rows and keys that do not count are not looked at."""
    problem = make_problem(Case(2, 100, 300, 4, 2, 64, DTYPE, causal=True), device)
    problem.q[1, row, 2, 0], problem.k[..., 0] = value, problem.k[..., 0].abs() + 1
    for *_, max_logit in each_family(lambda: run(problem, return_max_logit=True)):
        assert max_logit.isnan().tolist() == [False, False, True, False]
    lengths = [(10, 40), (70, 90)]
    problem = make_problem(Case(2, 0, 0, 2, 2, 64, DTYPE, kind="padded"), device, lengths)
    for *_, max_logit in each_family(lambda: run(problem, return_max_logit=True)):
        assert problem.q.isnan().any() and problem.k.isnan().any() and max_logit.isfinite().all()


UNSEEN = (
    Case(2, 3, 700, 4, 2, 64, DTYPE, window=(50, 0)),
    Case(2, 100, 700, 4, 2, 64, DTYPE, window=(70, 20)),
    Case(1, 150, 900, 2, 1, 128, "float16", causal=True, window=(130, -1), softcap=20.0),
    Case(1, 70, 600, 2, 2, 256, DTYPE, causal=True, window=(33, -1), alibi="heads"),
    Case(1, 90, 600, 2, 2, 96, DTYPE, window=(200, -1), dropout=0.3),
    Case(1, 20, 60, 2, 2, 32, DTYPE, window=(9, -1), sinks=True),
    Case(4, 60, 500, 4, 2, 128, DTYPE, kind="packed", window=(40, 0)),
    Case(4, 100, 300, 4, 2, 64, DTYPE, kind="leftpad", window=(31, 7), dropout=0.2),
)


@pytest.mark.each
@pytest.mark.parametrize("page_size", (0, 1, 7, 16, 64, 256))
@pytest.mark.parametrize("unseen_case", UNSEEN, ids=lambda case: case.id)
def test_keys_that_no_query_sees(device, each_family, unseen_case, page_size):
    """Behind a window, in blocks that are partly seen: NaN in K and V changes nothing."""
    if page_size and unseen_case.kind == "dense":
        unseen_case = dataclasses.replace(unseen_case, kind="packed")
    problem = make_problem(dataclasses.replace(unseen_case, page_size=page_size), device)
    clean = dataclasses.replace(problem, k=problem.k.clone(), v=problem.v.clone())
    assert poison_unseen(problem) > 0
    for out, lse, dmask in each_family(lambda: run(problem)):
        check_forward(clean, out, lse, keep=dmask >= 0 if problem.case.dropout else None)


def poison_unseen(problem) -> int:
    """Makes K and V NaN where no query of the sequence sees them; returns the number of keys."""
    case, layout, count = problem.case, problem.layout, 0
    lengths = [(case.seqlen_q, case.seqlen_k)] * case.batch
    if layout is not None:
        lengths = list(zip(layout.lens_q, layout.lens_k))
    for i, (seqlen_q, seqlen_k) in enumerate(lengths):
        unseen = max(min(seqlen_k - seqlen_q - case.window[0], seqlen_k), 0)
        count += unseen
        for x in (problem.k, problem.v):
            if layout is None:
                x[i, :unseen] = NAN
                continue
            rows = torch.arange(layout.starts_k[i], layout.starts_k[i] + unseen, device=x.device)
            if problem.block_table is None:
                x[rows] = NAN
            else:
                x[problem.block_table[i].long()[rows // case.page_size], rows % case.page_size] = NAN
    return count


@pytest.mark.parametrize("page_size", (0, 1, 7, 16, 64, 256))
@pytest.mark.parametrize("seqlen_q", (1, 4, 40))
@pytest.mark.parametrize("new", (None, 1, 6))
@pytest.mark.parametrize("features", ({}, {"head_dim": 128, "causal": True}, {"softcap": 20.0, "leftpad": (3, 0, 11)}),
                         ids=str)  # fmt: skip
def test_cache_rows_that_no_query_sees(device, page_size, seqlen_q, new, features):
    """Pages before a sliding window are freed and used again. One token, several, chunks of prompts, with appends."""
    window = (21, 0) if seqlen_q > 1 else (37, -1)
    case = kv.KvCase(lengths=(700, 150, 90), capacity=1000, page_size=page_size, seqlen_q=seqlen_q, seqlen_new=new,
                     window=window, **features)  # fmt: skip
    problem = kv.make_problem(case, device)
    whole = problem.clone()
    for options in ({}, {"num_splits": 3}, {"batch_invariant": True}):
        for i, n in enumerate(case.lengths):
            first = case.leftpad[i] if case.leftpad else 0
            seen = n + case.new - seqlen_q - window[0]
            for cache in (problem.k_cache, problem.v_cache):
                shape = (max(min(seen, n) - first, 0), *cache.shape[2:])
                kv.put_rows(problem, cache, i, first, cache.new_full(shape, NAN))
        out, lse = kv.run(problem, **options)
        kv.run(whole)  # extends its cache
        kv.check_attention(whole, out, lse)


GRADIENT_CASES = (
    Case(2, 200, 90, 4, 2, 64, DTYPE, causal=True),
    Case(1, 300, 140, 4, 2, 128, DTYPE, causal=True),
    Case(2, 150, 70, 2, 2, 32, "float16", window=(-1, 20)),
    Case(1, 180, 100, 2, 1, 256, DTYPE, causal=True),
    Case(1, 180, 100, 2, 2, 96, DTYPE, causal=True, softcap=10.0, alibi="heads"),
    Case(1, 180, 100, 2, 2, 192, DTYPE, causal=True, dropout=0.2),
    Case(2, 180, 100, 4, 2, 64, DTYPE, causal=True, sinks=True),
    Case(4, 180, 100, 4, 2, 128, DTYPE, causal=True, kind="padded"),
    Case(4, 90, 300, 4, 2, 64, DTYPE, causal=True, kind="packed", window=(30, -1), sinks=True),
)


@pytest.mark.parametrize("gradient_case", GRADIENT_CASES, ids=lambda case: case.id)
def test_gradients_of_what_takes_no_part(device, each_family, gradient_case):
    """NaN in q and dout of rows without keys, and in keys that no query sees, reaches no gradient but is 0 there."""
    clean = make_problem(gradient_case, device)
    problem = dataclasses.replace(clean, q=clean.q.clone(), k=clean.k.clone(), v=clean.v.clone())
    if gradient_case.window[0] >= 0:
        assert poison_unseen(problem) > 0
    dout = torch.randn(*clean.q.shape[:-1], clean.v.shape[-1], device=device, dtype=clean.v.dtype)
    poisoned = dout.clone()
    keyless = run(clean)[1].isinf().movedim(-2, -1) if clean.sinks is None else keyless_rows(clean)
    problem.q[keyless], poisoned[keyless] = NAN, NAN
    wanted = list(each_family(lambda: gradients(clean, dout), BACKWARD_FAMILIES))
    for grads, clean_grads in zip(each_family(lambda: gradients(problem, poisoned), BACKWARD_FAMILIES), wanted):
        for grad, wanted_grad in zip(grads, clean_grads):
            torch.testing.assert_close(grad, wanted_grad, atol=2e-2, rtol=2e-2)
    assert keyless.any() or gradient_case.window[0] >= 0


def keyless_rows(problem) -> torch.Tensor:
    return run(dataclasses.replace(problem, sinks=None))[1].isinf().movedim(-2, -1)


def gradients(problem, dout):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in problem.inputs.items()}
    torch.manual_seed(5)
    out = run(dataclasses.replace(problem, **leaves))[0]
    return torch.autograd.grad(out, list(leaves.values()), dout)


@pytest.mark.parametrize("head_dim", (32, 64, 128, 256))
@pytest.mark.parametrize("features", ({}, {"softcap": 8.0}, {"dropout": 0.2}), ids=str)
def test_an_lse_of_either_infinity_says_no_keys(device, each_family, head_dim, features):
    """Of rows that see keys too, as merges of several calls have it."""
    q, k, v = (torch.randn(2, 150, 2, head_dim, device=device, dtype=torch.bfloat16) for _ in "qkv")
    dropout, softcap = features.get("dropout", 0.0), features.get("softcap", 0.0)
    backend = backends.get(device)
    head = (None, dropout, 0.2, True, -1, -1, softcap)

    def grads(sign):
        out, lse, _, state = backend.fwd(q, k, v, None, *head, False, None)
        out[:, 40:60], lse[:, :, 40:60] = 0, sign * INF
        return backend.bwd(torch.ones_like(out), q, k, v, out, lse, None, None, None, *head, True, None, state)[:3]

    plus, minus = (list(each_family(lambda sign=sign: grads(sign), BACKWARD_FAMILIES)) for sign in (1, -1))
    for with_plus, with_minus in zip(plus, minus):
        assert (with_minus[0][:, 40:60] == 0).all()
        for a, b in zip(with_plus, with_minus):
            assert b.isfinite().all()
            torch.testing.assert_close(a, b)


def test_public_functions_agree_on_rows_without_keys(device):
    """Dense and packed: out 0 and LSE +inf, whatever their queries hold."""
    q, k, v = (torch.randn(n, 2, 64, device=device, dtype=torch.bfloat16) for n in (90, 50, 50))
    q[:40] = NAN
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (90, 50))
    dense = flash_attn_func(q[None], k[None], v[None], causal=True, return_attn_probs=True)
    packed = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 90, 50, causal=True, return_attn_probs=True)
    for out, lse in ((dense[0][0], dense[1][0]), packed[:2]):
        assert (out[:40] == 0).all() and (lse[:, :40] == INF).all()
        assert out[40:].isfinite().all() and lse[:, 40:].isfinite().all()
