"""FLOP formulas of flash_attn_cp_func: a rank counts its queries and all keys of their documents, so that the sum over
ranks is the count of one GPU. While a graph is traced the plan is unknown, and the rank's own keys count."""

from __future__ import annotations

import torch

from flash_attn.context_parallel.cp_plan import plan_of
from flash_attn.context_parallel.operators import CpArgs, CpBackwardArgs
from flash_attn.context_parallel.plan.layouts import segments
from flash_attn.ops import flops

_core = torch.ops.flash_attn_core


def _pairs(call: CpArgs) -> int:
    batch = 1 if call.q.dim() == 3 else call.q.shape[0]
    if not flops.is_known(call.plan):
        return int(batch * call.q.shape[-3] * call.k.shape[-3])
    plan = plan_of(call.plan)
    bounds = plan.cu_seqlens
    own = segments(plan.spans[plan.rank], bounds)
    return int(batch * sum((s.stop - s.start) * (bounds[s.document + 1] - bounds[s.document]) for s in own))


@flops.register(CpArgs, _core.cp_fwd)
def _forward(call: CpArgs) -> int:
    return flops.forward_flops(call.q, call.v, _pairs(call))


@flops.register(CpBackwardArgs, _core.cp_bwd)
def _backward(call: CpArgs) -> int:
    return flops.backward_flops(call.q, call.v, _pairs(call))
