"""Plain CUDA calls over a cache in one C function: equal bits to `attend_over_cache`, which calls it leaves to that,
and what autograd knows of its writes."""

from __future__ import annotations

import dataclasses

import kvcache_harness as kv
import pytest
import torch
from harness import by_function, record_served
from serving_harness import make_latent_batch

from flash_attn import flash_attn_with_kvcache, set_batch_invariant

pytestmark = pytest.mark.devices("cuda")
CASES = (
    kv.KvCase(),
    kv.KvCase(causal=True, seqlen_new=3, seqlen_q=3),
    kv.KvCase(page_size=16, softcap=5.0, window=(40, 0)),
    kv.KvCase(seqlen_q=40, causal=True, layout="heads_first"),
)


def make_problem(case, device):
    """Without cache_batch_idx."""
    problem, batch = kv.make_problem(case, device), len(case.lengths)
    if case.page_size:
        return problem
    caches = {"k_cache": problem.k_cache[:batch], "v_cache": problem.v_cache[:batch]}
    return dataclasses.replace(problem, rows=None, **caches)


@pytest.fixture
def served(monkeypatch):
    return record_served(monkeypatch, "attention_over_cache")


def both(problem, served, **options):
    """(out, lse, k_cache, v_cache) of a call by the C function and by attend_over_cache."""
    results = []
    for is_on in (True, False):
        copy = problem.clone()
        if is_on:
            result = kv.run(copy, **options)
        else:
            with by_function():
                result = kv.run(copy, **options)
        results.append((*result, copy.k_cache, copy.v_cache))
    assert served == [True]
    return results


@pytest.mark.parametrize("kv_case", CASES, ids=str)
@pytest.mark.parametrize("options", ({}, {"num_splits": 3}, {"softmax_scale": 0.2}), ids=str)
def test_equal_bits(device, served, kv_case, options):
    fast, slow = both(make_problem(kv_case, device), served, **options)
    assert all(torch.equal(kv.bits(a), kv.bits(b)) for a, b in zip(fast, slow))


@pytest.mark.parametrize("causal", (False, True))
def test_equal_bits_of_latent_attention(device, served, causal):
    batch = make_latent_batch(device)
    rows, batch_size = slice(0, 2 * len(batch.batch.lengths)), len(batch.batch.lengths)
    q, qv = (x[rows].unflatten(0, (batch_size, 2)) for x in (batch.q, batch.q_v))
    options = {"cache_seqlens": batch.batch.lengths, "block_table": batch.batch.table, "causal": causal}
    fast = flash_attn_with_kvcache(q, batch.k, batch.v, qv=qv, return_softmax_lse=True, **options)
    with by_function():
        slow = flash_attn_with_kvcache(q, batch.k, batch.v, qv=qv, return_softmax_lse=True, **options)
    assert served == [True] and all(torch.equal(a, b) for a, b in zip(fast, slow))


def test_a_given_out_is_returned_and_batch_invariance_is_seen(device, served):
    problem = make_problem(kv.KvCase(causal=True), device)
    out = torch.empty_like(problem.q)
    version = out._version
    assert kv.run(problem, out=out)[0] is out and out._version == version + 1
    with set_batch_invariant(True):
        invariant = kv.run(problem)[0]
    with by_function():
        assert torch.equal(kv.bits(invariant), kv.bits(kv.run(problem, batch_invariant=True)[0]))
    assert served == [True, True]


def test_writes_are_known(device, served):
    problem = make_problem(kv.KvCase(seqlen_new=1), device)
    versions = problem.k_cache._version, problem.v_cache._version
    kv.run(problem)
    assert served == [True]
    assert (problem.k_cache._version, problem.v_cache._version) == (versions[0] + 1, versions[1] + 1)


LEFT_TO_PYTHON = {
    "int of lengths": lambda p: kv.run(p, cache_seqlens=3),
    "int64 lengths": lambda p: kv.run(p, cache_seqlens=p.lengths.long()),
    "gradient": lambda p: flash_attn_with_kvcache(p.q.clone().requires_grad_(), p.k_cache, p.v_cache),
    "batch index": lambda p: kv.run(p, cache_batch_idx=torch.arange(len(p.lengths), device="cuda", dtype=torch.int32)),
    "convention": lambda p: kv.run(p, lse_convention="fa3"),
    "causal as an int": lambda p: kv.run(p, causal=1),
    "subclass": lambda p: flash_attn_with_kvcache(
        p.q.as_subclass(type("X", (torch.Tensor,), {})), p.k_cache, p.v_cache
    ),
}


@pytest.mark.parametrize("name", LEFT_TO_PYTHON)
def test_calls_left_to_python(device, served, name):
    LEFT_TO_PYTHON[name](make_problem(kv.KvCase(), device))
    assert not any(served)


BAD = {
    "heads": lambda p: kv.run(p, block_table=torch.zeros(1, 1, device="cuda", dtype=torch.int32)),
    "lengths": lambda p: kv.run(p, cache_seqlens=p.lengths[:1].repeat(7)),
    "num_splits": lambda p: kv.run(p, num_splits=-1),
    "softcap": lambda p: kv.run(p, softcap=-1.0),
    "out": lambda p: kv.run(p, out=torch.empty_like(p.q)[:, :0]),
    "keys alone": lambda p: kv.run(p, k=p.q),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_python(device, name):
    problem, texts = make_problem(kv.KvCase(), device), []
    for is_on in (True, False):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            if is_on:
                BAD[name](problem)
            else:
                with by_function():
                    BAD[name](problem)
        texts.append((type(caught.value), str(caught.value).splitlines()[0]))
    assert texts[0] == texts[1]
