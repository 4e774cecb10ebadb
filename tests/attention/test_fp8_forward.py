"""The forward of e4m3 q, k and v by kernels of 8 bits: masks, lengths, packed sequences, heads, descales, unused rows.

tests/attention/test_fp8.py has the inputs on which formats and orders of keys go wrong.
"""

from __future__ import annotations

import pytest
import torch
from fp8_harness import (
    E4M3,
    MEAN,
    NAN_CODE,
    PEAKED,
    PLAIN,
    PRODUCT_BITS,
    PRODUCTS,
    dequantized,
    lse_error,
    of_query_heads,
    products_lse,
    relative_rmse,
    set_nan,
)  # fmt: skip
from harness import backend_forward, captured
from reference import Varlen, attention, attention_varlen, sequence_bounds
from test_fp8 import inputs, quantized

from flash_attn import explain, flash_attn_func, flash_attn_varlen_func

HEAD_DIMS = (64, 128, 256)
D = 128  # where the head dim makes no difference
FAST_ERROR = 1.2  # of the output, relative to that by exp2: 3.1e-2 where that has 2.6e-2
FAST_LSE = 1e-1  # of one key: e4m3 bits are linear between powers of two (3 %), and has 3 bits after the point (6 %)


def few_keys_lse(d):
    """wgmma cuts each of the sums of a score to PRODUCT_BITS below its largest term, which is about 64 here.

    Rows of many keys average it out (LSE).
    """
    return 1.1 * d / PRODUCTS * 2**-PRODUCT_BITS * 64 / d**0.5


@pytest.fixture(autouse=True)
def by_its_own_kernels(monkeypatch):
    """Also where those of the KV cache are faster."""
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "wgmma")


def random_8_bit(device, *shape, mean=0.0):
    return (torch.randn(shape, device=device) + mean).to(E4M3)


def scale(device, *shape, size=1.0):
    """Factors around `size`, no powers of two."""
    return (torch.rand(shape, device=device) * 0.7 + 0.4) * size


def check(result, expected, exp="exact", bound=PLAIN, lse=0.0):
    """lse: bound of its error where scores are large."""
    out, ours, _ = result
    assert not out.isnan().any()
    error = relative_rmse(out, expected.out)
    bound *= 1.0 if exp == "exact" else FAST_ERROR
    assert error <= bound, f"relative RMSE {error:.2e}, bound {bound:.1e}"
    lse = max(lse, few_keys_lse(out.shape[-1])) if exp == "exact" else FAST_LSE + lse
    assert lse_error(ours, expected.lse) <= lse


def dense(device, batch, seqlen_q, seqlen_k, heads, heads_k, d=D):
    q = random_8_bit(device, batch, seqlen_q, heads, d)
    return q, *(random_8_bit(device, batch, seqlen_k, heads_k, d) for _ in "kv")


# Factors of q and k: with descales as large as amax / 448, e4m3 bits straight from the scores come without clamping.
SIZES = {"wide": 1.0, "quantized": 64.0}


def enlarged(size, *tensors):
    """e4m3 of `size` times the values, for descales of 1 / size."""
    return [(x.float() * size).to(E4M3) for x in tensors]


LENGTHS = ((1, 1), (63, 64), (64, 129), (128, 128), (129, 127), (200, 1000), (300, 100), (1000, 513), (513, 1024))
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 30)},
    "left": {"window_size": (150, -1)},
    "right": {"window_size": (-1, 200)},
    "narrow": {"window_size": (3, 0)},
}


def reference_options(options):
    return {{"window_size": "window"}.get(name, name): value for name, value in options.items()}


@pytest.mark.each
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("exp", ("exact", "fast"))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: "x".join(map(str, lengths)))
def test_lengths_and_masks(device, lengths, mask, exp, d, size):
    q, k, v = dense(device, 2, *lengths, 4, 2, d)
    options, size = MASKS[mask], SIZES[size]
    q, k = enlarged(size, q, k)
    expected = attention(dequantized(q, 1 / size), dequantized(k, 1 / size), v, **reference_options(options))
    descales = {"q_descale": 1 / size, "k_descale": 1 / size}
    check(flash_attn_func(q, k, v, return_attn_probs=True, exp=exp, **descales, **options), expected, exp)


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("exp", ("exact", "fast"))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("heads, heads_k", ((6, 6), (6, 2), (8, 1)))
def test_heads_and_many_work_tiles(device, heads, heads_k, causal, exp, d):
    """On a GPU more work tiles than multiprocessors: the next one is fetched, its S issued, while O is stored."""
    batch = 1 if device == "cpu" else 16
    q, k, v = dense(device, batch, 640, 700, heads, heads_k, d)
    check(
        flash_attn_func(q, k, v, causal=causal, return_attn_probs=True, exp=exp), attention(q, k, v, causal=causal), exp
    )


DESCALES = {
    "tensor": lambda device, heads: scale(device),
    "head": lambda device, heads: scale(device, heads),
    "batch and head": lambda device, heads: scale(device, 3, heads),
    "expanded": lambda device, heads: scale(device).expand(3, heads),
    "of both signs": lambda device, heads: scale(device, heads) * (1 - 2 * (torch.arange(heads, device=device) % 2)),
    "strided": lambda device, heads: scale(device, heads, 3, 2)[..., 1].t(),
}


@pytest.mark.parametrize("exp", ("exact", "fast"))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("query_heads", (False, True))
@pytest.mark.parametrize("name", DESCALES)
def test_descales(device, name, query_heads, size, exp):
    q, k, v = dense(device, 3, 150, 260, 4, 2)
    q, k = enlarged(SIZES[size], q, k)
    q_descale = DESCALES[name](device, 4 if query_heads else 2) / SIZES[size]
    k_descale, v_descale = DESCALES[name](device, 2) / SIZES[size], DESCALES[name](device, 2)
    expected = attention(
        dequantized(q, of_query_heads(q_descale, 4)), dequantized(k, k_descale), dequantized(v, v_descale), causal=True
    )
    result = flash_attn_func(
        q, k, v, causal=True, return_attn_probs=True, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        exp=exp,
    )  # fmt: skip
    check(result, expected, exp)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_descales_that_the_stream_has_just_written(device, d):
    """The kernels start before the previous one has ended."""
    q, k, v = dense(device, 2, 300, 400, 4, 2, d)
    descale = torch.empty((), device=device)
    for value in torch.rand(50).tolist():
        descale.fill_(value)
        out = flash_attn_func(q, k, v, q_descale=descale, v_descale=descale)
        torch.cuda.synchronize()
        assert torch.equal(out, flash_attn_func(q, k, v, q_descale=descale, v_descale=descale))


@pytest.mark.parametrize("out_dtype", (None, torch.float16, torch.bfloat16))
def test_output_dtype_scale_and_sinks(device, out_dtype):
    q, k, v = dense(device, 2, 200, 300, 4, 4)
    sinks = torch.randn(4, device=device) * 3
    result = flash_attn_func(
        q, k, v, softmax_scale=0.05, causal=True, return_attn_probs=True, out_dtype=out_dtype, sinks=sinks
    )
    assert result[0].dtype == (out_dtype or torch.bfloat16)
    check(result, attention(q, k, v, sinks=sinks, scale=0.05, causal=True))


def packed(device, lengths_q, lengths_k, heads, heads_k, unused=(0, 0), d=D):
    """Sequences between rows of no sequence, which hold NaN."""
    before, after = unused
    cu_q, cu_k = (
        torch.tensor([before, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    )
    total_q, total_k = (int(cu[-1]) + after for cu in (cu_q, cu_k))
    q = random_8_bit(device, total_q, heads, d)
    k, v = (random_8_bit(device, total_k, heads_k, d) for _ in "kv")
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
        set_nan(x, slice(0, before))
        set_nan(x, slice(int(cu[-1]), None))
    return q, k, v, cu_q, cu_k


def layout_of(cu_q, cu_k, total_q):
    lens_q, lens_k = ([end - begin for begin, end in zip(cu, cu[1:])] for cu in (cu_q, cu_k))
    return Varlen(cu_q[:-1], lens_q, cu_k[:-1], lens_k, total_q)


PACKED = {
    "uneven": ((5, 300, 64, 129, 1), (5, 300, 128, 700, 3)),
    "empty": ((0, 100, 0, 7, 50), (40, 0, 0, 130, 50)),
    "one": ((257,), (513,)),
    "many": ((17, 130, 3, 64) * 9, (100, 130, 1, 65) * 9),
}


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("exp", ("exact", "fast"))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PACKED)
def test_packed(device, name, mask, exp, d, size):
    lengths = PACKED[name]
    q, k, v, cu_q, cu_k = packed(device, *lengths, 4, 2, unused=(3, 5), d=d)
    options, size = MASKS[mask], SIZES[size]
    q, k = enlarged(size, q, k)
    descales = [scale(device, len(lengths[0]), heads, size=1 / x) for heads, x in ((4, size), (2, size), (2, 1.0))]
    wide = [x.nan_to_num(nan=0.0) for x in (q.double(), k.double(), v.double())]
    expected = attention_varlen(
        *(dequantized_packed(x, descale, cu) for x, descale, cu in zip(wide, descales, (cu_q, cu_k, cu_k))),
        layout_of(cu_q.tolist(), cu_k.tolist(), q.shape[0]), **reference_options(options),
    )  # fmt: skip
    result = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max(lengths[0]), max(lengths[1]), return_attn_probs=True, exp=exp, q_descale=descales[0],
        k_descale=descales[1], v_descale=descales[2], **options,
    )  # fmt: skip
    check(result, expected, exp)


def dequantized_packed(x, descale, cu_seqlens):
    """x (total, heads, d) times the descale (b, heads) of each row's sequence."""
    result = x.clone()
    for i, (begin, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
        result[begin:end] *= descale[i, :, None].double()
    return result


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("cu_k", ([0, 90, 40, 200], [-5, 100, 300, 150], [0, 1 << 30, 5, 6], [40, 50, 50, 90]))
def test_cu_seqlens_of_anything(device, cu_k, d):
    q, k, v, cu_q, _ = packed(device, (70, 0, 130), (70, 0, 130), 2, 1, d=d)
    given = torch.tensor(cu_k, dtype=torch.int32, device=device)
    layout = layout_of(cu_q.tolist(), sequence_bounds(cu_k, k.shape[0]), q.shape[0])
    result = flash_attn_varlen_func(q, k, v, cu_q, given, 130, 200, return_attn_probs=True)
    check(result, attention_varlen(q.double(), k.double(), v.double(), layout))


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_nan_before_a_window_and_in_masked_rows(device, d):
    """Keys that no query sees may hold NaN."""
    q, k, v = dense(device, 2, 100, 700, 2, 2, d)
    expected = attention(q, k, v, window=(150, 10))
    for x in (k, v):
        set_nan(x, (slice(None), slice(0, 450)))
    check(flash_attn_func(q, k, v, window_size=(150, 10), return_attn_probs=True), expected)


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("exp", ("exact", "fast"))
def test_nan_among_visible_keys_is_seen(device, exp, d, size):
    q, k, v = dense(device, 1, 100, 300, 2, 2, d)
    q, k = enlarged(SIZES[size], q, k)
    k.view(torch.uint8)[0, 200, 0, 5] = NAN_CODE
    descales = {"q_descale": 1 / SIZES[size], "k_descale": 1 / SIZES[size]}
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, exp=exp, **descales)
    assert out[:, :, 0].isnan().all() and lse[:, 0].isnan().all()
    assert not out[:, :, 1].isnan().any() and not lse[:, 1].isnan().any()


BOUNDS = {
    "plain": 4e-2,
    "mean": MEAN,
    "sink6": PEAKED,
    "sink12": PEAKED,
    "std2": 2.5e-2,
    "rising3": 4e-2,
    "rising8": 4e-2,
}


@pytest.mark.each
@pytest.mark.parametrize("exp", ("exact", "fast"))
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("kind", BOUNDS)
def test_hard_inputs(device, kind, d, exp):
    """Row maxima that are taken again and again, sinks, and sums of thousands of keys."""
    q, k, v = inputs(kind, 16384 if kind == "mean" or kind.startswith("sink") else 4096, device, head_dim=d)
    if kind.startswith("std"):
        v += 0.5
    (q, q_descale), (k, k_descale), (v, v_descale) = (quantized(x) for x in (q, k, v))
    wide = [dequantized(*x) for x in ((q, q_descale), (k, k_descale), (v, v_descale))]
    result = flash_attn_func(
        q, k, v, return_attn_probs=True, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, exp=exp
    )
    check(result, attention(*wide), exp, BOUNDS[kind], products_lse(*wide[:2], d**-0.5))


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("exp", ("exact", "fast"))
@pytest.mark.parametrize("size", (1.0, 30.0, 400.0))
def test_scores_far_apart(device, size, exp, d):
    """Thousands of octaves below the largest: such keys have no weight. Where the two largest differ by no more than
    wgmma's sums are off, either may be the one that has it."""
    q, k, v = dense(device, 1, 130, 400, 2, 2, d)
    expected = attention(dequantized(q, size), dequantized(k, size), v)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, q_descale=size, k_descale=size, exp=exp)
    largest = torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double()).topk(2).values
    clear = (largest[..., 0] - largest[..., 1] > 0.05) | (size == 1)
    assert clear.double().mean() > 0.9 and out.isfinite().all()
    assert relative_rmse(out[clear], expected.out[clear]) <= PLAIN
    assert lse_error(lse / size**2, expected.lse / size**2) <= (few_keys_lse(d) if exp == "exact" else FAST_LSE)


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("exp", ("exact", "fast"))
def test_scores_beyond_the_precision_of_float32(device, exp, d):
    """Differences of scores of 2^38 octaves are rounded to thousands: what has weight is open, NaN is not."""
    q, k, v = dense(device, 1, 130, 400, 2, 2, d)
    out, _, _ = flash_attn_func(q, k, v, return_attn_probs=True, q_descale=3e4, k_descale=3e4, exp=exp)
    assert out.isfinite().all() and (out.abs() <= v.float().abs().max()).all()


def test_zero_descales(device):
    q, k, v = dense(device, 1, 130, 200, 2, 2)
    zero = torch.zeros((), device=device)
    result = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, q_descale=zero)
    check(result, attention(dequantized(q, 0.0), k, v, causal=True))


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_strides(device, d):
    """Heads before rows, and columns of a wider tensor."""
    q, k, v = (random_8_bit(device, 2, 4, 300, d).transpose(1, 2) for _ in "qkv")
    check(flash_attn_func(q, k, v, return_attn_probs=True), attention(q, k, v))
    q, k, v = random_8_bit(device, 2, 300, 4, 3 * d).split(d, -1)
    check(flash_attn_func(q, k, v, return_attn_probs=True), attention(q, k, v))


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("exp", ("exact", "fast"))
def test_runs_agree_alone_and_in_a_batch(device, exp, d):
    """Equal bits in two runs, and for a sequence alone, in a batch and packed."""
    q, k, v = dense(device, 3, 260, 390, 4, 2, d)
    out = flash_attn_func(q, k, v, causal=True, exp=exp)
    assert torch.equal(out, flash_attn_func(q, k, v, causal=True, exp=exp))
    assert torch.equal(out[1:2], flash_attn_func(q[1:2], k[1:2], v[1:2], causal=True, exp=exp))
    cu_q, cu_k = (torch.arange(4, dtype=torch.int32, device=device) * length for length in (260, 390))
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    assert torch.equal(out.flatten(0, 1), flash_attn_varlen_func(*flat, cu_q, cu_k, 260, 390, causal=True, exp=exp))


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.devices("cuda")
@pytest.mark.parametrize("exp", ("exact", "fast"))
def test_cuda_graph(device, exp, d):
    q, k, v = dense(device, 2, 700, 900, 4, 2, d)
    graph, out = captured(lambda: flash_attn_func(q, k, v, causal=True, exp=exp))
    for _ in range(3):
        for x in (q, k, v):
            x.copy_(random_8_bit(device, *x.shape))
        graph.replay()
        assert torch.equal(out, flash_attn_func(q, k, v, causal=True, exp=exp))


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_the_kernels_support_such_calls(device, d):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no wgmma")
    q, k, v = dense(device, 1, 200, 200, 2, 2, d)
    plan = explain(flash_attn_func, q, k, v, exp="fast")["forward"]
    assert plan["qkv_dtype"] == "e4m3" and plan["exp"] == ("exact" if d == 256 else "fast")
    assert plan["stages"] == ("transpose_v,attention" if d == 256 else "attention")
    narrow = [x[..., : d - 16].contiguous() for x in (q, k, v)]
    assert "qkv_dtype" not in explain(flash_attn_func, *narrow)["forward"]
    assert "qkv_dtype" not in explain(flash_attn_func, q, k, v, softcap=5.0)["forward"]
    expected = flash_attn_func(q, k, v)
    out = torch.full(q.shape, float("nan"), dtype=torch.bfloat16, device=device)
    for given in (out, out.transpose(1, 2).contiguous().transpose(1, 2)):
        result = backend_forward(q, k, v, given)[0]
        assert result.data_ptr() == given.data_ptr() and torch.equal(given, expected)
    for wrong in (out.half(), out[:, 1:], out.cpu()):
        with pytest.raises(RuntimeError, match="^out: expected"):
            backend_forward(q, k, v, wrong)


def test_exp_is_exact_or_fast(device):
    q, k, v = dense(device, 1, 10, 10, 2, 2)
    with pytest.raises(RuntimeError, match="exp: expected 'exact' or 'fast', got 'slow'"):
        flash_attn_func(q, k, v, exp="slow")
    half = [x.half() for x in (q, k, v)]
    assert torch.equal(flash_attn_func(*half, exp="fast"), flash_attn_func(*half))  # no such kernels
