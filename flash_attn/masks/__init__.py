"""Masks as data: `AttentionMask` and its normal form, `MaskFactors`."""

from .attention_mask import AttentionMask
from .factors import MaskFactors

__all__ = ["AttentionMask", "MaskFactors"]
