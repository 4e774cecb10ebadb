"""The Python interface: names, signatures and build identity, packed forms, autograd, and what arguments may be."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys

import flash_attn_3_harness  # noqa: F401  # has flash_attn_interface
import fresh_process
import pytest
import torch
from signatures import plain_signature
from torch.utils.checkpoint import checkpoint

import flash_attn
from flash_attn import (
    backends,
    flash_attn_func,
    flash_attn_interface,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    inference,
)
from flash_attn.ops import eager

pytestmark = pytest.mark.by_both_paths

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
KEYWORDS = (
    "*, sinks=None, mask=None, attn_bias=None, rel_bias=None, return_max_logit=False, batch_invariant=False, "
    "s_aux=None, learnable_sink=None, lse_convention='fa2'"
)
SCALING = "q_descale=None, k_descale=None, v_descale=None, v_descale_axis=None, out_dtype=None"
VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"(q, k, v, {TAIL}, {KEYWORDS}, {SCALING}, exp='exact')",
    "flash_attn_qkvpacked_func": f"(qkv, {TAIL}, {KEYWORDS})",
    "flash_attn_kvpacked_func": f"(q, kv, {TAIL}, {KEYWORDS})",
    "flash_attn_varlen_func": f"(q, k, v, {VARLEN}, {TAIL}, block_table=None, *, seqused_q=None, seqused_k=None, "
    f"leftpad_k=None, {KEYWORDS[3:]}, {SCALING}, exp='exact', qv=None, q_v=None)",
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {TAIL}, {KEYWORDS})",
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {VARLEN}, {TAIL}, {KEYWORDS})",
    "flash_attn_with_kvcache": "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False, *, out=None, plan=None, batch_invariant=False, lse_convention='fa2', sinks=None, "
    f"s_aux=None, learnable_sink=None, {SCALING}, k_descale_axis=None, qv=None, "
    "mask_bits=None, mask_keys=None)",
    "flash_attn_combine": "(out_partial, lse_partial, out=None, out_dtype=None, *, lse_convention='fa2')",
}

PUBLIC_MODULES = (
    "flash_attn", "flash_attn.context_parallel", "flash_attn.context_parallel.compat.ring_flash_attn", "flash_attn.fp8",
    "flash_attn.masks", "flash_attn.modules.mha", "flash_attn.modules.mlp", "flash_attn.sdpa", "flash_attn_interface",
)  # fmt: skip
BORROWED = re.compile(
    r"\bas (?:above|there|in)\b|\ball others:|\bothers:? as\b|\bmodule's docstring|<\w+>", re.IGNORECASE
)


def dtype_of(device):
    return torch.float32 if device == "cpu" else torch.float16


def tensor(device, *shape, grad=False):
    return torch.randn(*shape, device=device, dtype=dtype_of(device), requires_grad=grad)


def cumulative(device, *lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=dtype)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    function = getattr(flash_attn, name)
    assert inspect.isfunction(function)
    assert plain_signature(function) == SIGNATURES[name]
    assert getattr(flash_attn_interface, name) is function
    assert name in flash_attn.__all__


class Reached(Exception):
    """A call has left its public function, with these arguments."""


def reached(*args, **named):
    raise Reached(args, tuple(named.values()))


def holds(values, wanted):
    return any(x is wanted or (isinstance(x, tuple) and holds(x, wanted)) for x in values)


@pytest.mark.parametrize("name", sorted(set(SIGNATURES) - {"flash_attn_combine"}))
def test_every_option_leaves_the_public_function(monkeypatch, name):
    """None is tested in place and then forgotten: plain calls take another way, without options."""
    function = getattr(flash_attn, name)
    for module in (flash_attn_interface, inference):
        for passed_on in {"attend_rows_in_use", "attend_over_cache"} & set(vars(module)):
            monkeypatch.setattr(module, passed_on, reached)
    monkeypatch.setattr(flash_attn_interface._Attention, "apply", reached)
    monkeypatch.setattr(eager, "attention", reached)
    monkeypatch.setattr(eager, "attention_over_cache", reached)
    parameters = inspect.signature(function).parameters.values()
    given = {x.name: torch.zeros(1) for x in parameters if x.default is x.empty}
    for option in (x.name for x in parameters if x.default is not x.empty):
        value = object()
        with pytest.raises((Reached, TypeError, ValueError)) as caught:
            function(**given, **{option: value})
        if isinstance(caught.value, Reached):
            assert holds(caught.value.args, value), f"{name} drops {option}"
        else:
            assert str(caught.value).startswith(f"{option}: ")


def public_objects():
    """(name, object) of each name in `__all__` of the public modules, and of the public methods of its classes."""
    for module in map(importlib.import_module, PUBLIC_MODULES):
        for name in module.__all__:
            found = getattr(module, name)
            yield f"{module.__name__}.{name}", found
            if inspect.isclass(found):
                methods = (getattr(found, key) for key in vars(found) if key == "__init__" or not key.startswith("_"))
                yield from ((f"{module.__name__}.{x.__qualname__}", x) for x in methods if inspect.isroutine(x))


def test_help_stands_alone():
    """It sends nobody to another docstring, and all its placeholders are filled."""
    elsewhere = {name: BORROWED.findall(found.__doc__ or "") for name, found in public_objects()}
    assert {name: found for name, found in elsewhere.items() if found} == {}


def test_help_explains_every_parameter():
    unexplained = []
    for name, found in public_objects():
        if inspect.isfunction(found) and found.__qualname__ == found.__name__:
            lists = re.findall(r"(?:^ *|[.;] )((?:\w+, )*\w+):", found.__doc__, re.MULTILINE)
            explained = {"args", "kwargs", *", ".join(lists).split(", ")}
            unexplained += [f"{name}: {x}" for x in inspect.signature(found).parameters if x not in explained]
    assert unexplained == []


def test_version_and_build():
    assert flash_attn.__version__ == "2.8.3"
    build = flash_attn.__build__
    keys = {"release", "archs", "head_dims", "dtypes", "cuda", "torch", "commit", "backends"}
    assert set(build) == keys
    extension = backends.cuda_extension()
    assert build["backends"] == (["cpu"] if extension is None else ["cuda", "cpu"])
    assert flash_attn_interface.flash_attn_gpu is (extension or backends.get("cpu"))


def test_missing_extension_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", None)
    backends.get.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="^q: expected a CPU tensor, got one on cuda: .*only the CPU backend"):
            backends.get("cuda")
        assert backends.cuda_extension() is None
    finally:
        backends.get.cache_clear()


def test_import_leaves_triton_and_compilers_alone():
    program = (
        "import sys, torch; before = set(sys.modules); import flash_attn, flash_attn.ops.triton.rotary, "
        "flash_attn.layers.rotary, flash_attn.ops.triton.layer_norm, flash_attn.losses.cross_entropy, "
        "flash_attn.modules.mha; new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new & {'triton', 'einops', 'numpy', 'scipy'}), 'torch._dynamo' in set(sys.modules) - before)"
    )
    result = fresh_process.run(program, check=True)
    assert result.stdout.strip() == "[] False"


PACKED_OPTIONS = (
    {},
    {"causal": True, "window_size": (4, -1), "softcap": 7.0, "softmax_scale": 0.2},
    {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
)


def on(device, options):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


@pytest.mark.parametrize("options", PACKED_OPTIONS)
def test_packed_forms_equal_the_plain_one(device, options):
    options = on(device, options)
    qkv = tensor(device, 2, 9, 3, 4, 16)
    q, k, v = qkv.unbind(2)
    expected = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    for actual in (
        flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options),
        flash_attn_kvpacked_func(q, qkv[:, :, 1:], return_attn_probs=True, **options),
    ):
        assert len(actual) == 3 and all(torch.equal(a, b) for a, b in zip(actual, expected))


@pytest.mark.parametrize("options", PACKED_OPTIONS)
def test_varlen_packed_forms_equal_the_plain_one(device, options):
    options = on(device, options)
    qkv = tensor(device, 14, 3, 4, 16)
    q, k, v = qkv.unbind(1)
    cu = cumulative(device, 5, 0, 9)
    expected = flash_attn_varlen_func(q, k, v, cu, cu, 9, 9, return_attn_probs=True, **options)
    for actual in (
        flash_attn_varlen_qkvpacked_func(qkv, cu, 9, return_attn_probs=True, **options),
        flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 9, 9, return_attn_probs=True, **options),
    ):
        assert len(actual) == 3 and all(torch.equal(a, b) for a, b in zip(actual, expected))


@pytest.mark.parametrize("varlen", (False, True))
def test_packed_gradients_are_one_buffer(device, varlen):
    """The gradient of a packed tensor equals the plain gradients bitwise and is contiguous, as one allocation is."""
    shape = (14,) if varlen else (2, 9)
    qkv = tensor(device, *shape, 3, 4, 16, grad=True)
    cu = (cumulative(device, 5, 0, 9),) if varlen else ()
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(-3))
    if varlen:
        out = flash_attn_varlen_func(q, k, v, *cu, *cu, 9, 9, causal=True)
        packed = flash_attn_varlen_qkvpacked_func(qkv, *cu, 9, causal=True)
    else:
        out = flash_attn_func(q, k, v, causal=True)
        packed = flash_attn_qkvpacked_func(qkv, causal=True)
    dout = torch.randn_like(out)
    expected = torch.stack(torch.autograd.grad(out, (q, k, v), dout), dim=-3)
    (actual,) = torch.autograd.grad(packed, qkv, dout)
    assert torch.equal(actual, expected) and actual.is_contiguous()

    kv = torch.stack([k, v], dim=-3).detach().requires_grad_()
    if varlen:
        packed = flash_attn_varlen_kvpacked_func(q, kv, *cu, *cu, 9, 9, causal=True)
    else:
        packed = flash_attn_kvpacked_func(q, kv, causal=True)
    dq, dkv = torch.autograd.grad(packed, (q, kv), dout)
    assert torch.equal(dq, expected.select(-3, 0)) and torch.equal(dkv, expected.narrow(-3, 1, 2))
    assert dkv.is_contiguous()


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("options", ({}, {"causal": True}, {"window_size": (1, 2), "softcap": 3.0}))
def test_gradients_of_output_and_lse(device, options):
    """gradcheck of (out, lse) in float64; with causal and sq > sk some rows see no key."""

    def call(q, k, v):
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    q = torch.randn(1, 6, 4, 5, device=device, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 4, 2, 5, device=device, dtype=torch.float64, requires_grad=True) for _ in "kv")
    assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.devices("cpu")
def test_gradients_of_varlen_output_and_lse(device):
    cu_q, cu_k = cumulative(device, 2, 0, 4), cumulative(device, 3, 1, 2)

    def call(q, k, v):
        out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 3, causal=True, return_attn_probs=True)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    q = torch.randn(7, 2, 3, device=device, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(7, 1, 3, device=device, dtype=torch.float64, requires_grad=True) for _ in "kv")
    assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_lse_gradient_keeps_its_digits_in_half_precision(device, dtype):
    """A gradient of the LSE that dtype would round down is not: rounded, it would make all of dq smaller by a part of
    `lost`, where the roundings of scores and results cancel in the mean."""
    q = torch.randn(1, 12, 2, 16, device=device).to(dtype).requires_grad_()
    k, v = ((torch.rand(1, 12, 2, 16, device=device) + 0.5).to(dtype).requires_grad_() for _ in "kv")
    lse = flash_attn_func(q, k, v, return_attn_probs=True)[1]
    lost = 0.96 * torch.finfo(dtype).eps / 2
    dlse = torch.full_like(lse, 1.0 + lost)
    assert torch.equal(dlse.to(dtype), torch.ones_like(dlse, dtype=dtype))
    (dq,) = torch.autograd.grad(lse, q, dlse)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / math.sqrt(16)
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1) * (1.0 + lost), k.double()) / 4
    assert (dq.double() / expected - 1.0).mean().abs() < 0.3 * lost


def test_torch_func_grad(device):
    q, k, v = (tensor(device, 1, 4, 2, 8) for _ in "qkv")
    actual = torch.func.grad(lambda q: flash_attn_func(q, k, v).square().sum())(q)
    leaf = q.clone().requires_grad_()
    flash_attn_func(leaf, k, v).square().sum().backward()
    assert torch.equal(actual, leaf.grad)


@pytest.mark.parametrize("argument", ("seqused_k", "leftpad_k", "block_table"))
def test_forward_only_arguments_say_so_in_the_backward(device, argument):
    q = tensor(device, 6, 2, 8, grad=True)
    k, v = (tensor(device, *((2, 4) if argument == "block_table" else (8,)), 2, 8) for _ in "kv")
    shape = {"block_table": [[1], [0]]}.get(argument, [2, 3])
    value = torch.tensor(shape, dtype=torch.int32, device=device)
    cu_q, cu_k = cumulative(device, 2, 4), cumulative(device, 4, 4)
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 4, **{argument: value})
    with pytest.raises(NotImplementedError, match=f"^{argument}: expected None in training, got a tensor"):
        out.sum().backward()


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpoint_repeats_the_dropout(device, use_reentrant):
    q, k, v = (tensor(device, 2, 20, 2, 16, grad=True) for _ in "qkv")

    def block(q, k, v):
        return flash_attn_func(q, k, v, dropout_p=0.4)

    gradients = []
    for call in (block, lambda *x: checkpoint(block, *x, use_reentrant=use_reentrant)):
        torch.manual_seed(3)
        for x in (q, k, v):
            x.grad = None
        call(q, k, v).square().sum().backward()
        gradients.append([x.grad for x in (q, k, v)])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_only_inputs_that_ask_for_a_gradient_get_one(device):
    q, k, v = (tensor(device, 1, 4, 2, 8, grad=grad) for grad in (False, True, False))
    out, lse, dmask = flash_attn_func(q, k, v, dropout_p=0.5, return_attn_probs=True)
    assert out.requires_grad and lse.requires_grad and not dmask.requires_grad
    out.sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None


def test_no_graph_without_gradients(device):
    q, k, v = (tensor(device, 1, 4, 2, 8) for _ in "qkv")
    assert not flash_attn_func(q, k, v).requires_grad
    with torch.no_grad():
        assert not flash_attn_func(q.requires_grad_(), k, v).requires_grad
    with torch.inference_mode():
        assert flash_attn_func(q, k, v).is_inference()


def test_output_is_contiguous_whatever_the_inputs(device):
    """Transposed and strided inputs, and a strided head dim, give the result of their contiguous copies."""
    base = [tensor(device, 2, 4, 9, 16) for _ in "qkv"]
    expected = flash_attn_func(*(x.transpose(1, 2).contiguous() for x in base))
    transposed = flash_attn_func(*(x.transpose(1, 2) for x in base))
    strided = flash_attn_func(*(x.transpose(1, 2).repeat_interleave(2, dim=-1)[..., ::2] for x in base))
    for out in (transposed, strided):
        assert torch.equal(out, expected) and out.is_contiguous()


def test_head_dim_that_is_no_multiple_of_8(device):
    q, k, v = (tensor(device, 2, 9, 2, 20) for _ in "qkv")
    padded = [torch.nn.functional.pad(x, (0, 4)) for x in (q, k, v)]
    out = flash_attn_func(q, k, v)
    assert out.shape == q.shape
    expected = flash_attn_func(*padded, softmax_scale=20**-0.5)[..., :20]
    assert (out - expected).abs().max() <= torch.finfo(out.dtype).eps * 4


def test_forms_of_cu_seqlens_and_max_seqlen(device):
    q, k, v = (tensor(device, 14, 2, 16) for _ in "qkv")
    cu = cumulative(device, 5, 0, 9)
    expected = flash_attn_varlen_func(q, k, v, cu, cu, 9, 9)
    for cu_form in (cu, cu.long(), torch.stack([cu, cu], dim=1)[:, 0]):
        for longest in (9, 10**6, torch.tensor(9), torch.tensor(9, device=device, dtype=torch.int32), 1):
            assert torch.equal(flash_attn_varlen_func(q, k, v, cu_form, cu_form, longest, longest), expected)


def test_tensor_max_seqlen_sizes_s_dmask(device):
    q, k, v = (tensor(device, 300, 2, 16) for _ in "qkv")
    cu, longest = cumulative(device, 100, 200), torch.tensor(200, device=device)
    dmask = flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, dropout_p=0.5, return_attn_probs=True)[2]
    assert dmask.shape == (2, 2, 256, 256)


@pytest.mark.devices("cuda")
def test_forward_does_not_wait_for_the_gpu(device):
    q, k, v = (tensor(device, 14, 2, 16) for _ in "qkv")
    cu, longest = cumulative(device, 5, 0, 9), torch.tensor(9, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, dropout_p=0.1)
        flash_attn_func(q[None], k[None], v[None], dropout_p=0.1, return_attn_probs=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_wrong_kinds_of_arguments(device):
    q, k, v = (tensor(device, 4, 2, 8) for _ in "qkv")
    cu = cumulative(device, 4)
    cases = [
        (lambda: flash_attn_func(None, k, v), "q: expected a Tensor, got NoneType"),
        (lambda: flash_attn_func(q[None], k[None], None), "v: expected a Tensor, got NoneType"),
        (lambda: flash_attn_func(q[None], [1], v[None]), "k: expected a Tensor, got list"),
        (lambda: flash_attn_qkvpacked_func(3), "qkv: expected a Tensor, got int"),
        (lambda: flash_attn_varlen_func(q, k, v, None, cu, 4, 4), "cu_seqlens_q: expected a Tensor, got NoneType"),
        (
            lambda: flash_attn_varlen_func(q, k, v, cu, cu, None, 4),
            "max_seqlen_q: expected an int or an integer tensor, got None",
        ),
        (
            lambda: flash_attn_func(q[None], k[None], v[None], window_size=4),
            "window_size: expected a pair (left, right), got 4",
        ),
    ]
    for call, message in cases:
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value) == message


def test_wrong_packed_shapes(device):
    x = tensor(device, 2, 4, 2, 2, 8)
    cu = cumulative(device, 4)
    dense, varlen = "(batch, seqlen, {0}, heads, head_dim)", "(total, {0}, heads, head_dim)"
    cases = [
        (lambda: flash_attn_qkvpacked_func(x), "qkv", dense.format(3), [2, 4, 2, 2, 8]),
        (lambda: flash_attn_kvpacked_func(x[:, :, 0], x[0]), "kv", dense.format(2), [4, 2, 2, 8]),
        (lambda: flash_attn_varlen_qkvpacked_func(x, cu, 4), "qkv", varlen.format(3), [2, 4, 2, 2, 8]),
        (lambda: flash_attn_varlen_kvpacked_func(x[0, :, 0], x[0, :, :1], cu, cu, 4, 4), "kv", varlen.format(2), None),
    ]
    for call, name, expected, shape in cases:
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == f"{name}: expected shape {expected}, got {shape or [4, 1, 2, 8]}"
