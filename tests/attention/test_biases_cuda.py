"""Biases as data in the sizes, dtypes and families of the kernels; the CPU backend runs the same tests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import kernel_tables
import pytest
import torch
from harness import captured
from mask_harness import ScoreCall, dense_of, expected, ints, packed_expected, ranges_mask, starts
from reference import assert_accurate, assert_gradient_accurate, dlse_of_rounding, farther

import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func

BATCH, HEADS, SQ, SK = 2, 6, 205, 304  # several tiles of rows and of keys, the last ones not full; TMA takes SK
INF, SCALE = math.inf, 0.1
# Sizes of an attn_bias, by which axes it has.
SHAPES = {
    "full": (BATCH, HEADS, SQ, SK),
    "heads": (1, HEADS, SQ, SK),
    "scores": (1, 1, SQ, SK),
    "batches": (BATCH, 1, SQ, SK),
    "keys": (BATCH, 1, 1, SK),
    "rows": (1, HEADS, SQ, 1),
    "numbers": (BATCH, HEADS, 1, 1),
}


@dataclass
class Call(ScoreCall):
    bias: str = ""
    dim: int = 128
    rel: int = 0  # R
    dim_v: int = 0  # 0: dim
    mask: bool = False  # as data too
    wide: bool = False  # attn_bias in float32
    dtype: torch.dtype = torch.bfloat16
    scale: float = 1.0  # of the bias

    __str__ = ScoreCall.__str__

    def scores(self):
        return {"softmax_scale": SCALE, "causal": self.causal, "window_size": self.window, "softcap": self.softcap}


CALLS = [
    *(Call("full", dim, causal=dim == 96) for dim in kernel_tables.NARROW),
    *(Call(name) for name in SHAPES if name != "full"),
    *(Call(name, 64, wide=True, dtype=torch.float16) for name in ("full", "heads", "keys")),
    *(Call("heads", dim, wide=True) for dim in (128, 256)),
    Call("full", 40, dtype=torch.float16, window=(90, 20)),
    Call("heads", 192, dim_v=128, sinks=True),
    Call("full", 64, softcap=2.0, alibi=True),
    Call("full", 128, softcap=2.0, causal=True, heads_k=6),
    Call("heads", 256, softcap=2.0),
    *(Call("scores", dim, causal=True) for dim in (64, 128)),  # the gradient leaves out what the window hides
    Call("batches", 64, window=(90, 20), heads_k=6),
    Call("heads", 128, wide=True, causal=True),
    Call("heads", 64, dropout=0.2),
    Call("keys", 128, dropout=0.2, causal=True),
    Call("full", 256, dropout=0.1),
    Call("full", 64, deterministic=True),
    Call("heads", 128, deterministic=True, causal=True),
    Call("scores", 64, wide=True, scale=1e6),  # beyond float16
    *(Call("heads", dim, scale=scale) for dim in (64, 128, 256) for scale in (5.0, 200.0)),  # each block raises row_max
    Call("keys", 128, dtype=torch.float16, scale=30.0),
    Call(rel=5),
    Call(rel=40, dim=64, causal=True),
    Call(rel=1000, dim=64, heads_k=6),
    Call(rel=64, dim=256, sinks=True),
    Call(rel=7, dim=32, dropout=0.2, window=(100, 100)),
    Call(rel=100, dim=128, softcap=2.0),
    Call("heads", 64, rel=9, causal=True),
]
MASKED_CALLS = [
    Call("full", 64, mask=True),
    Call("heads", 128, mask=True, causal=True),
    Call("keys", 256, mask=True, rel=6),
    Call(rel=30, dim=128, mask=True, softcap=2.0, deterministic=True),
]


def make(call, device, sq=SQ, sk=SK):
    """(q, k, v, tensors by name): those that get gradients."""
    dims = (call.dim, call.dim, call.dim_v or call.dim)
    sizes = zip((sq, sk, sk), (HEADS, call.heads_k, call.heads_k), dims)
    leaves = dict(zip("qkv", (torch.randn(BATCH, n, h, d, device=device).to(call.dtype) for n, h, d in sizes)))
    if call.sinks:
        leaves["sinks"] = torch.randn(HEADS, device=device)
    if call.bias:
        bias = call.scale * torch.randn(SHAPES[call.bias], device=device)
        if call.bias in ("full", "heads"):
            bias[..., 3::17] = -INF
            bias[:, :, 11] = -INF
        leaves["attn_bias"] = bias if call.wide else bias.to(call.dtype)
    if call.rel:
        leaves["rel_bias"] = torch.randn(HEADS, 2 * call.rel + 1, device=device)
    return {name: x.requires_grad_() for name, x in leaves.items()}


def slopes(call, device):
    return torch.full((HEADS,), 0.1, device=device) if call.alibi else None


def step(call, leaves, mask, dout=None, dlse=None, **options):
    """(out, LSE, S_dmask, gradients by name, dout, dlse) of a training step."""
    q, k, v, *_ = leaves.values()
    more = {name: x for name, x in leaves.items() if name not in "qkv"}
    out, lse, s_dmask = flash_attn_func(
        q, k, v, call.dropout, **call.scores(), deterministic=call.deterministic, return_attn_probs=True, mask=mask,
        alibi_slopes=slopes(call, q.device), **more, **options,
    )  # fmt: skip
    dout = torch.randn_like(out) if dout is None else dout
    dlse = torch.randn_like(lse) if dlse is None else dlse
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    return out, lse, s_dmask, dict(zip(leaves, grads)), dout, dlse


def check(call, device):
    leaves = make(call, device)
    mask = ranges_mask(BATCH, SQ, SK, device) if call.mask else None
    assert_right(call, leaves, mask, *step(call, leaves, mask))


def assert_right(call, leaves, mask, out, lse, s_dmask, grads, dout, dlse):
    """What step() returned, against float64."""
    keep = s_dmask[:, :, :SQ, :SK] >= 0 if call.dropout else None
    dense = None if mask is None else dense_of(mask, SQ, SK, BATCH, HEADS)
    options = {"alibi_slopes": slopes(call, out.device), "scale": SCALE}
    (right, right_grads), (plain, plain_grads) = (
        expected(call, leaves, dense, keep, dout, dlse, dtype, **options) for dtype in (torch.float64, call.dtype)
    )
    assert_accurate(out, right.out, plain.out)
    assert_accurate(lse, right.lse, plain.lse.to(lse.dtype), "lse", slack=1e-4)
    if call.dropout:
        assert_accurate(s_dmask[:, :, :SQ, :SK].abs(), right.probs.to(call.dtype), plain.probs, "S_dmask")
    if call.scale > 1:  # dP is close to softmax_d, which comes from out in 16 bits
        off = dlse_of_rounding(right.out, right.out.to(call.dtype), dout)
        _, saved = expected(call, leaves, dense, keep, dout, dlse + off, torch.float64, **options)
        plain_grads = {name: farther(right_grads[name], plain_grads[name], saved[name]) for name in grads}
    for name, ours in grads.items():
        assert ours.dtype == leaves[name].dtype and ours.shape == leaves[name].shape
        assert_gradient_accurate(ours, right_grads[name], plain_grads[name], name)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_biases(device, family, call):
    """With rows and keys that entries of -inf hide."""
    if device == "cpu" and call.dim > 64:
        pytest.skip("a head dim of the kernels")
    check(call, device)


@pytest.mark.parametrize("call", MASKED_CALLS, ids=str)
def test_biases_and_masks(device, call):
    if device == "cpu" and call.dim > 64:
        pytest.skip("a head dim of the kernels")
    check(call, device)


@pytest.mark.devices("cuda")
def test_head_dim_512(device):
    check(Call("heads", 512, causal=True), device)
    check(Call(rel=20, dim=320), device)


@pytest.mark.parametrize("wide", (False, True))
@pytest.mark.parametrize("kind", ("row stride", "pairs", "column stride", "offset", "transposed", "expanded"))
def test_strides(device, family, kind, wide):
    """No stride and no address of a bias changes a result; where TMA loads it in 16 bits, by no more than rounding."""
    call = Call("full", 64, wide=wide, causal=True)
    leaves = make(call, device)
    plain = leaves["attn_bias"].detach()
    if kind == "expanded":
        plain = plain[:1, :, :, :1].expand(SHAPES["full"])
        given = plain
        leaves["attn_bias"] = plain.contiguous().requires_grad_()
    else:
        big = {
            "row stride": lambda: plain.new_empty(BATCH, HEADS, SQ, SK + 1)[..., :SK],
            "pairs": lambda: plain.new_empty(BATCH, HEADS, SQ, SK + 2)[..., :SK],
            "column stride": lambda: plain.new_empty(BATCH, HEADS, SQ, 2 * SK)[..., ::2],
            "offset": lambda: plain.new_empty(plain.numel() + 1)[1:].view(plain.shape),
            "transposed": lambda: plain.new_empty(BATCH, HEADS, SK, SQ).mT,
        }[kind]()
        given = big.copy_(plain)
    *right, dout, dlse = step(call, leaves, None)
    others = {**leaves, "attn_bias": given.detach().requires_grad_()}
    ours = step(call, others, None, dout, dlse)
    pairs = [*zip(ours[:2], right[:2]), (ours[3]["attn_bias"], right[3]["attn_bias"])]
    for mine, theirs in pairs:
        if device == "cuda" and (wide or family == "mma_sync"):
            assert torch.equal(mine, theirs)
        if device == "cpu":
            torch.testing.assert_close(mine, theirs)  # it adds a bias that broadcasts by other instructions
    assert_right(call, others, None, *ours)


def test_gradients_repeat_their_bits(device, family):
    """Those of biases in every mode."""
    for call in (Call("heads", 64), Call("scores", 64, causal=True), Call("keys", 128, rel=9), Call("numbers", 64)):
        leaves = make(call, device)
        *first, dout, dlse = step(call, leaves, None)
        for _ in range(2):
            again = step(call, leaves, None, dout, dlse)
            for name in {"attn_bias", "rel_bias"} & set(leaves):
                assert torch.equal(again[3][name], first[3][name])


LENGTHS = [(200, 133), (0, 5), (71, 0), (1, 64), (131, 390)]
PACKED_CALLS = [
    Call("packed", 64, causal=True),
    Call("packed", 128, rel=20),
    Call(rel=9, dim=64, softcap=3.0),
    Call("packed heads", 256, wide=True),
    Call("packed heads", 96, window=(100, 60), deterministic=True),
]


@pytest.mark.parametrize("call", PACKED_CALLS, ids=str)
def test_packed_sequences(device, family, call):
    """Rows and columns of a bias count within each sequence; lengths of zero are among them."""
    if device == "cpu" and call.dim > 64:
        pytest.skip("a head dim of the kernels")
    total_q, total_k = (sum(n) for n in zip(*LENGTHS))
    longest_q, longest_k = (max(n) for n in zip(*LENGTHS))
    cu_q, cu_k = starts(LENGTHS, device)
    sizes = ((total_q, HEADS), (total_k, call.heads_k), (total_k, call.heads_k))
    leaves = dict(zip("qkv", (torch.randn(n, h, call.dim, device=device).to(call.dtype) for n, h in sizes)))
    if call.bias:
        bias = torch.randn(HEADS if "heads" in call.bias else 1, total_q, longest_k, device=device)
        leaves["attn_bias"] = bias if call.wide else bias.to(call.dtype)
    if call.rel:
        leaves["rel_bias"] = torch.randn(HEADS, 2 * call.rel + 1, device=device)
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    more = {name: x for name, x in leaves.items() if name not in "qkv"}
    out, lse, _ = flash_attn_varlen_func(
        leaves["q"], leaves["k"], leaves["v"], cu_q, cu_k, longest_q, longest_k, **call.scores(),
        deterministic=call.deterministic, return_attn_probs=True, **more,
    )  # fmt: skip
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))

    right, plain = (
        packed_expected(call, LENGTHS, leaves, None, dout, dlse, dtype, scale=SCALE)
        for dtype in (torch.float64, call.dtype)
    )
    assert_accurate(out, right[0], plain[0])
    assert_accurate(lse, right[1], plain[1].to(lse.dtype), "lse", slack=1e-4)
    for name, ours in zip(leaves, grads):
        assert_gradient_accurate(ours, right[2][name], plain[2][name], name)


@pytest.mark.devices("cuda")
def test_lengths_of_any_content(device, family):
    """A bias has fewer columns than a sequence claims to have keys: no address is outside of it."""
    q, k, v = (torch.randn(300, 2, 64, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    bias = torch.randn(1, 300, 20, device=device).requires_grad_()
    cu = ints(0, 290, device=device)
    out = flash_attn_varlen_func(q, k, v, cu, cu, 20, 20, attn_bias=bias)
    grads = torch.autograd.grad(out.sum(), (q, k, v, bias))
    assert all(x.isfinite().all() for x in (out, *grads))


@pytest.mark.devices("cuda")
def test_offsets_beyond_32_bits(device, family):
    """The last matrix of a bias that has more than 2^31 elements."""
    sq, sk = 128, 70000
    if torch.cuda.mem_get_info()[0] < 3 * 2 * 130 * sq * sk:
        pytest.skip("too little free memory")
    q, k, v = (torch.randn(1, n, 260, 32, device=device, dtype=torch.bfloat16) for n in (sq, sk, sk))
    bias = torch.zeros(1, 260, sq, sk, device=device, dtype=torch.bfloat16)
    bias[:, -1] = torch.randn(sq, sk, device=device)
    last = slice(-1, None)
    out = flash_attn_func(q, k[:, :, :1], v[:, :, :1], attn_bias=bias)[:, :, last]
    right = flash_attn_func(q[:, :, last], k[:, :, :1], v[:, :, :1], attn_bias=bias[:, last])
    torch.testing.assert_close(out, right)


@pytest.mark.devices("cuda")
def test_a_graph_reads_the_biases_of_each_replay(device, family):
    call = Call("heads", 64, rel=9, deterministic=True)
    leaves = make(call, device)
    *_, dout, dlse = step(call, leaves, None)

    def replayed():  # new leaves, because the old ones belong to another stream
        return step(call, {name: x.detach().requires_grad_() for name, x in leaves.items()}, None, dout, dlse)

    graph, ours = captured(replayed)
    for _ in range(2):
        with torch.no_grad():
            for name in ("attn_bias", "rel_bias"):
                leaves[name].copy_(torch.randn_like(leaves[name]))
        graph.replay()
        right = step(call, leaves, None, dout, dlse)
        assert torch.equal(ours[0], right[0]) and torch.equal(ours[1], right[1])
        for name in leaves:
            assert torch.equal(ours[3][name], right[3][name])


@pytest.mark.devices("cuda")
def test_plans_of_calls_with_a_bias(device, family):
    q, k, v, bias = make(Call("heads"), device).values()
    plans = flash_attn.explain(flash_attn_func, q, k, v, attn_bias=bias)
    variants = {"wgmma": ("biased", "biased"), "mma_sync": ("dropout", "dropout")}
    assert tuple(plans[name]["kernel"] for name in ("forward", "backward")) == (family, family)
    assert tuple(plans[name]["variant"] for name in ("forward", "backward")) == variants[family]
    plain = flash_attn.explain(flash_attn_func, q, k, v)
    assert plain["forward"]["variant"] not in variants[family]


@pytest.mark.devices("cuda")
@pytest.mark.parametrize(
    "given,message",
    (
        (
            {"attn_bias": (2, 4, 5, 4)},
            r"attn_bias: expected shape \[1 or 2, 1 or 4, 1 or 5, 1 or 5\], got \[2, 4, 5, 4\]",
        ),
        ({"rel_bias": (4, 6)}, r"rel_bias: expected shape \[4, 2 R \+ 1\], got \[4, 6\]"),
    ),
)
def test_errors(device, given, message):
    q = torch.randn(2, 5, 4, 64, device=device).bfloat16()
    with pytest.raises(RuntimeError, match=message):
        flash_attn_func(q, q, q, **{name: torch.zeros(size, device=device) for name, size in given.items()})
    with pytest.raises(RuntimeError, match="attn_bias: expected dtype bfloat16 or float32, got float16"):
        flash_attn_func(q, q, q, attn_bias=torch.zeros(5, 5, device=device).half())
    eight_bit = q.to(torch.float8_e4m3fn)
    scale = torch.ones(2, 4, device=device)
    with pytest.raises(RuntimeError, match="expected float16 or bfloat16 with a bias on CUDA, got float8_e4m3fn"):
        flash_attn_func(q, eight_bit, eight_bit, k_descale=scale, v_descale=scale,
                        attn_bias=torch.zeros(5, 5, device=device))  # fmt: skip
