"""What a call of `flash_attn_cp_func` asks for: checked, agreed upon by all ranks, and carried out on rows."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.context_parallel import gathered, ulysses
from flash_attn.context_parallel.agreement import raise_on_ranks_of_last_plan
from flash_attn.context_parallel.compute import Options, sink_gradient, sum_dtype
from flash_attn.context_parallel.plan import CpPlan, normal_window
from flash_attn.context_parallel.ulysses import Heads
from flash_attn.cpu import checks
from flash_attn.ops import arguments, context
from flash_attn.ops.lse import check_convention

_CUDA_DTYPES = (torch.float16, torch.bfloat16)
_MOST_GATHERED_BYTES = 4 << 30  # of K and V of all ranks in one buffer; above, "auto" takes ring


def agreed_call(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, plan, sinks,
    sm_margin, *, lse_convention="fa2", kind=None, wants_state=False,
):  # fmt: skip
    """(call, its number among the plan's, inputs) that all ranks have agreed on, as far as the plan compares calls."""
    call, inputs, error, seed = None, (q, k, v, sinks), None, None
    try:
        check_convention(lse_convention)
        call, inputs = request(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, plan, sinks,
            sm_margin,
        )  # fmt: skip
    except Exception as raised:  # of any kind: the other ranks wait to be told
        error = raised
    if not isinstance(plan, CpPlan):
        raise_on_ranks_of_last_plan("flash_attn_cp_func", error)
    if call is not None and call.options.dropout_p > 0:
        seed = torch.randint(0, 2**63 - 1, (1,), device="cpu").item()  # on every rank, so that generators stay together
    number, seed = plan.compare("flash_attn_cp_func", "" if call is None else call.request, error, seed)
    plan.transport.connect(inputs[0].device)
    if kind is not None and seed is None and not call.padded_from:
        plan.known_calls[kind] = call
    if seed is not None or wants_state:  # a copy from the host that other calls do without
        state = torch.tensor([seed or 0, 0], dtype=torch.int64, device="cpu").to(inputs[0].device)
        call.options = call.options._replace(rng_state=state)
    return call, number, inputs


class Call:
    """What is the same on all ranks of one call, and how this one's tensors are shaped."""

    def __init__(self, plan: CpPlan, method: str, batch: int, options: Options, inputs, padded_from: int):
        self.plan, self.method, self.batch, self.options = plan, method, batch, options
        self.padded_from = padded_from  # v's head dim before padding, or 0
        self.moves_heads = method == "ulysses" or plan.has_two_dimensions
        self.request = self._request(inputs)

    def _request(self, inputs) -> str:
        """All that ranks must agree on, contents of tensors excepted."""
        kinds = [None if x is None else (*x.shape[-2:], x.dtype, x.device.type, x.requires_grad) for x in inputs]
        slopes = self.options.alibi_slopes
        options = self.options._replace(alibi_slopes=None if slopes is None else tuple(slopes.shape))
        return repr((self.method, self.batch, options, kinds, torch.is_grad_enabled()))

    def compare_backward(self, number: int, error: BaseException | None = None) -> None:
        """Agree that all ranks are at the backward of the call of this number."""
        self.plan.compare_backward("flash_attn_cp_func", self.request, number, error)

    def rows(self, x: Tensor) -> Tensor:
        """(batch, tokens, ...) as (batch * tokens, ...)."""
        return x.contiguous() if self.plan.is_packed else x.contiguous().flatten(0, 1)

    def tokens(self, x: Tensor) -> Tensor:
        """The reverse."""
        return x if self.plan.is_packed else x.view(self.batch, self.plan.num_tokens, *x.shape[1:])

    def head_rows(self, x: Tensor) -> Tensor:
        """An LSE or its gradient (batch, heads, tokens) as (heads, batch * tokens)."""
        return x.contiguous() if self.plan.is_packed else x.transpose(0, 1).flatten(1)

    def head_tokens(self, x: Tensor) -> Tensor:
        if self.plan.is_packed:
            return x.contiguous()
        return x.view(x.shape[0], self.batch, self.plan.num_tokens).transpose(0, 1).contiguous()


def request(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, plan, sinks,
    sm_margin,
):  # fmt: skip
    """(call, inputs) of what the public function is given."""
    if not isinstance(plan, CpPlan):
        raise TypeError(f"plan: expected a CpPlan, got {arguments.shown(plan)}")
    inputs = arguments.attention_inputs(("q", "k", "v"), (q, k, v))
    for name, x in zip("qkv", inputs):
        if type(x) is not Tensor and not isinstance(x, torch.nn.Parameter):
            raise TypeError(f"{name}: expected the plain tensor of this rank's tokens, got {type(x).__name__}")
    context.reject_tangents(("q", "k", "v"), inputs)
    _check_shapes(plan, *inputs)
    scale = arguments.scale(softmax_scale, arguments.head_dim("q", q))
    window = normal_window(arguments.flag("causal", causal), window_size, plan.cu_seqlens[-1])
    if alibi_slopes is not None:
        arguments.check_constant("alibi_slopes", alibi_slopes)
    if sinks is not None:
        sinks = arguments.sinks(sinks)
        _check_sinks(sinks, q)
    batch = 1 if plan.is_packed else q.shape[0]
    options = Options(
        window, scale, arguments.number("softcap", softcap), arguments.number("dropout_p", dropout_p),
        arguments.flag("deterministic", deterministic), alibi_slopes, None,
        sm_margin=arguments.sm_margin(sm_margin),
    )  # fmt: skip
    _check_options(plan, batch, q, options)
    method = _method(plan, batch, *inputs, options)
    padded = 0
    if q.shape[-1] % 8 and q.is_cuda:
        padded = v.shape[-1]
        inputs = tuple(torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)) for x in inputs)
    inputs = (*inputs, sinks)
    return Call(plan, method, batch, options, inputs, padded), inputs


def _check_shapes(plan: CpPlan, q, k, v):
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
    if max(q.shape[-1], v.shape[-1]) > 256:
        raise RuntimeError(f"q: expected head dims of at most 256, got {q.shape[-1]} and {v.shape[-1]}")


def _check_sinks(sinks, q):
    if tuple(sinks.shape) != (q.shape[-2],):
        raise RuntimeError(f"sinks: expected shape [{q.shape[-2]}], got {list(sinks.shape)}")
    if sinks.dtype not in (torch.float32, sum_dtype(q.dtype)) or sinks.device != q.device:
        raise RuntimeError(f"sinks: expected float32 on {q.device}, got {sinks.dtype} on {sinks.device}")


def _check_options(plan: CpPlan, batch: int, q, options: Options):
    # here and not only in the backends, which a rank without tokens does not call
    checks.check_numbers(options.dropout_p, options.softmax_scale, options.softcap, sum_dtype(q.dtype))
    slopes = options.alibi_slopes
    if slopes is not None:
        documents = len(plan.cu_seqlens) - 1 if plan.is_packed else batch
        allowed = ((q.shape[-2],), (documents, q.shape[-2]))
        if slopes.dtype != torch.float32 or tuple(slopes.shape) not in allowed or slopes.device != q.device:
            shapes = " or ".join(str(list(shape)) for shape in allowed)
            raise RuntimeError(
                f"alibi_slopes: expected float32 of shape {shapes} on {q.device}, got {arguments.shown(slopes)}"
            )


def _method(plan: CpPlan, batch: int, q, k, v, options: Options) -> str:
    """The plan's, or by bytes: ulysses moves q and out too but not all K and V to all ranks. Equal on all ranks.

    CUDA kernels cannot begin at any column of a dropout mask: then all_gather, whose keys begin with a document's.
    """
    can_ring = not (q.is_cuda and options.dropout_p > 0) or plan.begins_at_mask_columns
    if plan.method != "auto":
        return plan.method if can_ring or plan.method != "ring" else "all_gather"
    tokens, ranks, heads, heads_k = plan.cu_seqlens[-1] * batch, plan.size, q.shape[-2], k.shape[-2]
    if plan.has_two_dimensions:  # each rank gathers K and V of its own heads
        owned = Heads.divide(heads, heads_k, plan.head_ranks.transport.size).key
        heads_k = max(b - a for a, b in owned)
    dims = q.shape[-1] + v.shape[-1]
    gathered_bytes = tokens * heads_k * dims * q.element_size()
    is_windowed = options.window[0] is not None
    can_move_heads = not plan.has_two_dimensions and heads % ranks == 0 and heads_k % ranks == 0
    if can_move_heads and not is_windowed and (heads + heads_k) < heads_k * ranks:
        return "ulysses"
    return "ring" if gathered_bytes > _MOST_GATHERED_BYTES and not is_windowed and can_ring else "all_gather"


def forward_rows(call: Call, q, k, v, sinks):
    """(out, LSE (heads, rows), what the backward of heads that move needs)."""
    given = call.method, call.batch, *(call.rows(x) for x in (q, k, v)), sinks, call.options
    if call.moves_heads:
        return ulysses.forward(call.plan.head_ranks, *given)
    return (*gathered.forward(call.plan.passes, *given), ())


def gradients(call: Call, dout, dlse, q, k, v, out, lse, kept, sinks):
    """[dq, dk, dv] and, with sinks, theirs. out, lse, kept: of forward_rows()."""
    rows = [call.rows(x) for x in (q, k, v)]
    # other ranks may have a gradient where this one has none, and wait for its part
    dout = torch.zeros_like(out) if dout is None else call.rows(dout)
    if dlse is not None:
        dlse = call.head_rows(dlse).to(lse.dtype)
    elif call.moves_heads:
        dlse = torch.zeros_like(lse)
    given = call.method, call.batch, dout, *rows
    if call.moves_heads:
        grads = ulysses.backward(call.plan.head_ranks, *given, dlse, kept, call.options)
    else:
        grads = gathered.backward(call.plan.passes, *given, out, lse, dlse, call.options)
    grads = [call.tokens(grad) for grad in grads]
    return grads if sinks is None else [*grads, sink_gradient(sinks, dout, out, lse, dlse)]
