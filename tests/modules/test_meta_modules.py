"""Modules built on the meta device and loaded, as FSDP and loaders of checkpoints do it, against modules built at once.

Memory that comes without values is NaN here.
"""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch._subclasses import FakeTensorMode

from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.modules.block import Block, ParallelBlock
from flash_attn.modules.embedding import BertEmbeddings
from flash_attn.modules.mha import MHA, FlashCrossAttention, FlashSelfAttention, get_alibi_slopes
from flash_attn.modules.mlp import FusedMLP, GatedMlp
from flash_attn.ops.layer_norm import DropoutAddLayerNorm
from flash_attn.ops.triton.layer_norm import RMSNorm

HEADS, HEAD_DIM = 4, 32
EMBED = HEADS * HEAD_DIM
FLASH = {"use_flash_attn": True, "causal": True}


class OnQKV(torch.nn.Module):
    """A module of packed q, k and v, of hidden states of EMBED features."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.unflatten(-1, (HEADS, -1)).unsqueeze(2).repeat(1, 1, 3, 1, 1))


class OnKV(OnQKV):
    def forward(self, x):
        heads = x.unflatten(-1, (HEADS, -1))
        return self.inner(heads, heads.unsqueeze(2).repeat(1, 1, 2, 1, 1))


class OnTokens(OnQKV):
    def forward(self, x):
        return self.inner((x[..., 0] > 0).long())


class Sum(OnQKV):
    """The sum of the results of a module."""

    def forward(self, x):
        return sum(self.inner(x))


def mixer(dim):
    return MHA(dim, HEADS, use_alibi=True, **FLASH)


class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.loss = RMSNorm(EMBED), CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, x):
        rows = self.norm(x).flatten(0, 1)
        return self.loss(rows, torch.arange(rows.shape[0], device=x.device))


MODULES = {
    "alibi": lambda: MHA(EMBED, HEADS, use_alibi=True, **FLASH),
    "grouped alibi": lambda: MHA(EMBED, HEADS, num_heads_kv=2, use_alibi=True, **FLASH),
    "rotary": lambda: MHA(EMBED, HEADS, rotary_emb_dim=16, **FLASH),
    "xpos": lambda: MHA(EMBED, HEADS, rotary_emb_dim=16, rotary_emb_scale_base=64, **FLASH),
    "by definition": lambda: MHA(EMBED, HEADS, rotary_emb_dim=HEAD_DIM),
    "rotary alone": lambda: OnQKV(RotaryEmbedding(HEAD_DIM, interleaved=True)),
    "self": lambda: OnQKV(FlashSelfAttention(alibi_slopes=get_alibi_slopes(HEADS))),
    "cross": lambda: OnKV(FlashCrossAttention(causal=True, alibi_slopes=get_alibi_slopes(HEADS))),
    "norm and loss": Loss,
    "block": lambda: Sum(Block(EMBED, mixer, GatedMlp, RMSNorm, residual_in_fp32=True)),
    "parallel block": lambda: Sum(ParallelBlock(EMBED, mixer, FusedMLP, fused_dropout_add_ln=True)),
    "embeddings and norm": lambda: torch.nn.Sequential(
        OnTokens(BertEmbeddings(EMBED, 2, 16, 2)), DropoutAddLayerNorm(EMBED)
    ),
}


def without_values(device):
    return lambda x: torch.full_like(x, math.nan, device=device)


def to_empty(module, state, device):
    module._apply(without_values(device))
    module.load_state_dict(state)


def to_empty_one_by_one(module, state, device):
    """What FSDP does without param_init_fn."""
    for part in module.modules():
        if [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
            part._apply(without_values(device), recurse=False)
            with torch.no_grad():
                part.reset_parameters()
    module.load_state_dict(state)


def assign(module, state, device):
    """Buffers that are not saved stay on meta."""
    module.load_state_dict(state, assign=True)


def assign_and_fill(module, state, device):
    """What transformers does."""
    assign(module, state, device)
    for part in module.modules():
        for name, x in part.named_buffers(recurse=False):
            setattr(part, name, without_values(device)(x))


def again(module, state, device):
    """Memory without values in place of values."""
    to_empty(module, state, device)
    to_empty(module, state, device)


def build(name, device):
    with torch.device(device):
        return MODULES[name]()


LOADS = (to_empty_one_by_one, assign, assign_and_fill, again)
CASES = [(name, to_empty) for name in MODULES] + [(name, load) for name in ("alibi", "xpos") for load in LOADS]


@pytest.mark.parametrize("name,load", CASES)
def test_loaded_modules_compute_the_same(device, name, load):
    plain, loaded = build(name, device), build(name, "meta")
    dtype = torch.float32
    if device == "cuda":
        dtype = torch.bfloat16
        plain, loaded = plain.to(dtype), loaded.to(dtype)
    state = plain.state_dict()
    assert list(loaded.state_dict()) == list(state)
    load(loaded, state, device)
    x = torch.randn(2, 9, EMBED, device=device, dtype=dtype)
    expected = plain(x)
    for module in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded)), loaded, loaded):
        assert torch.equal(module(x), expected)
    half = torch.float16
    for ours, theirs in ((copy.deepcopy(loaded), copy.deepcopy(plain)), (loaded, plain)):
        assert torch.equal(ours.to(half)(x.to(half)), theirs.to(half)(x.to(half)))
    dtypes = {key: buffer.dtype for key, buffer in plain.named_buffers()}
    assert {key: buffer.dtype for key, buffer in loaded.named_buffers()} == dtypes
    for key, buffer in plain.named_buffers():
        ours = loaded.get_buffer(key)
        assert ours.is_meta or torch.equal(ours, buffer)  # on meta where nothing has used it


@pytest.mark.parametrize("name,load", [("alibi", assign), ("xpos", assign_and_fill)])
def test_compiled_before_the_first_use(device, name, load):
    plain, loaded = build(name, device).half(), build(name, "meta").half()
    load(loaded, plain.state_dict(), device)
    x = torch.randn(2, 9, EMBED, device=device, dtype=torch.float16)
    torch._dynamo.reset()
    compiled = torch.compile(loaded, backend="aot_eager")
    torch.testing.assert_close(compiled(x), plain(x))
    torch.testing.assert_close(loaded(x), plain(x))


def test_first_use_in_inference_mode(device):
    plain, loaded = build("alibi", device).half(), build("alibi", "meta").half()
    assign(loaded, plain.state_dict(), device)
    x = torch.randn(2, 9, EMBED, device=device, dtype=torch.float16)
    with torch.inference_mode():
        loaded(x)
    loaded(x).sum().backward()
    assert torch.equal(loaded(x), plain(x))


@pytest.mark.parametrize("name", ("alibi", "xpos"))
def test_a_call_on_fake_tensors_leaves_nothing(device, name):
    """As exports make them, and estimates of memory: tables and buffers made there have no values."""
    plain, loaded = build(name, device).half(), build(name, "meta").half()
    assign(loaded, plain.state_dict(), device)
    x = torch.randn(2, 9, EMBED, device=device, dtype=torch.float16)
    expected = plain(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        for module in (plain, loaded):
            assert module(mode.from_tensor(x)).shape == x.shape
    for module in (plain, loaded):
        assert torch.equal(module(x), expected)


def test_values_that_a_user_gives(device):
    """They count, and move with the module."""
    rotary = RotaryEmbedding(16, device="meta")
    rotary._apply(without_values(device))
    rotary.inv_freq = rotary.inv_freq * 0.25
    stretched = RotaryEmbedding(16, device=device)
    stretched.inv_freq = stretched.inv_freq * 0.25
    qkv = torch.randn(1, 9, 3, 2, 16, device=device)
    expected = stretched(qkv.clone())
    assert not torch.equal(expected, RotaryEmbedding(16, device=device)(qkv.clone()))
    assert torch.equal(rotary.to(device)(qkv.clone()), expected)
    assert torch.equal(rotary.to("cpu").to_empty(device=device)(qkv.clone()), expected)


def test_slopes_without_values_are_named(device):
    """A tensor on meta has none to remember, and a tensor that is assigned later has."""
    slopes = torch.tensor(get_alibi_slopes(HEADS), dtype=torch.float32, device=device)
    qkv = torch.randn(1, 9, 3, HEADS, 16, device=device, dtype=torch.float16)
    expected = FlashSelfAttention(alibi_slopes=slopes)(qkv)
    module = FlashSelfAttention(alibi_slopes=slopes.to("meta"))
    module._apply(without_values(device))
    message = r"^alibi_slopes: expected a tensor on q's device \(\w+(:0)?\), got one on meta"
    with pytest.raises(RuntimeError, match=message):
        module(qkv)
    module.alibi_slopes = slopes
    assert torch.equal(module(qkv), expected)
    assert torch.equal(module.to(device)(qkv), expected)
