"""The top-level module of this name."""

from flash_attn_config import CONFIG, show

__all__ = ["CONFIG", "show"]
