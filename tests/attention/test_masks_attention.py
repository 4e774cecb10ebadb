"""Attention under masks as data and additive biases, forward and backward, against the float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mask_harness
import pytest
import torch
from mask_harness import ScoreCall, expected, ints, packed_expected, packed_mask, starts
from reference import assert_accurate, assert_gradient_accurate

from flash_attn import backends
from flash_attn.cpu.scores import ScoreOptions, ScoreRule
from flash_attn.cpu.tiles import HeadRange, visited_tiles
from flash_attn.masks import AttentionMask

pytestmark = pytest.mark.devices("cpu")  # test_masks_cuda.py and test_biases_cuda.py are of both
NAN, INF = float("nan"), math.inf
BATCH, HEADS, SQ, SK, DIM = 2, 6, 75, 530, 8  # two tiles of keys


BIASES = {"full": (BATCH, HEADS, SQ, SK), "heads": (1, HEADS, SQ, SK), "keys": (BATCH, 1, 1, SK), "one": (1, 1, 1, 1)}


def make_mask(kind, device):
    return mask_harness.make_mask(kind, BATCH, SQ, SK, device, block_size=(16, 64))


@dataclass
class Call(ScoreCall):
    """One call of the backend: its arguments other than q, k and v."""

    mask: str | None = None
    bias: str | None = None
    rel: int = 0  # R
    dtype: torch.dtype = torch.float64

    __str__ = ScoreCall.__str__

    def tensors(self, device) -> dict:
        """The options that are tensors, by the names of backend and reference."""
        found = {"alibi_slopes": torch.rand(BATCH, HEADS, device=device) * 0.2 if self.alibi else None}
        found["sinks"] = torch.randn(HEADS, device=device) if self.sinks else None
        found["attn_bias"] = torch.randn(BIASES[self.bias], device=device).to(self.dtype) if self.bias else None
        found["rel_bias"] = torch.randn(HEADS, 2 * self.rel + 1, device=device) if self.rel else None
        return found


CALLS = [
    Call("documents", causal=True, sinks=True),
    Call("ranges", window=(90, 200), softcap=2.0, alibi=True, dropout=0.3),
    Call("startend", bias="heads", sinks=True, softcap=3.0, heads_k=6),
    Call("padding", bias="keys", rel=5, causal=True, dropout=0.2),
    Call("blocks", alibi=True, rel=40, sinks=True, window=(400, -1), heads_k=1),
    Call("bits", bias="full", batch_invariant=True, dropout=0.1),
    Call("all", causal=True, softcap=2.0, bias="one", heads_k=3),
    Call(None, bias="full", alibi=True, causal=True, softcap=2.0),
    Call(None, rel=700, dropout=0.4, sinks=True),
    Call("ranges", bias="heads", rel=3, dtype=torch.bfloat16, causal=True),
    Call("bits", bias="full", dtype=torch.float16, sinks=True, batch_invariant=True),
    Call("documents", dtype=torch.float32, rel=9, window=(30, 30)),
]


def inputs(call, device, sizes=((BATCH, SQ, HEADS), (BATCH, SK, 0), (BATCH, SK, 0))):
    shapes = ((*size[:-1], size[-1] or call.heads_k, DIM) for size in sizes)
    return [torch.randn(shape, device=device).to(call.dtype) for shape in shapes]


def numbers(call):
    """(p_dropout, scale, causal, window, softcap) in the order of the backend."""
    return call.dropout, DIM**-0.5, call.causal, *call.window, call.softcap


def forward(call, device, q, k, v, mask, tensors):
    """out, LSE, S_dmask, rng_state, max_logit of the backend."""
    named = {name: x for name, x in tensors.items() if x is not None and name != "alibi_slopes"}
    return backends.get(device).fwd(
        q, k, v, None, tensors["alibi_slopes"], *numbers(call), True, None, return_max_logit=True,
        batch_invariant=call.batch_invariant, mask=None if mask is None else mask.factors, **named,
    )  # fmt: skip


def backward(call, device, dout, dlse, q, k, v, results, mask, tensors, **more):
    named = {name: x for name, x in tensors.items() if x is not None and name != "alibi_slopes"}
    out, lse, _, rng_state, _ = results
    return backends.get(device).bwd(
        dout, q, k, v, out, lse, None, None, None, tensors["alibi_slopes"], *numbers(call), False, None, rng_state,
        dlse=dlse, batch_invariant=call.batch_invariant, mask=None if mask is None else mask.factors, **named, **more,
    )  # fmt: skip


def check(call, device, q, k, v, mask, tensors):
    """One training step against the reference; returns results and gradients."""
    results = forward(call, device, q, k, v, mask, tensors)
    out, lse, s_dmask, _, max_logit = results
    keep = s_dmask[:, :, :SQ, : k.shape[1]] >= 0 if call.dropout else None
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = backward(call, device, dout, dlse, q, k, v, results, mask, tensors)
    dense = None if mask is None else mask_harness.dense_of(mask, SQ, k.shape[1], BATCH, HEADS)
    leaves = {"q": q, "k": k, "v": v, **{n: x for n, x in tensors.items() if x is not None and n != "alibi_slopes"}}
    right, right_grads = plain, plain_grads = expected(
        call, leaves, dense, keep, dout, dlse, torch.float64, alibi_slopes=tensors["alibi_slopes"]
    )
    if call.dtype != torch.float64:
        plain, plain_grads = expected(
            call, leaves, dense, keep, dout, dlse, call.dtype, alibi_slopes=tensors["alibi_slopes"]
        )
    slack = 1e-10 if call.dtype == torch.float64 else 1e-5
    assert_accurate(out, right.out, plain.out, slack=slack)
    assert_accurate(lse, right.lse, plain.lse.to(lse.dtype), "lse", slack=slack)
    assert_accurate(max_logit, right.max_logit, plain.max_logit.to(lse.dtype), "max_logit", slack=slack)
    if call.dropout:
        probs = s_dmask[:, :, :SQ, : k.shape[1]].abs()
        assert_accurate(probs, right.probs.to(call.dtype), plain.probs, "S_dmask", slack=slack)
    assert len(grads) == len(right_grads) + 1  # softmax_d
    for ours, name in zip([*grads[:3], *grads[4:]], right_grads):
        given = tensors.get(name)
        assert given is None or (ours.dtype == given.dtype and ours.shape == given.shape)
        assert_gradient_accurate(ours, right_grads[name], plain_grads[name], name)
        if call.dtype == torch.float64:
            assert_accurate(ours, right_grads[name], plain_grads[name].to(ours.dtype), name, slack=slack)
    return results, grads, dout, dlse


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_masks_and_biases(device, call):
    """With the other features; NaN in hidden keys and queries changes nothing."""
    mask = None if call.mask is None else make_mask(call.mask, device)
    q, k, v = inputs(call, device)
    if call.mask == "documents":
        k, v = k[:, :SQ].contiguous(), v[:, :SQ].contiguous()
    tensors = call.tensors(device)
    if tensors["attn_bias"] is not None and call.bias != "one":
        tensors["attn_bias"][..., 3::17] = -INF
    results, grads, dout, dlse = check(call, device, q, k, v, mask, tensors)
    rule = ScoreRule.create(
        ScoreOptions(1.0, 0.0, call.causal, *call.window, None, mask=mask and mask.factors,
                     attn_bias=tensors["attn_bias"]), BATCH, q)  # fmt: skip
    unused = rule.unused(BATCH, HEADS, k.shape[2], SQ, k.shape[1])
    if unused is None:
        return
    assert call.mask is None or unused.rows.any() or unused.keys.any()
    q, dout, out = (x.masked_fill(unused.rows.transpose(1, 2)[..., None], NAN) for x in (q, dout, results[0]))
    k, v = (x.masked_fill(unused.keys.transpose(1, 2)[..., None], NAN) for x in (k, v))
    again = forward(call, device, q, k, v, mask, tensors)
    if call.dropout == 0:
        for ours, before in zip((*again[:2], again[4]), (*results[:2], results[4])):
            assert torch.equal(ours, before)
    again = backward(call, device, dout, dlse, q, k, v, [out, *results[1:]], mask, tensors)
    for ours, before in zip(again, grads):
        assert torch.equal(ours, before)


# ---- gradients of biases ----


@pytest.mark.parametrize(
    "axes,stride_0",
    [(axes, False) for axes in ((), (0,), (1,), (2,), (3,), (0, 1, 2))]  # of all axes: the next test
    + [((0,), True), ((1, 3), True), ((2,), True)],
)
def test_gradients_of_broadcast_biases(device, axes, stride_0):
    """Axes of size 1 are summed; of expanded ones every element has its own gradient, which autograd sums."""
    call = Call(dtype=torch.bfloat16, causal=True)
    q, k, v = inputs(call, device, ((2, 20, 6), (2, 30, 0), (2, 30, 0)))
    full = (2, 6, 20, 30)
    bias = torch.randn([1 if axis in axes else n for axis, n in enumerate(full)], device=device)
    bias = bias.expand(full) if stride_0 else bias
    tensors = {**call.tensors(device), "attn_bias": bias}
    _, grads, _, _ = check(call, device, q, k, v, None, tensors)
    assert grads[-1].shape == bias.shape and grads[-1].dtype == torch.float32
    results = forward(call, device, q, k, v, None, tensors)
    dout, dlse = torch.randn_like(results[0]), torch.randn_like(results[1])
    assert len(backward(call, device, dout, dlse, q, k, v, results, None, tensors, bias_grad=False)) == 4


def test_gradient_of_a_bias_of_one_number(device):
    """The sum of the gradients that equal biases of each score have: the same numbers, added in another order."""
    call = Call(dtype=torch.bfloat16, causal=True)
    q, k, v = inputs(call, device, ((2, 20, 6), (2, 30, 0), (2, 30, 0)))
    one = torch.randn(1, 1, 1, 1, device=device)
    every = {**call.tensors(device), "attn_bias": one.expand(2, 6, 20, 30).contiguous()}
    results = forward(call, device, q, k, v, None, every)
    dout, dlse = torch.randn_like(results[0]), torch.randn_like(results[1])
    grad, terms = (
        backward(call, device, dout, dlse, q, k, v, results, None, {**every, "attn_bias": bias})[-1]
        for bias in (one, every["attn_bias"])
    )
    assert grad.shape == one.shape and grad.dtype == torch.float32
    assert (grad.double() - terms.double().sum()).abs() <= 1e-6 * terms.double().abs().sum()


@pytest.mark.parametrize("sizes,reach", (((1, 1), 1), ((3, 7), 6), ((40, 9), 6), ((40, 9), 1000), ((9, 600), 6)))
def test_gradients_of_relative_biases(device, sizes, reach):
    """Distances that are clamped on both sides, or none; head by head, more rows than keys."""
    call = Call(rel=reach, heads_k=3)
    q, k, v = inputs(call, device, ((2, sizes[0], 6), (2, sizes[1], 0), (2, sizes[1], 0)))
    check(call, device, q, k, v, None, call.tensors(device))


def test_biases_of_minus_infinity(device):
    """Hide as a mask does: rows and keys of nothing else take no part, and there is no NaN in a gradient."""
    call = Call(bias="full", sinks=True)
    q, k, v = inputs(call, device)
    tensors = call.tensors(device)
    seen = torch.rand(BATCH, HEADS, SQ, SK, device=device) > 0.5
    seen[:, :, 3], seen[:, :, :, 7] = False, False
    tensors["attn_bias"].masked_fill_(~seen, -INF)
    k[:, 7], v[:, 7], q[:, 3] = NAN, NAN, NAN
    results = forward(call, device, q, k, v, None, tensors)
    dout, dlse = torch.randn_like(results[0]), torch.randn_like(results[1])
    dout[:, 3] = NAN
    grads = backward(call, device, dout, dlse, q, k, v, results, None, tensors)
    finite = {**tensors, "attn_bias": tensors["attn_bias"].masked_fill(~seen, 0.0)}
    mask = AttentionMask.from_tensor(seen)
    masked = forward(call, device, q, k, v, mask, finite)
    for ours, right in zip(
        (*results, *grads), (*masked, *backward(call, device, dout, dlse, q, k, v, masked, mask, finite))
    ):
        assert torch.equal(ours, right) and not ours.isnan().any()
    assert (grads[-1][~seen] == 0).all()


# ---- packed sequences ----


def packed_call(device, lengths, mask, bias, rel_bias, q, k, v, **options):
    """(results, gradients, dout, dlse) of the packed backend: causal, softcap 3."""
    cu_q, cu_k = starts(lengths, device)
    maxima = (max(n) for n in zip(*lengths))
    named = {"mask": None if mask is None else mask.factors, "attn_bias": bias, "rel_bias": rel_bias}
    sizes, scores = (cu_q, cu_k), (*maxima, 0.0, 0.3, False, True, -1, -1, 3.0, False, None)
    backend = backends.get(device)
    results = backend.varlen_fwd(q, k, v, None, *sizes, None, None, None, None, *scores, **named, **options)
    dout, dlse = torch.randn_like(results[0]), torch.randn_like(results[1])
    out, lse, _, state = results
    scores = (*scores[:-1], None, state)
    grads = backend.varlen_bwd(dout, q, k, v, out, lse, *[None] * 3, *sizes, None, *scores, dlse=dlse, **named)
    return results, grads, dout, dlse


@pytest.mark.parametrize("kind", ("ranges", "startend", "bits", "none"))
def test_packed_sequences(device, kind):
    """Ranges, bits and rows of a bias count within each sequence; lengths of zero are among them."""
    lengths = [(20, 33), (0, 5), (7, 0), (31, 70)]
    (total_q, total_k), longest = (sum(n) for n in zip(*lengths)), 70
    heads, heads_k = 6, 2
    q, k, v = (torch.randn(n, h, DIM, device=device).double() for n, h in ((total_q, heads), *[(total_k, heads_k)] * 2))
    mask = None if kind == "none" else packed_mask(kind, lengths, device)
    bias = torch.randn(heads if kind == "bits" else 1, total_q, longest, device=device)
    rel_bias = torch.randn(heads, 11, device=device)
    results, grads, dout, dlse = packed_call(device, lengths, mask, bias, rel_bias, q, k, v)
    leaves = {"q": q, "k": k, "v": v, "attn_bias": bias, "rel_bias": rel_bias}
    call = Call(causal=True, softcap=3.0)
    out, lse, right = packed_expected(call, lengths, leaves, mask, dout, dlse, torch.float64, scale=0.3)
    assert_accurate(results[0], out, out, slack=1e-10)
    assert_accurate(results[1], lse, lse, "lse", slack=1e-10)
    for ours, (name, x) in zip([*grads[:3], *grads[4:]], leaves.items()):
        assert ours.dtype == x.dtype
        assert_gradient_accurate(ours, right[name], right[name].to(x.dtype), name)


def test_pages_take_ranges_of_queries(device):
    """Keys of a sequence are counted through its pages, from leftpad_k on."""
    q, pages = torch.randn(5, 2, DIM, device=device), torch.randn(4, 8, 2, DIM, device=device)
    cu_q, cu_k = ints(0, 5, device=device), ints(0, 20, device=device)
    table, pad = ints([3, 0, 2], device=device), ints(2, device=device)
    mask = AttentionMask.query_ranges(
        ints(0, 1, 2, 3, 17, device=device), ints(4, 9, 2, 30, 30, device=device), packed=True
    )
    rest = (5, 20, 0.0, 0.3, False, False, -1, -1, 0.0, False, None)
    fwd = backends.get(device).varlen_fwd
    paged = fwd(q, pages, pages, None, cu_q, cu_k, None, pad, table, None, *rest, mask=mask.factors)
    rows = pages[table[0].long()].flatten(0, 1)[2:20]
    flat = fwd(q, rows, rows, None, cu_q, cu_k - ints(0, 2, device=device), *[None] * 4, *rest, mask=mask.factors)
    for ours, expected_result in zip(paged[:2], flat[:2]):
        assert torch.equal(ours, expected_result)
    assert (flat[0][2] == 0).all()
    keys = AttentionMask.from_startend_row_indices(torch.zeros(1, 20, 2, dtype=torch.int32, device=device), False)
    with pytest.raises(RuntimeError, match="^mask: expected no key_hidden with block_table, got one$"):
        fwd(q, pages, pages, None, cu_q, cu_k, None, pad, table, None, *rest, mask=keys.factors)


@pytest.mark.parametrize("sizes", ((0, 0), (4, 0), (0, 4)))
def test_nothing_to_attend_to(device, sizes):
    """No queries, no keys: rows without keys, gradients of the biases 0."""
    sq, sk = sizes
    call = Call(heads_k=3)
    q, k, v = inputs(call, device, ((2, sq, 6), (2, sk, 0), (2, sk, 0)))
    seen = torch.ones(2, 1, sq, sk, dtype=torch.bool, device=device)
    masks = [
        AttentionMask.from_tensor(seen), AttentionMask.key_padding(seen.new_ones(sk)),
        AttentionMask.query_ranges(*torch.zeros(2, sq, dtype=torch.int32, device=device)),
        AttentionMask.from_function(lambda b, h, i, j: i >= j, None, None, sq, sk, device),
    ]  # fmt: skip
    tensors = {**call.tensors(device), "attn_bias": torch.randn(2, 1, sq, sk, device=device).double(),
               "rel_bias": torch.randn(6, 3, device=device)}  # fmt: skip
    for mask in masks:
        results = forward(call, device, q, k, v, mask, tensors)
        assert (results[0] == 0).all() and results[1].isposinf().all()
        grads = backward(call, device, results[0], results[1], q, k, v, results, mask, tensors)
        assert all((grad == 0).all() for grad in grads) and grads[-2].shape == (2, 1, sq, sk)


# ---- cost, errors ----


def test_hidden_tiles_are_left_out(device):
    """Keys of other documents, and blocks that are not listed, are no work."""
    documents = AttentionMask.documents(torch.arange(0, 8193, 1024, device=device), 8192)
    lists = torch.tensor([[[[0, 9], [3, 3]]]], device=device)
    blocks = AttentionMask.from_block_lists(
        torch.full((1, 1, 2), 2, device=device), lists, block_size=(128, 512), seqlen_q=256, seqlen_k=8192
    )
    q = torch.empty(1, 256, 2, DIM, device=device)
    for mask, sq, visited in ((documents, 8192, [(2048, 2560), (2560, 3072)]), (blocks, 256, [(0, 512), (4608, 5120)])):
        rule = ScoreRule.create(ScoreOptions(1.0, 0.0, False, -1, -1, None, mask=mask.factors), 1, q)
        row0 = 2048 if sq == 8192 else 0
        tiles = visited_tiles(rule, HeadRange(0, 1, 0, 1, 2), row0, row0 + 128, 512, sq, 8192)
        assert [(tile.col0, tile.col1) for tile, _ in tiles] == visited


def refused(device, message, out=None, **named):
    q = torch.randn(2, 5, 4, 2, device=device)
    with pytest.raises((RuntimeError, TypeError)) as caught:
        backends.get(device).fwd(q, q, q, out, None, 0.0, 1.0, False, -1, -1, 0.0, False, None, **named)
    assert str(caught.value) == message


def test_errors(device):
    ranges = AttentionMask.query_ranges(*torch.zeros(2, 3, 2, 5, dtype=torch.int32, device=device)).factors
    refused(device, "mask.query_ranges: expected a batch of 1 or 2, got shape [3, 2, 5, 2]", mask=ranges)
    ranges = AttentionMask.query_ranges(*torch.zeros(2, 2, 3, 5, dtype=torch.int32, device=device)).factors
    refused(device, "mask.query_ranges: expected a head count that divides 4, got shape [2, 3, 5, 2]", mask=ranges)
    short = AttentionMask.key_padding(torch.ones(2, 4, dtype=torch.bool, device=device)).factors
    refused(device, "mask.key_hidden: expected 5 x 2 or 4 as its last two sizes, got shape [2, 1, 4, 2]", mask=short)
    packed = AttentionMask.query_ranges(*torch.zeros(2, 5, dtype=torch.int32, device=device), packed=True)
    refused(device, "mask: expected a mask of dense sequences, got one of packed sequences", mask=packed.factors)
    refused(device, "mask: expected MaskFactors, got Tensor", mask=torch.ones(5, 5, device=device))
    bias = torch.zeros(2, 4, 5, 4, device=device)
    refused(device, "attn_bias: expected shape [1 or 2, 1 or 4, 1 or 5, 1 or 5], got [2, 4, 5, 4]", attn_bias=bias)
    refused(device, "attn_bias: expected dtype float32, got bfloat16", attn_bias=bias.bfloat16())
    refused(device, "rel_bias: expected shape [4, 2 R + 1], got [4, 6]", rel_bias=torch.zeros(4, 6, device=device))
    q = torch.randn(2, 5, 4, 2, device=device)
    with pytest.raises(RuntimeError, match="^mask: expected None over a KV cache, got one$"):
        backends.get(device).fwd_kvcache(q, q, q, *[None] * 10, 1.0, False, -1, -1, 0.0, True, 0, mask=ranges)
    bias = torch.zeros(2, 4, 5, 5, device=device)
    out = bias.view(-1)[:80].view(2, 5, 4, 2)
    message = "out: expected memory that does not overlap attn_bias, got elements of both"
    refused(device, message, out=out, attn_bias=bias)
