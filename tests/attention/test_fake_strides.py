"""Strides that compilers are promised are those of the results: every operator, its inputs permuted and sliced."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from interpreted import run_interpreted
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import flash_attn
from flash_attn import flash_attn_interface as interface
from flash_attn.context_parallel import CpPlan, LocalGroup, operators
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.ops.triton import cross_entropy, dispatch, layer_norm, rotary

NAMESPACES = ("flash_attn", "flash_attn_core")
BATCH, SEQLEN, HEADS, HEAD_DIM, CAPACITY = 2, 9, 4, 16, 24
OPTIONS = (0.0, 0.25, True, -1, -1, 0.0)  # dropout_p, softmax_scale, causal, window left and right, softcap
# From a contiguous tensor with axes (batch, seqlen, heads, head_dim), the last two of which every input has.
LAYOUTS = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "head dim first": lambda x: x.movedim(-1, -3).contiguous().movedim(-3, -1),
    "seqlen last": lambda x: x.movedim(-3, -1).contiguous().movedim(-1, -3),
    "slices": lambda x: torch.stack([x, x], -2).flatten(-3, -2)[..., ::2, :],
    "every other feature": lambda x: torch.stack([x, x], -1)[..., 0],
}


def of(result):
    """(shape, stride, dtype) of all tensors; no stride of an axis of one element, which may have any."""
    return [
        (x.shape, [stride for size, stride in zip(x.shape, x.stride()) if size != 1 and x.numel() > 0], x.dtype)
        for x in tree_leaves(result)
        if isinstance(x, torch.Tensor)
    ]


def faked(mode, inputs):
    return tree_map_only(torch.Tensor, mode.from_tensor, inputs)


class ComparesFakes(TorchDispatchMode):
    """Calls the fake of every operator of ours before it, and compares the results."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace not in NAMESPACES:
            return function(*args, **kwargs)
        with FakeTensorMode() as mode:
            given, named = faked(mode, (args, kwargs))
            promised = function(*given, **named)
        result = function(*args, **kwargs)
        assert of(result) == of(promised), function
        self.seen.add(function.name())
        return result


def operators_of_the_package():
    names = torch._C._dispatch_get_all_op_names()
    return {name for name in names if name.split("::")[0] in NAMESPACES}


def call_attention(device, layout):
    """Every operator of attention, forward and backward."""
    dtype = torch.float32 if device == "cpu" else torch.float16

    def rows(*shape, grad=False):
        return layout(torch.randn(*shape, HEADS, HEAD_DIM, device=device, dtype=dtype)).requires_grad_(grad)

    def differentiate(function, *inputs, **options):
        result = function(*inputs, **options)
        results = [x for x in tree_leaves(result) if x.requires_grad]
        given = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.autograd.grad(results, given, [layout(torch.randn_like(x)) if x.dim() > 3 else x for x in results])

    dense, packed = (BATCH, SEQLEN), (14,)
    cu = torch.tensor([0, 5, 14], dtype=torch.int32, device=device)
    q, k, v = (rows(*dense, grad=True) for _ in "qkv")
    options = {
        "causal": True,
        "return_attn_probs": True,
        "return_max_logit": True,
        "sinks": torch.ones(HEADS, device=device),
    }
    differentiate(flash_attn.flash_attn_func, q, k, v, **options)
    differentiate(flash_attn.flash_attn_func, q, k, v, dropout_p=0.1, return_attn_probs=True)
    differentiate(flash_attn.flash_attn_qkvpacked_func, rows(*dense, 3, grad=True))
    differentiate(flash_attn.flash_attn_kvpacked_func, q, rows(*dense, 2, grad=True))
    tokens = [rows(*packed, grad=True) for _ in "qkv"]
    differentiate(flash_attn.flash_attn_varlen_func, *tokens, cu, cu, 9, 9, **options)
    differentiate(flash_attn.flash_attn_varlen_qkvpacked_func, rows(*packed, 3, grad=True), cu, 9)
    dq = torch.autograd.grad(flash_attn.flash_attn_func(q, k, v), q, layout(rows(*dense)), create_graph=True)
    torch.autograd.grad(dq, (q, k, v), layout(rows(*dense)))
    with torch.no_grad():
        flash_attn.flash_attn_jvp(q, k, v, *(rows(*dense) for _ in "qkv"))
        _public_operators(layout, (q, k, v), tokens, cu)
        _cache(device, rows)
        partial = torch.randn(3, BATCH, HEADS, SEQLEN, device=device).transpose(2, 3)
        for out in (None, rows(*dense).contiguous()):
            flash_attn.flash_attn_combine(rows(3, *dense), partial, out=out)


def _public_operators(layout, dense, packed, cu):
    out, lse, _, state = interface._flash_attn_forward(*dense, *OPTIONS, None, False)
    grads = [torch.empty_like(x) for x in dense]
    interface._flash_attn_backward(layout(out), *dense, out, lse, *grads, *OPTIONS, None, False, state)
    out, lse, _, state = interface._flash_attn_varlen_forward(*packed, cu, cu, 9, 9, *OPTIONS)
    grads = [torch.empty_like(x) for x in packed]
    interface._flash_attn_varlen_backward(
        layout(out), *packed, out, lse, *grads, cu, cu, 9, 9, *OPTIONS, None, False, state
    )  # fmt: skip


def _cache(device, rows):
    q, (k_cache, v_cache) = rows(BATCH, SEQLEN), (rows(BATCH, CAPACITY) for _ in "kv")
    if k_cache.stride(-1) != 1:  # which a cache may not have
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    lengths = torch.tensor([3, 9], dtype=torch.int32, device=device)
    plan = flash_attn.KvCachePlan(lengths, SEQLEN, HEADS, HEADS, HEAD_DIM, CAPACITY, causal=True)
    plan.update(lengths)
    options = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **options, plan=plan)
    flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, q, q, **options)
    flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, q, q, **options, out=q.clone().contiguous())


def call_context_parallel(layout, comparing):
    def run(rank):
        plan = CpPlan.dense(SEQLEN, group=rank)
        with comparing:
            q, k, v = (layout(torch.randn(BATCH, SEQLEN, HEADS, HEAD_DIM)).requires_grad_() for _ in "qkv")
            args = operators.CpArgs(q, k, v, None, None, plan.handle, *OPTIONS, False, 0)
            out, lse, _ = operators.attention(args)
            torch.autograd.grad((out, lse), (q, k, v), (layout(torch.randn_like(out)), torch.ones_like(lse)))

    LocalGroup(1).run(run)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention(device, layout):
    with ComparesFakes() as comparing:
        call_attention(device, LAYOUTS[layout])
    if device == "cpu":
        call_context_parallel(LAYOUTS[layout], comparing)
        assert comparing.seen == operators_of_the_package()


def triton_calls(device, layout):
    """A call of every function with a Triton kernel: (function, its arguments, its options)."""
    x, other = (layout(torch.randn(BATCH, SEQLEN, HEADS, HEAD_DIM, device=device)) for _ in range(2))
    weight, cos = torch.rand(2, HEAD_DIM, device=device), torch.rand(2, CAPACITY, HEAD_DIM // 2, device=device)
    cu, labels = torch.tensor([0, 4, 9], device=device), torch.zeros(HEADS, dtype=torch.long, device=device)
    for interleaved, tables in itertools.product((False, True), (cos, cos[..., :4])):
        options = {"interleaved": interleaved}
        yield apply_rotary_emb, (x, *tables), options
        yield apply_rotary_emb, (x.clone(), *tables), {**options, "inplace": True}
        yield apply_rotary_emb, (x[0], *tables), {**options, "cu_seqlens": cu}
    for options in ({}, {"dropout_p": 0.5, "return_dropout_mask": True}, {"residual_in_fp32": True}):
        options["prenorm"] = True
        yield layer_norm.rms_norm_fn, (x.half(), weight[0], None), options
        yield layer_norm.layer_norm_fn, (x, *weight, other, other, *weight), options
    yield layer_norm.layer_norm_linear_fn, (x, *weight, weight, None), {"prenorm": True}
    yield cross_entropy.cross_entropy_loss, (x[0, 0], labels), {"label_smoothing": 0.1}


def check_triton(device, layouts=tuple(LAYOUTS)):
    for name in layouts:
        for function, inputs, options in triton_calls(device, LAYOUTS[name]):
            with FakeTensorMode() as mode:
                given, named = faked(mode, (inputs, options))
                promised = of(function(*given, **named))
            assert of(function(*inputs, **options)) == promised, (function.__name__, name, options)


@pytest.mark.devices("cuda")
def test_triton(device):
    check_triton(device)


def check_interpreted():
    """`check_triton` with kernels that Triton's interpreter runs."""

    def serves(x):
        return type(x) in (torch.Tensor, torch.nn.Parameter)

    for module in (rotary, layer_norm, cross_entropy, dispatch):
        module.kernel_serves = serves
    check_triton("cpu", ("heads first", "seqlen last", "every other feature"))


def test_triton_under_the_interpreter():
    pytest.importorskip("triton")
    folder = str(Path(__file__).parent)
    run_interpreted(f"sys.path[:0] = {[folder, *sys.path]!r}\nimport {Path(__file__).stem} as test\n"
                    "test.check_interpreted()\nprint('equal')")  # fmt: skip
