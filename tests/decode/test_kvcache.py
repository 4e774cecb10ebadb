"""flash_attn_with_kvcache on dense caches: append, lengths, rotary, features, layouts; float64 is the reference."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, GQA_RATIOS, HEAD_DIMS
from kvcache_harness import KvCase, check_append, check_attention, check_call, make_problem, run

from flash_attn import flash_attn_with_kvcache

pytestmark = pytest.mark.by_both_paths

FEATURES = ({}, {"causal": True}, {"window": (20, 0)}, {"window": (7, 3)}, {"softcap": 4.0, "causal": True},
            {"alibi": True, "causal": True}, {"alibi": True, "softcap": 9.0, "window": (30, -1)})  # fmt: skip


@pytest.mark.each
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("seqlen_q,seqlen_new", ((1, None), (1, 1), (3, 5), (5, 3), (4, 4)))
def test_append_and_attend(device, seqlen_q, seqlen_new, features):
    check_call(KvCase(seqlen_q=seqlen_q, seqlen_new=seqlen_new, **features), device)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES["cpu"])))
def test_dtypes(device, dtype):
    if dtype not in DTYPES[device]:
        pytest.skip(f"{dtype} tensors are for the CPU")
    check_call(KvCase(seqlen_q=2, seqlen_new=2, causal=True, dtype=dtype, rotary_dim=32), device)


@pytest.mark.parametrize("head_dim", (*HEAD_DIMS, 3, 37, 100, 250, 300))
def test_head_dims(device, head_dim):
    """Those that are no multiple of 8 too, whose cache rows are not aligned.

    Narrow ones with more heads: two keys, two queries and a dozen outputs may all round well in plain attention.
    """
    nheads = 4 if head_dim >= 8 else 64
    check_call(KvCase(head_dim=head_dim, nheads=nheads, seqlen_q=2, seqlen_new=2, causal=True), device)
    check_call(KvCase(head_dim=head_dim, nheads=nheads, seqlen_q=1, window=(25, 0), softcap=5.0), device)


@pytest.mark.parametrize("layout", ("permuted", "heads_first", "sliced", "unaligned"))
@pytest.mark.parametrize("head_dim", (64, 37))
def test_cache_layouts(device, layout, head_dim):
    """The cache is used where it lies, and written there."""
    check_call(KvCase(layout=layout, head_dim=head_dim, seqlen_q=2, seqlen_new=2, causal=True, rotary_dim=16), device)
    check_call(KvCase(layout=layout, head_dim=head_dim), device)


def test_k_and_v_cache_as_halves_of_one_tensor(device):
    problem = make_problem(KvCase(seqlen_q=1, seqlen_new=1), device)
    both = torch.stack([problem.k_cache, problem.v_cache], dim=2)
    problem.k_cache, problem.v_cache = both.unbind(2)
    out, lse = run(problem)
    check_attention(problem, out, lse)
    for i, n in enumerate(problem.case.lengths):
        assert torch.equal(both[problem.rows[i], n], torch.stack([problem.k[i, 0], problem.v[i, 0]]))


@pytest.mark.parametrize("ratio", GQA_RATIOS)
@pytest.mark.parametrize("window", ((-1, -1), (33, 0)))
def test_head_ratios(device, ratio, window):
    for seqlen_q in (1, 3):
        case = KvCase(nheads=2 * ratio, nheads_k=2, window=window, seqlen_q=seqlen_q, seqlen_new=1, head_dim=32)
        check_call(case, device)


@pytest.mark.parametrize("window", ((0, 0), (0, -1), (-1, 0), (-1, 4), (4, -1), (200, 0), (3, 200), (200, 200)))
@pytest.mark.parametrize("causal", (False, True))
def test_windows(device, window, causal):
    """Also where there are more queries than keys, whose first rows see nothing."""
    check_call(KvCase(lengths=(40, 0, 3, 90), seqlen_q=6, window=window, causal=causal), device)


@pytest.mark.parametrize("seqlen_q", (64, 65, 130))
@pytest.mark.parametrize("features", ({"causal": True}, {}, {"window": (50, 10), "softcap": 8.0}), ids=str)
def test_chunks_of_a_prompt(device, seqlen_q, features):
    lengths = (0, 1, 200, 64)
    check_call(KvCase(lengths, seqlen_q, seqlen_q, capacity=333, rotary_dim=64, **features), device)


@pytest.mark.each
@pytest.mark.parametrize("length", (5000, 0, -1))
@pytest.mark.parametrize("head_dim", (64, 128, 256, 512))
@pytest.mark.parametrize("seqlen_q", (1, 5, 13))
@pytest.mark.parametrize("page_size", (0, 32))
def test_one_sequence(device, length, head_dim, seqlen_q, page_size):
    """Few tiles, of 16, 32 and 64 packed rows, with up to 79 parts each: more than the merge looks at together."""
    case = KvCase(
        (length,), seqlen_q, capacity=5024, nheads=8, head_dim=head_dim, causal=seqlen_q > 1, page_size=page_size
    )
    check_call(case, device)


@pytest.mark.parametrize("num_splits", (0, 1, 2, 3, 7, 64, 1000))
def test_splits(device, num_splits):
    """Parts without keys, sequences without keys, more parts than keys, several queries of several heads."""
    lengths = (3000, 0, -1, 1, 511)
    check_call(KvCase(lengths, capacity=3001, nheads=8, seqlen_new=1), device, num_splits=num_splits)
    case = KvCase(lengths, seqlen_q=3, capacity=3000, causal=True, window=(1500, 0), alibi=True)
    check_call(case, device, num_splits=num_splits)


@pytest.mark.parametrize("head_dim", (64, 128, 256, 512))
@pytest.mark.parametrize("num_splits", (2, 7, 40))
def test_slots_that_nobody_writes(device, num_splits, head_dim):
    """More than 32 CTAs a tile, most of which leave no partial result: NaN in the memory of the others is not read."""
    case = KvCase((5000,), capacity=5000, nheads=8, nheads_k=1, head_dim=head_dim)
    problem = make_problem(case, device)
    if device == "cuda":
        used = [torch.full((elements,), float("nan"), device=device) for elements in (1 << 24, 1 << 20, 1 << 16)]
        del used
    out, lse = run(problem, num_splits=num_splits)
    check_attention(problem, out, lse)


@pytest.mark.parametrize("seqlen_new", (None, 0, 2))
def test_lengths_zero_full_and_padding(device, seqlen_new):
    new = seqlen_new or 0
    case = KvCase((0, 96 - new, -1, 50, -1), seqlen_q=2, seqlen_new=seqlen_new, rotary_dim=32 if new else 0)
    problem, out, lse = check_call(case, device)
    assert torch.isfinite(out).all()


def test_all_requests_are_padding(device):
    check_call(KvCase((-1, -1, -1), seqlen_new=1), device)


def test_lengths_as_int_and_default(device):
    def problem():
        torch.manual_seed(3)
        return make_problem(KvCase((33,) * 4, seqlen_q=2, seqlen_new=2, causal=True), device)

    problems = [problem() for _ in range(4)]
    kinds = (33, problems[1].lengths, problems[2].lengths.long(), problems[3].lengths[None].expand(2, 4)[0])
    results = [run(p, cache_seqlens=lengths) for p, lengths in zip(problems, kinds)]
    for p, (out, lse) in zip(problems, results):
        check_attention(p, out, lse)
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    whole = make_problem(KvCase((96,) * 4), device)
    out, lse = run(whole, cache_seqlens=None)
    check_attention(whole, out, lse)
    assert torch.equal(out, run(whole, cache_seqlens=96)[0])


def test_the_batch_order_is_the_default_row(device):
    problem = make_problem(KvCase(), device)
    problem.k_cache, problem.v_cache = (x[problem.rows.long()] for x in (problem.k_cache, problem.v_cache))
    problem.rows = None
    check_attention(problem, *run(problem))


@pytest.mark.parametrize("seqlen_new", (None, 3))
def test_left_padding(device, seqlen_new):
    """More padding than cached keys leaves the new ones, or none."""
    case = KvCase(leftpad=(3, 0, 93, 17), seqlen_q=3, seqlen_new=seqlen_new, causal=True, rotary_dim=seqlen_new and 32)
    check_call(case, device)


@pytest.mark.each
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("head_dim,rotary_dim", ((64, 64), (64, 32), (64, 10), (128, 96), (37, 20), (512, 128)))
@pytest.mark.parametrize("mask", ({}, {"causal": True}, {"window": (30, 2)}), ids=str)
def test_rotary(device, interleaved, head_dim, rotary_dim, mask):
    case = KvCase(head_dim=head_dim, rotary_dim=rotary_dim, interleaved=interleaved, seqlen_q=3, seqlen_new=5, **mask)
    check_call(case, device)
    check_call(KvCase(head_dim=head_dim, rotary_dim=rotary_dim, interleaved=interleaved, seqlen_new=1, **mask), device)


def test_queries_are_not_modified(device):
    problem = make_problem(KvCase(seqlen_new=1, rotary_dim=64), device)
    arguments = [problem.q, problem.k, problem.v, problem.cos, problem.lengths, problem.rows]
    copies = [x.clone() for x in arguments]
    run(problem)
    assert all(torch.equal(a, b) for a, b in zip(arguments, copies))


def strided_tensors(x):
    """Views with the values of x: wider rows, another order of the axes, an odd start."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 5), float("nan"))[..., 3 : 3 + x.shape[-1]]
    order = x.new_empty(x.shape[1], x.shape[2], x.shape[0], x.shape[3]).permute(2, 0, 1, 3)
    odd = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    return [view.copy_(x) for view in (wide, order, odd)]


@pytest.mark.parametrize("head_dim", (64, 37))
def test_views_of_queries_and_new_keys(device, head_dim):
    case = KvCase(seqlen_q=2, seqlen_new=2, head_dim=head_dim, causal=True)
    for index in range(3):
        problem = make_problem(case, device)
        for name in ("q", "k", "v"):
            setattr(problem, name, strided_tensors(getattr(problem, name))[index])
        check_attention(problem, *run(problem))
    problem = make_problem(case, device)
    problem.q = problem.q.transpose(1, 3).contiguous().transpose(1, 3)
    check_attention(problem, *run(problem))


@pytest.mark.parametrize("head_dim", (64, 37))
def test_result_in_a_given_tensor(device, head_dim):
    problem = make_problem(KvCase((40, -1, 91, 0), seqlen_q=2, head_dim=head_dim), device)
    for out in (torch.empty_like(problem.q), *strided_tensors(torch.zeros_like(problem.q))):
        result, lse = run(problem, out=out)
        assert result is out
        check_attention(problem, out, lse)
    wide = torch.full((4, 2, 4, head_dim + 5), 7.0, device=device, dtype=problem.q.dtype)
    run(problem, out=wide[..., 3 : 3 + head_dim])
    assert (wide[..., :3] == 7).all() and (wide[..., 3 + head_dim :] == 7).all()


def test_large_scores(device):
    """Scores of about 1e4: the LSE is as large, and one key has all the weight."""
    problem = make_problem(KvCase(seqlen_q=2, seqlen_new=2, causal=True), device)
    problem.q *= 300
    before = problem.clone()
    out, lse = run(problem)
    check_append(problem, before)
    check_attention(problem, out, lse)


def test_empty_calls(device):
    def tensor(*shape):
        return torch.randn(*shape, device=device, dtype=torch.float16)

    cache = tensor(3, 8, 2, 32)
    out, lse = flash_attn_with_kvcache(tensor(3, 0, 4, 32), cache, cache, return_softmax_lse=True)
    assert out.shape == (3, 0, 4, 32) and lse.shape == (3, 4, 0)
    out = flash_attn_with_kvcache(tensor(0, 2, 4, 32), cache[:0], cache[:0], cache_seqlens=3)
    assert out.shape == (0, 2, 4, 32)
    out, lse = flash_attn_with_kvcache(tensor(3, 2, 4, 32), cache[:, :0], cache[:, :0], return_softmax_lse=True)
    assert (out == 0).all() and torch.isposinf(lse).all()
    k, v = tensor(3, 2, 2, 32), tensor(3, 2, 2, 32)
    flash_attn_with_kvcache(tensor(3, 0, 4, 32), cache, cache.clone(), k, v, cache_seqlens=1)
    assert torch.equal(cache[:, 1:3], k)


@pytest.mark.devices("cuda")
def test_many_sequences(device):
    """No hidden limit of a grid dimension."""
    q = torch.randn(70_000, 1, 1, 64, device=device, dtype=torch.bfloat16)
    cache = torch.randn(70_000, 3, 1, 64, device=device, dtype=torch.bfloat16)
    lengths = torch.full((70_000,), 3, device=device, dtype=torch.int32)
    out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths)
    scores = torch.einsum("bqhd,bkhd->bqhk", q.double(), cache.double()) / 8
    assert (out - torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1), cache.double())).abs().max() < 2e-2
    heads = q.view(1, 1, 70_000, 64)
    out_of_heads = flash_attn_with_kvcache(heads, cache.transpose(0, 2), cache.transpose(0, 2), cache_seqlens=3)
    assert (out_of_heads.view(out.shape) - out).abs().max() < 2e-2


@pytest.mark.devices("cuda")
@pytest.mark.big
def test_caches_of_more_than_2_to_the_31_elements(device):
    """Only the last keys are random, and a window reads no other: dense, and as the last pages of a pool."""
    count, heads, dim, last = 2_200_000, 8, 128, 600
    k_cache, v_cache = (torch.zeros(1, count, heads, dim, device=device, dtype=torch.bfloat16) for _ in "kv")
    for x in (k_cache, v_cache):
        x[:, -last:].normal_()
    q = torch.randn(1, 1, heads, dim, device=device, dtype=torch.bfloat16)
    small = [x[:, -last:].contiguous() for x in (k_cache, v_cache)]
    expected = flash_attn_with_kvcache(q, *small)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=count, window_size=(last - 1, 0))
    assert (out - expected).abs().max() < 1e-2
    pages = [x.view(-1, 100, heads, dim) for x in (k_cache, v_cache)]
    table = torch.arange(count // 100 - last // 100, count // 100, device=device, dtype=torch.int32)[None]
    out = flash_attn_with_kvcache(q, *pages, block_table=table, cache_seqlens=last)
    assert (out - expected).abs().max() < 1e-2
