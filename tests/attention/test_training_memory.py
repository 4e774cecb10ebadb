"""Memory of training: what a backward allocates grows linearly, and after a step all of it is free."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from cases import WGMMA_HEAD_DIMS
from test_memory import cuda_peak, rounded

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from flash_attn.ops import normalize

HEADS, HEADS_K = 4, 2
SMALL = 2**16  # random states, lengths, turn counters of deterministic mode: not of the size of a row


def accumulator_bytes(rows, head_dim, sequences):
    """The float32 dq accumulator and softmax_d: rows of each sequence rounded up to 128, head dims up to 256. The rows
    before the first and after the last sequence of a packed batch have separate tiles."""
    padded = (rows + 128 * (sequences + 2)) * HEADS
    return padded * (head_dim if head_dim in (32, *WGMMA_HEAD_DIMS) else head_dim + 64) * 4 + padded * 4


def backward_peak(seqlen, head_dim, **options):
    """Bytes that one dense backward adds at its peak; the forward's results exist before it."""
    gc.collect()  # what earlier tests left in cycles would otherwise be freed in between
    q = torch.randn(2, seqlen, HEADS, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(2, seqlen, HEADS_K, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv"
    )
    out = flash_attn_func(q, k, v, **options)
    dout = torch.randn_like(out)
    return cuda_peak(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("options", ({}, {"causal": True, "softcap": 5.0}, {"dropout_p": 0.1}, {"deterministic": True}),
                         ids=("plain", "softcap", "dropout", "deterministic"))  # fmt: skip
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_backward_allocates_gradients_accumulator_and_softmax_d(device, options, head_dim):
    """Nothing else, K and V not expanded to the query heads; at twice the length twice as much."""
    seqlen = 4096
    peaks = [backward_peak(n, head_dim, **options) for n in (seqlen, 2 * seqlen)]
    for peak, rows in zip(peaks, (2 * seqlen, 4 * seqlen)):
        gradients = sum(rounded(rows * heads * head_dim * 2) for heads in (HEADS, HEADS_K, HEADS_K))
        assert peak <= gradients + accumulator_bytes(rows, head_dim, 2) + SMALL
    assert peaks[1] <= 2 * peaks[0]


@pytest.mark.devices("cuda")
def test_backward_of_sequences_allocates_as_much(device):
    q, k, v = (torch.randn(6000, HEADS, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    cu = torch.tensor([0, 1000, 1001, 6000], device=device, dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, cu, cu, 4999, 4999, causal=True)
    dout = torch.randn_like(out)
    peak = cuda_peak(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    assert peak <= 3 * rounded(q.numel() * 2) + accumulator_bytes(6000, 64, 3) + SMALL


@pytest.mark.devices("cuda")
def test_packed_gradient_is_written_in_place(device):
    """The gradient of qkv is one buffer that the kernels write: no three gradients and their concatenation."""
    qkv = torch.randn(1, 4096, 3, HEADS, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = flash_attn_qkvpacked_func(qkv)
    dout = torch.randn_like(out)
    peak = cuda_peak(lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True))
    assert peak <= rounded(qkv.numel() * 2) + accumulator_bytes(4096, 64, 1) + SMALL


def training_step(device, seqlen, dropout_p):
    """One step with out and LSE in the loss; weak references to every tensor of it."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(1, seqlen, 2, 64, device=device, dtype=dtype, requires_grad=True) for _ in "qkv")
    out, lse, _ = flash_attn_func(q, k, v, causal=True, dropout_p=dropout_p, return_attn_probs=True)
    loss = out.float().square().sum() + (0.0 if dropout_p else lse.sum())
    loss.backward()
    return [weakref.ref(x) for x in (q, k, v, out, lse, loss, out.grad_fn, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("dropout_p", (0.0, 0.2))
def test_a_step_leaves_nothing_to_the_garbage_collector(device, dropout_p):
    """Saved tensors are freed when the step's variables go: no reference cycle keeps them until a collection."""
    training_step(device, 32, dropout_p)
    gc.collect()
    gc.disable()
    try:
        references = training_step(device, 32, dropout_p)
        assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()


def test_an_abandoned_forward_frees_what_it_saved(device):
    """A forward whose backward never runs."""
    q = torch.randn(1, 32, 2, 16, device=device, dtype=torch.float16, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        out, lse, _ = flash_attn_func(q, q, q, return_attn_probs=True)
        references = [weakref.ref(x) for x in (out, lse, out.grad_fn)]
        del out, lse
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("head_dim", (40, 36))
@pytest.mark.parametrize("autocast", (False, True))
def test_a_backward_keeps_what_the_kernels_read(device, autocast, head_dim, monkeypatch):
    """Not also the inputs of which that is a copy: in another dtype, with a head dim of whole 16 bytes."""
    monkeypatch.setattr(normalize, "_pads", lambda q: True)
    dtype, saved = torch.float32 if autocast else torch.bfloat16, {}
    q, k, v = (torch.randn(1, 64, 2, head_dim, device=device, dtype=dtype, requires_grad=True) for _ in "qkv")
    sinks = torch.randn(2, device=device, dtype=torch.bfloat16, requires_grad=True)

    def pack(x):
        saved[x.data_ptr()] = x.numel() * x.element_size()
        return x

    for call, inputs in (
        (flash_attn_func, (q, k, v)),
        (flash_attn_qkvpacked_func, (torch.stack((q, k, v), 2),)),
        (flash_attn_kvpacked_func, (q, torch.stack((k, v), 2))),
    ):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                out, lse, _ = call(*inputs, sinks=sinks, return_attn_probs=True)
        operand = 64 * 2 * 40 * 2
        assert 4 * operand <= sum(saved.values()) <= 4 * operand + lse.numel() * 4 + 32  # sinks, random state
        grads = torch.autograd.grad(out.sum(), (q, sinks))
        assert [x.dtype for x in grads] == [dtype, torch.bfloat16]


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.devices("cpu")
def test_many_steps_on_the_cpu_do_not_grow(device):
    """One leaked tensor of a step would add 256 KiB each time."""
    for _ in range(10):
        training_step(device, 512, 0.0)
    before = resident_bytes()
    for _ in range(40):
        training_step(device, 512, 0.0)
    assert resident_bytes() - before < 40 * 2**18 // 2


@pytest.mark.devices("cuda")
def test_many_steps_on_the_gpu_do_not_grow(device):
    """After each step as many bytes are allocated as after the first one."""
    training_step(device, 300, 0.1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        training_step(device, 300, 0.1)
        assert torch.cuda.memory_allocated() == before
