"""Arguments of FlashAttention-3 that flash_attn has nothing for, and those that a combination excludes."""

from __future__ import annotations

from flash_attn.eight_bit import EIGHT_BIT


def reject_unsupported(qv=None, attention_chunk=0, cu_seqlens_k_new=None, seqlens_rotary=None):
    """Raise NotImplementedError for the first argument given that is not served at all, by name."""
    tensors = {"qv": qv, "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": seqlens_rotary}
    for name, value in tensors.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None, got a tensor: it is not supported")
    if attention_chunk:
        raise NotImplementedError(f"attention_chunk: expected 0, got {attention_chunk}: it is not supported")


def scaling(q, k, v, q_descale, k_descale, v_descale, out=None):
    """The arguments of flash_attn for 8-bit tensors; none where all are wider, whose descales have no effect."""
    given = {"q_descale": (q, q_descale), "k_descale": (k, k_descale), "v_descale": (v, v_descale)}
    if all(x.dtype not in EIGHT_BIT for x, _ in given.values()):
        return {}
    descales = {name: descale if x.dtype in EIGHT_BIT else None for name, (x, descale) in given.items()}
    return {**descales, "out_dtype": None if out is None else out.dtype}


def scaling_values(scaling):
    """The same in the order in which flash_attn's functions pass it on, with v_descale_axis."""
    return (*(scaling.get(name) for name in ("q_descale", "k_descale", "v_descale")), None, scaling.get("out_dtype"))


def reject_training(q, k, v):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype in EIGHT_BIT:
            raise NotImplementedError(f"{name}: expected at least 16 bits in training, got {x.dtype}: no backward")


def reject_beside(reason, **arguments):
    """Raise NotImplementedError for the first argument given that the reason, another argument, excludes."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None {reason}, got a tensor: it is not supported")
