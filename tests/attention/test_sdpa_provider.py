"""`flash_attn.sdpa.register`: PyTorch's flash attention operators by our backends.

On the CPU the operators are called by name, through the dispatcher, autograd and compilers; on CUDA also by
scaled_dot_product_attention, which chooses them for CUDA tensors alone.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from reference import Varlen, assert_accurate, assert_gradient_accurate, attention_varlen
from sdpa_harness import LAYOUTS, check, expected, make, recorded, run_with_gradients
from torch.nn import attention

import flash_attn.sdpa
from flash_attn import backends
from flash_attn.dropout import dropout_mask, keep_scale
from flash_attn.sdpa import operators
from flash_attn.sdpa.provider import OPERATORS

if not hasattr(attention, "register_flash_attention_impl"):
    pytest.skip("this torch has no registry of flash attention implementations", allow_module_level=True)

varlen = pytest.importorskip("torch.nn.attention.varlen")
NAME = "flash_attn_test"
BACKENDS = {"cpu": "aot_eager", "cuda": "inductor"}


@pytest.fixture
def provider():
    flash_attn.sdpa.register(NAME)
    attention.activate_flash_attention_impl(NAME)
    yield
    attention.restore_flash_attention_impl(_raise_warn=False)


def flash(q, k, v, dropout_p=0.0, is_causal=False, scale=None):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]


def test_registry(device):
    """Activation and restoration; both may be repeated, and cuDNN attention comes back."""
    inputs = make(device)
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    for _ in range(2):
        flash_attn.sdpa.register(NAME)
        assert NAME in attention.list_flash_attention_impls()
        attention.activate_flash_attention_impl(NAME)
        assert attention.current_flash_attention_impl() == NAME
        assert torch.backends.cuda.cudnn_sdp_enabled() == (cudnn and backends.cuda_extension() is None)
        with recorded(device, "fwd") as calls:
            flash(*inputs)
        assert len(calls) == 1
        attention.restore_flash_attention_impl()
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
        with recorded(device, "fwd") as calls:
            if device == "cpu":
                with pytest.raises(NotImplementedError):
                    flash(*inputs)
            else:
                flash(*inputs)
        assert calls == []


def kernels(key):
    """Where the kernel of each operator for a dispatch key was registered, as torch tells."""
    found = {}
    for name in OPERATORS:
        if hasattr(torch.ops.aten, name):
            lines = torch._C._dispatch_dump(f"aten::{name}").splitlines()
            found[name] = [line.split("::")[0] for line in lines if line.startswith(f"{key}: ")]
    return found


@pytest.mark.devices("cpu")
def test_kernels_are_replaced_and_come_back(device, monkeypatch, recwarn):
    """Those for CUDA tensors too, which needs no GPU; without a warning; by the next implementation as well."""
    monkeypatch.setattr(backends, "cuda_extension", lambda: backends)
    before = {key: kernels(key) for key in ("CUDA", "CPU")}
    assert len(before["CUDA"]) >= 4
    flash_attn.sdpa.register(NAME)
    attention.register_flash_attention_impl("another", register_fn=lambda: None)
    for restore in (attention.restore_flash_attention_impl, lambda: attention.activate_flash_attention_impl("another")):
        attention.activate_flash_attention_impl(NAME)
        for key in before:
            ours = kernels(key)
            assert all(len(ours[name]) == 1 and ours[name] != before[key][name] for name in ours)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        restore()
        assert {key: kernels(key) for key in before} == before
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert not [w for w in recwarn if "verrid" in str(w.message)]


def test_cudnn_stays_if_wanted(device):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    flash_attn.sdpa.register(NAME, disable_cudnn=False)
    attention.activate_flash_attention_impl(NAME)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    attention.restore_flash_attention_impl()


def test_torch_without_registry(monkeypatch):
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    with pytest.raises(RuntimeError, match="torch: expected a version with .*flash_attn.sdpa.use"):
        flash_attn.sdpa.register(NAME)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", (False, True))
def test_layouts(device, provider, layout, is_causal):
    inputs = make(device, layout=layout)
    check(flash(*inputs, is_causal=is_causal), inputs, causal=is_causal)


@pytest.mark.parametrize("lengths", ((1, 1), (1, 70), (70, 33), (33, 70)))
def test_causal_operator_is_bottom_right(device, provider, lengths):
    """As torch's own kernel, which causal_lower_right relies on."""
    inputs = make(device, *lengths)
    check(flash(*inputs, is_causal=True), inputs, causal=True)


@pytest.mark.parametrize("heads", ((3, 3), (6, 2), (5, 1)))
@pytest.mark.parametrize("dim", (8, 64, 136))
@pytest.mark.parametrize("scale", (None, 0.3))
def test_heads_dims_and_scales(device, provider, heads, dim, scale):
    inputs = make(device, 20, 50, *heads, dim, dtype=torch.bfloat16)
    check(flash(*inputs, scale=scale), inputs, scale=scale)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_as_meta_functions_say(device, provider, layout):
    """Shapes, strides and dtypes of all results, on which compiled code relies."""
    inputs = [x.detach() for x in make(device, layout=layout)]
    forward = torch.ops.aten._scaled_dot_product_flash_attention.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    results = forward(*inputs, 0.1, True)
    compare_to_fake(forward, (*inputs, 0.1, True), results)
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = results
    args = (torch.randn_like(out), *inputs, out, lse, cum_q, cum_k, max_q, max_k, 0.1, True, seed, offset)
    compare_to_fake(backward, args, backward(*args))


def compare_to_fake(operator, args, results):
    mode = torch._subclasses.fake_tensor.FakeTensorMode()
    fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
    with mode:
        promised = operator(*fakes)
    for ours, fake in zip(results, promised):
        if isinstance(ours, torch.Tensor):
            assert (ours.shape, ours.stride(), ours.dtype) == (fake.shape, fake.stride(), fake.dtype)
        else:
            assert ours == fake


@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("dropout_p", (0.1, 0.6))
def test_dropout(device, provider, dropout_p, is_causal):
    """Forward and backward use the mask of the returned rng_state; kept scores are scaled by 1 / (1 - p)."""
    inputs = make(device, 70, 90)
    results = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, dropout_p, is_causal)
    assert results[6].dtype == torch.uint64 and results[6].shape == (2,)
    keep = dropout_mask(results[6].view(torch.int64), dropout_p, 2, 4, 70, 90)
    deviation = (dropout_p * (1 - dropout_p) / keep.numel()) ** 0.5
    assert abs(keep.double().mean().item() - (1 - dropout_p)) < 6 * deviation
    assert keep_scale(dropout_p) == pytest.approx(1 / (1 - dropout_p), rel=1e-6)
    check(results[0], inputs, causal=is_causal, keep=keep, rp_dropout=1 / (1 - dropout_p))


def test_inference_mode(device, provider):
    inputs = make(device)
    with torch.inference_mode():
        assert torch.equal(flash(*inputs, is_causal=True), flash(*(x.detach() for x in inputs), is_causal=True))


def test_dropout_follows_the_generator(device, provider):
    inputs = make(device)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append((flash(*inputs, dropout_p=0.5), flash(*inputs, dropout_p=0.5)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[2][0]) and not torch.equal(*results[0])


def test_debug_mask(device, provider):
    """return_debug_mask returns S_dmask: dropped probabilities are negative."""
    inputs = make(device, 40, 50)
    results = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.4, False, True)
    keep = dropout_mask(results[6].view(torch.int64), 0.4, 2, 4, 40, 50)
    assert torch.equal(results[8][:, :, :40, :50] >= 0, keep)
    assert results[8].shape == (2, 4, 128, 128)


@pytest.mark.parametrize("dropout_p", (0.0, 0.4))
def test_compile(device, provider, dropout_p):
    """No graph breaks, the bits of eager mode, gradients too."""

    def function(q, k, v):
        return flash(q * 1.5, k, v, dropout_p, True)

    inputs = make(device, layout="packed")
    dout = torch.randn_like(inputs[0])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(run_with_gradients(compiled, inputs, dout), run_with_gradients(function, inputs, dout)):
        assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpoint(device, provider, use_reentrant):
    """Recomputing the forward in the backward drops the same scores."""

    def function(q, k, v):
        return flash(q, k, v, 0.4, True)

    def checkpointed(q, k, v):
        return torch.utils.checkpoint.checkpoint(function, q, k, v, use_reentrant=use_reentrant)

    inputs = [x.contiguous().detach().requires_grad_() for x in make(device)]
    grads = []
    for f in (function, checkpointed):
        torch.manual_seed(7)
        f(*inputs).square().sum().backward()
        grads.append([x.grad for x in inputs])
        for x in inputs:
            x.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_deterministic_flag(device, provider):
    """torch's flag reaches the backward."""
    inputs = make(device)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for flag, warn_only in ((True, False), (True, True), (False, False)):
            torch.use_deterministic_algorithms(flag, warn_only=warn_only)
            out = flash(*inputs, dropout_p=0.3)
            with recorded(device, "bwd") as calls:
                torch.autograd.grad(out, inputs, torch.ones_like(out))
            assert [args[16] for args in calls] == [flag]
    finally:
        torch.use_deterministic_algorithms(before)


LENGTHS_Q, LENGTHS_K = [5, 0, 33, 20], [9, 12, 33, 0]


def make_varlen(device, heads=4, heads_k=2, dim=16, dtype=torch.float16):
    """[q, k, v], cu_seqlens of both sides, and the layout of the reference."""
    starts = [[sum(lengths[:i]) for i in range(5)] for lengths in (LENGTHS_Q, LENGTHS_K)]
    cu = [torch.tensor(s, dtype=torch.int32, device=device) for s in starts]
    shapes = ((starts[0][-1], heads, dim), *[(starts[1][-1], heads_k, dim)] * 2)
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    return inputs, cu, Varlen(starts[0][:-1], LENGTHS_Q, starts[1][:-1], LENGTHS_K, starts[0][-1])


def varlen_options(function, **options):
    """Those of the keyword arguments that this torch's function has."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}


@pytest.mark.parametrize("window", ((-1, -1), (-1, 0), (7, 0), (3, 4)))
def test_varlen_attn(device, provider, window):
    inputs, cu, layout = make_varlen(device)
    with recorded(device, "varlen_fwd") as calls:
        out, lse = varlen.varlen_attn(
            *inputs, *cu, max(LENGTHS_Q), max(LENGTHS_K), return_aux=varlen.AuxRequest(lse=True), scale=0.4,
            window_size=window, **varlen_options(varlen.varlen_attn, enable_gqa=True),
        )  # fmt: skip
    assert len(calls) == 1
    dout = torch.randn_like(out)
    ours = torch.autograd.grad(out, inputs, dout)
    results = []
    for dtype in (torch.float64, out.dtype):
        result = attention_varlen(*inputs, layout, window=window, scale=0.4, dtype=dtype)
        results.append((result, torch.autograd.grad(result.out, inputs, dout.to(dtype))))
    (reference, reference_grads), (plain, plain_grads) = results
    assert_accurate(out, reference.out, plain.out)
    assert_accurate(lse, reference.lse, plain.lse, "lse")
    for name, *grads in zip(("dq", "dk", "dv"), ours, reference_grads, plain_grads):
        assert_gradient_accurate(*grads, name)


def test_varlen_attn_compiles(device, provider):
    inputs, cu, _ = make_varlen(device)
    options = varlen_options(varlen.varlen_attn, enable_gqa=True)

    def function(q, k, v):
        return varlen.varlen_attn(q, k, v, *cu, max(LENGTHS_Q), max(LENGTHS_K), window_size=(-1, 0), **options)

    dout = torch.randn_like(inputs[0])
    compiled = torch.compile(function, fullgraph=True, backend=BACKENDS[device])
    for a, b in zip(run_with_gradients(compiled, inputs, dout), run_with_gradients(function, inputs, dout)):
        assert torch.equal(a, b)


def test_dense_flash_attention_forward(device, provider):
    """aten::_flash_attention_forward without lengths: (batch, seqlen, heads, head_dim), windows and ALiBi."""
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in make(device, 30, 50)]
    lengths = (None, None, 30, 50)
    operator = torch.ops.aten._flash_attention_forward
    out = operator(*inputs, *lengths, 0.0, False, False, window_size_left=9, window_size_right=5)[0]
    reference = expected([x.transpose(1, 2) for x in inputs], window=(9, 5)).transpose(1, 2)
    plain = expected([x.transpose(1, 2) for x in inputs], out.dtype, window=(9, 5)).transpose(1, 2)
    assert_accurate(out, reference, plain)
    slopes = torch.rand(4, device=device)
    with torch.no_grad():
        out = operator(*inputs, *lengths, 0.0, True, False, alibi_slopes=slopes)[0]
        options = {"causal": True, "alibi_slopes": slopes}
        swapped = [x.transpose(1, 2) for x in inputs]
        reference, plain = (expected(swapped, dtype, **options) for dtype in (torch.float64, out.dtype))
    assert_accurate(out.transpose(1, 2), reference, plain)
    with pytest.raises(NotImplementedError, match="alibi_slopes: expected None in training"):
        operator(*inputs, *lengths, 0.0, True, False, alibi_slopes=slopes)
    used = torch.full((2,), 7, dtype=torch.int32, device=device)
    with torch.no_grad(), pytest.raises(RuntimeError, match="seqused_k: expected None for dense attention"):
        operator(*inputs, *lengths, 0.0, True, False, seqused_k=used)


def make_paged(device):
    """q, k, v, block table, cu_seqlens_q, lengths of keys, and the layout of the reference."""
    q = torch.randn(5, 4, 16, device=device, dtype=torch.float16)
    k, v = torch.randn(2, 6, 16, 2, 16, device=device, dtype=torch.float16)
    table = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32, device=device)
    cu = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    used = torch.tensor([20, 31], dtype=torch.int32, device=device)
    return q, k, v, table, cu, used, Varlen([0, 2], [2, 3], [0, 0], [20, 31], 5)


@pytest.mark.parametrize("num_splits", (None, 1))
@pytest.mark.parametrize("by", ("function", "varlen_attn", "varlen_attn_out"))
def test_paged(device, provider, by, num_splits):
    """What newer versions of torch have: pages, lengths of keys, a given out. num_splits 1 means batch invariance."""
    q, k, v, table, cu, used, layout = make_paged(device)
    out, options = torch.full_like(q, float("nan")), {"seqused_k": used, "block_table": table, "num_splits": num_splits}
    with recorded(device, "varlen_fwd") as calls:
        if by == "function":
            lse = operators.flash_forward_inplace(out, q, k, v, cu, None, 3, 32, 0.0, True, False, **options)
        else:
            function = getattr(varlen, by, None)
            if function is None or "block_table" not in inspect.signature(function).parameters:
                pytest.skip("this torch has no paged varlen_attn")
            options.update(window_size=(-1, 0), enable_gqa=True, return_aux=varlen.AuxRequest(lse=True))
            args = (out,) if by == "varlen_attn_out" else ()
            out, lse = function(*args, q, k, v, cu, None, 3, 32, **options)
    assert [args[23] for args in calls] == [num_splits == 1]
    reference, plain = (
        attention_varlen(q, k, v, layout, block_table=table, causal=True, dtype=dtype)
        for dtype in (torch.float64, q.dtype)
    )
    assert_accurate(out, reference.out, plain.out)
    assert_accurate(lse, reference.lse, plain.lse, "lse")


# ---- what SDPA itself chooses, on CUDA ----


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("dim", (40, 64, 100, 128, 256))
def test_sdpa_comes_here(device, provider, dim, is_causal):
    """Also where torch prefers cuDNN, and with head dims that SDPA pads."""
    inputs = make(device, 130, 130, dim=dim, dtype=torch.bfloat16)
    with recorded(device, "fwd") as forwards, recorded(device, "bwd") as backwards:
        out = F.scaled_dot_product_attention(*inputs, is_causal=is_causal, enable_gqa=True)
        check(out, inputs, causal=is_causal)
    assert len(forwards) == len(backwards) == 1


@pytest.mark.devices("cuda")
def test_sdpa_rectangular_causal_is_top_left(device, provider):
    """SDPA does not send these to its flash attention; causal_lower_right it does."""
    from torch.nn.attention.bias import causal_lower_right

    inputs = make(device, 100, 300, heads_k=4)
    top_left = torch.ones(100, 300, dtype=torch.bool, device=device).tril()
    with recorded(device, "fwd") as calls:
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        assert calls == []
        reference = F.scaled_dot_product_attention(*(x.double() for x in inputs), attn_mask=top_left)
        torch.testing.assert_close(out.double(), reference, atol=2e-3, rtol=0)
        out = F.scaled_dot_product_attention(*inputs, attn_mask=causal_lower_right(100, 300))
        assert len(calls) == 1
    check(out, inputs, causal=True)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("dropout_p", (0.0, 0.3))
def test_sdpa_compiles(device, provider, dropout_p):
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True, enable_gqa=True)

    inputs = make(device, 60, 60)
    dout = torch.randn_like(inputs[0])
    compiled = torch.compile(function, fullgraph=True, options={"fallback_random": True})
    with recorded(device, "fwd") as calls:
        results = run_with_gradients(compiled, inputs, dout)
    assert len(calls) == 1
    for a, b in zip(results, run_with_gradients(function, inputs, dout)):
        assert torch.equal(a, b)


@pytest.mark.devices("cuda")
def test_sdpa_under_autocast(device, provider):
    inputs = make(device, dtype=torch.float32)
    with torch.autocast(device, torch.bfloat16), recorded(device, "fwd") as calls:
        out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    assert out.dtype == torch.bfloat16 and len(calls) == 1
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(g.dtype == torch.float32 for g in grads)
    check(flash(*(x.bfloat16() for x in inputs), is_causal=True), inputs, causal=True)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("layout", (torch.jagged, torch.strided))
def test_nested_tensors(device, provider, layout):
    rows = [torch.randn(n, 4, 32, device=device, dtype=torch.float16) for n in (7, 120, 33)]
    nested = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
    q = nested.transpose(1, 2)
    with recorded(device, "varlen_fwd") as forwards, recorded(device, "varlen_bwd") as backwards:
        out = F.scaled_dot_product_attention(q, q, q)
        out = out.transpose(1, 2)
        if layout == torch.jagged:
            out.values().sum().backward()
    assert len(forwards) == 1 and len(backwards) == (layout == torch.jagged)
    for ours, x in zip(out.unbind(), rows):
        x = x.transpose(0, 1)[None]
        assert_accurate(ours.transpose(0, 1)[None], expected([x] * 3), expected([x] * 3, x.dtype))


@pytest.mark.devices("cuda")
def test_cuda_graph(device, provider):
    inputs = [x.detach() for x in make(device, 200, 200)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        flash(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash(*inputs, is_causal=True)
    inputs[0].normal_()
    graph.replay()
    assert torch.equal(out, flash(*inputs, is_causal=True))
