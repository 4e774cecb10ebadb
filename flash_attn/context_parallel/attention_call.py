"""One call of `flash_attn_cp_func`: its arguments checked and compared across ranks, its forward and its gradients."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from flash_attn._types import WindowSize
from flash_attn.context_parallel.compute import key_exchange, ulysses
from flash_attn.context_parallel.compute.kernel_calls import BackwardInputs, ForwardInputs, Options, sum_dtype
from flash_attn.context_parallel.compute.sums import sink_gradient
from flash_attn.context_parallel.compute.ulysses import Heads
from flash_attn.context_parallel.cp_plan import CpPlan, normal_window
from flash_attn.context_parallel.exchange.consistency import raise_on_ranks_of_last_plan
from flash_attn.context_parallel.plan.steps import CHUNK_METHODS
from flash_attn.cpu import checks
from flash_attn.limits import MAX_HEAD_DIM
from flash_attn.ops import arguments, context
from flash_attn.ops.lse import check_convention

_CUDA_DTYPES = (torch.float16, torch.bfloat16)
_MOST_GATHERED_BYTES = 4 << 30  # of K and V of all ranks in one buffer; "auto" takes ring above it


class Arguments(NamedTuple):
    """The arguments of `flash_attn_cp_func` that the result depends on, as the caller gave them."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    plan: CpPlan
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: WindowSize = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    sm_margin: int = 0


Inputs = tuple[Tensor, Tensor, Tensor, Optional[Tensor]]  # q, k, v, sinks


class AttentionCall:
    """The options of a call, equal on all ranks, and the shapes of this rank's tensors."""

    def __init__(self, plan: CpPlan, options: Options, inputs: Inputs, padded_from: int):
        self.plan, self.options = plan, options
        self.padded_from = padded_from  # v's head dim before padding, or 0
        self.moves_heads = options.method == "ulysses" or plan.has_two_dimensions
        self.request = self._request(inputs)

    def _request(self, inputs: Inputs) -> str:
        """What the ranks compare: everything but the contents of tensors."""
        kinds = [None if x is None else (*x.shape[-2:], x.dtype, x.device.type, x.requires_grad) for x in inputs]
        slopes = self.options.alibi_slopes
        options = {**self.options._asdict(), "alibi_slopes": None if slopes is None else tuple(slopes.shape)}
        return repr((options, kinds, torch.is_grad_enabled()))

    def compare_backward(self, number: int, error: BaseException | None = None) -> None:
        """Check that all ranks are at the backward of the call with this number."""
        self.plan.compare_backward("flash_attn_cp_func", self.request, number, error)

    def rows(self, x: Tensor) -> Tensor:
        """(batch, tokens, ...) as (batch * tokens, ...)."""
        return x.contiguous() if self.plan.is_packed else x.contiguous().flatten(0, 1)

    def tokens(self, x: Tensor) -> Tensor:
        """The reverse of `rows`."""
        return x if self.plan.is_packed else x.view(self.options.batch, self.plan.num_tokens, *x.shape[1:])

    def head_rows(self, x: Tensor) -> Tensor:
        """An LSE or its gradient (batch, heads, tokens) as (heads, batch * tokens)."""
        return x.contiguous() if self.plan.is_packed else x.transpose(0, 1).flatten(1)

    def head_tokens(self, x: Tensor) -> Tensor:
        """The reverse of `head_rows`."""
        if self.plan.is_packed:
            return x.contiguous()
        return x.view(x.shape[0], self.options.batch, self.plan.num_tokens).transpose(0, 1).contiguous()


def agreed_call(
    args: Arguments, lse_convention: str = "fa2", kind: Hashable = None, wants_state: bool = False
) -> tuple[AttentionCall, int, Inputs]:
    """(call, its number, inputs), after the ranks have compared it as far as the plan says.

    kind: the key under which the plan keeps the call. wants_state: make a rng_state without dropout too.
    """
    call: AttentionCall | None = None
    error, seed, plan = None, None, args.plan
    try:
        check_convention(lse_convention)
        call, inputs = checked_call(args)
    except Exception as raised:  # of any type: the other ranks wait for this one
        error = raised
        if not isinstance(plan, CpPlan):
            raise_on_ranks_of_last_plan("flash_attn_cp_func", error)
    if call is not None and call.options.dropout_p > 0:
        seed = int(
            torch.randint(0, 2**63 - 1, (1,), device="cpu").item()
        )  # on every rank, which keeps generators in step
    number, seed = plan.compare("flash_attn_cp_func", "" if call is None else call.request, error, seed)
    assert call is not None  # comparing raises the error
    plan.communicator.connect(inputs[0].device)
    if kind is not None and seed is None and not call.padded_from:
        plan.known_calls[kind] = call
    if seed is not None or wants_state:  # a copy from the host, which other calls need not wait for
        state = torch.tensor([seed or 0, 0], dtype=torch.int64, device="cpu").to(inputs[0].device)
        call.options = call.options._replace(rng_state=state)
    return call, number, inputs


def checked_call(args: Arguments) -> tuple[AttentionCall, Inputs]:
    """Raises for bad arguments of this rank; compares nothing."""
    plan = args.plan
    if not isinstance(plan, CpPlan):
        raise TypeError(f"plan: expected a CpPlan, got {arguments.shown(plan)}")
    inputs = arguments.attention_inputs(("q", "k", "v"), (args.q, args.k, args.v))
    for name, x in zip("qkv", inputs):
        if type(x) is not Tensor and not isinstance(x, torch.nn.Parameter):
            raise TypeError(f"{name}: expected the plain tensor of this rank's tokens, got {type(x).__name__}")
    context.reject_tangents(("q", "k", "v"), inputs)
    _check_shapes(plan, *inputs)
    options, sinks = _options(args, plan), args.sinks
    q, k, v = inputs
    if sinks is not None:
        sinks = arguments.sinks(sinks)
        _check_sinks(sinks, q)
    _check_options(plan, q, options)
    options = options._replace(method=_method(plan, q, k, v, options))
    padded_from = 0
    if q.shape[-1] % 8 and q.is_cuda:
        padded_from = v.shape[-1]
        q, k, v = (torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)) for x in inputs)
    return AttentionCall(plan, options, (q, k, v, sinks), padded_from), (q, k, v, sinks)


def _options(args: Arguments, plan: CpPlan) -> Options:
    scale = arguments.scale(args.softmax_scale, arguments.head_dim("q", args.q))
    window = normal_window(arguments.flag("causal", args.causal), args.window_size, plan.cu_seqlens[-1])
    if args.alibi_slopes is not None:
        arguments.check_constant("alibi_slopes", args.alibi_slopes)
    return Options(
        method=plan.method,
        batch=1 if plan.is_packed else args.q.shape[0],
        window=window,
        softmax_scale=scale,
        softcap=arguments.number("softcap", args.softcap),
        dropout_p=arguments.number("dropout_p", args.dropout_p),
        deterministic=arguments.flag("deterministic", args.deterministic),
        alibi_slopes=args.alibi_slopes,
        rng_state=None,
        sm_margin=arguments.sm_margin(args.sm_margin),
    )


def _check_shapes(plan: CpPlan, q: Tensor, k: Tensor, v: Tensor) -> None:
    axes = "num_tokens, nheads, head_dim" if plan.is_packed else "batch, num_tokens, nheads, head_dim"
    dtypes = _CUDA_DTYPES if q.is_cuda else checks.DTYPES
    if q.dtype not in dtypes:
        raise RuntimeError(f"q: expected one of {', '.join(map(str, dtypes))} on {q.device}, got {q.dtype}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != (3 if plan.is_packed else 4):
            raise RuntimeError(f"{name}: expected shape ({axes}), got {list(x.shape)}")
        if x.shape[-3] != plan.num_tokens:
            raise RuntimeError(
                f"{name}: expected the {plan.num_tokens} tokens of rank {plan.rank}, got {x.shape[-3]} "
                f"(shape {list(x.shape)})"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise RuntimeError(f"{name}: expected {q.dtype} on {q.device} as q, got {x.dtype} on {x.device}")
        if x.shape[:-2] != q.shape[:-2]:
            raise RuntimeError(f"{name}: expected batch and tokens of q, {list(q.shape[:-2])}, got {list(x.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise RuntimeError(f"k: expected head dim {q.shape[-1]} as q, got {k.shape[-1]}")
    if v.shape[-2] != k.shape[-2]:
        raise RuntimeError(f"v: expected {k.shape[-2]} heads as k, got {v.shape[-2]}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise RuntimeError(f"k: expected a number of heads that divides {q.shape[-2]}, got {k.shape[-2]}")
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        most = MAX_HEAD_DIM
        raise RuntimeError(f"q: expected head dims of at most {most}, got {q.shape[-1]} and {v.shape[-1]}")


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    if tuple(sinks.shape) != (q.shape[-2],):
        raise RuntimeError(f"sinks: expected shape [{q.shape[-2]}], got {list(sinks.shape)}")
    if sinks.dtype not in (torch.float32, sum_dtype(q.dtype)) or sinks.device != q.device:
        raise RuntimeError(f"sinks: expected float32 on {q.device}, got {sinks.dtype} on {sinks.device}")


def _check_options(plan: CpPlan, q: Tensor, options: Options) -> None:
    # not only in the backends, which a rank without tokens does not call
    checks.check_numbers(options.dropout_p, options.softmax_scale, options.softcap, sum_dtype(q.dtype))
    slopes = options.alibi_slopes
    if slopes is not None:
        documents = len(plan.cu_seqlens) - 1 if plan.is_packed else options.batch
        allowed = ((q.shape[-2],), (documents, q.shape[-2]))
        if slopes.dtype != torch.float32 or tuple(slopes.shape) not in allowed or slopes.device != q.device:
            shapes = " or ".join(str(list(shape)) for shape in allowed)
            raise RuntimeError(
                f"alibi_slopes: expected float32 of shape {shapes} on {q.device}, got {arguments.shown(slopes)}"
            )


def _method(plan: CpPlan, q: Tensor, k: Tensor, v: Tensor, options: Options) -> str:
    """The plan's method, or the one that moves fewer bytes; equal on all ranks.

    ulysses also moves q and out, but not all K and V to all ranks. CUDA kernels make a dropout mask by MASK_COLUMNS:
    where a ring's chunks begin between these, all_gather takes its place, whose keys begin with a document.
    """
    can_ring = not (q.is_cuda and options.dropout_p > 0) or plan.begins_at_mask_columns
    if plan.method != "auto":
        return plan.method if can_ring or plan.method not in CHUNK_METHODS else "all_gather"
    tokens, ranks, heads, heads_k = plan.cu_seqlens[-1] * options.batch, plan.size, q.shape[-2], k.shape[-2]
    if plan.has_two_dimensions:  # each rank gathers K and V of the heads that it computes
        owned = Heads.divide(heads, heads_k, plan.head_ranks.transport.size).key
        heads_k = max(b - a for a, b in owned)
    gathered_bytes = tokens * heads_k * (q.shape[-1] + v.shape[-1]) * q.element_size()
    is_windowed = options.window[0] is not None
    can_move_heads = not plan.has_two_dimensions and heads % ranks == 0 and heads_k % ranks == 0
    if can_move_heads and not is_windowed and (heads + heads_k) < heads_k * ranks:
        return "ulysses"
    return "ring" if gathered_bytes > _MOST_GATHERED_BYTES and not is_windowed and can_ring else "all_gather"


def forward_rows(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(out, LSE (heads, rows), tensors saved for the backward if heads move)."""
    inputs = ForwardInputs(call.rows(q), call.rows(k), call.rows(v), sinks, call.options)
    if call.moves_heads:
        return ulysses.forward(call.plan.head_ranks, inputs)
    return (*key_exchange.forward(call.plan.key_ranks, inputs), ())


def gradients(
    call: AttentionCall,
    dout: Tensor | None,
    dlse: Tensor | None,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    saved: Sequence[Tensor],
) -> list[Tensor]:
    """[dq, dk, dv] and, with sinks, theirs. out, lse, saved: of forward_rows()."""
    q, k, v, sinks = inputs
    # computed without a dout too: other ranks may have one and wait for this rank's part
    dout = torch.zeros_like(out) if dout is None else call.rows(dout)
    if dlse is not None:
        dlse = call.head_rows(dlse).to(lse.dtype)
    given = BackwardInputs(
        dout=dout, q=call.rows(q), k=call.rows(k), v=call.rows(v), out=out, lse=lse, dlse=dlse, options=call.options
    )
    if call.moves_heads:
        grads = ulysses.backward(call.plan.head_ranks, given, saved)
    else:
        grads = key_exchange.backward(call.plan.key_ranks, given)
    result = [call.tokens(grad) for grad in grads]
    return result if sinks is None else [*result, sink_gradient(sinks, dout, out, lse, dlse)]
