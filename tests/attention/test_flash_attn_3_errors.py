"""FlashAttention-3's functions and operators reject what flash_attn's do, by name, before anything is written."""

from __future__ import annotations

import math

import pytest
import torch
from flash_attn_3_harness import OPS, fa3

import flash_attn

ERRORS = (RuntimeError, TypeError, NotImplementedError)
B, SQ, SK, H, HK, D = 2, 6, 8, 4, 2, 32


def ints(device, *values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def randn(device, *shape, grad=False, dtype=torch.bfloat16):
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=grad)


def dense(device, grad=False, dim=D):
    return {"q": randn(device, B, SQ, H, dim, grad=grad), "k": randn(device, B, SK, HK, dim),
            "v": randn(device, B, SK, HK, dim)}  # fmt: skip


def varlen(device, grad=False):
    q, k, v = (x.flatten(0, 1) for x in dense(device).values())
    bounds = {"cu_seqlens_q": ints(device, 0, SQ, 2 * SQ), "cu_seqlens_k": ints(device, 0, SK, 2 * SK)}
    used = {"seqused_q": ints(device, 5, 3), "seqused_k": ints(device, 8, 4)}
    return {"q": q.requires_grad_(grad), "k": k, "v": v, **bounds, "max_seqlen_q": SQ, "max_seqlen_k": SK, **used}


def cache(device, packed=False, paged=False, value_dim=D, new=0):
    """Arguments of flash_attn_with_kvcache."""
    given = {"q": randn(device, *((B * SQ,) if packed else (B, SQ)), H, D), "cache_seqlens": ints(device, 5, 7)}
    given.update(k_cache=randn(device, B, SK, HK, D), v_cache=randn(device, B, SK, HK, value_dim))
    if packed:
        given["cu_seqlens_q"] = ints(device, 0, SQ, 2 * SQ)
    if paged:
        given["page_table"] = ints(device, *range(B)).unsqueeze(1)
    else:
        given["cache_batch_idx"] = ints(device, 1, 0)
    if new:
        given.update(k=randn(device, B, new, HK, D), v=randn(device, B, new, HK, D))
        given.update(rotary_cos=randn(device, 20, 8), rotary_sin=randn(device, 20, 8))
        given["cache_seqlens"] = ints(device, 5, 3)
    return given


def as_operator(given):
    """The same call of torch.ops.flash_attn_3.fwd."""
    names = {
        "k": "k_new", "v": "v_new", "k_cache": "k", "v_cache": "v", "cache_seqlens": "seqused_k",
        "cache_batch_idx": "kv_batch_idx", "cache_leftpad": "leftpad_k", "causal": "is_causal",
    }  # fmt: skip
    return {names.get(name, name): x for name, x in given.items()}


def with_out(given):
    v = given.get("v_cache", given.get("v"))
    return {**given, "out": torch.full((*given["q"].shape[:-1], v.shape[-1]), 7.0, device=v.device, dtype=v.dtype)}


CALLS = {
    "dense": (fa3.flash_attn_func, dense),
    "dense, out": (fa3.flash_attn_func, lambda device: with_out(dense(device))),
    "dense, padded, out": (fa3.flash_attn_func, lambda device: with_out(dense(device, dim=36))),
    "dense, gradients": (fa3.flash_attn_func, lambda device: dense(device, grad=True)),
    "dense, operator": (OPS.fwd, dense),
    "varlen": (fa3.flash_attn_varlen_func, varlen),
    "varlen, out": (fa3.flash_attn_varlen_func, lambda device: with_out(varlen(device))),
    "varlen, gradients": (fa3.flash_attn_varlen_func, lambda device: varlen(device, grad=True)),
    "varlen, operator": (OPS.fwd, varlen),
    "varlen, operator, out": (OPS.fwd, lambda device: with_out(varlen(device))),
    "varlen, functional operator": (fa3._flash_attn_forward, lambda device: varlen(device, grad=True)),
    "cache": (fa3.flash_attn_with_kvcache, cache),
    "cache, new keys, out": (fa3.flash_attn_with_kvcache, lambda device: with_out(cache(device, new=2))),
    "cache, new keys, operator": (OPS.fwd, lambda device: as_operator(cache(device, new=2))),
    "cache, packed, out": (fa3.flash_attn_with_kvcache, lambda device: with_out(cache(device, packed=True))),
    "cache, packed, pages": (fa3.flash_attn_with_kvcache, lambda device: cache(device, packed=True, paged=True)),
    "cache, packed, operator": (OPS.fwd, lambda device: as_operator(cache(device, packed=True, paged=True))),
    "cache, value dim, out": (fa3.flash_attn_with_kvcache, lambda device: with_out(cache(device, value_dim=16))),
    "cache, value dim, operator": (OPS.fwd, lambda device: as_operator(cache(device, value_dim=16))),
}


def wrong_tensors(name, x, device):
    """What no call may take in the place of a tensor: (kind, value)."""
    index = not x.is_floating_point()
    meta = torch.empty_like(x, device="meta")
    values = [
        ("dtype", x.float() if index else x.double()), ("boolean", x.bool()), ("rank", x.unsqueeze(0)),
        ("size", torch.cat((x, x))), ("meta", meta.requires_grad_(x.requires_grad)), ("sparse", x.detach().to_sparse()),
        ("list", x.tolist()),
    ]  # fmt: skip
    if device == "cuda":
        values.append(("device", x.cpu()))
    if name in ("k", "v", "k_cache", "v_cache", "out"):
        values.append(("heads", torch.cat((x, x[..., :1, :]), -2)))
    longer = name.startswith("rotary") or (name == "q" and x.dim() == 3)  # such tables, and rows of no sequence
    return [value for value in values if not (longer and value[0] == "size")]


@pytest.mark.parametrize("call", CALLS)
def test_each_tensor_is_checked(device, call):
    """Wrong dtype, rank, size, device, layout of each tensor: an error that names one of the call, and no result."""
    function, make = CALLS[call]
    accepted = []
    for name, x in make(device).items():
        if not isinstance(x, torch.Tensor):
            continue
        for kind, value in wrong_tensors(name, x.detach(), device):
            given = make(device)
            out, written = given.get("out"), {n: t.clone() for n, t in given.items() if n in ("k_cache", "v_cache")}
            try:
                function(**{**given, name: value})
            except ERRORS as error:
                text = str(error)
                named = text.partition(":")[0]
                operator = isinstance(function, torch._ops.OpOverloadPacket)
                if not (
                    named in given
                    or (kind == "list" and "argument" in text and (operator or "_flash_attn" in text))
                    or (kind == "sparse" and "SparseTensorImpl" in text)  # torch 2.4 itself refuses it
                ):
                    accepted.append((name, kind, text))
            else:
                accepted.append((name, kind, "accepted"))
            assert out is None or name == "out" or (out == 7).all(), (name, kind)
            assert all(torch.equal(given[n], t) for n, t in written.items()), (name, kind)
    assert not accepted, "\n".join(map(str, accepted))


NUMBERS = {
    "softmax_scale": ("x", float("nan")), "softcap": (None, "x", -1.0), "causal": (2, "x"), "sm_margin": (-1, 1.5),
    "window_size": (3, (1,), (None, 0), (0.5, 1)), "num_splits": (None, 1.5, "x"), "pack_gqa": ("x", 2),
    "attention_chunk": (1.5, None), "deterministic": ("x",), "max_seqlen_q": (-1, 1.5, "x"), "k_descale": ("x",),
    "rotary_interleaved": ("x",), "scheduler_metadata": (3,),
}  # fmt: skip


@pytest.mark.parametrize("call", [call for call, (function, _) in CALLS.items() if function.__module__ == fa3.__name__])
def test_each_number_is_checked(device, call):
    function, make = CALLS[call]
    for name, values in NUMBERS.items():
        if name not in function.__code__.co_varnames[: function.__code__.co_argcount]:
            continue
        for value in values:
            given = {**make(device), name: value}
            with pytest.raises(ERRORS, match=f"^{name}: expected"):
                function(**given)
            assert "out" not in given or (given["out"] == 7).all()


def in_one_buffer(x, shape):
    """(x, an out of this shape): the same memory."""
    buffer = torch.zeros(max(math.prod(shape) * 2, x.numel() * x.element_size()), device=x.device, dtype=torch.uint8)
    alias = buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape).copy_(x)
    return buffer, alias, buffer[: math.prod(shape) * 2].view(torch.bfloat16).view(shape)


@pytest.mark.parametrize("call", [call for call in CALLS if "out" in call])
def test_out_shares_no_memory(device, call):
    """With each argument, also with those that are copied before the kernels see them."""
    function, make = CALLS[call]
    for name in [name for name, x in make(device).items() if isinstance(x, torch.Tensor) and name != "out"]:
        given = make(device)
        buffer, given[name], given["out"] = in_one_buffer(given[name], given["out"].shape)
        before = buffer.clone()
        with pytest.raises(RuntimeError, match=f"^(out|{name}): expected memory that does not overlap"):
            function(**given)
        assert torch.equal(buffer, before)
        if name in ("k", "v") and "new" not in call:  # a last stride of 2
            wide = torch.cat((given[name], given[name]), -1)
            given.update({name: wide[..., ::2], "out": wide.view(-1)[: given["out"].numel()].view(given["out"].shape)})
            with pytest.raises(RuntimeError, match=f"^out: expected memory that does not overlap {name}"):
                function(**given)


def gradients_of(device, form):
    """Arguments of `torch.ops.flash_attn_3.bwd`: batches, with rows in use, and packed queries over batches of keys."""
    given = dense(device)
    q, k, v = given.values()
    out, lse, *_ = OPS.fwd(q, k, v)
    given.update(dout=torch.randn_like(out), out=out, softmax_lse=lse)
    if form == "rows in use":
        given.update(seqused_q=ints(device, 5, 3), seqused_k=ints(device, 8, 4))
    if form == "queries packed":
        given.update({name: given[name].flatten(0, 1) for name in ("q", "dout", "out")})
        given.update(softmax_lse=lse.transpose(0, 1).flatten(1), cu_seqlens_q=ints(device, 0, SQ, 2 * SQ))
    given.update({f"d{name}": torch.full_like(given[name], 7.0) for name in "qkv"})
    return given


@pytest.mark.parametrize("form", ("batches", "rows in use", "queries packed"))
def test_the_backward_is_checked(device, form):
    accepted = []
    OPS.bwd(**gradients_of(device, form))
    for name, x in gradients_of(device, form).items():
        for kind, value in wrong_tensors(name, x, device):
            if (name, kind) == ("softmax_lse", "dtype"):
                value = x.half()
            given = gradients_of(device, form)
            try:
                OPS.bwd(**{**given, name: value})
            except ERRORS as error:
                named = str(error).partition(":")[0]
                if named not in given and kind != "list":
                    accepted.append((name, kind, str(error)))
            else:
                accepted.append((name, kind, "accepted"))
            assert all((given[d] == 7).all() for d in ("dq", "dk", "dv")), (name, kind)
    assert not accepted, "\n".join(map(str, accepted))
    for name, other in (("dq", "q"), ("dk", "v"), ("dv", "dk"), ("dq", "dout")):
        given = gradients_of(device, form)
        if given[name].shape == given[other].shape:
            given[name] = given[other]
            before = given[other].clone()
            with pytest.raises(RuntimeError, match="expected memory that does not overlap"):
                OPS.bwd(**given)
            assert torch.equal(given[other], before)


# ---- inactive requests ----


@pytest.mark.parametrize("paged", (False, True))
@pytest.mark.parametrize("value_dim", (D, 16))
@pytest.mark.parametrize("sinks", (False, True))
def test_a_request_that_takes_no_part(device, paged, value_dim, sinks):
    """-1, and on the GPU a length that does not fit: out 0 and LSE -inf, as in flash_attn.flash_attn_with_kvcache."""
    absent = (-1,) if device == "cpu" else (-1, -5, SK + 1, 2**31 - 1)
    sinks = torch.linspace(-1, 2, H, device=device) if sinks else None
    for length in absent:
        given = {**cache(device, packed=True, paged=paged, value_dim=value_dim), "sinks": sinks, "causal": True}
        given["cache_seqlens"] = ints(device, 7, length)
        out, lse, *_ = fa3.flash_attn_with_kvcache(**given, return_softmax_lse=True)
        assert (out[SQ:] == 0).all() and lse[:, SQ:].isneginf().all() and lse[:, :SQ].isfinite().all()
        alone = {**given, "q": given.pop("q").view(B, SQ, H, D)}
        alone.pop("cu_seqlens_q")
        batch, batch_lse, *_ = fa3.flash_attn_with_kvcache(**alone, return_softmax_lse=True)
        assert (batch[1] == 0).all() and batch_lse[1].isneginf().all()
        torch.testing.assert_close(batch[0], out[:SQ], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(batch_lse[0], lse[:, :SQ], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("length", (-2, SK + 1))
@pytest.mark.parametrize("packed", (False, True))
def test_a_length_that_the_host_sees(device, length, packed):
    """An int, and a tensor of the CPU: an error, in all forms of a cache."""
    for as_int in (True, False):
        if device == "cuda" and not as_int:
            continue
        for value_dim in (D, 16):
            given = cache(device, packed=packed, value_dim=value_dim)
            given["cache_seqlens"] = length if as_int else ints(device, 3, length)
            with pytest.raises(RuntimeError, match="^cache_seqlens: expected"):
                fa3.flash_attn_with_kvcache(**given)


# ---- arguments without a tensor ----

METADATA = {
    "batch_size": (-1, 1.5, None, 3), "max_seqlen_q": (-1,), "max_seqlen_k": (-1, "x"), "num_heads_q": (-2, 0, 3, None),
    "num_heads_kv": (0, -1), "headdim": (0, 1.5), "headdim_v": (-8,), "qkv_dtype": (None, "bf16"), "page_size": (0, -1),
    "max_seqlen_k_new": (-1, None), "causal": ("x", 2), "window_size": (3,), "attention_chunk": (None,),
    "has_softcap": ("x",), "num_splits": (None, 1.5), "pack_gqa": ("x",), "sm_margin": (-1, None),
}  # fmt: skip


def test_scheduler_metadata_is_checked(device):
    lengths = ints(device, 90, 90)
    sizes = {
        "batch_size": 2,
        "max_seqlen_q": 70,
        "max_seqlen_k": 90,
        "num_heads_q": 4,
        "num_heads_kv": 2,
        "headdim": 64,
    }
    given = {**sizes, "cache_seqlens": lengths, "cu_seqlens_q": ints(device, 0, 5, 9), "cache_leftpad": lengths}
    assert fa3.get_scheduler_metadata(**given, page_size=16, num_splits=-1).numel() == 0
    wrong = {**METADATA, **{name: (given[name].float(), given[name][:1], 3) for name in list(given)[6:]}}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ERRORS, match=f"^({name}|cache_seqlens): expected"):
                fa3.get_scheduler_metadata(**{**given, name: value})
    with pytest.raises(RuntimeError, match="^num_heads: expected a value >= 1, got -2"):
        OPS.get_scheduler_metadata(2, 70, 90, -2, 2, 64, 64, torch.bfloat16, lengths)


@pytest.mark.parametrize("num_heads_q", (-2, None, 1.5, 3, 99))
def test_heads_of_packed_qkv(device, num_heads_q):
    qkv = randn(device, B, SQ, H + 2 * HK, D)
    with pytest.raises(ERRORS, match="^num_heads_q: expected"):
        fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=num_heads_q)


def test_combine_writes_nothing_that_it_reads(device):
    partial, lse = randn(device, 3, B, SQ, H, 2 * D)[..., ::2], torch.randn(3, B, SQ, H, device=device)
    out = partial.new_empty(0).set_(partial.untyped_storage(), 0, (B, SQ, H, D), (SQ * H * D, H * D, D, 1))
    for function in (fa3.flash_attn_combine, flash_attn.flash_attn_combine, OPS.fwd_combine):
        with pytest.raises(RuntimeError, match="^out: expected memory that does not overlap out_partial"):
            function(partial, lse, out)
