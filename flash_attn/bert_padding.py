"""Removing and restoring padding around varlen attention.

Everything is differentiable with respect to the hidden states. Index lists need the number of tokens on the host, so
the unpad functions wait for the GPU: for that number, for the longest length, and to see that given lengths fit.
"""

from __future__ import annotations

import torch
from einops import rearrange  # noqa: F401 - clients import the name from here
from torch import Tensor

from flash_attn.ops import arguments, conditions


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` of `input`: (n, ...) and int (m,) -> (m, ...)."""
    _check_indices("input", input, indices)
    return torch.index_select(input, 0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Rows `indices` of a zero tensor set to `values`: (m, ...) and int (m,) -> (first_axis_dim, ...)."""
    _check_indices("values", values, indices)
    first_axis_dim = arguments.integer("first_axis_dim", first_axis_dim, least=0)
    if indices.shape[0] != values.shape[0]:
        raise RuntimeError(
            f"indices: expected one for each row of values, [{values.shape[0]}], got {list(indices.shape)}"
        )
    output = torch.zeros(first_axis_dim, *values.shape[1:], dtype=values.dtype, device=values.device)
    return output.index_copy_(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(`index_first_axis(input, indices)`, input), for a residual branch next to the unpadded one."""
    return index_first_axis(input, indices), input


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Gather the tokens of a padded batch.

    Arguments:
        hidden_states: (batch, seqlen, ...)
        attention_mask: (batch, seqlen) bool, integer or floating point; non-zero marks a token.
        unused_mask: (batch, seqlen), like attention_mask; marks further tokens, kept but not counted as used.

    Returns:
        hidden_states: (total, ...), total the number of tokens kept.
        indices: int64 (total,), of the tokens in the flattened (batch * seqlen) axis.
        cu_seqlens: int32 (batch + 1,), cumulative number of tokens kept.
        max_seqlen_in_batch: int, the longest sequence of tokens kept.
        seqused: int32 (batch,), number of tokens of attention_mask in each sequence.

    Raises RuntimeError when a mask does not have the first two dimensions of hidden_states.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    used = attention_mask != 0
    kept = used
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        kept = used | (unused_mask != 0)
    hidden_states, indices = _gather_tokens(hidden_states, kept)
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    max_seqlen = int(lengths.max()) if lengths.numel() > 0 else 0
    return hidden_states, indices, _cumulative(lengths), max_seqlen, used.sum(dim=-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Gather the tokens of a batch whose rows each hold several sequences, one after the other, then padding.

    Arguments:
        hidden_states: (batch, seqlen, ...)
        attention_mask_in_length: (batch, seqlen) integer. The non-zero entries of a row are the lengths of its
            sequences, in order: a row [2, 3, 0, 0, 0, 0] holds one of 2 tokens, one of 3, and one padding token.

    Returns:
        hidden_states: (total, ...), total the number of tokens.
        indices: int64 (total,), of the tokens in the flattened (batch * seqlen) axis.
        cu_seqlens: int32 (number of sequences + 1,), cumulative lengths.
        max_seqlen_in_batch: int, the longest sequence.

    Raises RuntimeError when attention_mask_in_length does not have the first two dimensions of hidden_states, has a
    negative entry, or a row whose lengths sum to more than seqlen: its sequences would take the tokens of the next.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    row_lengths = attention_mask_in_length.sum(dim=-1, keepdim=True)
    seqlen = attention_mask_in_length.shape[1]
    columns = torch.arange(seqlen, device=row_lengths.device)
    hidden_states, indices = _gather_tokens(hidden_states, columns < row_lengths)
    lengths, max_seqlen = attention_mask_in_length.flatten(), 0
    if lengths.numel() > 0:
        shortest, longest_row, max_seqlen = torch.stack([lengths.min(), row_lengths.max(), lengths.max()]).tolist()
        if not conditions.holds(shortest >= 0):
            raise RuntimeError(f"attention_mask_in_length: expected lengths >= 0, got {shortest}")
        if not conditions.holds(longest_row <= seqlen):
            raise RuntimeError(
                f"attention_mask_in_length: expected lengths of a row that sum to at most {seqlen}, got {longest_row}"
            )
    return hidden_states, indices, _cumulative(lengths[lengths != 0]), max_seqlen


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Scatter tokens back into a padded batch: (total, ...) -> (batch, seqlen, ...), zero where there is no token.

    indices: int32 or int64 (total,), as from `unpad_input`.
    """
    _check_indices("hidden_states", hidden_states, indices)
    batch, seqlen = arguments.integer("batch", batch, least=0), arguments.integer("seqlen", seqlen, least=0)
    output = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return output.view(batch, seqlen, *hidden_states.shape[1:])


def _check_indices(name: str, x: Tensor, indices: Tensor) -> None:
    arguments.check_tensors((name, "indices"), (x, indices))
    if x.dim() == 0:
        raise RuntimeError(f"{name}: expected at least one dimension, got 0")
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"indices: expected int32 or int64 of shape (m,), got {arguments.shown(indices)}")
    if indices.device != x.device:
        raise RuntimeError(f"indices: expected a tensor on {name}'s device ({x.device}), got one on {indices.device}")


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    arguments.check_tensors(("hidden_states", name), (hidden_states, mask))
    if mask.shape != hidden_states.shape[:2]:
        raise RuntimeError(f"{name}: expected shape {list(hidden_states.shape[:2])}, got {list(mask.shape)}")


def _gather_tokens(hidden_states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    indices = mask.flatten().nonzero().flatten()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices


def _cumulative(lengths: Tensor) -> Tensor:
    """cu_seqlens, int32, of a vector of lengths."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
