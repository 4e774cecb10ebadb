"""FlashMLA's functions, computed by flash_attn: see README.md."""

import flash_attn as _flash_attn

if not hasattr(_flash_attn, "__build__"):
    raise ImportError(
        f"flash_mla: expected the flash_attn of the repository that it comes from, got another one of that name "
        f"({_flash_attn.__file__})"
    )

from flash_mla.flash_mla_interface import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

__version__ = "1.0.0"
__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]
