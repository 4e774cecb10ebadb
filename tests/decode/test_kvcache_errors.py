"""What flash_attn_with_kvcache refuses: by an error where the host can see it, else by marking the request."""

from __future__ import annotations

import pytest
import torch
from kvcache_harness import KvCase, check_append, check_attention, make_problem, run, storage_bits

from flash_attn import flash_attn_with_kvcache
from flash_attn.limits import MAX_HEAD_DIM

pytestmark = pytest.mark.by_both_paths

CAPACITY = 96


def refused(problem, message, **overrides):
    """The call raises, and no tensor is modified."""
    before = problem.clone()
    with pytest.raises(RuntimeError, match="^" + message):
        run(problem, **overrides)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(storage_bits(getattr(problem, name)), storage_bits(getattr(before, name)))


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("page_size", (0, 16))
def test_lengths_that_the_host_sees(device, page_size):
    problem = make_problem(KvCase(seqlen_q=2, seqlen_new=2, page_size=page_size), device)
    for lengths, message in (
        ((10, CAPACITY - 1, 5, 0), r"cache_seqlens: expected cache length plus 2 new rows of at most 96, got 95 \+ 2"),
        ((10, 3, 5, 2**31 - 1), r"cache_seqlens: expected cache length plus 2 new rows of at most 96, got 2147483647"),
        ((10, 3, -2, 0), "cache_seqlens: expected lengths >= 0, or -1 for an inactive request, got -2"),
    ):
        refused(problem, message, cache_seqlens=torch.tensor(lengths, dtype=torch.int32))


@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("length", (-2, CAPACITY - 1, 10**6, 2**31))
def test_length_given_as_an_int(device, page_size, length):
    problem = make_problem(KvCase(seqlen_q=2, seqlen_new=2, page_size=page_size), device)
    message = rf"cache_seqlens: expected cache length plus 2 new rows of at most 96, got {length} \+ 2"
    refused(problem, message, cache_seqlens=length)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("entry", (-1, 10**6))
def test_table_entries_that_the_host_sees(device, entry):
    problem = make_problem(KvCase((40, 20), seqlen_new=1, page_size=16), device)
    problem.table[0, 2] = entry
    refused(problem, rf"block_table: expected entries in \[0, 15\) for the pages in use, got {entry} for sequence 0")
    problem.table[0, 2] = 0
    problem.table[1, 1] = entry
    refused(problem, "block_table: expected entries")


def marked(problem, takes_part, **overrides):
    """The call succeeds; marked requests have out 0 and LSE +inf, nothing is appended for them."""
    before = problem.clone()
    out, lse = run(problem, **overrides)
    torch.cuda.synchronize()
    check_append(problem, before, takes_part)
    check_attention(problem, out, lse, takes_part)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("page_size", (0, 16, 17))
@pytest.mark.parametrize("seqlen_new", (None, 1, 3))
@pytest.mark.parametrize("wrong", (-2, -(2**31), 1, 1000, 2**31 - 1))
def test_lengths_on_the_device(device, page_size, seqlen_new, wrong):
    """wrong > 0: that many rows beyond the capacity, as far as int32 goes."""
    problem = make_problem(KvCase((40, 96 - 3, 17, 0), seqlen_new=seqlen_new, page_size=page_size), device)
    capacity = problem.table.shape[1] * page_size if page_size else CAPACITY
    problem.lengths[1] = wrong if wrong < 0 else min(capacity - (seqlen_new or 0) + wrong, 2**31 - 1)
    for num_splits in (0, 1, 3):
        marked(problem.clone(), (True, False, True, True), num_splits=num_splits)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("entry", (-1, 10**6, 2**31 - 1))
@pytest.mark.parametrize("slot", (0, 2))
@pytest.mark.parametrize("seqlen_new", (None, 2))
def test_table_entries_on_the_device(device, entry, slot, seqlen_new):
    """A page that is read, and the page that receives the new rows."""
    problem = make_problem(KvCase((46, 46, 17), seqlen_new=seqlen_new, page_size=16, seqlen_q=2), device)
    problem.table[1, slot] = entry
    before = problem.clone()
    out, lse = run(problem)
    problem.table[1, slot] = before.table[1, slot] = 0
    check_append(problem, before, (True, False, True))
    check_attention(problem, out, lse, (True, False, True))


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("row", (-1, 6, 10**6))
def test_cache_rows_on_the_device(device, row):
    problem = make_problem(KvCase((40, 20, 17, 9), seqlen_new=1), device)
    problem.rows[2] = row
    before = problem.clone()
    out, lse = run(problem)
    check_append(problem, before, (True, True, False, True))
    check_attention(problem, out, lse, (True, True, False, True))


@pytest.mark.devices("cuda")
def test_rotary_rows_on_the_device(device):
    """Angles exist for 50 rows: a sequence that needs more is marked."""
    problem = make_problem(KvCase((40, 49, 50, 9), seqlen_new=1, rotary_dim=32, causal=True), device)
    problem.cos, problem.sin = problem.cos[:50], problem.sin[:50]
    marked(problem, (True, True, False, True))


def test_arguments_are_named(device):
    problem = make_problem(KvCase((50,) * 4, seqlen_new=1), device)
    k, cos = problem.k, torch.randn(CAPACITY, 8, device=device, dtype=problem.q.dtype)
    for message, arguments in (
        ("v: expected", {"v": None}),
        ("cache_seqlens: expected", {"cache_seqlens": None}),
        ("k: expected shape", {"k": k[:, :, :1], "v": k[:, :, :1]}),
        ("v: expected", {"v": k[:, :0]}),
        ("rotary_sin: expected", {"rotary_cos": cos}),
        ("rotary_cos: expected", {"rotary_cos": cos.float(), "rotary_sin": cos.float()}),
        ("rotary_sin: expected", {"rotary_cos": cos, "rotary_sin": cos[:5]}),
        ("rotary_cos: expected at most 32 columns", dict.fromkeys(("rotary_cos", "rotary_sin"), cos.repeat(1, 5))),
        ("k: expected", {"k": None, "v": None, "rotary_cos": cos, "rotary_sin": cos}),
        ("cache_batch_idx: expected shape", {"cache_batch_idx": problem.rows[:2]}),
        ("cache_batch_idx: expected dtype int32", {"cache_batch_idx": problem.rows.float()}),
        ("cache_batch_idx: expected None", {"block_table": problem.rows[:, None]}),
        ("block_table: expected shape", {"cache_batch_idx": None, "block_table": problem.rows[:2, None]}),
        ("cache_seqlens: expected shape", {"cache_seqlens": problem.lengths[:2]}),
        ("cache_leftpad: expected shape", {"cache_leftpad": problem.lengths[:2]}),
        ("alibi_slopes: expected", {"alibi_slopes": torch.ones(3, device=device)}),
        ("softcap: expected", {"softcap": -1.0}),
        ("num_splits: expected a value >= 0, got -1", {"num_splits": -1}),
        ("out: expected shape", {"out": problem.q[:2].clone()}),
        ("out: expected the dtype of q", {"out": problem.q.float()}),
        ("out: expected a contiguous last dimension", {"out": problem.q.transpose(2, 3).contiguous().transpose(2, 3)}),
    ):
        refused(problem, message, **arguments)


def test_tensors_are_named(device):
    problem = make_problem(KvCase((50,) * 4), device)
    q, k_cache, v_cache = problem.q, problem.k_cache, problem.v_cache
    most = MAX_HEAD_DIM
    wide = q.repeat(1, 1, 1, most // 64 + 1)
    for message, arguments in (
        ("k_cache: expected the dtype of q", {"k_cache": k_cache.half()}),
        ("v_cache: expected shape", {"v_cache": v_cache[:, 1:]}),
        ("k_cache: expected batch size 4", {}),
        ("q: expected 4 dimensions", {"q": q[0]}),
        ("k_cache: expected 4 dimensions", {"k_cache": k_cache[0]}),
        ("k_cache: expected a contiguous last dimension", {"k_cache": k_cache.transpose(2, 3)}),
        ("q: expected a head count divisible by", {"q": torch.cat([q, q[:, :, :1]], dim=2)}),
        (f"q: expected a head dim of at most {most}", dict.fromkeys(("q", "k_cache", "v_cache"), wide)),
    ):
        with pytest.raises(RuntimeError, match="^" + message):
            flash_attn_with_kvcache(**{"q": q, "k_cache": k_cache, "v_cache": v_cache, **arguments})
    for name in ("q", "k_cache", "v_cache"):
        with pytest.raises(TypeError, match=f"^{name}: expected a Tensor, got list"):
            flash_attn_with_kvcache(**{"q": q, "k_cache": k_cache, "v_cache": v_cache, name: [1]})
    with pytest.raises(TypeError, match="^cache_seqlens: expected an int or an integer tensor, got 'many'"):
        flash_attn_with_kvcache(q, k_cache[:4], v_cache[:4], cache_seqlens="many")


@pytest.mark.devices("cuda")
def test_devices_are_named(device):
    problem = make_problem(KvCase((50,) * 4, seqlen_new=1), device)
    for name, argument in (
        ("cache_seqlens", "lengths"), ("cache_batch_idx", "rows"), ("k", "k"), ("v", "v"),
    ):  # fmt: skip
        refused(problem, f"{name}: expected", **{name: getattr(problem, argument).cpu()})


def test_no_gradient_is_silently_lost(device):
    problem = make_problem(KvCase((50,) * 4), device)
    problem.q.requires_grad_()
    out, lse = run(problem)
    for result in (out, lse):
        with pytest.raises(RuntimeError, match="no autograd formula"):
            result.sum().backward()
    with pytest.raises(RuntimeError, match="^out: expected None where gradients are recorded"):
        run(problem, out=torch.empty_like(problem.q))
    with torch.no_grad():
        assert not run(problem)[0].requires_grad
