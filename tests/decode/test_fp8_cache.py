"""`flash_attn_with_kvcache` over 8-bit caches: accuracy, shapes of descales, rows quantised where they are appended.

The caches come from the harness of 16-bit ones: keys that no query may see are NaN.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fp8_cache_harness import FORMATS, SHAPES, call, check, eight_bit_problem, scale
from fp8_harness import E4M3, INT8, decode, dequantized
from kvcache_harness import KvCase, clone_view, get_rows, places, plan_for
from torch.library import opcheck

from flash_attn import eight_bit, flash_attn_with_kvcache
from flash_attn.cpu.kvcache import rotate


@pytest.mark.each
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", (0, 16))
def test_descales(device, stored, shape, page_size):
    case = KvCase(lengths=(40, 0, 91, -1), seqlen_q=3, dtype="float16", causal=True, page_size=page_size)
    problem, *descales = eight_bit_problem(case, device, stored, shape)
    check(problem, *call(problem, device, *descales), *descales)


FEATURES = (
    KvCase(dtype="bfloat16"), KvCase(seqlen_q=5, causal=True, window=(20, 0)), KvCase(softcap=2.0), KvCase(alibi=True),
    KvCase(leftpad=(3, 0, 50, 17)), KvCase(layout="heads_first"), KvCase(layout="unaligned"), KvCase(layout="sliced"),
    KvCase(head_dim=128, nheads=8, nheads_k=1), KvCase(head_dim=256), KvCase(head_dim=72, page_size=1),
    KvCase(head_dim=128, page_size=10, capacity=100), KvCase(seqlen_q=40, causal=True, page_size=32),
    KvCase(seqlen_q=3, page_size=16, sinks=True),
)  # fmt: skip


@pytest.mark.each
@pytest.mark.parametrize("kv_case", FEATURES, ids=str)
@pytest.mark.parametrize("stored", FORMATS)
def test_features(device, stored, kv_case):
    problem, *descales = eight_bit_problem(kv_case, device, stored, "token" if stored is INT8 else "batch")
    check(problem, *call(problem, device, *descales), *descales)


@pytest.mark.parametrize("stored", FORMATS)
def test_out_plan_and_splits(device, stored):
    problem, *descales = eight_bit_problem(KvCase(dtype="float16", page_size=16), device, stored, "token")
    out = torch.empty_like(problem.q)
    result, lse = call(problem, device, *descales, out=out, plan=plan_for(problem))
    assert result is out
    check(problem, out, lse, *descales)
    check(problem, *call(problem, device, *descales, num_splits=3), *descales)


def test_batch_invariant(device):
    case = KvCase(lengths=(91, 91), dtype="float16", seqlen_q=4, causal=True)
    problem, *descales = eight_bit_problem(case, device, E4M3, "token")
    out, _ = call(problem, device, *descales, batch_invariant=True)
    single = dataclasses.replace(
        problem, q=problem.q[1:, 3:], lengths=problem.lengths[1:], rows=problem.rows[1:],
        case=dataclasses.replace(case, lengths=(91,), seqlen_q=1),
    )  # fmt: skip
    assert torch.equal(call(single, device, *descales, batch_invariant=True)[0], out[1:, 3:])


@pytest.mark.parametrize("out_dtype", (None, torch.float16))
def test_8_bit_queries(device, out_dtype):
    problem, *descales = eight_bit_problem(KvCase(seqlen_q=4, causal=True), device, E4M3, "batch")
    q_descale = scale(device, len(problem.case.lengths), problem.case.nheads) * 40
    problem.q = problem.q.to(E4M3)
    out, lse = call(problem, device, *descales, q_descale=q_descale, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.bfloat16)
    check(problem, out, lse, *descales, dequantized(problem.q, q_descale), bound=3.5e-2, q_descale=q_descale)


# ---- append ----


def quantized_rows(rows, descale, stored):
    """(quantized rows, descales) of new rows (rows, heads_k, head_dim): descale None is that of each row and head."""
    if descale is None:
        descale = eight_bit.descale_of(rows, (-1,), stored)
    return eight_bit.encode(rows, descale, stored), descale


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("shape", ("none", "number", *SHAPES))
@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("rotary_dim", (0, 32))
def test_append(device, stored, shape, page_size, rotary_dim):
    """New rows are quantised bit for bit as by `flash_attn.eight_bit`, after rotary; other rows are unchanged."""
    case = KvCase(
        lengths=(40, 0, 91, -1), seqlen_q=3, seqlen_new=3, dtype="float16", causal=True, page_size=page_size,
        rotary_dim=rotary_dim,
    )  # fmt: skip
    problem, *descales = eight_bit_problem(case, device, stored, shape if shape in SHAPES else "tensor")
    if shape in ("none", "number"):
        descales = [None, None] if shape == "none" else [0.02, 0.03]
    problem.k, problem.v = problem.k * 5, problem.v * 300  # beyond the range of most descales: these saturate
    before = problem.clone()
    old = [clone_view(x) if isinstance(x, torch.Tensor) else x for x in descales]
    out, lse = call(problem, device, *descales)
    by_token, queries = shape in ("token", "inline"), problem.q.clone()
    for i, length in enumerate(case.lengths):
        if length < 0:
            continue
        new = [problem.k[i], problem.v[i]]
        if rotary_dim:
            angles = [x[length : length + 3].cpu() for x in (problem.cos, problem.sin)]
            new[0], queries[i] = (rotate(x[i].cpu(), *angles, False).to(device) for x in (problem.k, problem.q))
        for (now, then), rows, given, descale in zip(caches(problem, before), new, old, descales):
            given = None if by_token else given_of(problem, given, i, length)
            quantized, row_descales = quantized_rows(rows, given, stored)
            place = places(problem, i, length, length + 3)
            if device == "cpu" or not rotary_dim:
                assert torch.equal(now[place], quantized.view(torch.int8))
                assert not by_token or torch.equal(descale[place], row_descales.squeeze(-1))
            then[place] = now[place]
    for now, then in caches(problem, before):
        assert torch.equal(now, then)  # nothing else is written
    for now, then in zip(descales, old):
        assert by_token or now is then or torch.equal(now, then)
    check(problem, out, lse, *(1.0 if x is None else x for x in descales), queries)


def caches(*problems):
    """(k caches), (v caches) of problems, as bytes."""
    return zip(*((x.k_cache.view(torch.int8), x.v_cache.view(torch.int8)) for x in problems))


def given_of(problem, descale, i, length):
    """A given descale for the new rows of a sequence, as it broadcasts to (rows, heads_k, head_dim)."""
    if not isinstance(descale, torch.Tensor):
        return torch.tensor(1.0 if descale is None else descale, device=problem.q.device)
    if descale.dim() < 2:
        return descale[:, None] if descale.dim() else descale
    if descale.dim() == 2:
        return descale[i][:, None]
    return get_rows(problem, descale.expand(problem.k_cache.shape[:3]), i, length, length + 3)[..., None]


@pytest.mark.parametrize("shape", ("tensor", "batch", "page"))
def test_8_bit_rows_are_copied(device, shape):
    case = KvCase(lengths=(40, 0), seqlen_q=2, seqlen_new=2, dtype="float16", causal=True)
    problem, *descales = eight_bit_problem(case, device, E4M3, shape)
    problem.k, problem.v = ((x * 30).to(E4M3) for x in (problem.k, problem.v))
    out, lse = call(problem, device, *descales)
    for i, length in enumerate(case.lengths):
        for (cache,), rows in zip(caches(problem), (problem.k, problem.v)):
            assert torch.equal(cache[places(problem, i, length, length + 2)], rows[i].view(torch.int8))
    check(problem, out, lse, *descales)


@pytest.mark.parametrize("axis", ("row", "page", None))
@pytest.mark.parametrize("page_size", (0, 1, 2, 16))
def test_descales_of_rows_and_of_pages(device, page_size, axis):
    """An append writes those of rows alone. In pages of one row, where shapes are alike, the call says which."""
    case = KvCase(lengths=(40, 0, 91), seqlen_q=2, seqlen_new=2, dtype="float16", causal=True, page_size=page_size)
    for shape in ("page", "token"):
        problem, *descales = eight_bit_problem(case, device, INT8, shape)
        alike, fits = page_size == 1, axis in (None, {"page": "page", "token": "row"}[shape])
        before = [x.clone() for x in (*descales, problem.k_cache, problem.v_cache)]
        axes = {"k_descale_axis": axis, "v_descale_axis": axis}
        if not fits and not alike:
            with pytest.raises(RuntimeError, match=f"^k_descale: expected shape .* with k_descale_axis='{axis}', got"):
                call(problem, device, *descales, **axes)
        elif alike and axis is None:
            with pytest.raises(RuntimeError, match="^k_descale: expected k_descale_axis='row'"):
                call(problem, device, *descales, **axes)
        else:
            out, lse = call(problem, device, *descales, **axes)
            check(problem, out, lse, *descales)
            writes = (axis or {"page": "page", "token": "row"}[shape]) == "row"
            assert all(torch.equal(x, y) != writes for x, y in zip(descales, before))
            continue
        assert all(map(torch.equal, (*descales, problem.k_cache, problem.v_cache), before))


def test_axes_of_descales_are_checked(device):
    q, k, v = dense(device)
    ones = torch.ones(2, 9, 2, device=device)
    for name, axis, descale, message in (
        ("k", "channel", ones, "k_descale_axis: expected None, 'page' or 'row', got 'channel'"),
        ("v", 3, ones, "v_descale_axis: expected None, 'channel', 'page' or 'row', got 3"),
        ("k", "row", None, "k_descale_axis: expected None without k_descale, got 'row'"),
        ("v", "page", ones, r"v_descale: expected shape \[2, 1, 2\] with"),
    ):
        given = {f"{name}_descale_axis": axis, f"{name}_descale": descale}
        with pytest.raises(RuntimeError, match=f"^{message}"):
            decode(flash_attn_with_kvcache, device, q, k, v, cache_seqlens=4, **given)


@pytest.mark.parametrize("stored", FORMATS)
def test_one_cache_is_quantised_once(device, stored):
    """One tensor as both caches receives equal rows, if one descale quantises them."""
    q, cache, _ = dense(device, stored)
    new, descales = torch.ones_like(NEW, device=device), [torch.full((), x, device=device) for x in (0.5, 0.25)]

    def append(k, v, **options):
        return decode(flash_attn_with_kvcache, device, q, cache, cache, k, v, cache_seqlens=4, **options)

    out = append(new, new, k_descale=descales[0], v_descale=descales[0])
    assert (cache[:, 4].float() == 2).all() and torch.equal(out, torch.full_like(out, 0.2))
    for k_descale, v_descale in (descales, (descales[0], None), (None, descales[1])):
        with pytest.raises(RuntimeError, match="^v_cache: "):
            append(new, new, k_descale=k_descale, v_descale=v_descale)
    quantized = new.to(stored)
    append(quantized, quantized, k_descale=descales[0], v_descale=descales[1])
    assert (cache[:, 4].float() == 1).all()


def test_non_finite_rows(device):
    """Infinities saturate; NaN is NaN for the queries that see it: as an e4m3 value, in the descale of int8."""
    for stored in FORMATS:
        case = KvCase(lengths=(5, 5), seqlen_q=2, seqlen_new=2, dtype="float16", causal=True)
        problem, *descales = eight_bit_problem(case, device, stored, "token")
        problem.v[0, 1, 0, 3], problem.v[1, 0, 1, 2] = float("nan"), float("inf")
        out, lse = call(problem, device, *descales)
        nan = out.isnan()
        assert nan[0, 1, :2].all(-1).all() if stored is INT8 else nan[0, 1, :2, 3].all()
        assert not nan[0, :, 2:].any() and not nan[1].any() and not lse.isnan().any()
        value = get_rows(problem, problem.v_cache.view(torch.int8), 1, 5, 6)[0, 1, 2].view(torch.int8)
        assert value.item() == (127 if stored is INT8 else 0x7E)


# ---- errors, operators ----


def dense(device, stored=E4M3, batch=2):
    q = torch.zeros(batch, 1, 4, 32, device=device, dtype=torch.float16)
    k = torch.zeros(batch, 9, 2, 32, device=device).to(stored)
    return q, k, k.clone()


NEW = torch.zeros(2, 1, 2, 32, dtype=torch.float16)


@pytest.mark.parametrize("given,message", [
    ({"k": NEW.float(), "v": NEW.float()}, "k: expected dtype float16 or float8_e4m3fn, got float32"),
    ({"k": NEW, "v": NEW.float()}, "v: expected .*float16.*, got float32"),
    ({"k": NEW.to(E4M3), "v": NEW.to(E4M3), "k_descale": torch.ones(2, 9, 2)},
     "k: expected new rows of at least 16 bits with k_descale of each row, got float8_e4m3fn"),
    ({"k": NEW.to(E4M3), "v": NEW.to(E4M3), "rotary_cos": torch.ones(9, 8), "rotary_sin": torch.ones(9, 8)},
     "rotary_cos: expected None with k of 8 bits, got a tensor"),
    ({"k": NEW, "v": NEW, "k_descale": torch.ones(2, 1, 2).expand(2, 9, 2)},
     "k_descale: expected elements that do not overlap"),
    ({"k_descale": torch.ones(2, 8, 2)}, r"k_descale: expected .*\[2, 9, 2\] or \[2, 1, 2\], got \[2, 8, 2\]"),
    ({"v_descale": torch.ones(3)}, r"v_descale: expected .*, got \[3\]"),
    ({"q_descale": 2.0}, "q_descale: expected None for q of float16, got a tensor"),
    ({"out": torch.zeros(2, 1, 4, 32)}, r"out: expected the dtype of q \(float16\), got float32"),
])  # fmt: skip
def test_bad_calls_are_named(device, given, message):
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    if "do not overlap" in message:
        options["k_descale"] = torch.ones(2, 1, 2, device=device).expand(2, 9, 2)
    with pytest.raises(RuntimeError, match=f"^{message}"):
        decode(flash_attn_with_kvcache, device, *dense(device), cache_seqlens=4, **options)


@pytest.mark.devices("cuda")
def test_cuda_says_what_is_missing(device):
    q, k, v = dense(device)
    with pytest.raises(NotImplementedError, match="^v_cache: .*no kernels for 8 bits of keys alone"):
        flash_attn_with_kvcache(q.to(E4M3), k, v.half(), cache_seqlens=4)


@pytest.mark.parametrize("append", (False, True))
def test_opcheck(device, append):
    """With int8, for opcheck compares what is written by operations that float8 does not have."""
    q, k, v = dense(device, INT8)
    new = NEW.to(device) if append else None
    tokens = (torch.ones(2, 9, 2, device=device), torch.ones(2, 9, 2, device=device)) if append else (None, None)
    lengths = torch.full((2,), 4, dtype=torch.int32, device=device)
    args = (q, k, v, new, new, None, None, lengths, *[None] * 6, *tokens, 0.2, True, -1, -1, 0.0, False, 0, False)
    op = torch.ops.flash_attn_core.kvcache_append_fwd if append else torch.ops.flash_attn_core.kvcache_fwd
    args = args if append else (*args, None, None, torch.ones(2, 2, device=device))
    decode(op, device, *args)
    opcheck(op.default, args)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("shape", ("token", "expanded"))
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_append(device, stored, shape, backend):
    case = KvCase(lengths=(5, 9), seqlen_q=2, seqlen_new=2, dtype="float16", causal=True, capacity=16)
    problem, *descales = eight_bit_problem(case, device, stored, shape)
    torch._dynamo.reset()
    results = []
    for function in (flash_attn_with_kvcache, torch.compile(flash_attn_with_kvcache, backend=backend, fullgraph=True)):
        copy, (k_descale, v_descale) = problem.clone(), map(clone_view, descales)
        out = decode(
            function, device, copy.q, copy.k_cache, copy.v_cache, copy.k, copy.v, cache_seqlens=copy.lengths,
            cache_batch_idx=copy.rows, causal=True, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
        results.append((out, *(x.view(torch.int8) for x in (copy.k_cache, copy.v_cache)), k_descale, v_descale))
    for eager, compiled in zip(*results):
        assert torch.equal(eager, compiled)


def test_versions_of_what_is_written(device):
    q, k, v = dense(device)
    tokens = [torch.ones(2, 9, 2, device=device) for _ in "kv"]
    new = NEW.to(device)
    versions = [x._version for x in (k, v, *tokens)]
    decode(
        flash_attn_with_kvcache, device, q, k, v, new, new, cache_seqlens=4, k_descale=tokens[0], v_descale=tokens[1]
    )
    assert all(x._version > version for x, version in zip((k, v, *tokens), versions))
