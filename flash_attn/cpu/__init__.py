"""The CPU backend: the functions of the extension module `flash_attn_2_cuda`, for CPU tensors, in plain PyTorch.

Same positional signatures and results as on the GPU; dtypes float16, bfloat16, float32 and float64; O(S) memory.
"""

from .backward import bwd
from .combine import combine
from .forward import fwd
from .kvcache import fwd_kvcache
from .kvcache_plan import kvcache_plan
from .varlen import varlen_bwd, varlen_fwd

__all__ = ["bwd", "combine", "fwd", "fwd_kvcache", "kvcache_plan", "varlen_bwd", "varlen_fwd"]
