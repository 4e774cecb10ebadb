"""Masks as data in the sizes and dtypes of the kernels with block lists; the CPU backend runs the same tests."""

from __future__ import annotations

from dataclasses import dataclass

import mask_harness
import pytest
import torch
from harness import captured
from mask_harness import INT_MAX, ScoreCall, expected, ints, packed_expected, packed_mask, starts
from reference import assert_accurate, assert_gradient_accurate, attention, visible

from flash_attn import backends
from flash_attn.masks import AttentionMask

pytestmark = pytest.mark.usefixtures("family")
NAN = float("nan")
INT_MIN = -(2**31)
BATCH, HEADS = 2, 6
# Several tiles of rows and of keys, the last ones not full. The CPU backend's own sizes are in test_masks_attention.py.
SQ, SK = (205, 300) if torch.cuda.is_available() else (75, 130)


def skip_on_cpu(device, call):
    """The CPU backend is one code for all head dims."""
    if device == "cpu" and call.dim > 64:
        pytest.skip("a head dim of the kernels")


def make_mask(kind, sq, sk, device):
    return mask_harness.make_mask(kind, BATCH, sq, sk, device)


def dense_of(mask, sq, sk):
    return mask_harness.dense_of(mask, sq, sk, BATCH, HEADS)


@dataclass
class Call(ScoreCall):
    """One call of the backend: its arguments other than tensors."""

    mask: str
    dim: int = 128
    dim_v: int = 0  # 0: dim
    dtype: torch.dtype = torch.bfloat16

    __str__ = ScoreCall.__str__


CALLS = [
    Call("documents", causal=True, sinks=True),
    Call("ranges", 64),
    Call("startend", heads_k=6),
    Call("padding", 96, causal=True),
    Call("blocks", window=(90, 200), heads_k=1),
    Call("sparse blocks", 64, dtype=torch.float16),
    Call("bits", 64, sinks=True, batch_invariant=True),
    Call("all", causal=True, heads_k=3),
    Call("all", 64),
    Call("nothing"),
    Call("everything", 64, causal=True),
    Call("bits", 32, dtype=torch.float16),
    Call("bits", 192),
    Call("startend", 192, dim_v=128, causal=True),
    Call("ranges", 256, causal=True),
    Call("sparse blocks", 256, heads_k=1),
    Call("documents", 40, window=(30, 30)),
    Call("all", 320, causal=True),
    Call("sparse blocks", 512),
    # dropout and score modifiers
    Call("ranges", 64, window=(90, 200), softcap=2.0, alibi=True, dropout=0.3),
    Call("startend", sinks=True, softcap=3.0, heads_k=6),
    Call("bits", dropout=0.1, causal=True),
    Call("all", alibi=True),
    Call("blocks", 192, dropout=0.2),
    Call("padding", 256, causal=True, softcap=2.0),
    # dQ in a separate kernel
    Call("ranges", 64, deterministic=True),
    Call("all", deterministic=True, sinks=True),
    Call("startend", deterministic=True, dropout=0.2, alibi=True),
    Call("bits", 192, dim_v=128, deterministic=True),
    Call("documents", 256, deterministic=True, softcap=2.0),
    Call("bits", 512, deterministic=True, dropout=0.2),
]


def make_tensors(call, device) -> dict:
    """The options that are tensors."""
    alibi = torch.rand(BATCH, HEADS, device=device) * 0.2 if call.alibi else None
    return {"alibi_slopes": alibi, "sinks": torch.randn(HEADS, device=device) if call.sinks else None}


def inputs(call, device, sq=SQ, sk=SK):
    dims = (call.dim, call.dim, call.dim_v or call.dim)
    sizes = zip((sq, sk, sk), (HEADS, call.heads_k, call.heads_k), dims)
    return [torch.randn(BATCH, n, h, d, device=device).to(call.dtype) for n, h, d in sizes]


def numbers(call):
    """(p_dropout, scale, causal, window, softcap) in the order of the backend."""
    return call.dropout, call.dim**-0.5, call.causal, *call.window, call.softcap


def given(tensors, mask):
    named = {} if tensors["sinks"] is None else {"sinks": tensors["sinks"]}
    return named if mask is None else {**named, "mask": mask.factors}


def forward(call, device, q, k, v, mask, tensors):
    """out, LSE, S_dmask, rng_state, max_logit of the backend."""
    return backends.get(device).fwd(
        q, k, v, None, tensors["alibi_slopes"], *numbers(call), True, None, True, call.batch_invariant,
        **given(tensors, mask),
    )  # fmt: skip


def backward(call, device, dout, dlse, q, k, v, results, mask, tensors):
    out, lse, _, rng_state, _ = results
    return backends.get(device).bwd(
        dout, q, k, v, out, lse, None, None, None, tensors["alibi_slopes"], *numbers(call), call.deterministic, None,
        rng_state, dlse, call.batch_invariant, **given(tensors, mask),
    )  # fmt: skip


def check(call, device, q, k, v, mask, tensors):
    """One training step against the reference; returns (results, gradients, dout, dlse)."""
    sq, sk = q.shape[1], k.shape[1]
    results = forward(call, device, q, k, v, mask, tensors)
    out, lse, s_dmask, _, max_logit = results
    keep = s_dmask[:, :, :sq, :sk] >= 0 if call.dropout else None
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = backward(call, device, dout, dlse, q, k, v, results, mask, tensors)
    leaves = {"q": q, "k": k, "v": v, **({} if tensors["sinks"] is None else {"sinks": tensors["sinks"]})}
    (right, right_grads), (plain, plain_grads) = (
        expected(call, leaves, dense_of(mask, sq, sk), keep, dout, dlse, dtype, alibi_slopes=tensors["alibi_slopes"])
        for dtype in (torch.float64, call.dtype)
    )
    assert_accurate(out, right.out, plain.out)
    assert_accurate(lse, right.lse, plain.lse.to(lse.dtype), "lse", slack=1e-4)
    assert_accurate(max_logit, right.max_logit, plain.max_logit.to(lse.dtype), "max_logit", slack=1e-4)
    if call.dropout:
        assert_accurate(s_dmask[:, :, :sq, :sk].abs(), right.probs.to(call.dtype), plain.probs, "S_dmask")
    for ours, name in zip([*grads[:3], *grads[4:]], right_grads):
        assert_gradient_accurate(ours, right_grads[name], plain_grads[name], name)
    return results, grads, dout, dlse


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_masks(device, call):
    """Against the reference; NaN in hidden keys and queries changes nothing."""
    skip_on_cpu(device, call)
    sk = SQ if call.mask == "documents" else SK
    mask = make_mask(call.mask, SQ, sk, device)
    q, k, v = inputs(call, device, SQ, sk)
    tensors = make_tensors(call, device)
    results, grads, dout, dlse = check(call, device, q, k, v, mask, tensors)
    seen = dense_of(mask, SQ, sk) & visible(SQ, sk, call.causal, call.window, device)
    rows = ~seen.any(3).transpose(1, 2)[..., None]
    keys = ~seen.any(2).view(BATCH, call.heads_k, -1, sk).any(2).transpose(1, 2)[..., None]
    q, dout, out = (x.masked_fill(rows, NAN) for x in (q, dout, results[0]))
    k, v = (x.masked_fill(keys, NAN) for x in (k, v))
    if call.dropout == 0:
        again = forward(call, device, q, k, v, mask, tensors)
        for ours, before in zip((*again[:2], again[4]), (*results[:2], results[4])):
            assert torch.equal(ours, before)
    again = backward(call, device, dout, dlse, q, k, v, [out, *results[1:]], mask, tensors)
    for ours, before in zip((*again[:3], *again[4:]), (*grads[:3], *grads[4:])):
        if call.deterministic or device == "cpu":
            assert torch.equal(ours, before)
        torch.testing.assert_close(ours, before, rtol=0.05, atol=0.05 * before.abs().max().item() + 1e-4)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("call", (Call("bits", 64, heads_k=6), Call("startend", 64, causal=True)), ids=str)
@pytest.mark.parametrize("sizes", ((200, 17000), (17000, 200)))
def test_lists_of_many_blocks(device, call, sizes):
    """More than the threads of the plan's blocks, in both directions."""
    q, k, v = inputs(call, device, *sizes)
    check(call, device, q, k, v, make_mask(call.mask, *sizes, device), make_tensors(call, device))


def test_values_of_any_content(device):
    """Ranges far outside, inverted and at the limits of 32 bits, bits beyond the last key."""
    limits = ints(INT_MIN, INT_MIN + 1, -1, 0, 1, SK - 1, SK, SK + 1, INT_MAX - 1, INT_MAX, device=device)
    any_of = [limits[torch.randint(0, len(limits), size, device=device)] for size in ((2, 1, SQ, 4), (1, 3, SK, 4))]
    words = torch.randint(INT_MIN, INT_MAX, (1, 1, SQ, -(-SK // 32)), dtype=torch.int32, device=device)
    kinds = torch.randint(0, 256, (1, 1, -(-SQ // 64), -(-SK // 64)), dtype=torch.uint8, device=device)
    ranges = AttentionMask.query_ranges(*any_of[0].unbind(-1))
    for factors in (
        ranges.factors._replace(query_ranges=any_of[0], key_hidden=any_of[1]),
        ranges.factors._replace(query_ranges=None, bits=words, block_map=kinds, block_size=(64, 64)),
    ):
        call = Call("", 64)
        check(call, device, *inputs(call, device), AttentionMask(factors, SQ, SK), make_tensors(call, device))


# ---- packed sequences ----


def packed_calls(call, device, lengths, mask, q, k, v, seqused_k=None):
    """(results, gradients, dout, dlse) of the packed backend; the backward takes no seqused_k."""
    cu_q, cu_k = starts(lengths, device)
    scores = (*map(max, zip(*lengths)), call.dropout, call.dim**-0.5, False, call.causal, *call.window, call.softcap)
    backend = backends.get(device)
    results = backend.varlen_fwd(
        q, k, v, None, cu_q, cu_k, seqused_k, None, None, None, *scores, False, None, mask=mask.factors
    )
    if seqused_k is not None:
        return results
    dout, dlse = torch.randn_like(results[0]), torch.randn_like(results[1])
    out, lse, _, state = results
    grads = backend.varlen_bwd(dout, q, k, v, out, lse, None, None, None, cu_q, cu_k, None, *scores,
                               call.deterministic, None, state, dlse=dlse, mask=mask.factors)  # fmt: skip
    return results, grads, dout, dlse


PACKED_CALLS = (
    Call("ranges", 64, causal=True),
    Call("startend", 128, window=(100, 60)),
    Call("bits", 128, softcap=3.0),
    Call("bits", 256),
    Call("ranges", 128, deterministic=True),
    Call("startend", 512, window=(100, 60)),
)


@pytest.mark.parametrize("call", PACKED_CALLS, ids=str)
def test_packed_sequences(device, call):
    """Ranges and bits count within each sequence; lengths of zero are among them."""
    skip_on_cpu(device, call)
    lengths = [(200, 133), (0, 5), (71, 0), (1, 64), (131, 390)]
    total_q, total_k = (sum(n) for n in zip(*lengths))
    sizes = ((total_q, HEADS), (total_k, call.heads_k), (total_k, call.heads_k))
    q, k, v = (torch.randn(n, h, call.dim, device=device).to(call.dtype) for n, h in sizes)
    mask = packed_mask(call.mask, lengths, device)
    results, grads, dout, dlse = packed_calls(call, device, lengths, mask, q, k, v)
    leaves = {"q": q, "k": k, "v": v}
    right, plain = (
        packed_expected(call, lengths, leaves, mask, dout, dlse, dtype) for dtype in (torch.float64, call.dtype)
    )
    assert_accurate(results[0], right[0], plain[0])
    assert_accurate(results[1], right[1], plain[1].to(results[1].dtype), "lse", slack=1e-4)
    for name, ours in zip("qkv", grads):
        assert_gradient_accurate(ours, right[2][name], plain[2][name], name)


def test_seqused_k_hides_the_keys_after_it(device):
    call, lengths, used = Call("bits", 64), [(150, 200), (90, 70)], (130, 7)
    q, k, v = (torch.randn(n, h, 64, device=device).bfloat16() for n, h in ((240, HEADS), (270, 2), (270, 2)))
    seen = torch.rand(1, 240, 200, device=device) > 0.5
    few = seen.clone()
    few[:, :150, used[0] :], few[:, 150:, used[1] :] = False, False
    mask, same = (AttentionMask.from_tensor(x, packed=True) for x in (seen, few))
    results = packed_calls(call, device, lengths, mask, q, k, v, ints(*used, device=device))
    for ours, right in zip(results[:2], packed_calls(call, device, lengths, same, q, k, v)[0][:2]):
        torch.testing.assert_close(ours, right, rtol=0.01, atol=0.01)


SHARED = [(150, 150, 100), (70, 40, 130), (9, 200, 0), (131, 41, 190)]  # (queries, first key, keys) of sequences


@pytest.mark.parametrize("call", (Call("ranges", 64), Call("startend", 64, window=(100, 60)), Call("bits", 128),
                                  Call("ranges", 160), Call("startend", 320)), ids=str)  # fmt: skip
def test_sequences_that_share_keys(device, call):
    """By seqused_k, in any order. Of each in turn the values that it does not see are NaN, to others too."""
    skip_on_cpu(device, call)
    queries, begins, lengths = zip(*SHARED)
    total_q, total_k = sum(queries), 300
    sizes = ((total_q, HEADS), (total_k, call.heads_k), (total_k, call.heads_k))
    q, k, v = (torch.randn(n, h, call.dim, device=device).to(call.dtype) for n, h in sizes)
    mask = packed_mask(call.mask, [(total_q, total_k)], device)
    cu_q = [0, *torch.tensor(queries).cumsum(0).tolist()]
    arrays = [ints(*x, device=device) for x in (cu_q, (*begins, 7), lengths)]
    options = (max(queries), total_k, 0.0, call.dim**-0.5, False, call.causal, *call.window, 0.0, False, None)
    for row, (sq, key, sk) in zip(cu_q, SHARED):
        rows, keys = slice(row, row + sq), slice(key, key + sk)
        dense = mask.sequence(row, row + sq, key, key + sk).to_dense()
        seen = dense.repeat_interleave(HEADS // dense.shape[1], 1) & visible(sq, sk, call.causal, call.window, device)
        values = torch.full_like(v, NAN)
        finite = v[keys].where(seen[0].unflatten(0, (call.heads_k, -1)).any(1).any(1).T[..., None], 0.0)
        values[keys] = finite.where(finite != 0.0, NAN)
        ours = backends.get(device).varlen_fwd(
            q, k, values, None, *arrays, None, None, None, *options, mask=mask.factors
        )
        right, plain = (
            attention(q[None, rows].to(dtype), k[None, keys].to(dtype), finite[None].to(dtype), mask=seen, dtype=dtype)
            for dtype in (torch.float64, call.dtype)
        )
        assert_accurate(ours[0][rows], right.out[0], plain.out[0])
        assert_accurate(ours[1][:, rows], right.lse[0], plain.lse[0].float(), "lse", slack=1e-4)


# ---- launches, errors ----


@pytest.mark.devices("cuda")
def test_a_deterministic_backward_repeats_its_bits(device):
    call = Call("all", 64, deterministic=True)
    q, k, v = inputs(call, device)
    mask, tensors = make_mask("all", SQ, SK, device), make_tensors(call, device)
    results = forward(call, device, q, k, v, mask, tensors)
    dout, dlse = torch.randn_like(results[0]), torch.randn_like(results[1])
    first, *others = (backward(call, device, dout, dlse, q, k, v, results, mask, tensors) for _ in range(3))
    for grads in others:
        assert all(torch.equal(ours, right) for ours, right in zip(grads[:3], first[:3]))


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("kind", ("ranges", "bits", "blocks"))
def test_a_graph_reads_the_mask_of_each_replay(device, kind):
    call = Call(kind, 64, deterministic=True)
    q, k, v = inputs(call, device)
    mask, other, tensors = *(make_mask(kind, SQ, SK, device) for _ in range(2)), make_tensors(call, device)
    dout, dlse = torch.randn_like(q), torch.randn(BATCH, HEADS, SQ, device=device)

    def step():
        results = forward(call, device, q, k, v, mask, tensors)
        return [*results[:2], *backward(call, device, dout, dlse, q, k, v, results, mask, tensors)[:3]]

    graph, ours = captured(step)
    for _ in range(2):
        for factor, new in zip(mask.factors.tensors().values(), other.factors.tensors().values()):
            factor.copy_(new)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(ours, step()))
        other = make_mask(kind, SQ, SK, device)


@pytest.mark.devices("cuda")
def test_plans_of_calls_with_a_mask(device, family):
    call = Call("bits", 128)
    q, k, v = inputs(call, device)
    mask = make_mask("bits", SQ, SK, device)
    rest = (None, *numbers(call))
    plan = backends.get(device).explain_fwd(q, k, v, None, *rest, False, None, mask=mask.factors)
    variant = {"wgmma": "listed", "mma_sync": "dropout"}[family]
    assert (plan["kernel"], plan["variant"]) == (family, variant) and "mask_plan,attention" in plan["stages"]
    plain = backends.get(device).explain_fwd(q, k, v, None, *rest, False, None)
    assert "mask_plan" not in plain["stages"] and plain["variant"] != variant
    lse = torch.empty(BATCH, HEADS, SQ, device=device)
    for deterministic in (False, True):
        plan = backends.get(device).explain_bwd(
            q, q, k, v, q, lse, None, None, None, *rest, deterministic, None, None, mask=mask.factors
        )
        dq_pass = deterministic and family == "wgmma"
        own = "listed_plain" if family == "wgmma" and not deterministic else variant
        assert (plan["kernel"], plan["variant"], plan["dq_pass"]) == (family, own, dq_pass)


def refused(function, message, *args, **named):
    with pytest.raises((RuntimeError, TypeError)) as caught:
        function(*args, **named)
    assert str(caught.value) == message


@pytest.mark.devices("cuda")
def test_errors(device):
    """What the CPU backend says of tensors that do not fit, and what kernels with a mask do not take."""
    q = torch.randn(2, 5, 4, 64, device=device).bfloat16()
    backend = backends.get(device)
    rest = (None, None, 0.0, 1.0, False, -1, -1, 0.0, False, None)

    def fails(message, **named):
        refused(backend.fwd, message, q, q, q, *rest, **named)

    def ranges(*sizes, dtype=torch.int32, where=device):
        return AttentionMask.query_ranges(*torch.zeros(2, *sizes, dtype=dtype, device=where)).factors

    fails("mask.query_ranges: expected a batch of 1 or 2, got shape [3, 2, 5, 2]", mask=ranges(3, 2, 5))
    fails("mask.query_ranges: expected a head count that divides 4, got shape [2, 3, 5, 2]", mask=ranges(2, 3, 5))
    fails("mask.query_ranges: expected 5 x 2 or 4 as its last two sizes, got shape [2, 1, 6, 2]", mask=ranges(2, 1, 6))
    on_cpu = "mask.query_ranges: expected a tensor on q's device (cuda:0), got one on cpu"
    fails(on_cpu, mask=ranges(2, 1, 5, where="cpu"))
    good = ranges(2, 1, 5)
    fails("mask.query_ranges: expected dtype int32, got int64",
          mask=good._replace(query_ranges=good.query_ranges.long()))  # fmt: skip
    strided = good.query_ranges.expand(2, 2, 5, 2)
    fails("mask.query_ranges: expected a contiguous tensor, got strides [10, 0, 2, 1]",
          mask=good._replace(query_ranges=strided))  # fmt: skip
    bits = AttentionMask.from_tensor(torch.ones(5, 40, dtype=torch.bool, device=device)).factors
    fails("mask.bits: expected 5 x 1 as its last two sizes, got shape [1, 1, 5, 2]", mask=bits)
    packed = AttentionMask.query_ranges(*torch.zeros(2, 5, dtype=torch.int32, device=device), packed=True).factors
    fails("mask: expected a mask of dense sequences, got one of packed sequences", mask=packed)
    fails("mask: expected MaskFactors, got Tensor", mask=torch.ones(5, 5, device=device))
    kinds = torch.ones(1, 1, 1, 1, dtype=torch.uint8, device=device)
    for size, message in (((96, 64), "multiples of 64 on CUDA, got (96, 64)"), ((64, 0), "positive ints, got (64, 0)")):
        blocks = good._replace(query_ranges=None, block_map=kinds, block_size=size)
        fails(f"mask: expected a block_size of {message}", mask=blocks)
    lse, sums = torch.zeros(2, 4, 5, device=device), torch.zeros(2, 5, 4, 64, device=device)
    refused(
        backend.bwd, "accumulate_dkv: expected False with a mask on CUDA, got True", q, q, q, q, q, lse, None, sums,
        sums.clone(), None, *rest[2:8], False, None, None, mask=good, accumulate_dkv=True,
    )  # fmt: skip
    out = good.query_ranges.view(torch.bfloat16)
    overlapping = out.new_empty(2 * 5 * 4 * 64)
    factor = overlapping[:40].view(torch.int32).view(2, 1, 5, 2).zero_()
    refused(
        backend.fwd, "out: expected memory that does not overlap mask.query_ranges, got elements of both", q, q, q,
        overlapping.view(2, 5, 4, 64), *rest[1:], mask=good._replace(query_ranges=factor),
    )  # fmt: skip
    codes, scale = q.to(torch.float8_e4m3fn), torch.ones(4, device=device)
    refused(
        backend.fwd, "k: expected float16 or bfloat16 with a mask on CUDA, got float8_e4m3fn", q, codes, codes, *rest,
        mask=good, k_descale=scale, v_descale=scale,
    )  # fmt: skip
    refused(backend.fwd_kvcache, "mask: expected None over a KV cache, got one", q, q, q, *[None] * 10, 1.0, False, -1,
            -1, 0.0, True, 0, mask=good)  # fmt: skip
    pages, cu = torch.randn(2, 16, 4, 64, device=device).bfloat16(), ints(0, 5, device=device)
    table, pad = ints([0, 1], device=device), ints(1, device=device)
    lengths = (5, 20, 0.0, 0.3, False, False, -1, -1, 0.0, False, None)
    refused(backend.varlen_fwd, "block_table: expected None with a mask on CUDA, got a tensor", q[0], pages, pages,
            None, cu, cu, None, None, table, None, *lengths, mask=packed)  # fmt: skip
    refused(backend.varlen_fwd, "leftpad_k: expected None with a mask on CUDA, got a tensor", q[0], q[0], q[0],
            None, cu, cu, None, pad, None, None, *lengths, mask=packed)  # fmt: skip
    refused(backend.varlen_fwd, "mask: expected a mask of packed sequences, got one of dense sequences", q[0], q[0],
            q[0], None, cu, cu, None, None, None, None, *lengths, mask=good)  # fmt: skip
