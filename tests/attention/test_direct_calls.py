"""The backends called directly, as `flash_attn_2_cuda.fwd` and its twins: what the kernels could not take is named."""

from __future__ import annotations

import math

import pytest
import torch
from cases import Case
from harness import check_forward, check_gradients, make_problem, run

from flash_attn import backends
from flash_attn.limits import MAX_HEAD_DIM

DTYPE = torch.bfloat16
MANY = 2**31
MOST = 2**30 - 1


def tensor(device, *shape, dtype=DTYPE):
    return torch.randn(*shape, device=device).to(dtype)


def fwd(device, q, k=None, v=None, out=None, alibi=None, scale=1.0, softcap=0.0, gen=None, sinks=None, window=(-1, -1)):
    k = q if k is None else k
    v = k if v is None else v
    return backends.get(device).fwd(q, k, v, out, alibi, 0.0, scale, False, *window, softcap, False, gen, sinks=sinks)


def varlen_fwd(device, q, k=None, table=None, cu=None, scale=1.0, softcap=0.0, seqused=None, maxima=(4, 4)):
    k = q if k is None else k
    cu = torch.tensor([0, 2, 4], dtype=torch.int32, device=device) if cu is None else cu
    return backends.get(device).varlen_fwd(
        q,
        k,
        k,
        None,
        cu,
        cu,
        seqused,
        None,
        table,
        None,
        *maxima,
        0.0,
        scale,
        False,
        False,
        -1,
        -1,
        softcap,
        False,
        None,
    )


def bwd(device, q, k=None, dout=None, lse=None, scale=1.0, softcap=0.0):
    k = q if k is None else k
    dout = q if dout is None else dout
    lse = torch.zeros(1, device=device).expand(q.shape[0], q.shape[2], q.shape[1]) if lse is None else lse
    return backends.get(device).bwd(
        dout, q, k, k, q, lse, None, None, None, None, 0.0, scale, False, -1, -1, softcap, False, None, None
    )


def fwd_kvcache(device, q, cache, k=None, lengths=None, table=None, rows=None, scale=1.0, softcap=0.0, plan=None):
    return backends.get(device).fwd_kvcache(
        q, cache, cache, k, k, lengths, None, None, rows, None, table, None, None, scale, False, -1, -1, softcap, True,
        0, plan,
    )  # fmt: skip


def refuses(message, call, *args, error=RuntimeError, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert str(caught.value).splitlines()[0] == message


def test_options_by_name(device):
    """FlashAttention-2's arguments are positional and end where they do; no name is dropped in silence."""
    q, cu = tensor(device, 1, 4, 2, 8), torch.tensor([0, 4], dtype=torch.int32, device=device)
    lse, backend = torch.zeros(1, 2, 4, device=device), backends.get(device)
    scores = (0.0, 1.0, False, -1, -1, 0.0, False, None)
    packed = (0.0, 1.0, False, False, -1, -1, 0.0, False, None)
    grads, none = (None, None, None), (None, None, None)
    x, packed_lse = q[0], lse[0]
    calls = {
        "fwd": (q, q, q, None, None, *scores),
        "varlen_fwd": (x, x, x, None, cu, cu, *none, None, 4, 4, *packed),
        "bwd": (q, q, q, q, q, lse, *grads, None, *scores, None),
        "varlen_bwd": (x, x, x, x, x, packed_lse, *grads, cu, cu, None, 4, 4, *packed, None),
        "fwd_kvcache": (q, q, q, *[None] * 10, *scores[1:6], True, 0),
    }
    sinks = torch.zeros(2, device=device)
    for name, arguments in calls.items():
        call = getattr(backend, name)
        results = call(*arguments)
        count = 2 if name == "fwd_kvcache" else 4
        assert (len(results), len(call(*arguments, sinks=sinks))) == (count, count + ("bwd" in name))
        with pytest.raises(TypeError, match="sink_logits"):
            call(*arguments, sink_logits=sinks)


def test_sizes_that_do_not_fit(device):
    """Expanded tensors have them without the memory; no call may cut them to 32 bits."""
    one = tensor(device, 1, 1, 1, 8)
    heads, batch = one.expand(1, 1, MANY, 8), one.expand(MANY, 1, 1, 8)
    rows = one.expand(1, MANY, 1, 8)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)

    def at_most(what):
        return f"expected at most {MOST} {what}, got {MANY}"

    for call in (fwd, bwd):
        for q, what in ((heads, "heads"), (batch, "sequences"), (rows, "rows")):
            refuses(f"q: {at_most(what)}", call, device, q)
        refuses(f"k: {at_most('heads')}", call, device, one[:, :, :0], heads)
        refuses(f"k: {at_most('rows')}", call, device, one, rows)
    refuses(f"q: {at_most('heads')}", varlen_fwd, device, heads[0])
    refuses(f"q: {at_most('rows')}", varlen_fwd, device, rows[0])
    refuses(f"k: {at_most('heads')}", varlen_fwd, device, one[0, :, :0], heads[0])
    for k, what in ((batch, "pages"), (rows, "rows")):
        refuses(f"k: {at_most(what)}", varlen_fwd, device, one[0], k, table.expand(2, 1))
    for q, what in ((heads, "heads"), (batch, "sequences"), (rows, "rows")):
        refuses(f"q: {at_most(what)}", fwd_kvcache, device, q, one)
    refuses(f"k_cache: {at_most('heads')}", fwd_kvcache, device, one[:, :, :0], heads)
    refuses(f"k_cache: {at_most('rows')}", fwd_kvcache, device, one, rows)
    refuses(f"q: expected at most {MOST} rows for each K/V head, got {2**40}", fwd_kvcache, device,
            one.expand(1, 2**20, 2**20, 8), one)  # fmt: skip


def test_pages_and_sequences_of_a_cache_that_do_not_fit(device):
    one = tensor(device, 1, 1, 1, 8)
    batch = one.expand(MANY, 1, 1, 8)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    for options in ({"table": table}, {"rows": table[0]}):
        with pytest.raises(RuntimeError, match=f"^k_cache: expected at most {MOST} (pages|sequences), got {MANY}$"):
            fwd_kvcache(device, one, batch, **options)


def test_sizes_of_the_merge(device):
    combine = backends.get(device).combine
    part, lse = torch.zeros(1, 1, 1, 1, 8, device=device), torch.zeros(1, 1, 1, 1, device=device)
    refuses(f"out_partial: expected at most {MOST} splits, got {MANY}", combine, part.expand(MANY, 1, 1, 1, 8),
            lse.expand(MANY, 1, 1, 1), None)  # fmt: skip
    for shape in ((1, 2**16, 2**16, 1), (0, 2**16, 2**16, 1), (1, 1, 2**11, 2**21)):
        rows = math.prod(shape[1:])
        refuses(f"out_partial: expected at most {MOST} rows of all heads, got {rows}", combine,
                part.expand(1, *shape[1:], 8)[: shape[0]], lse.expand(1, *shape[1:])[: shape[0]], None)  # fmt: skip


@pytest.mark.parametrize("head_dim", (0, 257 * 8))
def test_head_dims(device, head_dim):
    q = tensor(device, 1, 4, 2, head_dim)
    expected = f"at most {MAX_HEAD_DIM}" if head_dim else "at least 1"
    for call, x in ((fwd, q), (bwd, q), (varlen_fwd, q[0])):
        refuses(f"q: expected a head dim of {expected}, got {head_dim}", call, device, x)
    refuses(f"q: expected a head dim of {expected}, got {head_dim}", fwd_kvcache, device, q, q)


def nested(x):
    return torch.nested.nested_tensor(list(x.unbind(0)))


def jagged(x):
    return torch.nested.nested_tensor(list(x.unbind(0)), layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ("sparse", "nested", "jagged"))
def test_layouts_that_have_no_strides(device, kind):
    convert = {"sparse": torch.Tensor.to_sparse, "nested": nested, "jagged": jagged}[kind]
    got = f"expected a strided tensor, got a {'sparse' if kind == 'sparse' else 'nested'} one"
    x, flat = tensor(device, 2, 4, 2, 16), tensor(device, 4, 2, 16)
    given = convert(x)
    refuses(f"q: {got}", fwd, device, given, x)
    refuses(f"k: {got}", fwd, device, x, given, x)
    refuses(f"v: {got}", fwd, device, x, x, given)
    refuses(f"out: {got}", fwd, device, x, x, x, given)
    refuses(f"q: {got}", varlen_fwd, device, convert(flat), flat)
    refuses(f"k: {got}", varlen_fwd, device, flat, convert(flat))
    refuses(f"q: {got}", bwd, device, given, x, x, torch.zeros(2, 2, 4, device=device))
    refuses(f"dout: {got}", bwd, device, x, dout=given)
    refuses(f"q: {got}", fwd_kvcache, device, given, x)
    refuses(f"k_cache: {got}", fwd_kvcache, device, x, given)
    refuses(f"k: {got}", fwd_kvcache, device, x, x.clone(), given, torch.zeros(2, dtype=torch.int32, device=device))
    refuses(f"plan: {got}", fwd_kvcache, device, x, x, plan=given)
    if kind == "sparse":
        slopes, lengths = torch.ones(2, device=device), torch.ones(2, dtype=torch.int32, device=device)
        refuses(f"alibi_slopes: {got}", fwd, device, x, alibi=slopes.to_sparse())
        refuses(f"sinks: {got}", fwd, device, x, sinks=slopes.to_sparse())
        refuses(f"seqused_k: {got}", varlen_fwd, device, flat, seqused=lengths.to_sparse())
        cu = torch.tensor([0, 2, 4], dtype=torch.int32, device=device).to_sparse()
        refuses(f"cu_seqlens_q: {got}", varlen_fwd, device, flat, cu=cu)
        refuses(f"cache_seqlens: {got}", fwd_kvcache, device, x, x, lengths=lengths.to_sparse())
        refuses(f"block_table: {got}", fwd_kvcache, device, x, x, table=lengths[:, None].to_sparse())
        parts = torch.zeros(2, 1, 1, 1, 8, device=device)
        refuses(f"out_partial: {got}", backends.get(device).combine, parts.to_sparse(), parts[..., 0], None)
        refuses(f"lse_partial: {got}", backends.get(device).combine, parts, parts[..., 0].to_sparse(), None)


@pytest.mark.parametrize("dtype,name", [(torch.uint16, "uint16"), (torch.float8_e5m2, "float8_e5m2")])
def test_unusual_dtypes(device, dtype, name):
    accepted = "float16 or bfloat16" if device == "cuda" else "float16, bfloat16, float32 or float64"
    q = torch.zeros(1, 4, 2, 16, device=device).to(dtype)
    refuses(f"q: expected dtype {accepted}, got {name}", fwd, device, q)
    refuses(f"q: expected dtype {accepted}, got {name}", fwd_kvcache, device, q, q)


@pytest.mark.devices("cpu")
@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors(device):
    q = torch.quantize_per_tensor(torch.zeros(1, 4, 2, 16), 0.1, 0, torch.qint8)
    refuses("q: expected dtype float16, bfloat16, float32 or float64, got qint8", fwd, device, q)


@pytest.mark.devices("cpu")
def test_what_is_no_tensor(device):
    """pybind11 names every argument of the extension at once."""
    x, flat = tensor(device, 2, 4, 2, 16), tensor(device, 4, 2, 16)
    for name, call, args, options in (
        ("q", fwd, ([1.0], x), {}),
        ("k", fwd, (x, [1.0]), {}),
        ("v", fwd, (x, x, 3), {}),
        ("out", fwd, (x,), {"out": [1.0]}),
        ("alibi_slopes", fwd, (x,), {"alibi": [0.5, 0.5]}),
        ("sinks", fwd, (x,), {"sinks": [0.5, 0.5]}),
        ("seqused_k", varlen_fwd, (flat,), {"seqused": [2, 2]}),
        ("dout", bwd, (x,), {"dout": [1.0]}),
        ("softmax_lse", bwd, (x,), {"lse": [1.0]}),
        ("k_cache", fwd_kvcache, (x, [1.0]), {}),
        ("cache_seqlens", fwd_kvcache, (x, x), {"lengths": [1, 2]}),
        ("block_table", fwd_kvcache, (x, x), {"table": [[0], [1]]}),
        ("plan", fwd_kvcache, (x, x), {"plan": [1, 2]}),
    ):
        kind = "int" if name == "v" else "list"
        refuses(f"{name}: expected a Tensor, got {kind}", call, device, *args, error=TypeError, **options)


@pytest.mark.devices("cuda")
def test_generator_of_the_cpu(device):
    q = tensor(device, 1, 4, 2, 16)
    refuses("gen: expected a CUDA generator, got one on cpu", fwd, device, q, gen=torch.Generator())


def test_loose_maximum_lengths(device):
    """They size S_dmask alone: without it any int64 will do."""
    q = tensor(device, 4, 2, 16)
    expected = varlen_fwd(device, q)
    for maxima in ((0, 0), (2**31, 2**40), (2**63 - 1, 2**63 - 1)):
        assert all(torch.equal(x, y) for x, y in zip(varlen_fwd(device, q, maxima=maxima)[:2], expected[:2]))


CALLS = {
    "fwd": lambda device, x, **options: fwd(device, x, **options),
    "bwd": lambda device, x, **options: bwd(device, x, **options),
    "varlen_fwd": lambda device, x, **options: varlen_fwd(device, x[0], **options),
    "fwd_kvcache": lambda device, x, **options: fwd_kvcache(device, x, x, **options),
}


@pytest.mark.parametrize("call", CALLS)
def test_numbers_that_floats_do_not_hold(device, call):
    x = tensor(device, 1, 4, 2, 16)
    for softcap in (1e39, 1e-46, 1e-40, 1e16, 1e-16, math.inf):
        message = f"softcap: expected 0 or a value from 1e-15 to 1e+15, got {softcap:g}"
        refuses(message, CALLS[call], device, x, softcap=softcap)
    for scale in (1e39, -1e39, 3e38):
        refuses(
            f"softmax_scale: expected a magnitude of at most 2e+38, got {scale:g}", CALLS[call], device, x, scale=scale
        )
    message = "softmax_scale: expected a magnitude of at most 1e+15 with a softcap, got 1e+16"
    refuses(message, CALLS[call], device, x, scale=1e16, softcap=1.0)


@pytest.mark.devices("cpu")
def test_numbers_in_float64(device):
    """Its scores are computed in float64; the softcap has one range for all dtypes."""
    x = tensor(device, 1, 4, 2, 16, dtype=torch.float64)
    assert fwd(device, x * 1e-160, scale=1e307)[0].isfinite().all()
    refuses("softmax_scale: expected a magnitude of at most 1e+308, got 1.1e+308", fwd, device, x, scale=1.1e308)
    refuses("softcap: expected 0 or a value from 1e-15 to 1e+15, got 1e+16", fwd, device, x, softcap=1e16)


SOFTCAPS = (1e-15, 1e6, 1e15)  # between, scores of the size of the softcap would decide, which half precision loses
SCALES = (0.0, -0.125, 1e-46, 1e-40, -1e-40, 1e-30)


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("causal", (False, True))
def test_softcaps_at_the_ends_of_their_range(device, softcap, causal):
    """Forward and gradients are those of float64; zero scores stay zero."""
    check_both_passes(Case(2, 70, 150, 4, 2, 64, "bfloat16", causal=causal, softcap=softcap), device)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("causal", (False, True))
def test_scales_of_every_size(device, scale, causal):
    """Zero, negative, and so small that float32 has them as denormal numbers or not at all: nothing becomes NaN."""
    check_both_passes(Case(2, 150, 150, 4, 2, 64, "bfloat16", causal=causal), device, scale)


def check_both_passes(case, device, scale=None):
    problem = make_problem(case, device)
    problem.q[:, 3] = 0.0
    inputs = {name: x.requires_grad_() for name, x in problem.inputs.items()}
    out, lse, _ = run(problem, softmax_scale=scale)
    check_forward(problem, out, lse, scale=scale)
    dout = torch.randn_like(out)
    check_gradients(problem, dout, torch.autograd.grad(out, list(inputs.values()), dout), scale=scale)


def test_large_scale_of_small_scores(device):
    q, k, v = (tensor(device, 1, 40, 2, 64) for _ in "qkv")
    for large in (1e15, 1e30):
        factor = large**-0.5
        out = fwd(device, (q * factor).contiguous(), (k * factor).contiguous(), v, scale=large * 0.125)[0]
        assert (out - fwd(device, q, k, v, scale=0.125)[0]).abs().max() < 3e-2
