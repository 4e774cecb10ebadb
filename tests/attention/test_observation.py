"""What sees the calls of a backend: a profiler by names, FLASH_ATTN_DEBUG=1 by checks of what the device holds."""

from __future__ import annotations

import math
import os
import warnings

import fresh_process
import pytest
import torch

import flash_attn
from flash_attn import KvCachePlan, backends, observation
from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func

HEADS, HEADS_K, HEAD_DIM = 4, 2, 16


def tensor(device, *shape, grad=False):
    return torch.randn(*shape, device=device, dtype=torch.float16, requires_grad=grad)


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setattr(observation, "DEBUG", True)


def names_of(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile() as profile:
            call()
    events = [event for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CPU]
    return [event.key for event in events if event.key.startswith("flash_attn.")]


def test_profiled_calls_have_names(device):
    """With family and shapes, for every pass; elsewhere the backend is as it is."""
    q = tensor(device, 2, 9, HEADS, HEAD_DIM, grad=True)
    k = tensor(device, 2, 11, HEADS_K, HEAD_DIM, grad=True)
    options = {"causal": True, "window_size": (5, 0)}
    plans = flash_attn.explain(q, k, k, **options)
    names = names_of(lambda: flash_attn.flash_attn_func(q, k, k, **options).sum().backward())
    shapes = f"fp16 q{list(q.shape)} k{list(k.shape)} causal"
    assert names == [
        f"flash_attn.{name} {plans[direction]['kernel']} {shapes}"
        for name, direction in (("fwd", "forward"), ("bwd", "backward"))
    ]
    cache = tensor(device, 2, 32, HEADS_K, HEAD_DIM)
    names = names_of(lambda: flash_attn.flash_attn_with_kvcache(q.detach(), cache, cache, window_size=(3, 1)))
    assert len(names) == 1
    assert names[0].startswith("flash_attn.fwd_kvcache ")
    assert names[0].endswith(f"q{list(q.shape)} kcache{list(cache.shape)} window[3, 1]")
    assert backends.of(q) is backends.get(device)


CU = (0, 5, 5, 14)


def packed(device, cu_q=CU, cu_k=CU, rows=14, most=(9, 9), q=None, k=None, **options):
    q = tensor(device, rows, HEADS, HEAD_DIM) if q is None else q
    k = tensor(device, rows, HEADS_K, HEAD_DIM) if k is None else k
    return flash_attn.flash_attn_varlen_func(q, k, k, ints(device, *cu_q), ints(device, *cu_k), *most, **options)


def pages_of(device):
    return tensor(device, 6, 4, HEADS_K, HEAD_DIM)


def with_nan(x, *index, value=math.nan):
    with torch.no_grad():
        x[index] = value
    return x


BAD_PACKED = {
    "falls": (lambda d: packed(d, (0, 6, 5, 14)), r"cu_seqlens_q: expected values that never fall, got 6 and 5"),
    "negative": (lambda d: packed(d, cu_k=(-1, 5, 5, 14)), "cu_seqlens_k: expected values >= 0, got -1"),
    "beyond": (lambda d: packed(d, (0, 5, 5, 15), most=(20, 20)), "cu_seqlens_q: expected values of at most 14"),
    "longer": (
        lambda d: packed(d, most=(8, 9)),
        r"cu_seqlens_q: expected lengths of at most max_seqlen_q \(8\), got 9",
    ),
    "longer keys": (lambda d: packed(d, most=(9, 8)), r"cu_seqlens_k: expected lengths of at most max_seqlen_k \(8\)"),
    "packed name": (
        lambda d: flash_attn_varlen_qkvpacked_func(tensor(d, 14, 3, HEADS, HEAD_DIM), ints(d, 0, 15), 20),
        "cu_seqlens: expected values of at most 14",
    ),
    "page": (
        lambda d: packed(d, k=pages_of(d), block_table=ints(d, *range(1, 10)).view(3, 3)),
        r"block_table: expected entries in \[0, 6\)",
    ),
    "nan": (
        lambda d: packed(d, q=with_nan(tensor(d, 14, HEADS, HEAD_DIM), 7, 1, 2)),
        r"q: expected finite values, got nan at \[7, 1, 2\]",
    ),
}


@pytest.mark.parametrize("name", BAD_PACKED)
def test_packed_sequences_are_checked(device, debug, monkeypatch, name):
    call, message = BAD_PACKED[name]
    with pytest.raises(RuntimeError, match=f"^{message}"):
        call(device)
    if name not in ("page",):  # that the CPU rejects in any case
        monkeypatch.setattr(observation, "DEBUG", False)
        call(device)


def test_rows_that_are_not_in_use_are_not_checked(device, debug):
    q = with_nan(tensor(device, 16, HEADS, HEAD_DIM), slice(14, None))
    k = with_nan(tensor(device, 16, HEADS_K, HEAD_DIM), slice(14, None))
    packed(device, q=q, k=k)
    k = with_nan(tensor(device, 3, 32, HEADS_K, HEAD_DIM), slice(None), slice(7, None))
    flash_attn.flash_attn_with_kvcache(q[:3, None], k, k, cache_seqlens=ints(device, 7, -1, 5))


def test_infinities_and_gradients_are_checked(device, debug):
    q = tensor(device, 2, 9, HEADS, HEAD_DIM, grad=True)
    kv = tensor(device, 2, 9, 2, HEADS, HEAD_DIM)
    out = flash_attn.flash_attn_kvpacked_func(q, kv)
    with pytest.raises(RuntimeError, match=r"^dout: expected finite values, got nan at \[1, 0, 2, 3\]"):
        out.backward(with_nan(torch.ones_like(out), 1, 0, 2, 3))
    with_nan(kv, 1, 3, 1, 0, 0, value=-math.inf)
    with pytest.raises(RuntimeError, match=r"^kv \(its v\): expected finite values, got -inf at \[1, 3, 0, 0\]"):
        flash_attn.flash_attn_kvpacked_func(q, kv)


def cached(device, lengths=(7, 30), new=2, cache=None, table=None, **options):
    q = tensor(device, 2, 1, HEADS, HEAD_DIM)
    cache = tensor(device, 2, 32, HEADS_K, HEAD_DIM) if cache is None else cache
    k = tensor(device, 2, new, HEADS_K, HEAD_DIM)
    lengths = ints(device, *lengths)
    return flash_attn.flash_attn_with_kvcache(
        q, cache, cache.clone(), k, k, cache_seqlens=lengths, block_table=table, causal=True, **options
    )


def bad_cache(device, *index):
    return with_nan(tensor(device, 2, 32, HEADS_K, HEAD_DIM), *index)


BAD_CACHES = {
    "too long": (lambda d: cached(d, (7, 31)), "cache_seqlens: expected cache length plus 2 new rows of at most 32"),
    "negative": (lambda d: cached(d, (-2, 3)), "cache_seqlens: expected lengths >= 0, or -1"),
    "row": (
        lambda d: cached(d, cache_batch_idx=ints(d, 0, 2)), r"cache_batch_idx: expected entries in \[0, 2\), got 2",
    ),
    "page": (
        lambda d: cached(d, (7, 9), cache=pages_of(d), table=ints(d, 0, 1, 2, 3, 4, 6).view(2, 3)),
        r"block_table: expected entries in \[0, 6\) for the pages in use, got 6 for sequence 1",
    ),
    "angles": (
        lambda d: cached(d, rotary_cos=tensor(d, 31, 8), rotary_sin=tensor(d, 31, 8)),
        "rotary_cos: expected at least 32 rows, got 31",
    ),
    "nan": (
        lambda d: cached(d, cache=bad_cache(d, 1, 29)),
        r"k_cache: expected finite values in sequence 1, got nan at \[29, 0, 0\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CACHES)
def test_caches_are_checked(device, debug, name):
    call, message = BAD_CACHES[name]
    with pytest.raises(RuntimeError, match=f"^{message}"):
        call(device)


def test_a_stale_plan_is_told(device, debug):
    q, cache = tensor(device, 2, 1, HEADS, HEAD_DIM), tensor(device, 2, 32, HEADS_K, HEAD_DIM)
    lengths = ints(device, 7, 30)
    plan = KvCachePlan(lengths, 1, HEADS, HEADS_K, HEAD_DIM, 32)
    call = lambda: flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, plan=plan)  # noqa: E731
    call()
    lengths += 1
    message = r"^plan: expected one updated for cache_seqlens \[8, 31\], got one for \[7, 30\]"
    with pytest.raises(RuntimeError, match=message):
        call()
    plan.update(lengths)
    call()


@pytest.mark.devices("cuda")
def test_captured_calls_are_not_checked(device, debug):
    q, cache = tensor(device, 2, 1, HEADS, HEAD_DIM), tensor(device, 2, 32, HEADS_K, HEAD_DIM)
    lengths = ints(device, 7, 30)
    plan = KvCachePlan(lengths, 1, HEADS, HEADS_K, HEAD_DIM, 32)
    call = lambda: flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, plan=plan)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(lengths)
        call()
    lengths += 1
    graph.replay()
    call()  # what the replay planned for is not known


def test_the_environment_variable():
    code = (
        "import torch, flash_attn\n"
        "q = torch.full((1, 2, 1, 8), float('nan'))\n"
        "try:\n    flash_attn.flash_attn_func(q, q, q)\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    for value, expected in (("1", "q: expected finite values, got nan at [0, 0, 0, 0]"), ("0", "")):
        environment = {**os.environ, "FLASH_ATTN_DEBUG": value}
        result = fresh_process.run(code, env=environment)
        assert result.returncode == 0 and result.stdout.strip() == expected, result.stderr
