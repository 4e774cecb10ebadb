"""Exact attention over a sequence whose tokens are on several GPUs: docs/context_parallel.md.

plan: the tokens of each rank, and the order of its computations and transfers, in plain integers. exchange: how
tensors move between ranks. compute: calls of the attention backend, the sums of their results, and gradients. The
modules next to these folders are the public functions; imports go from each to those named before it.
"""

from flash_attn.context_parallel.cache import CpCache, flash_attn_cp_kvcache
from flash_attn.context_parallel.cp_plan import CpPlan
from flash_attn.context_parallel.exchange.local_group import LocalGroup
from flash_attn.context_parallel.function import flash_attn_cp_func
from flash_attn.utils.after_import import import_after as _import_after

_import_after("torch.utils.flop_counter", "flash_attn.context_parallel.flops")  # which registers formulas there

__all__ = ["CpCache", "CpPlan", "LocalGroup", "flash_attn_cp_func", "flash_attn_cp_kvcache"]
