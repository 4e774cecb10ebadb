"""Exact attention over a sequence whose tokens lie on several GPUs: docs/context_parallel.md."""

from flash_attn.context_parallel.cache import CpCache, flash_attn_cp_kvcache
from flash_attn.context_parallel.function import flash_attn_cp_func
from flash_attn.context_parallel.local_group import LocalGroup
from flash_attn.context_parallel.plan import CpPlan

__all__ = ["CpCache", "CpPlan", "LocalGroup", "flash_attn_cp_func", "flash_attn_cp_kvcache"]
