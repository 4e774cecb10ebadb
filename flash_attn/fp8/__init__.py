"""8 bits: quantising tensors for the attention functions, and training through 8-bit attention.

The arithmetic of 8-bit values and descales: `flash_attn.eight_bit`. Shapes, bounds, kernels: docs/fp8.md.
"""

from flash_attn.fp8.quantization import QuantizedQKV, hadamard, quantize, quantize_qkv
from flash_attn.fp8.straight_through import (
    flash_attn_straight_through_func,
    flash_attn_varlen_straight_through_func,
)

__all__ = [
    "QuantizedQKV",
    "flash_attn_straight_through_func",
    "flash_attn_varlen_straight_through_func",
    "hadamard",
    "quantize",
    "quantize_qkv",
]
