"""v, and with it the output, of another head dim than q and k."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import Case, value_dim_cases
from harness import backend_forward, check_forward, check_gradients, make_problem, run
from reference import assert_accurate, attention
from test_backward import check_training_step
from test_backward_families import check_both as check_both_backwards
from test_errors import fails
from test_families import FEATURES, check_families, run_family  # noqa: F401
from torch.library import opcheck

from flash_attn import KvCachePlan, backends, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn import flash_attn_interface as interface
from flash_attn.limits import MAX_HEAD_DIM
from flash_attn.ops import library  # noqa: F401

pytestmark = pytest.mark.by_both_paths

DTYPE = "bfloat16"
CORE = torch.ops.flash_attn_core
OPTIONS = (0.0, 0.25, True, -1, -1, 0.0)  # dropout_p, softmax_scale, causal, window left and right, softcap


@pytest.mark.parametrize("combination", value_dim_cases(), ids=lambda c: c.id)
def test_forward(device, combination):
    problem = make_problem(combination, device)
    out, lse, dmask = run(problem)
    reference = check_forward(problem, out, lse, keep=dmask >= 0 if combination.dropout else None)
    if combination.dropout and problem.layout is None:
        sq, sk = combination.seqlen_q, combination.seqlen_k
        rounded = reference.probs.to(dmask.dtype)
        assert_accurate(dmask[:, :, :sq, :sk].abs(), reference.probs, rounded, "S_dmask")


@pytest.mark.parametrize("combination", value_dim_cases(training=True), ids=lambda c: c.id)
def test_training_step(device, combination):
    check_training_step(make_problem(combination, device))


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(0, 5), (5, 0), (1, 1), (300, 1), (500, 700)])
def test_lengths(device, seqlen_q, seqlen_k):
    for causal in (False, True):
        case = Case(2, seqlen_q, seqlen_k, 4, 2, 192, DTYPE, causal=causal, head_dim_v=128)
        check_training_step(make_problem(case, device))


@pytest.mark.parametrize("head_dims", [(192, 128), (64, 96)])
def test_what_does_not_depend_on_v(device, head_dims):
    """LSE, largest logits and the dropped entries are those of v of the head dim of q and k."""
    case = Case(2, 150, 170, 4, 2, head_dims[0], DTYPE, causal=True, dropout=0.2, sinks=True, head_dim_v=head_dims[1])
    problem = make_problem(case, device)
    same = dataclasses.replace(problem, v=torch.randn_like(problem.k))
    results = []
    for each in (problem, same):
        torch.manual_seed(5)
        results.append(run(each, return_max_logit=True))
    (_, lse, dmask, max_logit), (_, same_lse, same_dmask, same_max_logit) = results
    assert torch.equal(dmask >= 0, same_dmask >= 0)
    torch.testing.assert_close(lse, same_lse, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(max_logit, same_max_logit, rtol=1e-6, atol=1e-5)


def test_default_scale(device):
    problem = make_problem(Case(1, 40, 60, 2, 2, 64, DTYPE, head_dim_v=16), device)
    tensors = (problem.q, problem.k, problem.v)
    assert torch.equal(flash_attn_func(*tensors), flash_attn_func(*tensors, softmax_scale=64**-0.5))


@pytest.mark.parametrize("head_dims", [(192, 128), (32, 72), (64, 13)])
def test_slices_of_wider_tensors(device, head_dims):
    """k and v in one tensor, whose other columns are NaN; so is the memory around out."""
    d, d_v = head_dims
    problem = make_problem(Case(2, 90, 140, 4, 2, d, DTYPE, causal=True, head_dim_v=d_v), device)
    wide = torch.full((2, 140, 2, d + d_v + 8), float("nan"), device=device, dtype=problem.q.dtype)
    k, v = wide[..., :d], wide[..., d : d + d_v]
    k.copy_(problem.k)
    v.copy_(problem.v)
    surrounding = torch.full((2, 90, 4, d_v + 9), 7.0, device=device, dtype=problem.q.dtype)
    out = surrounding[..., 3 : 3 + d_v]
    returned, lse, *_ = backend_forward(problem.q, k, v, out, causal=True)
    assert returned.data_ptr() == out.data_ptr()
    check_forward(problem, out, lse)
    assert (surrounding[..., :3] == 7.0).all() and (surrounding[..., 3 + d_v :] == 7.0).all()


def among_nan(tensor):
    """The same values in the middle columns of a wider tensor."""
    wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 16), float("nan"))
    wide[..., 8:-8] = tensor
    return wide[..., 8:-8]


@pytest.mark.parametrize("head_dims", [(192, 128), (136, 72), (32, 72), (128, 64), (256, 40)])
@pytest.mark.parametrize("kind", ("dense", "packed"))
def test_gradients_into_given_tensors(device, head_dims, kind):
    case = Case(2, 90, 140, 4, 2, head_dims[0], DTYPE, causal=True, kind=kind, head_dim_v=head_dims[1])
    problem = make_problem(case, device)
    out, lse, _ = run(problem)
    tensors = tuple(among_nan(x) for x in (problem.q, problem.k, problem.v))
    out, dout = among_nan(out), among_nan(torch.randn_like(out))
    surrounding = [torch.full((*x.shape[:-1], x.shape[-1] + 8), 7.0, device=device, dtype=x.dtype) for x in tensors]
    grads = [x[..., 8:] for x in surrounding]
    scale = head_dims[0] ** -0.5
    if kind == "dense":
        interface._flash_attn_backward(dout, *tensors, out, lse, *grads, 0.0, scale, True, -1, -1, 0.0, None, False)
    else:
        interface._flash_attn_varlen_backward(
            dout, *tensors, out, lse, *grads, problem.cu_seqlens_q, problem.cu_seqlens_k, problem.max_seqlen_q,
            problem.max_seqlen_k, 0.0, scale, True, -1, -1, 0.0, None, False,
        )  # fmt: skip
    check_gradients(problem, dout, grads)
    assert all((x[..., :8] == 7.0).all() for x in surrounding)


def test_deterministic_twice(device):
    problem = make_problem(Case(2, 300, 400, 4, 2, 192, DTYPE, causal=True, head_dim_v=128), device)
    leaves = {name: x.requires_grad_() for name, x in problem.inputs.items()}
    out = run(dataclasses.replace(problem, **leaves), deterministic=True)[0]
    dout = torch.randn_like(out)
    first, second = (torch.autograd.grad(out, list(leaves.values()), dout, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def small_inputs(device, grad=False):
    dtype = torch.float32 if device == "cpu" else torch.float16
    shapes = ((2, 9, 4, 24), (2, 11, 2, 24), (2, 11, 2, 16))
    return tuple(torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad) for shape in shapes)


def varlen_small_inputs(device, grad=False):
    q, k, v = (x.detach().flatten(0, 1).requires_grad_(grad) for x in small_inputs(device))
    lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 5, 18], [0, 9, 22]))
    return q, k, v, *lengths


@pytest.mark.parametrize("grad", (False, True))
def test_opcheck_forward(device, grad):
    rest = (*OPTIONS, False, False, True)
    opcheck(CORE.fwd.default, (*small_inputs(device, grad), *(None,) * 7, 0, 0, *rest))
    opcheck(CORE.fwd.default, (*varlen_small_inputs(device, grad), *(None,) * 5, 13, 13, *rest))


def test_opcheck_backward(device):
    q, k, v = small_inputs(device)
    out, lse, _, rng_state = interface._flash_attn_forward(q, k, v, *OPTIONS, None, False)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    saved = (torch.randn_like(out), None, q, k, v, out, lse, rng_state)
    opcheck(CORE.bwd.default, (*saved, *(None,) * 4, 0, 0, *OPTIONS, False))
    grads = [torch.empty_like(x) for x in (q, k, v)]
    opcheck(
        interface._flash_attn_backward,
        (torch.randn_like(out), q, k, v, out, lse, *grads, *OPTIONS, None, False, rng_state),
    )


@pytest.mark.parametrize("head_dims", [(24, 16), (20, 36)])
def test_compiled_equals_eager(device, head_dims):
    d, d_v = head_dims
    dtype = torch.float32 if device == "cpu" else torch.float16

    def step(q, k, v):
        out = flash_attn_func(q, k, v, causal=True)
        return out, torch.autograd.grad(out.float().sum(), (q, k, v))

    def make(*shape):
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    inputs = make(2, 9, 4, d), make(2, 11, 2, d), make(2, 11, 2, d_v)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, causal=True), backend="aot_eager", fullgraph=True)
    out = compiled(*inputs)
    grads = torch.autograd.grad(out.float().sum(), inputs)
    eager, eager_grads = step(*inputs)
    assert out.shape == (2, 9, 4, d_v) and torch.equal(out, eager)
    assert all(torch.equal(a, b) for a, b in zip(grads, eager_grads))


def test_functional_gradient(device):
    q, k, v = small_inputs(device)
    grads = torch.func.grad(lambda *x: flash_attn_func(*x).float().sum(), argnums=(0, 1, 2))(q, k, v)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("dims", ((512, 512), (320, 40), (72, 384)))
def test_head_dims_beyond_those_of_kernels(device, dims):
    """Up to 512 on CPU tensors, in float64: dense and packed with gradients, over a cache that receives rows."""
    d, d_v = dims
    make = {"device": device, "dtype": torch.float64}
    q, k, v = torch.randn(1, 9, 4, d, **make), torch.randn(1, 21, 2, d, **make), torch.randn(1, 21, 2, d_v, **make)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    reference = attention(*inputs, causal=True, window=(11, 0))
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (9, 21))
    options = {"causal": True, "window_size": (11, 0)}
    packed = flash_attn_varlen_func(*(x[0] for x in inputs), cu_q, cu_k, 9, 21, **options)[None]
    expected = torch.autograd.grad(reference.out.square().sum(), inputs)
    for out in (flash_attn_func(*inputs, **options), packed):
        torch.testing.assert_close(out, reference.out)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), inputs), expected)
    if d == d_v:
        q, k, v = (x.detach() for x in inputs)
        caches = [torch.cat([x[:, :16], torch.zeros(1, 8, 2, d, **make)], 1) for x in (k, v)]
        plan = KvCachePlan(cu_k[:1] + 16, 9, 4, 2, d, 24, seqlen_new=5, **options)
        out = flash_attn_with_kvcache(
            q, *caches, k[:, 16:], v[:, 16:], cache_seqlens=cu_k[:1] + 16, plan=plan, **options
        )  # fmt: skip
        torch.testing.assert_close(out, reference.out)


def test_errors(device):
    q, k, v = (torch.randn(2, n, 2, 16, device=device).bfloat16() for n in (5, 7, 7))
    most = MAX_HEAD_DIM
    wide = torch.randn(2, 7, 2, most + 8, device=device).bfloat16()
    out = torch.full_like(q, 7.0)
    fails(f"v: expected a head dim from 1 to {most}, got {most + 8}", backend_forward, q, k, wide, out)
    fails(f"v: expected a head dim from 1 to {most}, got {most + 8}", flash_attn_func, q, k, wide)
    fails(f"v: expected a head dim from 1 to {most}, got 0", backend_forward, q, k, wide[..., :0], out)
    fails("v: expected shape [2, 7, 2, 8], got [2, 6, 2, 8]", backend_forward, q, k, v[:, 1:, :, :8], out)
    fails("v: expected shape [2, 7, 2, 16], got [7, 2, 8]", backend_forward, q, k, v[0, ..., :8], out)
    fails("k: expected shape [2, 7, 2, 16], got [2, 7, 2, 8]", backend_forward, q, k[..., :8], v, out)
    fails("out: expected shape [2, 5, 2, 8], got [2, 5, 2, 16]", backend_forward, q, k, v[..., :8], out)
    lse = torch.zeros(2, 2, 5, device=device)
    rest = (None, 0.0, 1.0, False, -1, -1, 0.0, False, None, None)

    def backward(dout, out, dv=None):
        backends.get(device).bwd(dout, q, k, v[..., :8], out, lse, None, None, dv, *rest)

    narrow = q[..., :8].contiguous()
    fails("dout: expected shape [2, 5, 2, 8], got [2, 5, 2, 16]", backward, q, narrow)
    fails("out: expected shape [2, 5, 2, 8], got [2, 5, 2, 16]", backward, narrow, q)
    dv = torch.full_like(v, 7.0)
    fails("dv: expected shape [2, 7, 2, 8], got [2, 7, 2, 16]", backward, narrow, narrow, dv)
    assert (out == 7.0).all() and (dv == 7.0).all()
    lengths = torch.tensor([0, 5], dtype=torch.int32, device=device)
    fails(
        "v: expected shape [7, 2, 8], got [6, 2, 8]",
        flash_attn_varlen_func, q[0], k[0], v[0, 1:, :, :8], lengths, lengths, 5, 5,
    )  # fmt: skip


def test_caches_have_one_head_dim(device):
    q, k_cache, v_cache = (torch.randn(2, n, 2, 16, device=device).bfloat16() for n in (1, 7, 7))
    message = "v_cache: expected shape [2, 7, 2, 16], got [2, 7, 2, 8]"
    fails(message, flash_attn_with_kvcache, q, k_cache, v_cache[..., :8], cache_seqlens=3)
    new = (k_cache[:, :1], v_cache[:, :1, :, :8].contiguous())
    message = "v: expected shape [2, 1, 2, 16], got [2, 1, 2, 8]"
    fails(message, flash_attn_with_kvcache, q, k_cache, v_cache, *new, cache_seqlens=3)


# ---- both families of kernels ----


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("head_dims", [(192, 128), (136, 72), (128, 64), (64, 128), (96, 256)])
def test_families(hopper, run_family, monkeypatch, head_dims, features):  # noqa: F811
    case = Case(2, 333, 401, 4, 2, head_dims[0], DTYPE, head_dim_v=head_dims[1], **features)
    check_families(make_problem(case, hopper), run_family)
    check_both_backwards(case, hopper, monkeypatch)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("kind", ("packed", "padded", "seqused", "leftpad"))
@pytest.mark.parametrize("features", ("full", "causal", "window", "sinks"))
@pytest.mark.parametrize("page_size", (0, 8, 48))
def test_families_packed(hopper, run_family, features, kind, page_size):  # noqa: F811
    case = Case(7, 200, 350, 4, 2, 192, DTYPE, kind=kind, page_size=page_size, head_dim_v=128, **FEATURES[features])
    check_families(make_problem(case, hopper), run_family)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("causal", (False, True))
def test_more_row_blocks_than_multiprocessors(hopper, run_family, dtype, causal):  # noqa: F811
    case = Case(3, 900, 1100, 12, 4, 192, dtype, causal=causal, head_dim_v=128)
    check_families(make_problem(case, hopper), run_family)
