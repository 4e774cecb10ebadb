"""Turns a Case into tensors, into a call of the public functions, and into the reference of the same tensors.

Every K/V row that no query may see (tails of pages, unused pages, rows before the left padding, rows beyond the used
length, rows after the last sequence) is NaN, and so are the query rows of no sequence.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from cases import OPTIONS, Case
from reference import (
    Attention,
    Varlen,
    assert_accurate,
    assert_gradient_accurate,
    attention,
    attention_varlen,
    dlse_of_rounding,
    farther,
)
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn import backends, flash_attn_func, flash_attn_varlen_func
from flash_attn.dropout import dropout_threshold
from flash_attn.ops import eager

NAN = float("nan")
FP64_SLACK = 1e-10


def exact_keep_scale(p: float) -> float:
    return 2.0**32 / (2**32 - dropout_threshold(p))


def slack_of(dtype: torch.dtype) -> float:
    return FP64_SLACK if dtype == torch.float64 else 1e-5


@dataclass
class Problem:
    """The tensors of one case. Dense cases have no layout."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    layout: Varlen | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    seqused_k: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None

    @property
    def options(self) -> dict:
        """Keyword arguments that the public functions and the reference share."""
        numbers = {name: getattr(self.case, name) for name in OPTIONS}
        return {**numbers, "alibi_slopes": self.alibi_slopes, "sinks": self.sinks}

    @property
    def inputs(self) -> dict:
        """The tensors that have a gradient."""
        tensors = {"q": self.q, "k": self.k, "v": self.v, "sinks": self.sinks}
        return {name: x for name, x in tensors.items() if x is not None}


def on_cpu(record):
    """A dataclass with its tensors on the CPU, lists of them too: references then run no GPU kernels of libraries."""

    def moved(value):
        if isinstance(value, list):
            return [moved(x) for x in value]
        return value.cpu() if torch.is_tensor(value) else value

    return replace(record, **{name: moved(value) for name, value in vars(record).items()})


def alibi_slopes(case: Case, device: str) -> torch.Tensor | None:
    shape = {"none": None, "heads": (case.nheads,), "batch": (case.batch, case.nheads)}[case.alibi]
    return None if shape is None else torch.rand(shape, device=device) * 0.3


def make_sinks(case: Case, device: str) -> torch.Tensor | None:
    """Logits of the size of a row's LSE: some sinks take most of the probability, some hardly any."""
    return torch.randn(case.nheads, device=device) * 3 + 4 if case.sinks else None


def make_problem(case: Case, device: str, lengths=None) -> Problem:
    """Random tensors of a case. lengths: (seqlen_q, seqlen_k) of each sequence, of concatenated cases."""
    dtype = getattr(torch, case.dtype)
    if case.kind == "dense":
        q = torch.randn(case.batch, case.seqlen_q, case.nheads, case.head_dim, device=device, dtype=dtype)
        k, v = (
            torch.randn(case.batch, case.seqlen_k, case.nheads_k, d, device=device, dtype=dtype) for d in key_dims(case)
        )
        return Problem(case, q, k, v, alibi_slopes(case, device), make_sinks(case, device))
    return _concatenated(case, device, dtype, default_lengths(case) if lengths is None else lengths)


def default_lengths(case: Case) -> list[tuple[int, int]]:
    """The case's own lengths, an empty query, an empty key sequence, shorter ones, and so on in turn."""
    sq, sk = case.seqlen_q, case.seqlen_k
    turn = [(sq, sk), (0, sk // 2), (sq // 2 + 1, 0), (sq // 3 + 1, sk // 2 + 1)]
    return [turn[i % 4] for i in range(case.batch)]


def key_dims(case: Case) -> tuple[int, int]:
    """Head dims of k and v."""
    return case.head_dim, case.value_dim


def _int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def _starts(lengths) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def _concatenated(case: Case, device, dtype, lengths) -> Problem:
    lens_q, lens_k = [q for q, _ in lengths], [k for _, k in lengths]
    leftpad = [(3 * i + 5) % 11 if case.kind == "leftpad" else 0 for i in range(len(lengths))]
    used = [n + pad for n, pad in zip(lens_k, leftpad)]
    stored = [n + (4 + 7 * i if case.kind == "seqused" else 0) for i, n in enumerate(used)]
    cu_q, cu_k = _starts(lens_q), _starts(stored)
    total_q = cu_q[-1] + (13 if case.kind == "padded" else 0)
    q = torch.full((total_q, case.nheads, case.head_dim), NAN, device=device, dtype=dtype)
    q[: cu_q[-1]] = torch.randn(cu_q[-1], case.nheads, case.head_dim, device=device, dtype=dtype)
    problem = Problem(
        case, q, q, q, alibi_slopes(case, device), make_sinks(case, device),
        Varlen(cu_q[:-1], lens_q, [s + pad for s, pad in zip(cu_k, leftpad)], lens_k, total_q),
        _int32(cu_q, device), _int32(cu_k, device), max(lens_q, default=0), max(stored, default=0),
    )  # fmt: skip
    problem.seqused_k = _int32(used, device) if case.kind == "seqused" else None
    problem.leftpad_k = _int32(leftpad, device) if case.kind == "leftpad" else None
    if case.page_size:
        _page_keys(problem, leftpad, used)
    else:
        shapes = [(cu_k[-1] + 9, case.nheads_k, d) for d in key_dims(case)]
        problem.k, problem.v = (torch.full(shape, NAN, device=device, dtype=dtype) for shape in shapes)
        for start, n in zip(problem.layout.starts_k, lens_k):
            for x, shape in zip((problem.k, problem.v), shapes):
                x[start : start + n] = torch.randn(n, *shape[1:], device=device, dtype=dtype)
    return problem


def _page_keys(problem: Problem, leftpad, used):
    """Scatter the keys of each sequence over random pages of a pool; unused table slots hold invalid page numbers."""
    case, page_size, device, dtype = problem.case, problem.case.page_size, problem.q.device, problem.q.dtype
    counts = [-(-n // page_size) for n in used]
    pool = torch.randperm(sum(counts) + 2)
    shapes = [(len(pool), page_size, case.nheads_k, d) for d in key_dims(case)]
    problem.k, problem.v = (torch.full(shape, NAN, device=device, dtype=dtype) for shape in shapes)
    table = torch.full((len(used), max(counts, default=0) + 2), -1, dtype=torch.int32)
    table[:, 1::2] = 10**6
    taken = 0
    for i, (count, pad, n) in enumerate(zip(counts, leftpad, used)):
        pages = pool[taken : taken + count]
        taken += count
        table[i, :count] = pages.int()
        for pages_of, shape in zip((problem.k, problem.v), shapes):
            rows = torch.full((count * page_size, *shape[2:]), NAN, device=device, dtype=dtype)
            rows[pad:n] = torch.randn(n - pad, *shape[2:], device=device, dtype=dtype)
            pages_of[pages.to(device)] = rows.view(count, *shape[1:])
    problem.block_table = table.to(device)
    problem.layout.starts_k = list(leftpad)


def run(problem: Problem, **overrides):
    """Call the public function of a problem -> (out, lse, S_dmask)."""
    case, options = problem.case, problem.options
    window = options.pop("window")
    arguments = dict(options, window_size=window, dropout_p=case.dropout, return_attn_probs=True)
    if problem.layout is None:
        return flash_attn_func(problem.q, problem.k, problem.v, **{**arguments, **overrides})
    arguments.update(
        cu_seqlens_q=problem.cu_seqlens_q, cu_seqlens_k=problem.cu_seqlens_k, max_seqlen_q=problem.max_seqlen_q,
        max_seqlen_k=problem.max_seqlen_k, block_table=problem.block_table, seqused_k=problem.seqused_k,
        leftpad_k=problem.leftpad_k,
    )  # fmt: skip
    return flash_attn_varlen_func(problem.q, problem.k, problem.v, **{**arguments, **overrides})


def expected(problem: Problem, dtype=torch.float64, keep=None, q=None, k=None, v=None, **overrides) -> Attention:
    """The reference of a problem in a dtype. keep: bool (b, h, >= sq, >= sk), of dropout."""
    q, k, v = (own if given is None else given for own, given in zip((problem.q, problem.k, problem.v), (q, k, v)))
    options = {**problem.options, "dtype": dtype, "rp_dropout": exact_keep_scale(problem.case.dropout), **overrides}
    if problem.layout is not None:
        return attention_varlen(q, k, v, problem.layout, block_table=problem.block_table, keep=keep, **options)
    if keep is not None:
        keep = keep[:, :, : q.shape[1], : k.shape[1]]
    return attention(q, k, v, keep=keep, **options)


def check_forward(problem: Problem, out, lse, keep=None, **overrides):
    """out and LSE against the float64 reference by the error criterion. Returns the reference."""
    dtype = problem.q.dtype
    reference = expected(problem, keep=keep, **overrides)
    plain = reference if dtype == torch.float64 else expected(problem, dtype, keep, **overrides)
    assert out.dtype == dtype and out.device == problem.q.device
    assert_accurate(out, reference.out, plain.out, "out", slack=slack_of(dtype))
    check_lse(problem, lse, reference.lse, plain.lse)
    return reference


def check_lse(problem: Problem, lse, reference, plain):
    """LSE against the float64 reference; it is float32 also for half precision inputs, and accurate as such.

    An absolute error of LSE is a relative error of every probability that the backward recomputes from it: 1e-4 is a
    fifth of half a unit in the last place of float16. 1e-6 relative are eight float32 units.
    """
    dtype = problem.q.dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_accurate(lse, reference, plain, "lse", slack=slack_of(dtype))
    if dtype in (torch.float16, torch.bfloat16):
        finite = torch.isfinite(reference)
        excess = (lse.double() - reference).abs() - 1e-6 * reference.abs()
        assert (excess[finite] <= 1e-4).all(), f"lse: error {excess[finite].max().item():.3e} as a float32 value"


def check_public_call(problem: Problem, **overrides):
    """Run a problem without dropout and check out and LSE."""
    out, lse, dmask = run(problem, **overrides)
    assert dmask.shape == (0,)
    check_forward(problem, out, lse)
    return out, lse


def differentiable(problem: Problem, dtype, keep=None, **overrides):
    """`problem.inputs` in a dtype, as leaves, and the reference of them."""
    inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in problem.inputs.items()}
    return list(inputs.values()), expected(problem, dtype, keep, **inputs, **overrides)


def differentiate(leaves, result: Attention, dout, dlse=None):
    """The gradients of the leaves, from those of out and, if given, of the LSE."""
    outputs, weights = [result.out], [dout.to(result.out.dtype)]
    if dlse is not None:
        outputs, weights = [*outputs, result.lse], [*weights, dlse.to(result.lse.dtype)]
    grads = torch.autograd.grad(outputs, leaves, weights, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads)]


def gradients(problem: Problem, dout, dtype, keep=None, dlse=None, **overrides):
    """The gradients of `problem.inputs` by the reference in a dtype."""
    return differentiate(*differentiable(problem, dtype, keep, **overrides), dout, dlse)


def reference_gradients(problem: Problem, dout, keep=None, dlse=None, saved_out=None, **overrides):
    """-> (exact gradients, those of plain attention, exact out and LSE).

    Those of plain attention are in q's dtype or, where these are further off, exact ones from an out in q's dtype.
    A backward reads such an out (saved_out, if it is not the exact one, rounded): rowsum(dout * out) is off as if dlse
    were. With few keys in a row, a sink or dropout dS is a small difference of it, which plain attention, that has its
    own softmax, gets right.
    """
    leaves, result = differentiable(problem, torch.float64, keep, **overrides)
    exact, out, lse = differentiate(leaves, result, dout, dlse), result.out.detach(), result.lse.detach()
    saved_out = out.to(problem.q.dtype) if saved_out is None else saved_out
    off = dlse_of_rounding(out, saved_out, dout)
    saved = differentiate(leaves, result, dout, off if dlse is None else off + dlse.double())
    del leaves, result  # the graph, before there is another
    of_dtype = (
        exact if out.dtype == problem.q.dtype else gradients(problem, dout, problem.q.dtype, keep, dlse, **overrides)
    )
    plain = [farther(*three) for three in zip(exact, of_dtype, saved)]
    return exact, plain, (out, lse)


def check_gradients(problem: Problem, dout, grads, keep=None, dlse=None, **overrides):
    exact, plain, results = reference_gradients(problem, dout, keep, dlse, **overrides)
    for (name, x), ours, reference, same in zip(problem.inputs.items(), grads, exact, plain, strict=True):
        assert ours.dtype == x.dtype
        if name != "sinks":
            assert_gradient_accurate(ours, reference, same, f"d{name}")
    if problem.sinks is not None:
        excess = (grads[3].double() - exact[3]).abs() - sink_gradient_error(problem, results, dout, dlse)
        assert (excess <= 1e-4).all(), f"dsinks: beyond six standard deviations by {excess.max().item():.3e}"


def sink_gradient_error(problem: Problem, results, dout, dlse=None) -> torch.Tensor:
    """Six standard deviations (h) of dsinks, from the rounding of P, of out, from which rowsum(dout * out) is taken,
    and of the float32 LSE. A gradient of h numbers is too few for the error of plain attention to be a yardstick.

    results: exact out and LSE.
    """
    out, lse = results
    weight = torch.exp(problem.sinks[:, None] - lse)
    rows = dout.double().square().sum(-1) * out.square().mean(-1)
    of_delta = 2 * (torch.finfo(problem.q.dtype).eps / 2) ** 2 * rows.transpose(-1, -2)
    delta = (dout.double() * out).sum(-1).transpose(-1, -2) - (0.0 if dlse is None else dlse.double())
    of_lse = (torch.finfo(torch.float32).eps * lse.masked_fill(lse.isinf(), 0.0) * delta).square()
    variance = weight.square() * (of_delta + of_lse)
    return 6 * variance.sum(-1).view(-1, problem.case.nheads).sum(0).sqrt()


def backend_forward(q, k, v, out=None, alibi=None, p=0.0, scale=None, causal=False, window=(-1, -1), softcap=0.0,
                    return_softmax=False):  # fmt: skip
    """`fwd` of the backend of q's device, positionally, as the extension's clients call it."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return backends.get(q.device.type).fwd(
        q, k, v, out, alibi, p, scale, causal, window[0], window[1], softcap, return_softmax, None
    )


def backend_varlen_forward(problem: Problem, q=None, k=None, v=None, out=None, scale=None, return_softmax=False,
                           **replaced):  # fmt: skip
    """`varlen_fwd` of the backend of q's device, positionally; replaced: cu_seqlens_q, max_seqlen_q, ..."""
    q, k, v = (own if given is None else given for own, given in zip((problem.q, problem.k, problem.v), (q, k, v)))
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table", "alibi_slopes",
             "max_seqlen_q", "max_seqlen_k")  # fmt: skip
    c = problem.case
    return backends.get(q.device.type).varlen_fwd(
        q, k, v, out, *(replaced.get(n, getattr(problem, n)) for n in names), replaced.get("p", c.dropout),
        q.shape[-1] ** -0.5 if scale is None else scale, False, c.causal, c.window[0], c.window[1],
        replaced.get("softcap", c.softcap), return_softmax, None,
    )  # fmt: skip


@contextmanager
def by_function():
    """Every call by the functions of the backend, or FlashAttnFunc; plain CUDA tensors would pass them by."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "attention", lambda *args: NotImplemented)
        patch.setattr(eager, "attention_over_cache", lambda *args: NotImplemented)
        patch.setattr(eager, "packed_attention", lambda *args: NotImplemented)
        yield


def record_served(monkeypatch, name):
    """A list that tells of each call whether the C function `eager.NAME` served it."""
    served, original = [], getattr(eager, name)

    def function(*args):
        result = original(*args)
        served.append(result is not NotImplemented)
        return result

    monkeypatch.setattr(eager, name, function)
    return served


@contextmanager
def no_synchronisation():
    """Any call that waits for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Recorder(TorchDispatchMode):
    """Keeps the operators that reach the dispatcher."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def captured(call):
    """Warm up on a side stream, capture a call there; returns (graph, its results)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = call()
    return graph, results
