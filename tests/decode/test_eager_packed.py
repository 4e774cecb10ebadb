"""Plain packed CUDA calls of servers in one C function: equal bits to `calls.forward_in_use`, which calls it leaves to
that, and equal errors."""

from __future__ import annotations

import pytest
import torch
from harness import by_function, record_served
from serving_harness import HEADS, LENGTHS_Q, keywords, make_batch, make_latent_batch

from flash_attn import set_batch_invariant
from flash_attn.integrations import sglang, vllm

pytestmark = pytest.mark.devices("cuda")


@pytest.fixture
def served(monkeypatch):
    return record_served(monkeypatch, "packed_attention")


def call(batch, **options):
    given = keywords(
        q=batch.q, k=batch.k, v=batch.v, cu_seqlens_q=batch.cu_q, max_seqlen_q=max(LENGTHS_Q), seqused_k=batch.lengths,
        max_seqlen_k=64, block_table=batch.table, causal=True, return_softmax_lse=True, softcap=0,
    )  # fmt: skip
    return vllm.flash_attn_varlen_func(**{**given, **options})


def latent_call(batch, **options):
    given = keywords(q=batch.q, k=batch.k, v=batch.v, q_v=batch.q_v, softmax_scale=0.05)
    return call(batch.batch, **{**given, **options})


def sglang_call(batch, **options):
    return sglang.flash_attn_with_kvcache(
        batch.q, batch.k, batch.v, page_table=batch.table, cache_seqlens=batch.lengths, cu_seqlens_q=batch.cu_q,
        causal=True, return_softmax_lse=True, **options,
    )[:2]  # fmt: skip


def packed_keys(batch, **options):
    k, v = batch.k.nan_to_num().flatten(0, 1), batch.v.nan_to_num().flatten(0, 1)
    return call(batch, k=k, v=v, cu_seqlens_k=batch.cu_q, seqused_k=None, block_table=None, **options)


SERVED = {
    "pages": call,
    "window": lambda b: call(b, window_size=[9, 0]),
    "softcap": lambda b: call(b, softcap=2.0, softmax_scale=0.3),
    "not causal": lambda b: call(b, causal=False, window_size=None),
    "batch-invariant": lambda b: call(b, num_splits=1),
    "sinks": lambda b: call(b, s_aux=torch.linspace(-1, 2, HEADS, device="cuda")),
    "sinks of 16 bits": lambda b: call(b, s_aux=torch.linspace(-1, 2, HEADS, device="cuda", dtype=b.q.dtype)),
    "cu_seqlens_k": lambda b: call(b, cu_seqlens_k=b.cu_q * 0),
    "packed keys": packed_keys,
    "all keys": lambda b: call(b, k=b.k.nan_to_num(), v=b.v.nan_to_num(), seqused_k=None, cu_seqlens_k=b.cu_q),
    "sm_margin": lambda b: sglang_call(b, sm_margin=4),
}


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("head_dim_v", (32, 16))
def test_equal_bits(device, served, name, head_dim_v):
    batch = make_batch(device, head_dim_v)
    fast = SERVED[name](batch)
    with by_function():
        slow = SERVED[name](batch)
    assert served == [True] and all(torch.equal(a, b) for a, b in zip(fast, slow))


@pytest.mark.parametrize("options", ({}, {"causal": False}, {"softmax_scale": None}, {"num_splits": 1}), ids=str)
def test_equal_bits_of_latent_attention(device, served, options):
    batch = make_latent_batch(device)
    fast = latent_call(batch, **options)
    with by_function():
        slow = latent_call(batch, **options)
    assert served == [True] and all(torch.equal(a, b) for a, b in zip(fast, slow))


def test_a_given_out_is_returned_and_batch_invariance_is_seen(device, served):
    batch = make_batch(device)
    out = torch.empty_like(batch.q)
    version = out._version
    assert call(batch, out=out)[0] is out and out._version > version
    with set_batch_invariant(True):
        invariant = call(batch)[0]
    with by_function():
        assert torch.equal(invariant, call(batch, num_splits=1)[0])
    assert served == [True, True]


LEFT_TO_PYTHON = {
    "int64 lengths": lambda b: call(b, seqused_k=b.lengths.long()),
    "a cache without pages": lambda b: call(b, k=b.k[:5], v=b.v[:5], block_table=None),
    "no lengths": lambda b: call(b, seqused_k=None),
    "gradient": lambda b: call(b, q=b.q.clone().requires_grad_()),
    "subclass": lambda b: call(b, q=b.q.as_subclass(type("X", (torch.Tensor,), {}))),
}


@pytest.mark.parametrize("name", LEFT_TO_PYTHON)
def test_calls_left_to_python(device, served, name):
    LEFT_TO_PYTHON[name](make_batch(device))
    assert served == [False]


BAD = {
    "softcap": lambda b: call(b, softcap=-1.0),
    "lengths": lambda b: call(b, seqused_k=b.lengths[:2]),
    "out": lambda b: call(b, out=torch.empty_like(b.q)[:, :0]),
    "out in q": lambda b: call(b, out=b.q),
    "heads": lambda b: call(b, q=b.q[:, :3]),
    "sinks": lambda b: call(b, s_aux=torch.zeros(HEADS + 1, device="cuda")),
    "cu_seqlens_q": lambda b: call(b, cu_seqlens_q=b.cu_q[None]),
    "block_table": lambda b: call(b, block_table=b.table.long().bool()),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_python(device, name):
    batch, texts = make_batch(device), []
    for is_on in (True, False):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            if is_on:
                BAD[name](batch)
            else:
                with by_function():
                    BAD[name](batch)
        texts.append((type(caught.value), str(caught.value).splitlines()[0]))
    assert texts[0] == texts[1]
