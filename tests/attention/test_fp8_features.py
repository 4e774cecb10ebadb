"""8-bit attention with every feature and shape of descale, its errors, operators, compilers, training through it."""

from __future__ import annotations

import pytest
import torch
from fp8_harness import (
    E4M3,
    INT8,
    LSE,
    PLAIN,
    WIDE_P,
    dequantized,
    lse_bound,
    lse_error,
    of_query_heads,
    relative_rmse,
    set_nan,
)  # fmt: skip
from harness import captured
from reference import Varlen, attention, attention_varlen
from torch.library import opcheck

import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.fp8 import (
    flash_attn_straight_through_func,
    flash_attn_varlen_straight_through_func,
    quantize,
    quantize_qkv,
)

B, SQ, SK, H, HK, D = 2, 33, 50, 4, 2, 32
HALF = torch.float16


def random_8_bit(device, *shape, dtype=E4M3):
    return (torch.randn(shape, device=device) * (40 if dtype is INT8 else 1)).clamp(-120, 120).to(dtype)


def scale(device, *shape, size=1.0):
    """Factors around `size`, no powers of two."""
    return (torch.rand(shape, device=device) * 0.7 + 0.4) * size


def strided(x):
    """The same values at every third place of a larger tensor."""
    return torch.stack([x, x * 3, x * 5], -1)[..., 0]


def one(device, *_):
    return scale(device)


SHAPES = {  # of descales: of q and of k or v, for dense calls
    "number": (lambda device: 0.75, lambda device: 0.6),
    "tensor": (one, one),
    "one element": (lambda device: scale(device, 1), lambda device: scale(device, 1, 1)),
    "head": (lambda device: scale(device, H), lambda device: scale(device, HK)),
    "q by K/V head": (lambda device: scale(device, HK), lambda device: scale(device, HK)),
    "batch and head": (lambda device: scale(device, B, H), lambda device: scale(device, B, HK)),
    "batch and K/V head": (lambda device: scale(device, B, HK), lambda device: scale(device, B, HK)),
    "expanded": (lambda device: scale(device).expand(B, HK), lambda device: scale(device).expand(B, HK)),
    "one for each batch": (
        lambda device: scale(device, B, 1).expand(B, HK),
        lambda device: scale(device, B, 1).expand(B, HK),
    ),
    "strided": (lambda device: strided(scale(device, B, H)), lambda device: strided(scale(device, B, HK))),
    "sequence": (one, lambda device: scale(device, B, 1, HK)),
    "token": (one, lambda device: scale(device, B, SK, HK)),
    "token, strided": (one, lambda device: strided(scale(device, B, HK, SK)).transpose(1, 2)),
}


def check(out, lse, expected, device, bound=PLAIN):
    """Queries of 16 bits have the bound WIDE_P, and an LSE as exact as on the CPU."""
    error = relative_rmse(out, expected.out)
    assert error <= bound, f"relative RMSE {error:.2e}"
    assert lse_error(lse, expected.lse) <= (LSE if bound == WIDE_P else lse_bound(device, expected.max_logit))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("wide", (False, True))
def test_descales(device, name, wide):
    """wide: q of 16 bits, whose K and V are int8."""
    of_q, of_kv = SHAPES[name]
    stored = INT8 if wide else E4M3
    q = torch.randn(B, SQ, H, D, device=device, dtype=HALF) if wide else random_8_bit(device, B, SQ, H, D)
    k, v = (random_8_bit(device, B, SK, HK, D, dtype=stored) for _ in "kv")
    q_descale, k_descale, v_descale = None if wide else of_q(device), of_kv(device), of_kv(device)
    if wide:
        k_descale, v_descale = k_descale * 0.03, v_descale * 0.03
    out, lse, _ = flash_attn_func(
        q, k, v, causal=True, return_attn_probs=True, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
    )
    expected = attention(
        dequantized(q, of_query_heads(q_descale, H)), dequantized(k, k_descale), dequantized(v, v_descale), causal=True
    )
    assert out.dtype == (HALF if wide else torch.bfloat16)
    check(out, lse, expected, device, WIDE_P if wide else PLAIN)


@pytest.mark.parametrize("shape", ((HK, D), (B, HK, D)))
def test_values_with_a_descale_for_each_channel(device, shape):
    q, k, v = random_8_bit(device, B, SQ, H, D), random_8_bit(device, B, SK, HK, D), random_8_bit(device, B, SK, HK, D)
    v_descale = scale(device, *shape)
    options = {"v_descale": v_descale, "v_descale_axis": "channel", "out_dtype": HALF}
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    values = v.double() * (v_descale if len(shape) == 2 else v_descale[:, None])
    assert out.dtype == HALF
    check(out, lse, attention(q, k, values), device)


FEATURES = {
    "window": {"window": (9, 4)},
    "causal": {"causal": True},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": "heads"},
    "sinks": {"sinks": "heads"},
    "scale": {"scale": 0.4},
    "masked rows": {"causal": True, "seqlen_q": SK + 9},
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(device, name):
    options = dict(FEATURES[name])
    q, k, v = (
        random_8_bit(device, B, options.pop("seqlen_q", SQ), H, D),
        random_8_bit(device, B, SK, HK, D),
        random_8_bit(device, B, SK, HK, D),
    )
    options = {key: torch.rand(H, device=device) if value == "heads" else value for key, value in options.items()}
    descales = {"q_descale": scale(device, B, H), "k_descale": scale(device, B, HK), "v_descale": scale(device, B, HK)}
    expected = attention(
        dequantized(q, descales["q_descale"]), dequantized(k, descales["k_descale"]),
        dequantized(v, descales["v_descale"]), **options,
    )  # fmt: skip
    given = {{"window": "window_size", "scale": "softmax_scale"}.get(key, key): value for key, value in options.items()}
    out, lse, _, max_logit = flash_attn_func(
        q, k, v, return_attn_probs=True, return_max_logit=True, **descales, **given
    )
    check(out, lse, expected, device)
    assert (max_logit - expected.max_logit).abs().max() < 0.02 * expected.max_logit.abs().max()
    first_row = max(q.shape[1] - SK, 0)
    assert (out[:, :first_row] == 0).all() and lse[:, :, :first_row].isinf().all()


def test_values_of_another_head_dim(device):
    q, k, v = (
        random_8_bit(device, B, SQ, H, 48),
        random_8_bit(device, B, SK, HK, 48),
        random_8_bit(device, B, SK, HK, 20),
    )
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, v_descale=2.0)
    assert out.shape == (B, SQ, H, 20)
    check(out, lse, attention(q, k, 2 * v.double()), device)


@pytest.mark.parametrize("head_dim", (20, 33, 320))
def test_head_dims_that_are_padded(device, head_dim):
    q, k, v = (random_8_bit(device, B, n, h, head_dim) for n, h in ((SQ, H), (SK, HK), (SK, HK)))
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, k_descale=1.3)
    check(out, lse, attention(q, 1.3 * k.double(), v), device)


# ---- packed and paged ----

LENGTHS_Q, LENGTHS_K = (13, 0, 20, 7), (30, 5, 41, 0)


def layout(starts_k, lens_k, total_q):
    starts = torch.tensor([0, *LENGTHS_Q]).cumsum(0).tolist()[:-1]
    return Varlen(starts, list(LENGTHS_Q), starts_k, lens_k, total_q)


def cumulative(lengths, device):
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


@pytest.mark.parametrize("rows", ("batch", "token"))
@pytest.mark.parametrize("stored", (E4M3, INT8))
def test_packed(device, stored, rows):
    """Rows of no sequence hold NaN, their descales too where each row has one."""
    total_q, total_k, batch = sum(LENGTHS_Q) + 3, sum(LENGTHS_K) + 5, len(LENGTHS_Q)
    q = random_8_bit(device, total_q, H, D) if stored is E4M3 else torch.randn(total_q, H, D, device=device, dtype=HALF)
    k, v = (random_8_bit(device, total_k, HK, D, dtype=stored) for _ in "kv")
    size = 0.03 if stored is INT8 else 1.0
    if stored is E4M3:
        set_nan(k, slice(sum(LENGTHS_K), None))
        set_nan(v, slice(sum(LENGTHS_K), None))
    q_descale = scale(device, batch, H) if stored is E4M3 else None
    shape = (batch, HK) if rows == "batch" else (total_k, 1, HK)
    k_descale, v_descale = scale(device, *shape, size=size), scale(device, *shape, size=size)
    sequence_q = torch.repeat_interleave(torch.arange(batch), torch.tensor(LENGTHS_Q)).to(device)
    sequence_k = torch.repeat_interleave(torch.arange(batch), torch.tensor(LENGTHS_K)).to(device)
    if rows == "token":
        k_descale[sum(LENGTHS_K) :] = v_descale[sum(LENGTHS_K) :] = float("nan")
        values = [dequantized(k, k_descale), dequantized(v, v_descale)]
    else:
        values = [x[: len(sequence_k)].double() * s[sequence_k][..., None] for x, s in ((k, k_descale), (v, v_descale))]
    queries = q.double()
    if q_descale is not None:
        queries[: len(sequence_q)] *= q_descale[sequence_q][..., None]
    cu_q, cu_k = cumulative(LENGTHS_Q, device), cumulative(LENGTHS_K, device)
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 20, 41, causal=True, return_attn_probs=True, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale,
    )  # fmt: skip
    starts_k = torch.tensor([0, *LENGTHS_K]).cumsum(0).tolist()[:-1]
    expected = attention_varlen(queries, *values, layout(starts_k, list(LENGTHS_K), total_q), causal=True)
    check(out, lse, expected, device, PLAIN if stored is E4M3 else WIDE_P)


@pytest.mark.parametrize("rows", ("tensor", "batch", "page", "token"))
def test_paged(device, rows):
    """Unused rows and pages hold NaN, table entries beyond the keys name no page."""
    page_size, batch, total_q = 8, len(LENGTHS_Q), sum(LENGTHS_Q)
    pages = [-(-n // page_size) for n in LENGTHS_K]
    pool = torch.randperm(sum(pages) + 2)
    k, v = (torch.full((len(pool), page_size, HK, D), 0x7F, dtype=torch.uint8, device=device).view(E4M3) for _ in "kv")
    table, taken = torch.full((batch, max(pages) + 1), 10**6, dtype=torch.int32), 0
    for i, (count, n) in enumerate(zip(pages, LENGTHS_K)):
        table[i, :count], taken = pool[taken : taken + count].int(), taken + count
        for cache in (k, v):
            for j in range(n):
                cache[table[i, j // page_size], j % page_size] = random_8_bit(device, HK, D)
    shape = {"tensor": (), "batch": (batch, HK), "page": (len(pool), 1, HK), "token": (len(pool), page_size, HK)}[rows]
    k_descale, v_descale = scale(device, *shape), scale(device, *shape)
    q, used = torch.randn(total_q, H, D, device=device, dtype=HALF), torch.tensor(LENGTHS_K, dtype=torch.int32)
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, cumulative(LENGTHS_Q, device), cumulative(LENGTHS_K, device), 20, 41, causal=True,
        return_attn_probs=True, block_table=table.to(device), seqused_k=used.to(device), k_descale=k_descale,
        v_descale=v_descale,
    )  # fmt: skip
    keys = [x.double() if rows == "batch" else dequantized(x, s) for x, s in ((k, k_descale), (v, v_descale))]
    for i, start in enumerate(layout([0] * 4, list(LENGTHS_K), total_q).starts_q):
        stop, n = start + LENGTHS_Q[i], LENGTHS_K[i]
        mine = [x[table[i, : pages[i]].long()].flatten(0, 1)[:n] for x in keys]
        if rows == "batch":
            mine = [x * s[i][:, None] for x, s in zip(mine, (k_descale, v_descale))]
        if stop > start:
            expected = attention(q[None, start:stop], mine[0][None], mine[1][None], causal=True)
            if n == 0:
                assert (out[start:stop] == 0).all() and lse[:, start:stop].isinf().all()
            else:
                check(out[None, start:stop], lse[None, :, start:stop], expected, device, WIDE_P)


# ---- errors ----

SCALE = torch.ones(())


@pytest.mark.parametrize("given,message", [
    ({"q": INT8}, "q: expected dtype float16, bfloat16 or float8_e4m3fn, got int8"),
    ({"q": torch.float8_e5m2}, "q: expected dtype"),
    ({"q": HALF, "k": HALF}, r"v: expected the dtype of k \(float16\), got float8_e4m3fn"),
    ({"k": HALF}, r"k: expected the dtype of q \(float8_e4m3fn\), got float16"),
    ({"k": INT8}, r"k: expected the dtype of q \(float8_e4m3fn\), got int8"),
    ({"v": INT8}, "v: expected dtype float8_e4m3fn, float16 or bfloat16, got int8"),
    ({"q": HALF, "k": torch.bfloat16}, r"k: expected the dtype of q \(float16\), float8_e4m3fn or int8, got bfloat16"),
    ({"q": HALF, "v": INT8}, r"v: expected the dtype of k \(float8_e4m3fn\), got int8"),
    ({"q": HALF, "k": HALF, "v": HALF, "k_descale": SCALE}, "k_descale: expected None for k of float16, got a tensor"),
    ({"v": HALF, "v_descale": 2.0}, "v_descale: expected None for v of float16, got a tensor"),
    ({"q": HALF, "q_descale": SCALE}, "q_descale: expected None for q of float16, got a tensor"),
    ({"k_descale": SCALE.double()}, "k_descale: expected dtype float32, got float64"),
    ({"k_descale": torch.ones(3)}, r"k_descale: expected one element or shape \[2\] or \[2, 2\] or .*, got \[3\]"),
    ({"k_descale": torch.ones(2, 4)}, r"k_descale: expected .*, got \[2, 4\]"),
    ({"k_descale": torch.ones(2, 49, 2)}, r"k_descale: expected .*\[2, 50, 2\] or \[2, 1, 2\], got \[2, 49, 2\]"),
    ({"q_descale": torch.ones(2, 33, 4)}, r"q_descale: expected .*, got \[2, 33, 4\]"),
    ({"v_descale": torch.ones(2, 32)}, r"v_descale: expected .*, got \[2, 32\]"),
    ({"v_descale": torch.ones(2, 4), "v_descale_axis": "channel"}, r"v_descale: expected shape \[2, 32\] or \[2, 2"),
    ({"v_descale_axis": "channel"}, "v_descale_axis: expected None without v_descale, got 'channel'"),
    ({"v_descale_axis": "head"}, "v_descale_axis: expected None or 'channel', got 'head'"),
    ({"k_descale": "1"}, "k_descale: expected a number, got '1'"),
    ({"k_descale": torch.ones((), requires_grad=True)}, "k_descale: expected a value that requires no gradient"),
    ({"k_descale": torch.ones(2).to_sparse()}, "k_descale: expected a strided Tensor"),
    ({"out_dtype": torch.float32}, "out_dtype: expected float16 or bfloat16, got float32"),
    ({"out_dtype": "half"}, "out_dtype: expected a torch.dtype, got 'half'"),
    ({"q": HALF, "out_dtype": torch.bfloat16}, r"out_dtype: expected None or the dtype of q \(float16\), got bfloat16"),
    ({"dropout_p": 0.1}, "dropout_p: expected 0 with 8-bit tensors, got 0.1"),
])  # fmt: skip
def test_bad_calls_are_named(device, given, message):
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    if isinstance(options.get("k_descale"), torch.Tensor) and given["k_descale"].requires_grad:
        options["k_descale"] = options["k_descale"].detach().requires_grad_()
    shapes = {"q": (B, SQ, H, D), "k": (B, SK, HK, D), "v": (B, SK, HK, D)}
    tensors = {name: torch.zeros(shape, device=device).to(options.pop(name, E4M3)) for name, shape in shapes.items()}
    with pytest.raises((RuntimeError, TypeError), match=f"^{message}"):
        flash_attn_func(**tensors, **options)


def test_descales_on_another_device_are_named(device):
    q = random_8_bit(device, B, SQ, HK, D)
    with pytest.raises(RuntimeError, match="^k_descale: expected a tensor on q's device"):
        flash_attn_func(q, q, q, k_descale=torch.ones((), device="meta"))


@pytest.mark.parametrize("name,shape", (
    ("flash_attn_qkvpacked_func", (B, SQ, 3, H, D)), ("flash_attn_kvpacked_func", (B, SK, 2, HK, D)),
))  # fmt: skip
def test_packed_tensors_have_at_least_16_bits(device, name, shape):
    x = random_8_bit(device, *shape)
    inputs = (x,) if "qkv" in name else (random_8_bit(device, B, SQ, H, D), x)
    with pytest.raises(RuntimeError, match="^q?kv: expected at least 16 bits .*, got float8_e4m3fn"):
        getattr(flash_attn, name)(*inputs)


def test_no_backward(device):
    q = torch.randn(B, SQ, H, D, device=device, dtype=HALF, requires_grad=True)
    k, v = (random_8_bit(device, B, SK, HK, D) for _ in "kv")
    out = flash_attn_func(q, k, v)
    with pytest.raises(NotImplementedError, match="^k: expected at least 16 bits in training"):
        out.sum().backward()


def test_autocast_leaves_8_bit_tensors_alone(device):
    if device == "cuda":
        pytest.skip("CUDA has no float32 attention")
    q, k, v = (
        torch.randn(B, SQ, H, D),
        random_8_bit(device, B, SK, HK, D, dtype=INT8),
        random_8_bit(device, B, SK, HK, D, dtype=INT8),
    )
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flash_attn_func(q, k, v, k_descale=0.03, v_descale=0.03)
    assert out.dtype == torch.bfloat16
    assert relative_rmse(out, attention(q.bfloat16(), 0.03 * k.double(), 0.03 * v.double()).out) < 3e-3


# ---- operators ----


def call(function, x, **options):
    return function(x.q, x.k, x.v, q_descale=x.q_descale, k_descale=x.k_descale, v_descale=x.v_descale, **options)


def quantized_qkv(device):
    shapes = ((B, SQ, H, D), (B, SK, HK, D), (B, SK, HK, D))
    return quantize_qkv(*(torch.randn(shape, device=device) for shape in shapes))


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled(device, backend):
    x = quantized_qkv(device)
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_func, backend=backend, fullgraph=True)
    for out_dtype in (None, HALF):
        for a, b in zip(
            call(compiled, x, return_attn_probs=True, out_dtype=out_dtype),
            call(flash_attn_func, x, return_attn_probs=True, out_dtype=out_dtype),
        ):
            assert a.dtype == b.dtype and torch.equal(a, b)
    out = compiled(x.q, x.k, x.v, k_descale=0.5)
    assert torch.equal(out, flash_attn_func(x.q, x.k, x.v, k_descale=0.5))


def test_opcheck(device):
    """With int8 keys, for opcheck compares arguments by operations that float8 does not have."""
    q = torch.randn(B, SQ, H, D, device=device, dtype=HALF)
    k, v = (random_8_bit(device, B, SK, HK, D, dtype=INT8) for _ in "kv")
    args = (q, k, v, *[None] * 7, 0, 0, 0.0, 0.1, True, -1, -1, 0.0, False, False, False, False)
    opcheck(
        torch.ops.flash_attn_core.fwd.default, (*args, None, scale(device, B, HK), scale(device, HK, D), True, None)
    )


def test_fakes(device):
    with torch._subclasses.FakeTensorMode():
        q, k = torch.empty(B, SQ, H, D, device=device).to(E4M3), torch.empty(B, SK, HK, D, device=device).to(E4M3)
        out, lse, dmask = flash_attn_func(q, k, k, return_attn_probs=True)
        assert out.dtype == dmask.dtype == torch.bfloat16 and out.shape == q.shape and lse.dtype == torch.float32
        assert flash_attn_func(q, k, k, out_dtype=HALF).dtype == HALF
        assert flash_attn_func(q, k, k.to(HALF)).dtype == HALF


@pytest.mark.devices("cuda")
def test_graph(device):
    """Descales are read on the device: a replay sees new ones."""
    x = quantized_qkv(device)
    graph, out = captured(lambda: call(flash_attn_func, x))
    x.v_descale.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, call(flash_attn_func, x))


def test_explain(device):
    x = quantized_qkv(device)
    plan = flash_attn.explain(x.q, x.k, x.v, k_descale=x.k_descale)
    assert plan["forward"]["dtype"] == ("e4m3" if device == "cpu" else "fp16") and plan["backward"] is None


@pytest.mark.parametrize("wide", (False, True))
def test_batch_invariant(device, wide):
    q = torch.randn(3, SQ, H, D, device=device, dtype=HALF) if wide else random_8_bit(device, 3, SQ, H, D)
    k, v, descale = random_8_bit(device, 3, SK, HK, D), random_8_bit(device, 3, SK, HK, D), scale(device, 3, HK)
    whole = flash_attn_func(q, k, v, k_descale=descale, batch_invariant=True)
    alone = flash_attn_func(q[1:2], k[1:2], v[1:2], k_descale=descale[1:2], batch_invariant=True)
    assert torch.equal(whole[1:2], alone)


# ---- training straight through the rounding ----


def reference_gradients(tensors, dout, dlse, **options):
    """Gradients of float64 attention at the quantised values."""
    leaves = []
    for x in tensors:
        x8, descale = quantize(x.detach(), "head", power_of_two=True)
        leaves.append(dequantized(x8, descale).requires_grad_())
    expected = attention(*leaves, **options)
    return expected, torch.autograd.grad((expected.out, expected.lse), leaves, (dout.double(), dlse.double()))


@pytest.mark.parametrize("half", (HALF, torch.bfloat16))
@pytest.mark.parametrize("causal", (False, True))
def test_straight_through(device, half, causal):
    shapes = ((B, SQ, H, D), (B, SK, HK, D), (B, SK, HK, D))
    tensors = [torch.randn(shape, device=device).to(half).requires_grad_() for shape in shapes]
    out, lse = flash_attn_straight_through_func(*tensors, causal=causal, return_attn_probs=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), tensors, (dout, dlse))
    expected, exact = reference_gradients(tensors, dout, dlse, causal=causal)
    assert out.dtype == half
    check(out, lse, expected, device)
    for ours, reference in zip(grads, exact):
        assert ours.dtype == half and relative_rmse(ours, reference) < 2e-2


@pytest.mark.parametrize("half", (HALF, torch.bfloat16))
@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("exponent", ("largest", "smallest"))
def test_straight_through_of_values_of_any_size(device, half, name, exponent):
    """Up to the largest finite ones, and down to where results are no subnormal numbers.

    Kernels take 8-bit q and k as fp16, whose range bounds them on a GPU.
    """
    tensors = dict(zip("qkv", (torch.randn(B, n, h, D, device=device) for n, h in ((SQ, H), (SK, HK), (SK, HK)))))
    limits = torch.finfo(half)
    extreme = limits.max if exponent == "largest" else limits.tiny * 2**8
    if device == "cuda" and name != "v":
        extreme = min(extreme, torch.finfo(HALF).max)
    tensors[name] *= extreme / tensors[name].abs().amax((1, 3), keepdim=True)  # in each head
    scale = D**-0.5
    if name != "v" and exponent == "largest":
        tensors["qk".replace(name, "")] *= 2.0**-8
        scale *= 2.0**8 / extreme
    tensors = [y.to(half).requires_grad_() for y in tensors.values()]
    out, lse = flash_attn_straight_through_func(*tensors, scale, return_attn_probs=True)
    # No sum of products overflows, and dout has no subnormal numbers, which kernels flush to 0.
    weight = max(2.0**-8 / max(tensors[2].detach().double().abs().max().item(), 1.0), limits.tiny * 2**6)
    dout, dlse = (torch.randn_like(out).double() * weight).to(half), torch.randn_like(lse) * 2**-8
    grads = torch.autograd.grad((out, lse), tensors, (dout, dlse))
    expected, exact = reference_gradients(tensors, dout, dlse, scale=scale)
    check(out, lse, expected, device)
    for ours, reference in zip(grads, exact):
        assert torch.isfinite(ours).all()
        if reference.square().mean().sqrt() > limits.tiny:
            assert relative_rmse(ours, reference) < 2e-2


def test_straight_through_packed_with_sinks(device):
    tensors = [
        torch.randn(n, h, D, device=device, dtype=HALF, requires_grad=True) for n, h in ((40, H), (76, HK), (76, HK))
    ]
    sinks = torch.randn(H, device=device, requires_grad=True)
    cu_q, cu_k = cumulative(LENGTHS_Q, device), cumulative(LENGTHS_K, device)
    out = flash_attn_varlen_straight_through_func(*tensors, cu_q, cu_k, 20, 41, causal=True, sinks=sinks)
    rounded = [dequantized(*quantize(x, "head", power_of_two=True)).to(HALF).detach().requires_grad_() for x in tensors]
    same_sinks = sinks.detach().requires_grad_()
    plain = flash_attn_varlen_func(*rounded, cu_q, cu_k, 20, 41, causal=True, sinks=same_sinks)
    dout = torch.randn_like(out)
    assert relative_rmse(out, plain) < PLAIN
    ours, expected = (
        torch.autograd.grad(out, [*tensors, sinks], dout),
        torch.autograd.grad(plain, [*rounded, same_sinks], dout),
    )
    for a, b in zip(ours, expected):
        assert relative_rmse(a, b) < 2e-2


def test_straight_through_saves_8_bits(device):
    tensors = [torch.randn(B, SK, H, D, device=device, dtype=HALF, requires_grad=True) for _ in "qkv"]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        flash_attn_straight_through_func(*tensors)
    assert sum(x.dtype is E4M3 for x in saved) == 3
    of_inputs = sum(x.numel() * x.element_size() for x in tensors)
    assert sum(x.numel() * x.element_size() for x in saved) < of_inputs  # out and LSE included


def test_straight_through_compiled(device):
    tensors = [torch.randn(B, SK, H, D, device=device, dtype=HALF, requires_grad=True) for _ in "qkv"]
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_straight_through_func, backend="aot_eager", fullgraph=True)
    dout = torch.randn(B, SK, H, D, device=device, dtype=HALF)
    results = [
        torch.autograd.grad(f(*tensors, causal=True), tensors, dout)
        for f in (compiled, flash_attn_straight_through_func)
    ]
    for a, b in zip(*results):
        assert relative_rmse(a, b) < 1e-2


@pytest.mark.parametrize("given,message", [
    ({"q": torch.float32}, "q: expected dtype float16 or bfloat16, got float32"),
    ({"k": torch.bfloat16}, r"k: expected the dtype of q \(float16\), got bfloat16"),
    ({"v": E4M3}, r"v: expected the dtype of q \(float16\), got float8_e4m3fn"),
])  # fmt: skip
def test_straight_through_takes_16_bits(device, given, message):
    tensors = {name: torch.zeros(B, SK, H, D, device=device).to(given.get(name, HALF)) for name in "qkv"}
    with pytest.raises(RuntimeError, match=f"^{message}"):
        flash_attn_straight_through_func(**tensors)
