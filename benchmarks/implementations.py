"""The implementations measured side by side, on the same tensors, laid out (batch, seqlen, heads, head_dim)."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
from dataclasses import dataclass, replace
from typing import Callable

import over_cache
import package_peers
import torch
import torch_peers
from check import MAX_RELATIVE_ERROR, relative_error
from torch.nn.attention import SDPBackend, sdpa_kernel

DEFAULT_PEERS = ("sdpa_flash", "sdpa_cudnn")
MAX_FP8_ERROR = 0.2  # e4m3 has three fraction bits

# What a row may need of an implementation (the names appear in the report).
CPU, BACKWARD, GQA, PACKED, WINDOW = "CPU tensors", "backward", "GQA", "packed sequences", "window"
SOFTCAP, ALIBI, DROPOUT, RECTANGULAR = "softcap", "ALiBi", "dropout", "causal with sq != sk"
SINKS, MAX_LOGIT, VALUE_DIM = "sinks", "largest logits", "head dim of V"
COMMON = frozenset({CPU, BACKWARD, GQA, PACKED, WINDOW, SOFTCAP, ALIBI, DROPOUT, RECTANGULAR, VALUE_DIM})
EVERYTHING = COMMON | {SINKS, MAX_LOGIT}


@dataclass
class Inputs:
    """q, k, v, dout: (b, s, h, d), or (total, h, d) with cu_seqlens int32 (b + 1); slopes, sinks: fp32 (h) or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    cu_seqlens: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    @property
    def leaves(self):
        """What a backward differentiates by."""
        return self.q, self.k, self.v

    def sample_options(self, queries):
        """What else the reference is told of the last `queries` rows and the last head."""
        return {}


def make_inputs(row, device, requires_grad=False, seed=0):
    """Standard-normal inputs of a row, the same for every implementation and every run."""
    if row.over_cache:
        return over_cache.make_inputs(row, device, seed)
    case = row.case
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    leading_q = (sum(row.seqlens),) if row.seqlens else (case.batch, case.seqlen_q)
    leading_k = leading_q if row.seqlens else (case.batch, case.seqlen_k)

    def randn(leading, heads, head_dim=case.head_dim):
        return torch.randn(*leading, heads, head_dim, device=device, dtype=dtype, generator=generator)

    q, k = randn(leading_q, case.nheads), randn(leading_k, case.nheads_k)
    v, dout = randn(leading_k, case.nheads_k, case.value_dim), randn(leading_q, case.nheads, case.value_dim)
    cu_seqlens = None
    if row.seqlens:
        cu_seqlens = torch.tensor((0,) + row.seqlens, device=device).cumsum(0).to(torch.int32)
    slopes = None
    if case.alibi != "none":
        slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / case.nheads) for i in range(case.nheads)], device=device)
    sinks = torch.randn(case.nheads, device=device, generator=generator) + 4 if case.sinks else None
    for tensor in (q, k, v):
        tensor.requires_grad_(requires_grad)
    return Inputs(q, k, v, dout, cu_seqlens, slopes, sinks)


def ours(row, inputs, deterministic=False, **modes):
    import flash_attn

    case = row.case
    options = {"dropout_p": case.dropout, "causal": case.causal, "window_size": case.window, "softcap": case.softcap}
    options.update(alibi_slopes=inputs.alibi_slopes, deterministic=deterministic, sinks=inputs.sinks, **modes)
    q, k, v = inputs.q, inputs.k, inputs.v
    if row.seqlens:
        cu, longest = inputs.cu_seqlens, max(row.seqlens)
        return lambda: flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options)
    if case.max_logit:
        return lambda: flash_attn.flash_attn_func(q, k, v, return_max_logit=True, **options)[0]
    return lambda: flash_attn.flash_attn_func(q, k, v, **options)


def fp8(row, inputs, exp):
    """The forward of e4m3 q, k and v, quantised by head outside of the timed call."""
    import flash_attn
    from flash_attn.fp8 import quantize

    (q, k, v), descales = zip(*(quantize(x, "head") for x in (inputs.q, inputs.k, inputs.v)))
    options = dict(zip(("q_descale", "k_descale", "v_descale"), descales))
    return lambda: flash_attn.flash_attn_func(q, k, v, causal=row.case.causal, exp=exp, **options)


def tangents(row, inputs):
    """The output, which flash_attn_jvp computes together with its tangent."""
    import flash_attn

    directions = [x.flip(1) for x in (inputs.q, inputs.k, inputs.v)]
    return lambda: flash_attn.flash_attn_jvp(inputs.q, inputs.k, inputs.v, *directions, causal=row.case.causal)[0]


def plain_problem(row, inputs):
    """(row, inputs) of the row's problem without features, on views of its tensors; the views are leaves."""
    plain = row.plain

    def view(tensor):
        return tensor.detach().view(plain.case.batch, -1, *tensor.shape[-2:]).requires_grad_(tensor.requires_grad)

    return plain, Inputs(*map(view, (inputs.q, inputs.k, inputs.v, inputs.dout)), None, None, None)


def plain_limits(row, device_type, mode):
    if row.seqlens and not row.equal_sequences:
        return "no plain problem of the same size"
    return "plain itself" if row.plain == row else None


def needs(row, mode):
    """What the row asks of an implementation wherever it runs, as names of EVERYTHING."""
    case = row.case
    asked = {
        BACKWARD: mode != "fwd",
        GQA: case.nheads != case.nheads_k,
        PACKED: bool(row.seqlens),
        WINDOW: case.window != (-1, -1),
        SOFTCAP: case.softcap > 0,
        ALIBI: case.alibi != "none",
        DROPOUT: case.dropout > 0,
        RECTANGULAR: case.causal and case.seqlen_q != case.seqlen_k,
        SINKS: case.sinks,
        MAX_LOGIT: case.max_logit,
        VALUE_DIM: case.value_dim != case.head_dim,
    }
    return [name for name, wanted in asked.items() if wanted]


@dataclass(frozen=True)
class Implementation:
    """`build(row, inputs)` returns the call, made and run within `context()`.

    offers: what it can do; further_limits(row, device_type, mode): any other reason why a row cannot run, or None;
    package: the module that must be installed; distribution: what must be installed instead, if its modules lie in
    another package's name; compiles: whether every shape costs it seconds of compilation; groups: the groups of rows
    that it joins without being named; problem(row, inputs): the (row, inputs) that it computes, is checked by and whose
    FLOPs count; error(row, inputs, mode, result): of a result, at most max_error.
    """

    name: str
    title: str
    build: Callable
    offers: frozenset = EVERYTHING
    further_limits: Callable = lambda row, device_type, mode: None
    context: Callable = contextlib.nullcontext
    package: str = "torch"
    distribution: str = ""
    compiles: bool = False
    groups: tuple[str, ...] = ()
    problem: Callable = lambda row, inputs: (row, inputs)
    max_error: float = MAX_RELATIVE_ERROR
    error: Callable = relative_error

    def limits(self, row, device_type="cuda", mode="fwd"):
        """Why the row is not measured, or None."""
        if row.over_cache:
            return over_cache.limits(self.name, row, device_type, mode)
        if device_type == "cpu" and CPU not in self.offers:
            return "needs a GPU"
        missing = [name for name in needs(row, mode) if name not in self.offers]
        return f"no {', no '.join(missing)}" if missing else self.further_limits(row, device_type, mode)

    def call(self, row, inputs):
        """The function to time, of the forward."""
        return (over_cache.BUILDERS[self.name] if row.over_cache else self.build)(row, inputs)

    @property
    def needed(self):
        """What must be installed, in words."""
        return f"the distribution {self.distribution}" if self.distribution else f"the module {self.package}"

    @property
    def installed(self):
        if self.distribution:
            return any(importlib.metadata.distributions(name=self.distribution))
        return importlib.util.find_spec(self.package) is not None

    def in_its_groups(self):
        """The same, for rows of its groups only."""

        def limits(row, device_type, mode):
            if row.group not in self.groups:
                return f"measured in {', '.join(self.groups)} only, unless named as a peer"
            return self.further_limits(row, device_type, mode)

        return replace(self, further_limits=limits)


@contextlib.contextmanager
def deterministic_flash():
    """SDPA's flash backend under torch's deterministic mode, without the mode's filling of fresh tensors."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = filled


def deterministic_limits(row, device_type, mode):
    return "its forward is the same" if mode == "fwd" else None


def deterministic_flash_limits(row, device_type, mode):
    return deterministic_limits(row, device_type, mode) or torch_peers.sdpa_flash_limits(row, device_type, mode)


def sdpa_peer(name, what, which, build=torch_peers.sdpa, more=frozenset(), limits=None):
    offers = frozenset({BACKWARD, GQA, DROPOUT}) | more
    extra = {} if limits is None else {"further_limits": limits}
    return Implementation(name, f"torch SDPA, {what}", build, offers, context=lambda: sdpa_kernel(which), **extra)


IMPLEMENTATIONS = {
    impl.name: impl
    for impl in (
        Implementation("ours", "flash_attn (this package)", ours, package="flash_attn"),
        Implementation(
            "ours_deterministic", "flash_attn (this package), deterministic=True",
            functools.partial(ours, deterministic=True), further_limits=deterministic_limits, package="flash_attn",
            groups=("deterministic",),
        ),
        Implementation(
            "ours_plain", "flash_attn (this package), the same problem without features", ours,
            further_limits=plain_limits, package="flash_attn", groups=("window", "varlen_equal", "features"),
            problem=plain_problem,
        ),
        *(
            Implementation(
                name, f"flash_attn (this package), e4m3 q, k and v, exp={exp!r}", functools.partial(fp8, exp=exp),
                package="flash_attn", groups=("fp8",), max_error=MAX_FP8_ERROR,
            )
            for name, exp in (("ours_fp8", "exact"), ("ours_fp8_fast", "fast"))
        ),
        Implementation(
            "ours_tangents", "flash_attn (this package), with the tangents of q, k and v", tangents,
            package="flash_attn", groups=("tangents",),
        ),
        sdpa_peer(
            "sdpa_flash", "flash backend (FlashAttention-2)", SDPBackend.FLASH_ATTENTION, torch_peers.sdpa_flash,
            frozenset({CPU, PACKED, WINDOW, ALIBI}), torch_peers.sdpa_flash_limits,
        ),
        Implementation(
            "sdpa_flash_deterministic", "torch SDPA, flash backend in deterministic mode", torch_peers.sdpa_flash,
            frozenset({BACKWARD, GQA, DROPOUT, PACKED, WINDOW}), deterministic_flash_limits, deterministic_flash,
            groups=("deterministic",),
        ),
        sdpa_peer("sdpa_cudnn", "cuDNN backend", SDPBackend.CUDNN_ATTENTION, more={VALUE_DIM}),
        sdpa_peer("sdpa_efficient", "memory-efficient backend", SDPBackend.EFFICIENT_ATTENTION, more={VALUE_DIM}),
        sdpa_peer("sdpa_math", "math backend", SDPBackend.MATH, more={CPU, VALUE_DIM}),
        Implementation("naive", "softmax(q k^T) v in torch operations", torch_peers.naive, COMMON - {PACKED, DROPOUT}),
        Implementation(
            "flex", "torch FlexAttention, compiled", torch_peers.flex, COMMON - {CPU, DROPOUT},
            torch_peers.flex_limits, compiles=True,
        ),
        Implementation(
            "triton", "our own Triton comparator", package_peers.triton_comparator,
            frozenset({BACKWARD, GQA, RECTANGULAR}), package="triton",
        ),
        Implementation(
            "flash_attn_3", "FlashAttention-3", package_peers.flash_attn_3, COMMON - {CPU, ALIBI, DROPOUT},
            package="flash_attn_interface",
        ),
        Implementation(
            "flash_attn_4", "FlashAttention-4", package_peers.flash_attn_4, COMMON - {CPU, ALIBI, DROPOUT},
            distribution="flash-attn-4",
        ),
    )
}  # fmt: skip


def choose(names, groups=()):
    """The implementations for a list of peers, ours first, then those that belong to one of `groups`. "all" means every
    one that is installed and belongs to no group. ValueError for a peer that is not known or not installed."""
    if "all" in names:
        everywhere = [impl.name for impl in IMPLEMENTATIONS.values() if impl.installed and not impl.groups]
        names = [*everywhere, *(name for name in names if name != "all")]
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"{name}: expected one of all, {', '.join(IMPLEMENTATIONS)}")
        if not IMPLEMENTATIONS[name].installed:
            raise ValueError(f"{name}: {IMPLEMENTATIONS[name].needed} is not installed")
    joining = [impl for impl in IMPLEMENTATIONS.values() if set(impl.groups) & set(groups) and impl.name not in names]
    chosen = [IMPLEMENTATIONS[name] for name in dict.fromkeys(["ours", *names])]
    return chosen + [impl.in_its_groups() for impl in joining if impl.installed]


def timed_call(forward, inputs, mode):
    """The function that is timed: the forward, the backward of one stored forward, or both."""
    if mode == "fwd":
        return forward
    leaves = inputs.leaves
    if mode == "fwd+bwd":
        return lambda: torch.autograd.grad(forward(), leaves, inputs.dout)
    out = forward()
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
