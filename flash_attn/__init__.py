"""Exact attention for PyTorch on NVIDIA GPUs and CPUs, with the API of flash_attn 2.8.3."""

import pkgutil as _pkgutil

# flash-attn-4 installs the package flash_attn.cute: folders of that name elsewhere on sys.path come after our own.
__path__ = _pkgutil.extend_path(__path__, __name__)
__version__ = "2.8.3"  # the API level that clients test for; __build__ has our own release

from flash_attn import fp8
from flash_attn._build import build_info as _build_info
from flash_attn.batch_invariance import is_batch_invariant, set_batch_invariant
from flash_attn.derivatives.interface import flash_attn_jvp
from flash_attn.dropout import dropout_mask
from flash_attn.explanation import explain
from flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn.inference import flash_attn_combine, flash_attn_with_kvcache
from flash_attn.kvcache_plan import KvCachePlan
from flash_attn.masks import AttentionMask
from flash_attn.utils.after_import import import_after as _import_after

__build__ = _build_info()
_import_after("torch.utils.flop_counter", "flash_attn.ops.flops")  # which registers formulas there

__all__ = [
    "AttentionMask",
    "KvCachePlan",
    "dropout_mask",
    "explain",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_jvp",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "fp8",
    "is_batch_invariant",
    "set_batch_invariant",
]
