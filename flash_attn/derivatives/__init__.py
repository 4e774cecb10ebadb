"""Forward-mode and second derivatives of attention (docs/derivatives.md)."""

from flash_attn.derivatives.interface import flash_attn_jvp

__all__ = ["flash_attn_jvp"]
