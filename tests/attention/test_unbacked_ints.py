"""Numbers that compiled code learns only when it runs, by `.item()` in its own graph, as ints of every function.

torch.compile knows nothing of such a number: neither its sign nor whether it fits, so that no code may branch on it.
"""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental import symbolic_shapes

import flash_attn
from flash_attn import bert_padding
from flash_attn import flash_attn_interface as interface
from flash_attn.fp8.straight_through import flash_attn_varlen_straight_through_func
from flash_attn.layers import rotary
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.modules.inner_attention import FlashCrossAttention, FlashSelfAttention
from flash_attn.modules.mha import MHA
from flash_attn.ops import conditions
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn.utils.generation import InferenceParams

pytestmark = pytest.mark.skipif(not hasattr(symbolic_shapes, "guard_or_true"), reason="such numbers need torch 2.8")

LONGEST, FEW = 9, 3  # the two numbers
BATCH, HEADS, HEAD_DIM, CAPACITY = 2, 4, 16, 40
OPTIONS = (0.0, 0.25, True)  # dropout_p, softmax_scale, causal


def dtype_of(device):
    return torch.float32 if device == "cpu" else torch.float16


def rows(device, *shape):
    return torch.randn(*shape, device=device, dtype=dtype_of(device))


def mha(device, **options):
    options.update(use_flash_attn=True, causal=True, layer_idx=0, device=device, dtype=dtype_of(device))
    return MHA(HEADS * HEAD_DIM, HEADS, **options)


class Inputs:
    """Modules, and tensors by name: a new copy at each access, for some functions write theirs."""

    def __init__(self, device):
        dense, packed, heads = (BATCH, LONGEST), (14,), (HEADS, HEAD_DIM)
        self._given = {
            "q": rows(device, *dense, *heads),
            "qkv": rows(device, *dense, 3, *heads),
            "kv": rows(device, *dense, 2, *heads),
            "grouped": rows(device, *dense, 9, HEAD_DIM),
            "packed": rows(device, *packed, *heads),
            "packed_qkv": rows(device, *packed, 3, *heads),
            "packed_kv": rows(device, *packed, 2, *heads),
            "cache": rows(device, BATCH, CAPACITY, *heads),
            "cos": torch.rand(CAPACITY, HEAD_DIM // 2, device=device, dtype=dtype_of(device)),
            "cu": torch.tensor([0, 5, 14], dtype=torch.int32, device=device),
            "lengths": torch.tensor([4, 7], dtype=torch.int32, device=device),
            "in_length": torch.tensor([[2, 3, *[0] * 7], [9, *[0] * 8]], device=device),
            "labels": torch.tensor([1, 3], device=device),
        }
        self.turn = rotary.RotaryEmbedding(HEAD_DIM, device=device)
        self.turn_and_scale = rotary.RotaryEmbedding(HEAD_DIM, scale_base=512, device=device)
        self.mha, self.decoder = mha(device), mha(device, rotary_emb_dim=HEAD_DIM)

    def __getattr__(self, name):
        return self._given[name].clone()


def unpadded(t, n, few):
    mask = torch.arange(LONGEST, device=t.cu.device) < t.lengths[:, None]
    qkv, indices, cu, longest, _ = bert_padding.unpad_input(t.qkv, mask)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, longest)
    return bert_padding.pad_input(out, indices, BATCH, n)


def concatenated(t, n, few):
    q, _, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(t.q, t.in_length)
    return flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, longest, longest)


def decoding(t, n, few):
    """A step after `few` tokens, of which max_seqlen is unknown too."""
    params = InferenceParams(max_seqlen=n + 20, max_batch_size=BATCH, seqlen_offset=few)
    params.key_value_memory_dict[0] = torch.stack([t.cache, t.cache], 2)
    with torch.no_grad():
        return t.decoder(t.q.flatten(2), inference_params=params)


def varlen_arguments(t, n, dtype=None):
    return *(t.packed.to(dtype) for _ in "qkv"), t.cu, t.cu, n, n


# name -> function of (Inputs, LONGEST, FEW).
CALLS = {
    "varlen": lambda t, n, few: flash_attn.flash_attn_varlen_func(*varlen_arguments(t, n), window_size=(n, few)),
    "varlen S_dmask": lambda t, n, few: flash_attn.flash_attn_varlen_func(
        *varlen_arguments(t, n), dropout_p=0.2, return_attn_probs=True
    ),
    "varlen seqused": lambda t, n, few: flash_attn.flash_attn_varlen_func(
        *varlen_arguments(t, n), seqused_q=t.lengths, seqused_k=t.lengths
    ),
    "varlen qkvpacked": lambda t, n, few: flash_attn.flash_attn_varlen_qkvpacked_func(t.packed_qkv, t.cu, n),
    "varlen kvpacked": lambda t, n, few: flash_attn.flash_attn_varlen_kvpacked_func(
        t.packed, t.packed_kv, t.cu, t.cu, n, n
    ),
    "straight through": lambda t, n, few: flash_attn_varlen_straight_through_func(
        *varlen_arguments(t, n, torch.float16)
    ),
    "window": lambda t, n, few: flash_attn.flash_attn_func(t.q, t.q, t.q, window_size=(few, n)),
    "window qkvpacked": lambda t, n, few: flash_attn.flash_attn_qkvpacked_func(t.qkv, window_size=(few, few)),
    "window kvpacked": lambda t, n, few: flash_attn.flash_attn_kvpacked_func(
        t.q, t.kv, causal=True, window_size=(few, n)
    ),
    "public operators": lambda t, n, few: (
        *interface._flash_attn_forward(t.q, t.q, t.q, *OPTIONS, few, n, 0.0, None, False)[:2],
        *interface._flash_attn_varlen_forward(*varlen_arguments(t, n), *OPTIONS, few, n)[:2],
    ),
    "cache": lambda t, n, few: flash_attn.flash_attn_with_kvcache(
        t.q, t.cache, t.cache, cache_seqlens=n, window_size=(n, few), num_splits=few
    ),
    "cache append": lambda t, n, few: flash_attn.flash_attn_with_kvcache(
        t.q, t.cache, t.cache, t.q, t.q, t.cos, t.cos, cache_seqlens=n, causal=True
    ),
    "rotary": lambda t, n, few: (
        rotary.apply_rotary_emb(t.q, t.cos, t.cos, seqlen_offsets=few),
        rotary.apply_rotary_emb(t.q, t.cos, t.cos, inplace=True, seqlen_offsets=few),
        apply_rotary(t.q, t.cos, t.cos, few),
    ),
    "rotary varlen": lambda t, n, few: rotary.apply_rotary_emb(
        t.packed, t.cos, t.cos, seqlen_offsets=few, cu_seqlens=t.cu, max_seqlen=n
    ),
    "rotary packed": lambda t, n, few: (
        rotary.apply_rotary_emb_qkv_(t.qkv, t.cos, t.cos, seqlen_offsets=few),
        rotary.apply_rotary_emb_qkv_(t.grouped, t.cos, t.cos, seqlen_offsets=n, num_heads_q=few),
        rotary.apply_rotary_emb_kv_(t.kv, t.cos, t.cos, seqlen_offsets=few),
    ),
    "RotaryEmbedding": lambda t, n, few: (
        t.turn(t.qkv, seqlen_offset=few),
        t.turn(t.qkv, max_seqlen=n),
        *t.turn(t.q, t.kv, few, n + 20),
    ),
    "RotaryEmbedding xPos": lambda t, n, few: t.turn_and_scale(t.qkv, seqlen_offset=few),
    "unpad_input": unpadded,
    "unpad concatenated": concatenated,
    "index_put_first_axis": lambda t, n, few: bert_padding.index_put_first_axis(t.cos[:2], t.labels, n),
    "CrossEntropyLoss": lambda t, n, few: CrossEntropyLoss(ignore_index=few)(t.cos[:2], t.labels),
    "inner attention": lambda t, n, few: (
        FlashSelfAttention(window_size=(few, few))(t.packed_qkv, cu_seqlens=t.cu, max_seqlen=n),
        FlashCrossAttention()(t.packed, t.packed_kv, cu_seqlens=t.cu, max_seqlen=n, cu_seqlens_k=t.cu, max_seqlen_k=n),
    ),
    "MHA": lambda t, n, few: t.mha(t.packed.flatten(1), cu_seqlens=t.cu, max_seqlen=n),
    "MHA decoding": decoding,
    "dropout_mask": lambda t, n, few: flash_attn.dropout_mask(t.in_length[0, :2], 0.2, few, few, n, n),
}


# Without it Dynamo breaks the graph at .item().
traces_items = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)


@traces_items
def both(device, call, backend):
    """(eager, compiled) results of call(Inputs, LONGEST, FEW), the numbers read within."""
    inputs, numbers = Inputs(device), torch.tensor([LONGEST, FEW], device=device)

    def function(numbers):
        return call(inputs, numbers[0].item(), numbers[1].item())

    torch._dynamo.reset()
    results = []
    for run in (function, torch.compile(function, backend=backend, fullgraph=True)):
        torch.manual_seed(1)
        result = run(numbers)
        results.append(result if isinstance(result, tuple) else (result,))
    torch._dynamo.reset()
    return results


@pytest.mark.parametrize("name", CALLS)
def test_compiled_equals_eager(device, name):
    for expected, actual in zip(*both(device, CALLS[name], "aot_eager")):
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected, atol=1e-5 if device == "cpu" else 1e-2, rtol=1e-2)


def test_inductor_and_gradients(device):
    qkv = rows(device, 14, 3, HEADS, HEAD_DIM).requires_grad_()

    def call(t, n, few):
        turned = rotary.apply_rotary_emb(qkv[:, 0], t.cos, t.cos, seqlen_offsets=few, cu_seqlens=t.cu, max_seqlen=n)
        return flash_attn.flash_attn_varlen_func(turned, *qkv[:, 1:].unbind(1), t.cu, t.cu, n, n, window_size=(n, few))

    results = [(out, *torch.autograd.grad(out.sum(), qkv)) for (out,) in both(device, call, "inductor")]
    for expected, actual in zip(*results):
        torch.testing.assert_close(actual, expected, atol=1e-5 if device == "cpu" else 1e-2, rtol=1e-2)


@traces_items
def test_what_does_not_fit_is_found_when_it_runs(device):
    inputs = Inputs(device)

    def function(offset):
        return apply_rotary(inputs.q, inputs.cos, inputs.cos, offset.item())

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    compiled(torch.tensor(CAPACITY - LONGEST))
    for wrong in (-1, CAPACITY - LONGEST + 1):
        with pytest.raises(RuntimeError):
            compiled(torch.tensor(wrong))


def test_conditions_of_known_numbers():
    for condition in (False, True):
        assert (
            conditions.may_hold(condition) is conditions.holds(condition) is conditions.is_known(condition) is condition
        )
        assert conditions.is_decided(condition)
