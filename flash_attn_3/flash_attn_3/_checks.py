"""Arguments of FlashAttention-3 that flash_attn has nothing for, and those that a combination excludes."""

from __future__ import annotations


def reject_unsupported(
    qv=None, q_descale=None, k_descale=None, v_descale=None, attention_chunk=0, cu_seqlens_k_new=None,
    seqlens_rotary=None,
):  # fmt: skip
    """Raise NotImplementedError for the first argument given that is not served at all, by name."""
    tensors = {
        "qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
        "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": seqlens_rotary,
    }  # fmt: skip
    for name, value in tensors.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None, got a tensor: it is not supported")
    if attention_chunk:
        raise NotImplementedError(f"attention_chunk: expected 0, got {attention_chunk}: it is not supported")


def reject_beside(reason, **arguments):
    """Raise NotImplementedError for the first argument given that the reason, another argument, excludes."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None {reason}, got a tensor: it is not supported")
