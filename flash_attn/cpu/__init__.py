"""The CPU backend: the functions of the extension module `flash_attn_2_cuda`, for CPU tensors, in plain PyTorch.

Same positional signatures and results as on the GPU; dtypes float16, bfloat16, float32 and float64; O(S) memory.
"""

from functools import partial

from .backward import bwd
from .combine import combine
from .forward import fwd
from .kvcache import fwd_kvcache
from .kvcache_plan import kvcache_plan
from .varlen import varlen_bwd, varlen_fwd

explain_fwd, explain_varlen_fwd = partial(fwd, explain=True), partial(varlen_fwd, explain=True)
explain_bwd, explain_varlen_bwd = partial(bwd, explain=True), partial(varlen_bwd, explain=True)
explain_kvcache = partial(fwd_kvcache, explain=True)

__all__ = [
    "bwd",
    "combine",
    "explain_bwd",
    "explain_fwd",
    "explain_kvcache",
    "explain_varlen_bwd",
    "explain_varlen_fwd",
    "fwd",
    "fwd_kvcache",
    "kvcache_plan",
    "varlen_bwd",
    "varlen_fwd",
]
