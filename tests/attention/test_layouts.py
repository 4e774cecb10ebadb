"""Where tensors lie in memory: strides, alignment, views, out=, int64 offsets, large grids."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from harness import backend_forward, backend_varlen_forward, check_forward, check_public_call, make_problem, run
from public_calls import CALLS, Inputs
from reference import assert_accurate, attention
from torch.utils._pytree import tree_leaves

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = pytest.mark.by_both_paths

DTYPE = torch.bfloat16
NAN = float("nan")


def in_nan_buffer(x, pad=8, offset=0):
    """A view with the values of x inside a NaN-filled buffer; offset in elements shifts the alignment."""
    size = [n + 2 for n in x.shape[:-1]] + [x.shape[-1] + pad]
    buffer = torch.full((torch.Size(size).numel() + offset,), NAN, device=x.device, dtype=x.dtype)
    view = buffer[offset:].view(size)[tuple(slice(1, n + 1) for n in x.shape[:-1]) + (slice(0, x.shape[-1]),)]
    view.copy_(x)
    return view


def transposed(x):
    """Stored (batch, heads, rows, dim)."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


LAYOUTS = {
    "nan_buffer": in_nan_buffer,
    "odd_row_pitch": lambda x: in_nan_buffer(x, pad=3),
    "unaligned": lambda x: in_nan_buffer(x, pad=8, offset=1),
    "unaligned_by_8_bytes": lambda x: in_nan_buffer(x, pad=8, offset=4),
    "heads_first": transposed,
    "batch_innermost": lambda x: x.movedim(0, -2).contiguous().movedim(-2, 0),
    "strided_head_dim": lambda x: torch.stack([x, torch.full_like(x, NAN)], dim=-1)[..., 0],
}


@pytest.mark.each
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", (64, 40, 37))
@pytest.mark.parametrize("features", ("plain", "all"))
def test_views_equal_contiguous_tensors_bitwise(device, layout, head_dim, features):
    """xformers demands a bitwise equal forward for views inside NaN-filled buffers."""
    options = {} if features == "plain" else {"causal": True, "window": (50, -1), "softcap": 20.0, "alibi": "heads"}
    problem = make_problem(Case(2, 90, 140, 4, 2, head_dim, "bfloat16", **options), device)
    out, lse, _ = run(problem)
    for names in (("q",), ("k",), ("v",), ("q", "k", "v")):
        originals = {name: getattr(problem, name) for name in names}
        for name, x in originals.items():
            setattr(problem, name, LAYOUTS[layout](x))
        other_out, other_lse, _ = run(problem)
        assert torch.equal(out, other_out) and torch.equal(lse, other_lse), names
        for name, x in originals.items():
            setattr(problem, name, x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_concatenated_sequences(device, layout):
    problem = make_problem(Case(4, 90, 140, 4, 2, 64, "bfloat16", causal=True, kind="packed"), device)
    out, lse, _ = run(problem)
    problem.q, problem.k, problem.v = (LAYOUTS[layout](x) for x in (problem.q, problem.k, problem.v))
    other_out, other_lse, _ = run(problem)
    assert torch.equal(out, other_out) and torch.equal(lse, other_lse)


@pytest.mark.parametrize("page_size", (1, 16))
@pytest.mark.parametrize("layout", ("nan_buffer", "unaligned", "odd_row_pitch", "heads_first"))
def test_views_of_pages(device, layout, page_size):
    problem = make_problem(Case(4, 30, 140, 4, 2, 64, "bfloat16", kind="packed", page_size=page_size), device)
    out, lse, _ = run(problem)
    problem.k, problem.v = LAYOUTS[layout](problem.k), LAYOUTS[layout](problem.v)
    other_out, other_lse, _ = run(problem)
    assert torch.equal(out, other_out) and torch.equal(lse, other_lse)


def test_expanded_inputs(device):
    """Stride 0 over batch, heads or rows."""
    x = torch.randn(1, 100, 1, 64, device=device, dtype=DTYPE)
    q, k, v = x.expand(3, 100, 4, 64), x.expand(3, 100, 2, 64), x[:, :1].expand(3, 100, 2, 64)
    out = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out, flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous(), causal=True))


def test_slices_of_a_fused_projection(device):
    """q, k, v as slices of one (b, s, (h + 2 h_k) d) tensor with 3 d extra columns."""
    fused = torch.randn(2, 130, (4 + 2 + 2 + 3) * 64, device=device, dtype=DTYPE)
    q, k, v = (fused[..., a * 64 : b * 64].unflatten(-1, (-1, 64)) for a, b in ((0, 4), (4, 6), (6, 8)))
    out = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out, flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous(), causal=True))


def test_axes_of_size_one_may_have_any_stride(device):
    problem = make_problem(Case(1, 1, 130, 1, 1, 64, "bfloat16"), device)
    out = run(problem)[0]
    problem.q = problem.q.as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    problem.k = problem.k.as_strided(problem.k.shape, (3, 64, 5, 1))
    assert torch.equal(out, run(problem)[0])


def test_inputs_are_never_modified(device):
    for kind, page_size in (("dense", 0), ("leftpad", 0), ("packed", 7)):
        case = Case(4, 70, 90, 4, 2, 64, "bfloat16", True, softcap=10.0, alibi="batch", dropout=0.2, kind=kind,
                    page_size=page_size)  # fmt: skip
        problem = make_problem(case, device)
        problem.q, problem.k, problem.v = (x.nan_to_num() for x in (problem.q, problem.k, problem.v))
        tensors = {name: x for name, x in vars(problem).items() if isinstance(x, torch.Tensor)}
        copies = {name: x.clone() for name, x in tensors.items()}
        versions = {name: x._version for name, x in tensors.items()}
        run(problem)
        assert all(torch.equal(x, copies[name]) for name, x in tensors.items())
        assert all(x._version == versions[name] for name, x in tensors.items())


@pytest.mark.parametrize("layout", ("contiguous", "heads_first", "nan_buffer", "unaligned", "odd_row_pitch"))
@pytest.mark.parametrize("kind", ("dense", "packed"))
def test_given_out_is_written_completely(device, layout, kind):
    """out= with any strides, poisoned with NaN; nothing outside it is touched."""
    problem = make_problem(Case(4, 130, 70, 4, 2, 64, "bfloat16", causal=True, kind=kind), device)
    forward = backend_varlen_forward if kind == "packed" else lambda p, out=None: backend_forward(
        p.q, p.k, p.v, out, causal=True
    )  # fmt: skip
    expected_out, expected_lse = forward(problem)[:2]
    poison = torch.full_like(problem.q, NAN)
    out = poison if layout == "contiguous" else LAYOUTS[layout](poison)
    around = None
    if out._base is not None and layout != "heads_first":
        around = out._base.clone()
    result, lse = forward(problem, out=out)[:2]
    assert result.data_ptr() == out.data_ptr() and result.stride() == out.stride()
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)
    if around is not None:
        written = out.numel()
        assert out._base.isnan().sum() == around.numel() - written, "elements outside the view were written"


def test_outputs_are_contiguous(device):
    for head_dim in (64, 40, 37):
        problem = make_problem(Case(2, 50, 60, 4, 2, head_dim, "bfloat16"), device)
        problem.q = transposed(problem.q)
        out, lse, _ = run(problem)
        assert out.is_contiguous() and lse.is_contiguous()


@pytest.mark.parametrize("shape", [(0, 5, 2), (2, 0, 2), (0, 0, 2)], ids=str)
def test_empty_tensors(device, shape):
    batch, seqlen_q, heads = shape
    for seqlen_k in (0, 7):
        for dropout in (0.0, 0.5):
            case = Case(batch, seqlen_q, seqlen_k, heads, 1, 64, "bfloat16", dropout=dropout, causal=True)
            out, lse, _ = run(make_problem(case, device))
            assert out.shape == (batch, seqlen_q, heads, 64) and lse.shape == (batch, heads, seqlen_q)


def test_no_heads(device):
    q = torch.randn(2, 5, 0, 64, device=device, dtype=DTYPE)
    out, lse, _ = flash_attn_func(q, q, q, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (2, 0, 5)


def test_nan_in_a_query_stays_in_its_row(device):
    """The rows of a warp raise their maxima together: the others may round differently."""
    problem = make_problem(Case(2, 130, 140, 4, 2, 64, "bfloat16", causal=True), device)
    out, lse, _ = run(problem)
    row = problem.q[0, 70, 1].clone()
    problem.q[0, 70, 1] = NAN
    other, other_lse, _ = run(problem)
    assert other[0, 70, 1].isnan().all()
    problem.q[0, 70, 1] = row
    other[0, 70, 1], other_lse[0, 1, 70] = out[0, 70, 1], lse[0, 1, 70]
    check_forward(problem, other, other_lse)


def test_nan_in_a_key_reaches_only_the_rows_that_see_it(device):
    problem = make_problem(Case(1, 200, 200, 2, 2, 64, "bfloat16", causal=True, alibi="heads"), device)
    out = run(problem)[0]
    problem.k[0, 90] = NAN
    other = run(problem)[0]
    assert torch.equal(out[:, :90], other[:, :90]) and other[:, 90:].isnan().all()


def test_infinite_values_are_kept(device):
    """An infinite V element gives an infinite output where it counts."""
    problem = make_problem(Case(1, 20, 30, 2, 2, 64, "bfloat16"), device)
    problem.v[0, 3, 0, 5] = float("inf")
    out = run(problem)[0]
    assert torch.isposinf(out[0, :, 0, 5]).all() and torch.isfinite(out[:, :, 1]).all()


@pytest.mark.parametrize("kind", ("dense", "packed"))
@pytest.mark.parametrize("dropout", (0.0, 0.3))
def test_repeats_bitwise(device, kind, dropout):
    problem = make_problem(Case(4, 200, 300, 4, 2, 64, "bfloat16", causal=True, kind=kind, dropout=dropout), device)
    results = []
    for _ in range(4):
        torch.manual_seed(2)
        results.append(run(problem))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_batch_entries_do_not_depend_on_each_other(device):
    """Batch-composition bit equality of the dense call, also for the last rows of a larger batch."""
    case = Case(5, 140, 90, 4, 2, 64, "bfloat16", window=(60, 10), softcap=10.0)
    problem = make_problem(case, device)
    out = run(problem)[0]
    for i in (0, 4):
        alone = flash_attn_func(problem.q[i : i + 1], problem.k[i : i + 1], problem.v[i : i + 1],
                                window_size=(60, 10), softcap=10.0)  # fmt: skip
        assert torch.equal(out[i], alone[0])


@pytest.mark.parametrize("batch,heads", [(70000, 1), (1, 70000), (300, 300)])
def test_no_grid_limit_on_batch_or_heads(device, batch, heads):
    case = Case(batch, 2, 3, heads, 1 if heads > 1 else heads, 8, "float16", causal=True)
    check_public_call(make_problem(case, device))


def test_no_grid_limit_on_sequences(device):
    """70000 sequences of one row and one key each: out is v."""
    total = 70000
    q, k, v = (torch.randn(total, 1, 8, device=device, dtype=DTYPE) for _ in "qkv")
    if device == "cpu":
        total = 3000
        q, k, v = (x[:total] for x in (q, k, v))
    cu = torch.arange(total + 1, device=device, dtype=torch.int32)
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu, cu, 1, 1, return_attn_probs=True)
    assert torch.equal(out, v)
    reference = (q.double() * k.double()).sum(-1).T * 8**-0.5
    torch.testing.assert_close(lse.double(), reference, atol=1e-5, rtol=1e-5)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("window", [(-1, -1), (300, 0)], ids=str)
def test_a_million_keys_and_queries(device, window):
    """seqlen 2^20 + 5: a few rows against the reference; the first, the last, and rows in between."""
    n = 2**20 + 5
    q, k, v = (torch.randn(1, n, 1, 32, device=device, dtype=DTYPE) for _ in "qkv")
    if window == (-1, -1):
        q = q[:, -300:]
    out, lse, _ = flash_attn_func(q, k, v, causal=True, window_size=window, return_attn_probs=True)
    rows = q.shape[1]
    for first in {0, rows // 2, rows - 100}:
        last = min(first + 100, rows)
        end = n - rows + last
        begin = 0 if window[0] < 0 else max(0, end - 100 - window[0] - 50)
        part = [q[:, first:last], k[:, begin:end], v[:, begin:end]]
        options = {"causal": True, "window": window}
        reference, plain = attention(*part, **options), attention(*part, **options, dtype=DTYPE)
        assert_accurate(out[:, first:last], reference.out, plain.out)
        assert_accurate(lse[:, :, first:last], reference.lse, plain.lse, "lse")


@pytest.mark.devices("cuda")
@pytest.mark.big
@pytest.mark.parametrize("which", ("q", "kv", "pages", "varlen"))
def test_more_than_2_31_elements(device, which):
    """int64 offsets: the last batch entry, page or sequence lies beyond 2^31 elements."""
    rows, heads, dim = 2**15 + 3, 4, 256
    batch = 2**31 // (rows * heads * dim) + 2
    shape = (batch, rows, heads, dim)

    def large():
        x = torch.zeros(shape, device=device, dtype=DTYPE)
        x[-1].normal_()
        assert x.numel() > 2**31
        return x

    small_kv = torch.randn(1, 40, 1, dim, device=device, dtype=DTYPE)
    if which == "q":
        q = large()
        out, lse, _ = flash_attn_func(q, *(small_kv.expand(batch, -1, -1, -1),) * 2, return_attn_probs=True)
        parts, got, got_lse = (q[-1:, -64:], small_kv, small_kv), out[-1:, -64:], lse[-1:, :, -64:]
    else:
        k = large()
        q = torch.randn(batch, 3, heads, dim, device=device, dtype=DTYPE)
        parts = (q[-1:], k[-1:], k[-1:])
        if which == "kv":
            out, lse, _ = flash_attn_func(q, k, k, return_attn_probs=True)
            got, got_lse = out[-1:], lse[-1:]
        else:
            cu = torch.tensor([0, 3], device=device, dtype=torch.int32)
            if which == "pages":
                cu_k = torch.tensor([0, rows], device=device, dtype=torch.int32)
                table = torch.tensor([[batch - 1]], device=device, dtype=torch.int32)
                out, lse, _ = flash_attn_varlen_func(q[-1], k, k, cu, cu_k, 3, rows, block_table=table,
                                                     return_attn_probs=True)  # fmt: skip
            else:
                k = k.flatten(0, 1)
                cu_k = torch.tensor([0, len(k) - rows, len(k)], device=device, dtype=torch.int32)
                cu = torch.tensor([0, 0, 3], device=device, dtype=torch.int32)
                out, lse, _ = flash_attn_varlen_func(q[-1], k, k, cu, cu_k, 3, len(k), return_attn_probs=True)
            got, got_lse = out[None], lse[None]
    reference, plain = attention(*parts), attention(*parts, dtype=DTYPE)
    assert_accurate(got, reference.out, plain.out)
    assert_accurate(got_lse, reference.lse, plain.lse, "lse")


@pytest.mark.devices("cuda")
@pytest.mark.big
def test_large_dense_problem_in_one_go(device):
    problem = make_problem(Case(1, 16384, 16384, 1, 1, 64, "bfloat16", causal=True), device)
    out, lse, _ = run(problem)
    check_forward(problem, out, lse)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("none", ("batch", "rows"))
def test_strides_of_tensors_without_elements_do_not_matter(device, name, none):
    """Those that is_contiguous() calls contiguous whatever they are, a last stride of 2 among them."""
    results = []
    for spread in (False, True):
        torch.manual_seed(3)
        results.append(tree_leaves(CALLS[name](Inputs(device, spread=spread, **{none: 0}))))
    assert len(results[0]) == len(results[1])
    for ours, expected in zip(*results):
        if isinstance(ours, torch.Tensor):
            torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
        else:
            assert ours == expected


def test_strides_of_no_keys_do_not_matter(device):
    """Queries over none: out 0 and gradients 0, as over contiguous ones."""
    q = torch.randn(2, 5, 4, 32, device=device, dtype=DTYPE, requires_grad=True)
    rows = q.detach().flatten(0, 1).requires_grad_()
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 5, 10], [0, 0, 0]))
    k, v = (torch.empty(2, 0, 2, 64, device=device, dtype=DTYPE)[..., ::2].requires_grad_() for _ in "kv")
    packed_k, packed_v = (x.detach()[0].requires_grad_() for x in (k, v))
    for out, inputs in (
        (flash_attn_func(q, k, v), (q, k, v)),
        (flash_attn_varlen_func(rows, packed_k, packed_v, cu_q, cu_k, 5, 0), (rows, packed_k, packed_v)),
    ):
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
        assert not out.any() and not grads[0].any() and [x.shape for x in grads] == [x.shape for x in inputs]
    assert not flash_attn_with_kvcache(q.detach(), k.detach(), v.detach(), causal=True).any()
