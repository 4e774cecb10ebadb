"""The top-level module of this name, its private names included: clients import them from here."""

import flash_attn_interface as _interface
from flash_attn_interface import *  # noqa: F403

__all__ = list(_interface.__all__)

_flash_attn_forward = _interface._flash_attn_forward
_flash_attn_backward = _interface._flash_attn_backward
flash_attn_3_gpu = _interface.flash_attn_3_gpu
