"""The names under which clients pass attention sinks, and the check of transformers that looks for them.

transformers passes a model's sinks as s_aux or learnable_sink if the signature of flash_attn_varlen_func has one of
them, and drops them without an error if it has neither.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers_state import keep_loaded_functions, keyword_processors

import flash_attn

NAMES = ("sinks", "s_aux", "learnable_sink")
FUNCTIONS = (
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_kvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
)
HEADS, HEAD_DIM, SEQLEN = 4, 32, 20


def call(name, device, **options):
    """A public function of attention on the same random tensors whenever it is called."""
    generator = torch.Generator(device=device).manual_seed(1)
    cu_seqlens = torch.tensor([0, 8, SEQLEN], dtype=torch.int32, device=device)
    packed = {"qkvpacked": (3,), "kvpacked": (None, 2)}.get(name.split("_")[-2], (None, None, None))
    rows = (SEQLEN,) if "varlen" in name else (2, SEQLEN)
    tensors = [
        torch.randn(
            *rows, *(() if n is None else (n,)), HEADS, HEAD_DIM, generator=generator, device=device,
            dtype=torch.bfloat16,
        )
        for n in packed
    ]  # fmt: skip
    sequences = ()
    if "varlen" in name:
        sequences = (cu_seqlens, 12) if len(packed) == 1 else (cu_seqlens, cu_seqlens, 12, 12)
    return getattr(flash_attn, name)(*tensors, *sequences, **options)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", NAMES[1:])
def test_every_name_means_the_same(device, function, name):
    parameter = inspect.signature(getattr(flash_attn, function)).parameters[name]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is None
    sinks = torch.linspace(-1, 5, HEADS, device=device)
    expected, other = (sinks.clone().requires_grad_() for _ in range(2))
    out = call(function, device, sinks=expected)
    same = call(function, device, **{name: other})
    assert torch.equal(out, same) and not torch.equal(out, call(function, device))
    out.float().sum().backward()
    same.float().sum().backward()
    assert expected.grad.abs().max() > 0
    assert torch.allclose(expected.grad, other.grad, rtol=1e-3)


@pytest.mark.parametrize("first,second", [("sinks", "s_aux"), ("sinks", "learnable_sink"), ("s_aux", "learnable_sink")])
def test_two_names(device, first, second):
    """The same tensor twice is one argument; two tensors are an error that names both, even where they are equal."""
    sinks = torch.zeros(HEADS, device=device)
    out = call("flash_attn_func", device, **{first: sinks, second: sinks})
    assert torch.equal(out, call("flash_attn_func", device, sinks=sinks))
    with pytest.raises(TypeError, match=f"^{second}: expected None, for {first} is given"):
        call("flash_attn_func", device, **{first: sinks, second: sinks.clone()})


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_tensor_is_named(device, name):
    with pytest.raises(TypeError, match=f"^{name}: expected a Tensor, got list"):
        call("flash_attn_func", device, **{name: [0.0] * HEADS})


def test_names_over_a_cache(device):
    q, cache = (torch.randn(2, n, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16) for n in (1, SEQLEN))
    sinks = torch.linspace(-1, 5, HEADS, device=device)
    parameters = inspect.signature(flash_attn.flash_attn_with_kvcache).parameters

    def call_cache(**options):
        return flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=SEQLEN, **options)

    expected = call_cache(sinks=sinks)
    assert not torch.equal(expected, call_cache())
    for name in NAMES:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY and parameters[name].default is None
        assert torch.equal(call_cache(**{name: sinks}), expected)
        with pytest.raises(TypeError, match=f"^{name}: expected a Tensor, got list"):
            call_cache(**{name: [0.0] * HEADS})
    for first, second in (("sinks", "s_aux"), ("sinks", "learnable_sink"), ("s_aux", "learnable_sink")):
        assert torch.equal(call_cache(**{first: sinks, second: sinks}), expected)
        with pytest.raises(TypeError, match=f"^{second}: expected None, for {first} is given"):
            call_cache(**{first: sinks, second: sinks.clone()})


def test_compiled(device):
    sinks = torch.linspace(-1, 5, HEADS, device=device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, s_aux):
        return flash_attn.flash_attn_func(q, q, q, s_aux=s_aux)

    q = torch.randn(1, 9, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    assert torch.equal(compiled(q, sinks), flash_attn.flash_attn_func(q, q, q, sinks=sinks))


def test_transformers_passes_the_sinks(device, monkeypatch):
    """Its own code from the states of a layer to the call: signature check, keyword arguments, the function."""
    gates = pytest.importorskip("transformers.modeling_flash_attention_utils")
    monkeypatch.setattr(gates, "is_flash_attn_2_available", lambda: True)  # it wants an installed one, and CUDA
    keep_loaded_functions(gates, monkeypatch)
    loaded = gates.lazy_import_flash_attention("flash_attention_2")
    assert loaded[0][1] is flash_attn.flash_attn_varlen_func
    assert keyword_processors(loaded)[0].keywords["supports_mapping"]["s_aux"]
    q, k, v = (torch.randn(2, SEQLEN, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(3))
    sinks = torch.linspace(-1, 5, HEADS, device=device, dtype=torch.bfloat16)
    mask = torch.ones(2, SEQLEN, dtype=torch.long, device=device)
    mask[0, 13:] = 0
    for attention_mask in (None, mask):
        out = gates._flash_attention_forward(
            q, k, v, attention_mask, SEQLEN, True, s_aux=sinks, attn_implementation="flash_attention_2"
        )
        expected = flash_attn.flash_attn_func(q, k, v, causal=True, sinks=sinks)
        if attention_mask is not None:
            expected = expected * mask[..., None, None]
        assert torch.allclose(out.float(), expected.float(), atol=1e-2)
        plain = flash_attn.flash_attn_func(q, k, v, causal=True)
        assert not torch.allclose(out[1].float(), plain[1].float(), atol=1e-2)
