"""The CUDA kernel of a forward together with its tangents, which computes both at the price of six products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad

from flash_attn import backends
from flash_attn.derivatives.blocks import unpack_tangents
from flash_attn.ops import calls, context
from flash_attn.ops.attention_args import TANGENT_INPUTS, AttentionArgs, Tangents, made


def forward(args: AttentionArgs, directions: Tangents) -> tuple[Tensor, ...] | None:
    """(out, lse, t_out, t_lse, rng_state) of a call; None: no kernel takes it, PyTorch operations do."""
    if not args.q.is_cuda or not _is_plain(args):
        return None
    with torch.no_grad():
        inputs = (calls.rows_contiguous(x) for x in calls.unpack(args.q, args.k, args.v))
        tangents = [_readable(x) for x in unpack_tangents(args, directions)]
        if all(x is None for x in tangents):
            return None
        results = backends.of(args.q).jvp_fwd(
            *inputs,
            *tangents,
            calls.as_index("cu_seqlens_q", args.cu_seqlens_q),
            calls.as_index("cu_seqlens_k", args.cu_seqlens_k),
            args.softmax_scale,
            args.causal,
            args.window_left,
            args.window_right,
            sm_margin=args.sm_margin,
        )
    return None if results is None else tuple(results)


def _readable(tangent: Tensor | None) -> Tensor | None:
    """As the kernel reads it; None for a tensor of zeros without memory, which autograd makes."""
    return None if tangent is None or tangent._is_zerotensor() else calls.rows_contiguous(tangent)


def _is_plain(args: AttentionArgs) -> bool:
    """Whether the scores are those of q and k under a window, the keys those of k, and no other result is wanted."""
    return (
        args.dropout_p == args.softcap == 0.0
        and args.alibi_slopes is None
        and args.named().keys() <= {"sm_margin"}
        and args.forward_only() is None
        and not args.is_scaled()
        and not any(args.further_results().values())
    )


class Computed:
    """What the kernel has computed of a call before autograd records it. Each result is handed out once: a node that
    kept its own output would keep itself."""

    def __init__(self, out: Tensor, lse: Tensor, t_out: Tensor, t_lse: Tensor, rng_state: Tensor) -> None:
        self._results: tuple[Tensor, ...] = (out, lse, out.new_empty(0), rng_state)
        self._tangents: tuple[Tensor, ...] = (t_out, t_lse)

    def take_results(self) -> tuple[Tensor, ...]:
        """Those of `calls.forward`."""
        results, self._results = self._results, ()
        return results

    def take_tangents(self) -> tuple[Tensor, ...]:
        """(t_out, t_lse)"""
        tangents, self._tangents = self._tangents, ()
        return tangents


def computed(args: AttentionArgs, directions: Tangents) -> Computed | None:
    results = forward(args, directions)
    return None if results is None else Computed(*results)


def computed_of_duals(args: AttentionArgs) -> Computed | None:
    """`computed` of a call within forward mode and no other transform, whose inputs have tangents."""
    if not context.is_forward_mode_alone():
        return None
    duals = [None if x is None else forward_ad.unpack_dual(x).tangent for x in args.differentiable()]
    if all(x is None for x in duals):
        return None
    plain = made(AttentionArgs, [_unwrapped(x) for x in args])
    directions = made(Tangents, [_unwrapped(x) for x in duals[: len(TANGENT_INPUTS)]])
    if not context.transformed():
        return computed(plain, directions)
    with temporarily_pop_interpreter_stack():  # or the results of operations would be wrapped
        return computed(plain, directions)


def _unwrapped(x: object) -> object:
    functorch = torch._C._functorch
    return functorch.get_unwrapped(x) if isinstance(x, Tensor) and functorch.is_functorch_wrapped_tensor(x) else x
