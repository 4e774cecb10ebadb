"""FlashAttention-3's package: its Python API and operators, computed by flash_attn."""

import flash_attn as _flash_attn

if not hasattr(_flash_attn, "__build__"):
    raise ImportError(
        f"flash_attn_3: expected the flash_attn of the repository that it comes from, got another one of that name "
        f"({_flash_attn.__file__})"
    )

__version__ = "3.0.0"
