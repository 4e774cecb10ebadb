"""The clients of FlashAttention-3's module: their own code where it is installed, else their calls, with the place.

How they find the module: tests/build/test_flash_attn_3_install.py.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from flash_attn_3_harness import CASES, DENSE, OPS, as_flash_attn, by_sequence, cache_problem, fa3
from harness import check_forward, check_gradients, make_problem
from reference import assert_accurate
from transformers_state import keep_loaded_functions, keyword_processors

import flash_attn


@pytest.fixture
def torch_fa3():
    """torch's own client, from 2.10 on: it imports flash_attn_interface and calls the operators by position."""
    module = pytest.importorskip("torch.nn.attention._fa3")
    module._fa3_import_module("flash_attn_interface")
    return module


@pytest.mark.parametrize("packed", (False, True))
def test_torch_calls_the_operators(device, torch_fa3, packed):
    problem = make_problem(CASES["varlen" if packed else "causal"], device)
    q, k, v = problem.q, problem.k, problem.v
    lengths = (problem.cu_seqlens_q, problem.cu_seqlens_k, problem.max_seqlen_q, problem.max_seqlen_k)
    lengths = lengths if packed else (None, None, q.shape[1], k.shape[1])
    given = None if packed else torch.empty_like(q.transpose(1, 2)).transpose(1, 2)  # as SDPA wants its output
    out, lse = torch_fa3._fa3_run_forward(q, k, v, *lengths, None, True, None, None, None, given)
    assert packed or out.data_ptr() == given.data_ptr()
    check_forward(problem, out, as_flash_attn(lse))
    dout = torch.randn_like(out)
    grads = torch_fa3._fa3_run_backward(dout, q, k, v, out, lse, *lengths, None, True, -1, -1)
    check_gradients(problem, dout, grads)


@pytest.mark.devices("cuda")
def test_torch_routes_sdpa_here(hopper, torch_fa3):
    """activate_flash_attention_impl("FA3"): scaled_dot_product_attention's flash backend, which wants sm_90."""
    from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
    from torch.nn.attention._registry import restore_flash_attention_impl

    leaves = [torch.randn(2, 4, 130, 64, device=hopper, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    activate_flash_attention_impl("FA3")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
            grads = torch.autograd.grad(out, leaves, out.detach())
    finally:
        restore_flash_attention_impl()
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out.transpose(1, 2), expected)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, leaves, expected.detach())):
        assert torch.allclose(ours, theirs, atol=2e-2)


def test_transformer_engine_imports_and_calls(device):
    """Transformer Engine (d0067d0d) attention/dot_product_attention/backends.py:147-164 and context_parallel.py."""
    from flash_attn_3.flash_attn_interface import (  # noqa: F401
        _flash_attn_backward,
        _flash_attn_forward,
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
    )

    problem = make_problem(CASES["varlen"], device)
    q, k, v, cu_q, cu_k = problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k
    options = {"softmax_scale": 0.2, "window_size_left": -1, "window_size_right": 0}
    forward = (*[None] * 4, cu_q, cu_k, *[None] * 3, problem.max_seqlen_q, problem.max_seqlen_k, *[None] * 9)
    out, lse, *_ = _flash_attn_forward(q, k, v, *forward, causal=True, **options)
    check_forward(problem, out, as_flash_attn(lse), scale=0.2)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    dout = torch.randn_like(out)
    backward = (cu_q, cu_k, None, None, problem.max_seqlen_q, problem.max_seqlen_k, *grads)
    _flash_attn_backward(dout, q, k, v, out, lse, *backward, is_causal=True, deterministic=True, **options)
    check_gradients(problem, dout, grads, scale=0.2)


def test_diffusers_call(device):
    """diffusers 0.42.1 models/attention_dispatch.py:788: all by keyword, always with the LSE."""
    problem = make_problem(DENSE, device)
    unused = dict.fromkeys(("qv", "q_descale", "k_descale", "v_descale", "softmax_scale", "pack_gqa"))
    out, lse, *_ = fa3.flash_attn_func(
        q=problem.q, k=problem.k, v=problem.v, **unused, causal=True, window_size=(-1, -1), attention_chunk=0,
        softcap=0.0, num_splits=1, deterministic=False, sm_margin=0, return_attn_probs=True,
    )  # fmt: skip
    check_forward(problem, out, as_flash_attn(lse))
    assert lse.permute(0, 2, 1).shape == problem.q.shape[:3]


def test_xformers_call(device):
    """xformers 0.0.35 ops/fmha/flash3.py: keys in pages, their lengths in seqused_k, queries packed or a batch."""
    q, k, v, table, cu, lengths = cache_problem(device)
    tail = (12, 48, table, None, None, None, None, None, None, None, None, 32**-0.5, True, -1, -1, 0, 0.0)
    for queries, cu_q in ((q, cu), (q[:9].view(3, 3, 4, 32), None)):
        head = (None, None, None, None, cu_q, None, None, None, lengths)
        out, lse, *_ = OPS.fwd(queries, k, v, *head, *tail, cu_q is not None, None, 1, None, 0)
        assert out.shape == queries.shape
        bounds = cu if cu_q is not None else torch.arange(0, 12, 3, dtype=torch.int32)
        (exact, exact_lse), (plain, _) = by_sequence(queries.reshape(-1, 4, 32), k, v, table, bounds, lengths)
        assert_accurate(out.flatten(0, -3), exact, plain, "out")
        lse = lse if cu_q is not None else lse.transpose(0, 1).flatten(1)
        assert torch.allclose(lse.double(), exact_lse, atol=1e-4)


@pytest.fixture
def transformers_gates(device, monkeypatch):
    """transformers lets flash_attention_3 through: on the GPU if it finds the distribution, on the CPU by this."""
    gates = pytest.importorskip("transformers.modeling_flash_attention_utils")
    if device == "cuda":
        from transformers.utils.import_utils import is_flash_attn_3_available

        if not is_flash_attn_3_available():
            pytest.skip("transformers finds no installed distribution flash_attn_3 (pip install ./flash_attn_3)")
    else:
        entry = gates.FLASH_ATTENTION_COMPATIBILITY_MATRIX[3]
        monkeypatch.setitem(entry, "general_availability_check", lambda: True)
        monkeypatch.setitem(entry, "pkg_availability_check", lambda *_: True)
        monkeypatch.setitem(entry, "supported_devices", ((lambda: True, "cpu"),))
    keep_loaded_functions(gates, monkeypatch)
    return gates


def transformers_model(attention, dtype, device, state=None):
    import transformers

    config = transformers.MistralConfig(
        vocab_size=61, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, sliding_window=20, initializer_range=0.12,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    if state is not None:
        model.load_state_dict({name: value.to(dtype) for name, value in state.items()})
    return model.to(device)


@pytest.mark.parametrize("padded", (False, True))
def test_a_transformers_model(device, transformers_gates, padded):
    """attn_implementation="flash_attention_3": logits and gradients at most twice as far from float32 as eager's."""
    reference = transformers_model("eager", torch.float32, device)
    rounded = {name: value.bfloat16() for name, value in reference.state_dict().items()}
    reference.load_state_dict({name: value.float() for name, value in rounded.items()})
    ids = torch.randint(1, 61, (3, 50), device=device)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :17], mask[2, :30] = 0, 0
    weights = torch.randn(3, 50, 61, device=device) * mask[..., None]

    def step(model):
        logits = model(input_ids=ids, attention_mask=mask).logits
        logits.backward(weights.to(logits.dtype))
        gradient = torch.cat([x.grad.double().flatten() for x in model.parameters()])
        return logits.detach()[mask.bool()].double(), gradient

    exact = step(reference)
    errors = []
    for name in ("eager", "flash_attention_3"):
        model = transformers_model(name, torch.bfloat16, device, rounded)
        assert model.config._attn_implementation == name
        errors.append([(x - y).norm().item() for x, y in zip(step(model), exact)])
    assert transformers_gates._flash_varlen_fn is fa3.flash_attn_varlen_func
    assert all(ours <= 2 * eager for eager, ours in zip(*errors)), errors


def test_transformers_passes_sinks_and_pages(device, transformers_gates):
    """What a model with sinks and continuous batching make of the signatures: s_aux, page_table, cache_seqlens."""
    q, k, v = (torch.randn(2, 20, 4, 32, device=device, dtype=torch.bfloat16) for _ in range(3))
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], device=device)
    out = transformers_gates._flash_attention_forward(
        q, k, v, None, 20, True, s_aux=sinks, softcap=2.0, attn_implementation="flash_attention_3"
    )
    assert torch.equal(out, fa3.flash_attn_func(q, k, v, causal=True, sinks=sinks, softcap=2.0))
    assert not torch.equal(out, fa3.flash_attn_func(q, k, v, causal=True, softcap=2.0))
    processors = keyword_processors(transformers_gates.lazy_import_flash_attention("flash_attention_3"))
    if len(processors) < 2:
        pytest.skip("this release of transformers passes pages on as they are")
    paged = processors[1]
    table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    options = paged(1, 20, True, s_aux=sinks, block_table=table, cache_seqlens=lengths)
    assert options["page_table"] is table and options["cache_seqlens"] is lengths and options["s_aux"] is sinks
    assert set(options) <= set(inspect.signature(fa3.flash_attn_with_kvcache).parameters)
