"""The model of theory.py counts the bytes that PyTorch's operations move."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

LAB = Path(__file__).resolve().parents[1]
sys.path += [str(LAB), str(LAB.parent)]

import theory

VIEWS = ("transpose", "expand", "view", "_unsafe_view", "device")


class Traffic(TorchDispatchMode):
    """Bytes read and written by each operation that is not a view; a matrix for all heads is not counted."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.__name__.split(".")[0] not in VIEWS:
            tensors = [x for x in (*args, out) if isinstance(x, torch.Tensor) and x.dim() != 2]
            self.bytes.append(sum(x.numel() * x.element_size() for x in tensors))
        return out


def test_the_model_counts_what_each_kernel_moves():
    """Of a GPU's operations in float16, whose softmax gives float32 in one kernel; nothing is computed."""
    if not torch.backends.cuda.is_built():
        pytest.skip("PyTorch without CUDA has no operations of a GPU to count")
    shape = (theory.BATCH, theory.HEADS, theory.SEQLEN, theory.HEAD_DIM)
    with pytest.importorskip("torch._subclasses").FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(shape, device="cuda", dtype=torch.float16) for _ in range(3))
        mask = torch.empty((theory.SEQLEN,) * 2, device="cuda", dtype=torch.float16)
        with Traffic() as counted:
            scores = torch.matmul(q, k.transpose(-1, -2)) * theory.HEAD_DIM**-0.5 + mask
            torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)
    assert counted.bytes == [kernel.bytes for kernel in theory.STANDARD]
