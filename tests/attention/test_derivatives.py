"""Forward mode and second derivatives against those of plain attention in float64, and by finite differences."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from reference import Varlen, assert_accurate, attention, attention_varlen
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn import (
    AttentionMask,
    flash_attn_func,
    flash_attn_jvp,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn.derivatives import blocks
from flash_attn.dropout import keep_scale
from flash_attn.fp8 import flash_attn_straight_through_func
from flash_attn.ops import library, normalize
from flash_attn.ops.attention_args import AttentionArgs, Tangents, backward_args, saved_for_backward

pytestmark = pytest.mark.by_both_paths

DTYPE = {"cpu": torch.float64, "cuda": torch.float16}
SEED = 3
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "rows without keys": {"causal": True, "few_keys": True},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.9},
    "alibi": {"alibi_slopes": True, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "dropout": {"dropout_p": 0.4},
    "value dim": {"value_dim": 16},
    "all": {"causal": True, "window_size": (5, 0), "softcap": 1.5, "alibi_slopes": True, "sinks": True,
            "dropout_p": 0.4},
}  # fmt: skip
CU_Q, CU_K = (0, 4, 4, 9, 11), (0, 6, 7, 7, 13)  # lengths 4 of 6, 0 of 1, 5 of 0, 2 of 6, and rows of no sequence


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


class Problem:
    """A call with a feature as functions of (q, k, v[, sinks]) -> (out, lse): ours, and plain attention in a dtype."""

    def __init__(self, device, feature, packed=False, sizes=(2, 9, 13, 4, 2, 8)):
        options = dict(FEATURES[feature])
        batch, sq, sk, heads, heads_k, head_dim = sizes
        if options.pop("few_keys", False):
            sk = sq // 2
        value_dim = options.pop("value_dim", head_dim)
        rows_q, rows_k = ((12,), (14,)) if packed else ((batch, sq), (batch, sk))
        shapes = [(*rows_q, heads, head_dim), (*rows_k, heads_k, head_dim), (*rows_k, heads_k, value_dim)]
        self.inputs = [torch.randn(shape, device=device, dtype=DTYPE[device]) for shape in shapes]
        if options.pop("sinks", False):
            dtype = torch.float64 if device == "cpu" else torch.float32
            self.inputs.append(torch.randn(heads, device=device, dtype=dtype))
        if options.get("alibi_slopes"):
            options["alibi_slopes"] = torch.rand(4 if packed else batch, heads, device=device)
        self.options, self.cu = options, (ints(device, *CU_Q), ints(device, *CU_K)) if packed else None

    def directions(self):
        return [torch.randn_like(x) for x in self.inputs]

    def call(self, q, k, v, sinks=None):
        torch.manual_seed(SEED)  # of the dropout mask
        options = {**self.options, "sinks": sinks, "return_attn_probs": True}
        if self.cu is None:
            return flash_attn_func(q, k, v, **options)
        return flash_attn_varlen_func(q, k, v, *self.cu, 5, 6, **options)

    def ours(self, *inputs):
        return self.call(*inputs)[:2]

    def jvp(self, tq, tk, tv, tsinks=None):
        torch.manual_seed(SEED)
        q, k, v, *sinks = self.inputs
        cu = {} if self.cu is None else dict(zip(("cu_seqlens_q", "cu_seqlens_k"), self.cu))
        given = {"sinks": sinks[0], "tsinks": tsinks} if sinks else {}
        return flash_attn_jvp(q, k, v, tq, tk, tv, **self.options, **given, **cu)

    def reference(self, dtype=torch.float64):
        options = {name: x for name, x in self.options.items() if name in ("causal", "softcap", "alibi_slopes")}
        options.update(window=self.options.get("window_size", (-1, -1)), scale=self.options.get("softmax_scale"))
        options["dtype"] = dtype
        p = self.options.get("dropout_p", 0.0)
        if p:
            dmask = self.call(*self.inputs)[2]
            options.update(keep=~torch.signbit(dmask), rp_dropout=keep_scale(p))

        def plain(q, k, v, sinks=None):
            if self.cu is None:
                if p:
                    options["keep"] = options["keep"][..., : q.shape[1], : k.shape[1]]
                result = attention(q, k, v, sinks=sinks, **options)
            else:
                layout = Varlen(CU_Q[:-1], [b - a for a, b in zip(CU_Q, CU_Q[1:])],
                                CU_K[:-1], [b - a for a, b in zip(CU_K, CU_K[1:])], len(q))  # fmt: skip
                result = attention_varlen(q, k, v, layout, sinks=sinks, **options)
            return result.out, result.lse

        return plain


@pytest.fixture
def small_blocks(monkeypatch):
    """Every problem has several blocks of rows, heads and sequences."""
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 4)
    monkeypatch.setattr(blocks, "BLOCK_SCORES", 200)


def check(ours, expected, plain):
    for name, x, y, z in zip(("first", "second", "third", "fourth"), ours, expected, plain):
        assert x.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        assert_accurate(x, y, z.to(x.dtype), name=name, factor=3.0, slack=1e-9 if x.dtype == torch.float64 else 1e-3)


def upcast(tensors):
    return tuple(x.double() for x in tensors)


@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
@pytest.mark.parametrize("feature", FEATURES)
def test_tangents(device, family, feature, packed, small_blocks):
    """By torch.func.jvp, by forward_ad and explicit, those of plain attention."""
    problem = Problem(device, feature, packed)
    inputs, directions = tuple(problem.inputs), tuple(problem.directions())
    results, tangents = torch.func.jvp(problem.ours, inputs, directions)
    plain = torch.func.jvp(problem.reference(DTYPE[device]), inputs, directions)[1]
    expected = torch.func.jvp(problem.reference(), upcast(inputs), upcast(directions))[1]
    check(tangents, expected, plain)
    for x, y in zip(problem.jvp(*directions), (*results, *tangents)):
        assert torch.equal(x, y)
    with torch.no_grad(), forward_ad.dual_level():
        duals = problem.ours(*map(forward_ad.make_dual, inputs, directions))
        for dual, *pair in zip(duals, results, tangents):
            assert all(map(torch.equal, forward_ad.unpack_dual(dual), pair))


TILES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (70, 33)},
    "one key a row": {"window_size": (0, 0)},
    "rows without keys": {"causal": True, "few_keys": True},
    "large scores": {"softmax_scale": 6.0},
}


@pytest.mark.each
@pytest.mark.parametrize("lengths", (((300, 429),), ((0, 130), (257, 64), (129, 300), (1, 1))), ids=("dense", "packed"))
@pytest.mark.parametrize("head_dim, dtype", ((64, torch.float16), (96, torch.float16), (128, torch.bfloat16)))
@pytest.mark.parametrize("feature", TILES)
def test_tangents_across_tiles(device, family, feature, head_dim, dtype, lengths):
    """Several blocks of keys, and on a GPU more work tiles than multiprocessors; grouped queries, padded rows."""
    batch, heads, heads_k = (2, 72, 24) if device == "cuda" else (1, 3, 1)
    dtype = dtype if device == "cuda" else torch.float64
    options, cu = dict(TILES[feature]), {}
    if options.pop("few_keys", False):
        lengths = tuple(pair[::-1] for pair in lengths)
    packed = len(lengths) > 1
    (total_q, total_k), lead = map(sum, zip(*lengths)), () if packed else (batch,)
    shapes = [(*lead, n, h, head_dim + 8) for n, h in ((total_q, heads), (total_k, heads_k), (total_k, heads_k))]
    inputs, directions = (
        [torch.randn(shape, device=device, dtype=dtype)[..., :head_dim] for shape in shapes] for _ in range(2)
    )
    if packed:
        starts = [[sum(x[i] for x in lengths[:n]) for n in range(len(lengths) + 1)] for i in (0, 1)]
        cu = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), (ints(device, *x) for x in starts)))
    ours = flash_attn_jvp(*inputs, *directions, **options, **cu)
    scores = {"window": options.pop("window_size", (-1, -1)), "scale": options.pop("softmax_scale", None), **options}

    def plain(dtype):
        def call(q, k, v):
            if packed:
                lens_q, lens_k = zip(*lengths)
                layout = Varlen(starts[0][:-1], list(lens_q), starts[1][:-1], list(lens_k), total_q)
                result = attention_varlen(q, k, v, layout, dtype=dtype, **scores)
            else:
                result = attention(q, k, v, dtype=dtype, **scores)
            return result.out, result.lse

        return call

    results, tangents = torch.func.jvp(plain(torch.float64), upcast(inputs), upcast(directions))
    rough = torch.func.jvp(plain(dtype), tuple(inputs), tuple(directions))
    check(ours, (*results, *tangents), (*rough[0], *rough[1]))


@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
@pytest.mark.parametrize("feature", FEATURES)
def test_second_backward(device, feature, packed, small_blocks):
    """The gradient of a function of the gradients, for the inputs and for the incoming gradient."""
    problem = Problem(device, feature, packed)
    weights = problem.directions()
    douts = [torch.randn_like(x) for x in problem.ours(*problem.inputs)]

    def second(function, dtype):
        leaves = [x.to(dtype if x.dtype == DTYPE[device] else x.dtype).requires_grad_() for x in problem.inputs]
        out, lse = function(*leaves)
        incoming = [x.to(y.dtype).requires_grad_() for x, y in zip(douts, (out, lse))]
        finite = torch.isfinite(lse)
        loss = (out * incoming[0]).sum() + (lse * incoming[1])[finite].sum()
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        product = sum((grad * x).sum() for grad, x in zip(grads, weights))
        return torch.autograd.grad(product, (*leaves, *incoming))

    expected, plain = (second(problem.reference(dtype), dtype) for dtype in (torch.float64, DTYPE[device]))
    check(second(problem.ours, DTYPE[device]), expected, plain)


@pytest.mark.each  # pairs are those of the tests above
@pytest.mark.devices("cpu")
@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
@pytest.mark.parametrize("feature", FEATURES)
def test_finite_differences(device, feature, packed):
    """First derivatives in forward mode, and second ones by reverse and by forward over reverse."""
    problem = Problem(device, feature, packed, sizes=(1, 4, 5, 2, 1, 2))
    inputs = [x.requires_grad_() for x in problem.inputs]

    def call(*inputs):
        return tuple(x.masked_fill(torch.isinf(x), 0.0) for x in problem.ours(*inputs))

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True, fast_mode=True)


PACKED_CALLS = {
    "qkv": (lambda x, cu: flash_attn_qkvpacked_func(x, causal=True), [(1, 4, 3, 2, 2)]),
    "kv": (lambda q, kv, cu: flash_attn_kvpacked_func(q, kv, causal=True), [(1, 4, 2, 2), (1, 5, 2, 1, 2)]),
    "varlen qkv": (lambda x, cu: flash_attn_varlen_qkvpacked_func(x, cu, 3), [(5, 3, 2, 2)]),
    "varlen kv": (lambda q, kv, cu: flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 3, 3), [(5, 2, 2), (5, 2, 1, 2)]),
    "rows in use": (
        lambda q, k, cu: flash_attn_varlen_func(q, k, k, cu, cu, 3, 3, seqused_q=cu[1:] * 0 + 2),
        [(5, 2, 2), (5, 1, 2)],
    ),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("name", PACKED_CALLS)
def test_finite_differences_of_packed_inputs(device, name):
    function, shapes = PACKED_CALLS[name]
    cu = ints(device, 0, 3, 5)
    inputs = [torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for shape in shapes]
    call = lambda *inputs: function(*inputs, cu)  # noqa: E731
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("feature", ("all", "value dim"))
def test_finite_differences_of_tangents(device, feature):
    """Gradients of all results of flash_attn_jvp, for the inputs and their tangents."""
    problem = Problem(device, feature, sizes=(1, 4, 5, 2, 1, 2))
    inputs = problem.inputs
    count = len(inputs)
    leaves = [x.requires_grad_() for x in (*inputs, *problem.directions())]

    def call(*leaves):
        problem.inputs = leaves[:count]
        return problem.jvp(*leaves[count:])

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


# ---- which tensors have tangents ----


def qkv(device, rows=6, keys=7):
    return tuple(torch.randn(1, n, 2, 8, device=device, dtype=DTYPE[device]) for n in (rows, keys, keys))


@pytest.mark.parametrize("missing", ("q", "k", "v", "kv", "qk", "qkv"))
def test_a_tangent_that_is_not_given_is_zero(device, family, missing):
    """As None, as a tensor without a tangent, as zeros; those given are expanded."""
    inputs = dict(zip("qkv", qkv(device)))
    given = {name: torch.randn_like(x[:, :1]).expand_as(x) for name, x in inputs.items() if name not in missing}
    zeros = {name: torch.zeros_like(inputs[name]) for name in missing}
    copies = {name: x.contiguous() for name, x in {**zeros, **given}.items()}
    expected = flash_attn_jvp(*inputs.values(), **{f"t{name}": x for name, x in copies.items()})
    actual = flash_attn_jvp(*inputs.values(), **{f"t{name}": x for name, x in given.items()})
    for x, y in zip(actual, expected):
        torch.testing.assert_close(x, y)
    if given:
        with forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(x, given[name]) if name in given else x for name, x in inputs.items()}
            tangent = forward_ad.unpack_dual(flash_attn_func(**duals)).tangent
        assert torch.equal(tangent, actual[2])


def test_one_key_passes_its_tangent_on(device, family):
    """Its probability is 1 whatever the scores: all of their tangent cancels."""
    q, k, v = qkv(device, keys=1)
    tq, tk, tv = (8 * torch.randn_like(x) for x in (q, k, v))
    t_out = flash_attn_jvp(q, k, v, tq, tk, tv)[2]
    torch.testing.assert_close(t_out, tv.expand_as(t_out), rtol=1e-3, atol=1e-3)


@pytest.mark.devices("cuda")
def test_a_kernel_computes_plain_calls(device, family, monkeypatch):
    """Of head dims up to 128, in every mode."""
    monkeypatch.setattr(blocks, "tangents", None)
    q, k, v = qkv(device)
    t_out = flash_attn_jvp(q, k, v, q, causal=True)[2]
    assert torch.equal(torch.func.jvp(lambda q: flash_attn_func(q, k, v, causal=True), (q,), (q,))[1], t_out)


@pytest.mark.devices("cuda")
def test_tangents_with_little_shared_memory(device, monkeypatch):
    """GPUs with 99 KB for a thread block have another tile at head dim 128, whose rows are computed alike."""
    monkeypatch.setattr(blocks, "tangents", None)
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "mma_sync")
    inputs = [torch.randn(1, n, 4, 128, device=device, dtype=torch.bfloat16) for n in 2 * (300, 429, 429)]
    expected = flash_attn_jvp(*inputs)
    monkeypatch.setenv("FLASH_ATTN_SMEM_LIMIT", "101376")
    assert all(map(torch.equal, flash_attn_jvp(*inputs), expected))


@pytest.mark.parametrize("with_sinks", (False, True))
def test_rows_without_keys_are_constant(device, family, with_sinks):
    """Gradients and tangents of theirs that are NaN reach nothing."""
    q, k, v = (x.requires_grad_() for x in qkv(device, 6, 4))
    sinks = torch.randn(2, device=device) if with_sinks else None
    tangent = torch.ones(2, device=device) if with_sinks else None
    tq = torch.randn_like(q)
    _, _, t_out, t_lse = flash_attn_jvp(q, k, v, tq, causal=True, sinks=sinks, tsinks=tangent)
    assert torch.equal(t_out[:, :2], torch.zeros_like(t_out[:, :2]))
    assert torch.equal(t_lse[..., :2], torch.full_like(t_lse[..., :2], float(with_sinks)))
    out = flash_attn_func(q, k, v, causal=True, sinks=sinks)
    dout = torch.randn_like(out)
    dout[:, :2] = float("nan")
    grads = torch.autograd.grad(out, (q, k, v), dout, create_graph=True)
    for x in torch.autograd.grad(sum(x.sum() for x in grads), (q, k, v)):
        assert torch.isfinite(x).all()


def test_jacobians_by_columns_and_rows(device):
    q, k, v = qkv(device, 2, 3)
    for argument in (0, 1, 2):
        columns = torch.func.jacfwd(flash_attn_func, argument)(q, k, v)
        torch.testing.assert_close(columns, torch.func.jacrev(flash_attn_func, argument)(q, k, v), rtol=1e-2, atol=2e-3)


def test_hessian_products_by_all_orders_of_modes(device):
    q, k, v = qkv(device, 2, 3)
    grad, jvp = torch.func.grad, torch.func.jvp
    t = torch.randn_like(q)

    def loss(q):
        return flash_attn_func(q, k, v).double().pow(3).sum()

    expected = jvp(grad(loss), (q,), (t,))[1]
    close = {"rtol": 1e-2, "atol": 1e-2} if device == "cuda" else {}
    torch.testing.assert_close(grad(lambda q: (grad(loss)(q) * t).sum())(q), expected, **close)
    torch.testing.assert_close(grad(lambda q: jvp(loss, (q,), (t,))[1])(q), expected, **close)
    hessian = torch.func.hessian(loss)(q)
    torch.testing.assert_close(torch.tensordot(hessian, t, dims=t.dim()), expected, **close)


def test_tangents_of_one_of_two_levels(device):
    """The inner level differentiates something else."""
    q, k, v = qkv(device)
    one, t = torch.ones((), device=device, dtype=q.dtype), torch.randn_like(q)

    def inner(q):
        return torch.func.jvp(lambda x: flash_attn_func(q, k, v) * x, (one,), (one,))[0]

    assert torch.equal(torch.func.jvp(inner, (q,), (t,))[1], flash_attn_jvp(q, k, v, t)[2])


def test_sinks_of_a_module_call_no_operator(device, monkeypatch):
    """A Parameter is a plain tensor: no dispatch in a backward, no refusal in forward mode."""
    q, k, v = qkv(device)
    sinks = torch.nn.Parameter(torch.randn(2, device=device))
    expected = flash_attn_jvp(q, k, v, q, sinks=sinks)[2]
    tangent = torch.func.jvp(lambda q: flash_attn_func(q, k, v, sinks=sinks), (q,), (q,))[1]
    assert torch.equal(tangent, expected)
    monkeypatch.setattr(library, "_backward_op", None)
    flash_attn_func(q, k, v, sinks=sinks).sum().backward()
    assert sinks.grad is not None


# ---- what is kept, what is passed on ----


def test_gradients_beside_tangents(device):
    """MeanFlow: the tangent is a constant of the loss, and the gradient of the primal keeps none of the tangents."""
    q, k, v = (x.requires_grad_() for x in qkv(device))
    tangents = [torch.randn_like(x) for x in (q, k, v)]
    for explicit in (True, False):
        if explicit:
            out, _, t_out, _ = flash_attn_jvp(q, k, v, *tangents)
        else:
            out, t_out = torch.func.jvp(flash_attn_func, (q, k, v), tuple(tangents))
        loss = (out - t_out.detach()).square().sum()
        expected = torch.autograd.grad((flash_attn_func(q, k, v) - t_out.detach()).square().sum(), (q, k, v))
        for x, y in zip(torch.autograd.grad(loss, (q, k, v)), expected):
            torch.testing.assert_close(x, y)
    copies = [x.clone() for x in tangents]
    out, _, t_out, t_lse = flash_attn_jvp(q, k, v, *copies)
    kept = [weakref.ref(x) for x in copies]
    del copies, t_out, t_lse
    gc.collect()
    assert [x() for x in kept] == [None] * 3


@pytest.mark.parametrize("what", ("autocast", "sinks", "head dim"))
def test_second_derivatives_of_what_is_converted(device, what, monkeypatch):
    """The kernels get copies in another dtype or with more columns; the derivative is that of what was given."""
    monkeypatch.setattr(normalize, "_pads", lambda q: True)
    dtype = torch.float32 if what == "autocast" else torch.bfloat16
    q = torch.randn(1, 5, 2, 12 if what == "head dim" else 16, device=device, dtype=dtype, requires_grad=True)
    sinks = torch.randn(2, device=device, dtype=torch.bfloat16, requires_grad=True)
    leaves = (q, sinks)

    def penalty(q, sinks):
        out = flash_attn_func(q, q, q, causal=True, sinks=sinks).float()
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.float().square().sum() for x in grads), leaves)

    with torch.autocast(device, torch.bfloat16, enabled=what == "autocast"):
        actual = penalty(q, sinks)

    def given(q, sinks):
        out = attention(q, q, q, causal=True, sinks=sinks).out
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.double().square().sum() for x in grads), leaves)

    for x, y in zip(actual, given(q, sinks)):
        assert x.dtype == y.dtype
        assert (x - y).double().norm() < 0.05 * y.double().norm()


def test_memory_of_a_block(device, monkeypatch):
    """No tensor is larger than an input or the scores of one block."""

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and "flash_attn_core" not in str(function):
                self.size = max(self.size, result.untyped_storage().nbytes() // result.element_size())
            return result

    monkeypatch.setattr(blocks, "BLOCK_ROWS", 16)
    monkeypatch.setattr(blocks, "BLOCK_SCORES", 1)
    seqlen = 256
    q, k, v = (torch.randn(1, seqlen, heads, 8, device=device, dtype=DTYPE[device], requires_grad=True)
               for heads in (4, 2, 2))  # fmt: skip
    grads = torch.autograd.grad(flash_attn_func(q, k, v).sum(), (q, k, v), create_graph=True)
    product = sum(x.sum() for x in grads)
    with Largest() as largest:
        torch.autograd.grad(product, (q, k, v))
        flash_attn_jvp(q.detach(), k.detach(), v.detach(), q.detach())
    assert 0 < largest.size <= max(q.numel(), 2 * 16 * seqlen)


@pytest.mark.devices("cpu")
def test_code_of_the_page(device):
    page = (Path(__file__).parents[2] / "docs" / "derivatives.md").read_text(encoding="utf-8")
    names = {}
    for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(code, names)
    assert names["qkv"].weight.grad.isfinite().all() and names["t_out"].shape == names["out"].shape


# ---- compiled code ----


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True, **options})


@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
def test_compiled_jvp(device, packed):
    problem = Problem(device, "all", packed)
    leaves = [x.requires_grad_() for x in problem.inputs]
    directions = [x.requires_grad_() for x in problem.directions()]
    options = {**problem.options, "dropout_p": 0.0}
    cu = {} if not packed else dict(zip(("cu_seqlens_q", "cu_seqlens_k"), problem.cu))

    def call(q, k, v, sinks, tq, tk, tv, tsinks):
        return flash_attn_jvp(q, k, v, tq, tk, tv, sinks=sinks, tsinks=tsinks, **options, **cu)

    results = [function(*leaves, *directions) for function in (call, compiled(call))]
    weights = [torch.randn_like(x) for x in results[0]]
    finite = [torch.isfinite(x) for x in results[0]]
    grads = []
    for result in results:
        loss = sum((x * y)[z].sum() for x, y, z in zip(result, weights, finite))
        grads.append(torch.autograd.grad(loss, (*leaves, *directions)))
    for x, y in zip((*results[0], *grads[0]), (*results[1], *grads[1])):
        torch.testing.assert_close(x, y)


@pytest.mark.needs_torch((2, 11), "has another error")
def test_compiled_code_drops_no_tangent(device):
    """It raises, or runs eagerly what it cannot compile."""
    q, k, v = qkv(device)
    t = torch.randn_like(q)
    message = "forward-mode.*flash_attn_jvp"

    def tangent(q, t):
        return torch.func.jvp(lambda q: flash_attn_func(q, k, v), (q,), (t,))[1]

    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        compiled(tangent)(q, t)
    assert torch.equal(compiled(tangent, fullgraph=False)(q, t), tangent(q, t))
    function = compiled(lambda q: flash_attn_func(q, k, v))
    function(q)
    errors = (NotImplementedError, torch._dynamo.exc.Unsupported)  # the latter of torch 2.14 itself
    with forward_ad.dual_level(), pytest.raises(errors, match=f"{message}|dual tensor"):
        function(forward_ad.make_dual(q, t))


def test_second_derivatives_of_the_operator(device):
    """Of code that Dynamo leaves as it is; compiled backwards are once differentiable, by torch."""
    q, k, v = (x.requires_grad_() for x in qkv(device))

    def penalty(function):
        (grad,) = torch.autograd.grad(function(q, k, v).square().sum(), q, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), (q, k, v))

    for x, y in zip(penalty(compiled(flash_attn_func, backend="eager")), penalty(flash_attn_func)):
        torch.testing.assert_close(x, y)


def test_opcheck(device):
    """Schemas, fakes and autograd of both operators."""
    q, k, v = (x.requires_grad_() for x in qkv(device))
    directions = Tangents(torch.randn_like(q), None, torch.randn_like(v), None)
    none, score = (None,) * 7, (0, 0, 0.0, 0.3, True, -1, -1, 0.0, False)
    core, args = torch.ops.flash_attn_core, AttentionArgs(q, k, v, *none, *score, False, False)
    torch.library.opcheck(core.jvp.default, (*directions, *args))
    out, lse, _, rng_state, *_ = core.fwd(*(x.detach() if isinstance(x, torch.Tensor) else x for x in args))
    call = backward_args(out, None, *saved_for_backward(args, out, lse, rng_state))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # no third derivative
    torch.library.opcheck(core.hvp.default, (*directions, *call), test_utils=tests)


# ---- errors ----


def refused_calls(device):
    """name -> (call, the beginning of its error)."""
    q, k, v = (torch.randn(1, 16, 2, 16, device=device, dtype=torch.float16) for _ in "qkv")
    cu, lengths, sinks = ints(device, 0, 16), ints(device, 9), torch.ones(2, device=device)
    wide, jvp, grad = torch.randn_like(q, requires_grad=True), torch.func.jvp, torch.func.grad

    def loss(q):
        return flash_attn_func(q, k, v).float().pow(2).sum()

    def varlen(q, **options):
        return flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 16, 16, **options)

    def paged(q):
        return flash_attn_varlen_func(q[0], k, v, cu, cu, 16, 16, block_table=ints(device, 0)[None])

    def eight_bit(sinks):
        return flash_attn_func(q, k.to(torch.int8), v.to(torch.int8), sinks=sinks)

    def twice(q):
        return jvp(lambda x: jvp(loss, (x,), (q,))[1], (q,), (q,))

    def third(x):
        return grad(lambda x: grad(lambda x: grad(loss)(x).sum())(x).sum())(x)

    def straight(q):
        (dq,) = torch.autograd.grad(flash_attn_straight_through_func(q, k, v).sum(), q, create_graph=True)
        return dq.sum().backward()

    tangent = (q,), (q,)
    return {
        "keys in use": (lambda: jvp(lambda q: varlen(q, seqused_k=lengths), *tangent), "seqused_k: expected None"),
        "left padding": (lambda: jvp(lambda q: varlen(q, leftpad_k=lengths), *tangent), "leftpad_k: expected None"),
        "pages": (lambda: jvp(paged, *tangent), "block_table: expected None in forward mode"),
        "8 bits and sinks": (lambda: jvp(eight_bit, (sinks,), (sinks,)), "k: expected at least 16 bits in"),
        "8 bits": (lambda: flash_attn_jvp(q, k.to(torch.int8), v, q), "k: expected at least 16 bits"),
        "tangent of a tangent": (lambda: twice(q), "flash_attn: expected one level of forward mode"),
        "third derivative": (lambda: third(q), "flash_attn: expected at most two derivatives"),
        "straight through": (lambda: straight(wide), "flash_attn_straight_through_func: expected one backward"),
        "shape": (lambda: flash_attn_jvp(q, k, v, q[:, :3]), r"tq: expected shape \[1, 16, 2, 16\]"),
        "dtype": (lambda: flash_attn_jvp(q, k, v, tv=v.float()), r"tv: expected shape .*, dtype float16"),
        "type": (lambda: flash_attn_jvp(q, k, v, tk=1.0), "tk: expected a Tensor, got float"),
        "no sinks": (lambda: flash_attn_jvp(q, k, v, tsinks=q), "tsinks: expected None without sinks"),
    }  # fmt: skip


@pytest.mark.parametrize("name", refused_calls("cpu"))
def test_what_has_no_derivative_is_refused_by_name(device, name):
    call, message = refused_calls(device)[name]
    with pytest.raises((NotImplementedError, RuntimeError, TypeError), match=f"^{message}"):
        call()


def masked_calls(device):
    """q, and (function of q and the given, name, given) of calls with a mask or a bias."""
    q, k, v = (torch.randn(1, 6, 2, 8, device=device, dtype=DTYPE[device]) for _ in "qkv")
    seen, cu = torch.rand(6, 6, device=device) > 0.4, ints(device, 0, 6)
    biases = {
        "attn_bias": torch.randn(6, 6, device=device, dtype=q.dtype),
        "rel_bias": torch.randn(2, 5, device=device),
    }

    def dense(name):
        return lambda q, given: flash_attn_func(q, k, v, **{name: given})

    def packed(q, given):
        return flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 6, 6, mask=given)

    documents, bits = AttentionMask.document_ids(cu.new_tensor([[0, 0, 0, 1, 1, 1]])), AttentionMask.from_tensor(seen)
    masks = [(dense("mask"), "mask", mask) for mask in (seen, documents, bits)]
    return q, [*masks, (packed, "mask", seen[None]), *((dense(name), name, bias) for name, bias in biases.items())]


def with_dual(function, q, given):
    with forward_ad.dual_level():
        function(forward_ad.make_dual(q, q), given)


SECOND = {
    "tangent": lambda f, q, x: torch.func.jvp(lambda q: f(q, x), (q,), (q,)),
    "dual": with_dual,
    "hessian": lambda f, q, x: torch.func.hessian(lambda q: f(q, x).sum())(q),
    "gradient of gradient": lambda f, q, x: torch.func.grad(lambda q: torch.func.grad(cubed(f, x))(q).sum())(q),
    "create_graph": lambda f, q, x: differentiated(f(q, x), q).sum().backward(),
    "incoming gradient": lambda f, q, x: torch.autograd.functional.jvp(lambda q: f(q, x), q, q),
}
OF_BIAS = {
    "tangent of the bias": lambda f, q, x: torch.func.jvp(lambda x: f(q, x), (x,), (x,)),
    "gradient of the bias": lambda f, q, x: differentiated(f(q, x), x).sum().backward(),
    "bias after q": lambda f, q, x: torch.autograd.grad(differentiated(f(q, x), q).sum(), x),
    "q after the bias": lambda f, q, x: torch.autograd.grad(differentiated(f(q, x), x).sum(), q),
}


def cubed(function, given):
    return lambda q: (function(q, given) ** 3).sum()


def differentiated(out, x):
    return torch.autograd.grad((out**3).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("what", (*SECOND, *OF_BIAS))
def test_masks_and_biases_are_refused_by_name(device, what):
    """Whichever input is differentiated, in whichever order; none is left out of the scores."""
    q, calls = masked_calls(device)
    q.requires_grad_(what not in ("tangent", "dual"))
    for function, name, given in calls:
        if what in OF_BIAS:
            if name == "mask":
                continue
            given.requires_grad_()
        message = f"^{name}: expected None with tangents or second derivatives, got one"
        with pytest.raises(NotImplementedError, match=message):
            {**SECOND, **OF_BIAS}[what](function, q, given)


def test_create_graph_keeps_the_gradients_of_converted_calls(device, monkeypatch):
    """Padded, with sinks of half precision, a mask and a bias: the gradients are those of a first derivative."""
    monkeypatch.setattr(normalize, "_pads", lambda q: True)
    shapes = (1, 5, 2, 12), (2,), (5, 5)
    leaves = [torch.randn(x, device=device, dtype=torch.bfloat16, requires_grad=True) for x in shapes]
    q, sinks, attn_bias = leaves
    out = flash_attn_func(q, q, q, sinks=sinks, attn_bias=attn_bias, mask=torch.ones_like(attn_bias).tril() > 0)
    expected, actual = (
        torch.autograd.grad(out.sum(), leaves, retain_graph=True, create_graph=x) for x in (False, True)
    )
    for x, y in zip(actual, expected):
        torch.testing.assert_close(x, y)


def test_a_tangent_of_the_incoming_gradient_alone_sees_the_mask(device):
    """The backward is linear in it, so that its tangent is a backward."""
    q, calls = masked_calls(device)
    q.requires_grad_()
    for function, _, given in calls:
        out = function(q, given)
        dout, tangent = torch.randn_like(out), torch.randn_like(out)
        (expected,) = torch.autograd.grad(out, q, tangent, retain_graph=True)
        with forward_ad.dual_level():
            (dq,) = torch.autograd.grad(out, q, forward_ad.make_dual(dout, tangent))
            torch.testing.assert_close(forward_ad.unpack_dual(dq).tangent, expected)
