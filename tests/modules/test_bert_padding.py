"""Unpadding and padding: round trips, every kind of mask, gradients, and the results that attention is fed with."""

from __future__ import annotations

import einops
import pytest
import torch

from flash_attn import bert_padding, flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

LENGTHS = [3, 0, 5, 1]
BATCH, SEQLEN = len(LENGTHS), 6


def length_mask(lengths, device, seqlen=SEQLEN):
    return torch.arange(seqlen, device=device) < torch.tensor(lengths, device=device)[:, None]


@pytest.mark.parametrize("dtype", (torch.bool, torch.int32, torch.int64, torch.uint8, torch.float32))
def test_round_trip(device, dtype):
    mask = length_mask(LENGTHS, device)
    x = torch.randn(BATCH, SEQLEN, 2, 5, device=device)
    unpadded, indices, cu_seqlens, longest, used = unpad_input(x, mask.to(dtype))
    assert torch.equal(unpadded, x[mask])
    assert indices.dtype == torch.int64 and indices.tolist() == [0, 1, 2, 12, 13, 14, 15, 16, 18]
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 3, 3, 8, 9]
    assert type(longest) is int and longest == 5
    assert used.dtype == torch.int32 and used.tolist() == LENGTHS
    assert torch.equal(pad_input(unpadded, indices, BATCH, SEQLEN), x * mask[..., None, None])


@pytest.mark.parametrize("dtype", (torch.bool, torch.int32, torch.int64))
def test_tokens_anywhere_in_the_row(device, dtype):
    """Left padding and holes; a token in both masks counts once."""
    mask = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1]], device=device)
    unused = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0]], device=device)
    x = torch.randn(2, 4, 3, device=device)
    unpadded, indices, cu_seqlens, longest, used = unpad_input(x, mask.to(dtype), unused.to(dtype))
    assert indices.tolist() == [1, 2, 3, 4, 6, 7]
    assert torch.equal(unpadded, x.flatten(0, 1)[indices])
    assert cu_seqlens.tolist() == [0, 3, 6] and longest == 3 and used.tolist() == [2, 2]


def test_nothing_to_keep(device):
    for shape in ((2, 4), (2, 0), (0, 4)):
        mask = torch.zeros(shape, dtype=torch.bool, device=device)
        unpadded, indices, cu_seqlens, longest, used = unpad_input(torch.randn(*shape, 3, device=device), mask)
        assert unpadded.shape == (0, 3) and indices.shape == (0,) and longest == 0
        assert cu_seqlens.tolist() == [0] * (shape[0] + 1) and used.tolist() == [0] * shape[0]
        assert torch.equal(pad_input(unpadded, indices, *shape), torch.zeros(*shape, 3, device=device))


def test_concatenated_sequences(device):
    rows = [[2, 3, 0, 0, 0, 0], [3, 2, 1, 0, 0, 0], [6, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    lengths = torch.tensor(rows, device=device)
    x = torch.randn(4, 6, 3, device=device)
    unpadded, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    mask = length_mask([sum(row) for row in rows], device)
    assert torch.equal(unpadded, x[mask]) and torch.equal(indices, mask.flatten().nonzero().flatten())
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 2, 5, 8, 10, 11, 17]
    assert type(longest) is int and longest == 6
    assert torch.equal(pad_input(unpadded, indices, 4, 6), x * mask[..., None])


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32))
def test_concatenated_sequences_that_do_not_fit_their_row(device, dtype):
    """They would take the tokens of the next row."""
    x = torch.randn(2, 4, 3, device=device)
    for rows, message in (
        ([[3, 2, 0, 0], [1, 0, 0, 0]], "expected lengths of a row that sum to at most 4, got 5"),
        ([[3, 1, 0, 0], [4, 1, 0, 0]], "expected lengths of a row that sum to at most 4, got 5"),
        ([[3, -2, 0, 0], [1, 0, 0, 0]], "expected lengths >= 0, got -2"),
    ):
        with pytest.raises(RuntimeError) as caught:
            unpad_input_for_concatenated_sequences(x, torch.tensor(rows, device=device, dtype=dtype))
        assert str(caught.value) == f"attention_mask_in_length: {message}"
    empty = torch.zeros(2, 0, dtype=dtype, device=device)
    assert unpad_input_for_concatenated_sequences(x[:, :0], empty)[3] == 0


def test_what_is_no_tensor_is_named(device):
    x, mask = torch.randn(2, 4, 3, device=device), torch.ones(2, 4, device=device)
    for call, name in (
        (lambda: unpad_input([1], mask), "hidden_states"),
        (lambda: unpad_input(x, [[1]]), "attention_mask"),
        (lambda: unpad_input_for_concatenated_sequences(x, None), "attention_mask_in_length"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected a Tensor"):
            call()


@pytest.mark.devices("cpu")
def test_gradients(device):
    mask = length_mask(LENGTHS, device)
    x = torch.randn(BATCH, SEQLEN, 2, dtype=torch.float64, requires_grad=True)
    indices = unpad_input(x.detach(), mask)[1]
    values = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpad_input(x, mask)[0], (x,))
    assert torch.autograd.gradcheck(lambda x: pad_input(x, indices, BATCH, SEQLEN), (values,))
    repeated = torch.tensor([1, 1, 0])
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, repeated), (values,))
    assert torch.autograd.gradcheck(lambda x: index_first_axis_residual(x, repeated), (values,))


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_index_functions(device, dtype):
    """int32 as well: transformers makes the indices of single tokens from cu_seqlens."""
    x = torch.randn(6, 2, 3, device=device, requires_grad=True)
    indices = torch.tensor([4, 0, 5], device=device, dtype=dtype)
    picked, residual = index_first_axis_residual(x, indices)
    assert torch.equal(picked, x[indices]) and torch.equal(residual, x)
    assert torch.equal(index_first_axis(x, indices), picked)
    scattered = index_put_first_axis(picked, indices, 6)
    kept = torch.zeros(6, 1, 1, device=device)
    kept[indices] = 1.0
    assert torch.equal(scattered, x * kept)
    assert torch.equal(index_put_first_axis(picked, indices.int(), 6), scattered)  # as transformers passes them
    (scattered.sum() + residual.sum()).backward()
    assert torch.equal(x.grad, (1.0 + kept).expand_as(x))


def test_attention_over_unpadded_tokens(device):
    """Unpad, varlen attention, pad: equal to attention of each sequence alone, zero at the padding."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    mask = length_mask(LENGTHS, device)
    qkv = torch.randn(BATCH, SEQLEN, 3, 2, 16, device=device, dtype=dtype)
    unpadded, indices, cu_seqlens, longest, _ = unpad_input(qkv, mask)
    out = flash_attn_varlen_func(*unpadded.unbind(1), cu_seqlens, cu_seqlens, longest, longest, causal=True)
    padded = pad_input(out, indices, BATCH, SEQLEN)
    for row, length in enumerate(LENGTHS):
        alone = flash_attn_func(*qkv[row : row + 1, :length].unbind(2), causal=True)[0]
        torch.testing.assert_close(padded[row, :length], alone, rtol=0, atol=8 * torch.finfo(dtype).eps)
        assert (padded[row, length:] == 0).all()


def test_rearrange_is_that_of_einops():
    assert bert_padding.rearrange is einops.rearrange


def test_mask_of_another_shape(device):
    x = torch.randn(2, 4, 3, device=device)
    mask = torch.ones(2, 3, device=device)
    cases = [
        (lambda: unpad_input(x, mask), "attention_mask"),
        (lambda: unpad_input(x, torch.ones(2, 4, device=device), mask), "unused_mask"),
        (lambda: unpad_input_for_concatenated_sequences(x, mask.long()), "attention_mask_in_length"),
    ]
    for call, name in cases:
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == f"{name}: expected shape [2, 4], got [2, 3]"
