"""Theory and measurement: the model counts what the operations move, the tables state both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

LAB = Path(__file__).resolve().parents[1]
sys.path += [str(LAB), str(LAB.parent)]

import theory
import theory_model as model
import theory_report

H200 = model.MACHINES["h200"]
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


def traffic(problem, dtype=torch.float16):
    """Bytes of each kernel that PyTorch would run on a GPU; nothing is computed."""
    if not torch.backends.cuda.is_built():
        pytest.skip("PyTorch without CUDA has no operations of a GPU to count")
    mode = pytest.importorskip("torch._subclasses").FakeTensorMode
    shape = (problem.batch, problem.heads, problem.seqlen, problem.head_dim)
    with mode(), torch.no_grad():
        q, k, v = (torch.empty(shape, device="cuda", dtype=dtype) for _ in range(3))
        mask = torch.empty((problem.seqlen,) * 2, device="cuda", dtype=dtype) if problem.causal else None
        with Traffic() as counted:
            theory.standard_attention(torch, q, k, v, mask)
    return counted.bytes


@pytest.mark.parametrize("problem", [model.Problem(512, 64, True), model.Problem(4096, 128, False)], ids=str)
def test_the_model_counts_what_each_kernel_moves(problem):
    kernels = model.standard_kernels(problem)
    assert len(kernels) == (6 if problem.causal else 5)
    assert traffic(problem) == [kernel.bytes(problem) for kernel in kernels]


def test_bfloat16_would_take_another_kernel():
    assert len(traffic(model.Problem(512, 64, True), torch.bfloat16)) == 7


def test_standard_attention_is_attention(monkeypatch):
    from reference import attention

    monkeypatch.setattr(model, "TOKENS", 96)
    monkeypatch.setattr(model, "WIDTH", 64)
    for causal in (False, True):
        problem = model.Problem(48, 32, causal)
        torch.manual_seed(0)
        calls = theory.make_calls(torch, problem, "cpu", torch.float32)
        standard, fused = (calls[name]() for name in ("standard", "fused"))
        assert standard.shape == (2, 48, 2, 32) and torch.allclose(standard, fused, atol=1e-5)
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 48, 2, 32) for _ in range(3))
        assert torch.allclose(fused.double(), attention(q, k, v, causal=causal).out.double(), atol=1e-5)


def test_what_the_fused_kernel_is_limited_by():
    assert model.fused_bound(model.Problem(512, 128, True), H200) == "memory"
    assert model.fused_bound(model.Problem(4096, 128, False), H200) == "tensor cores"
    faster = model.Machine("", 132, 1.83e9, 2 * 4096, 4.8e12)
    assert model.fused_bound(model.Problem(4096, 64, False), faster) == "exponentials"
    for problem in model.problems():
        assert problem.batch * problem.seqlen == model.TOKENS
        standard, fused = model.standard_seconds(problem, H200), model.fused_seconds(problem, H200)
        assert standard > fused >= problem.flop / H200.flops * 0.999


def test_memory_grows_with_the_length_only_where_scores_are_stored():
    sizes = [(model.standard_memory(p), model.fused_memory(p)) for p in model.problems()[: len(model.SEQLENS)]]
    assert all(later[0] == 2 * earlier[0] and later[1] == earlier[1] for earlier, later in zip(sizes, sizes[1:]))


def measured():
    """A result in which everything takes twice as long as predicted, and the longest do not fit."""
    rows = []
    for problem in model.problems():
        times = (model.standard_seconds(problem, H200), model.fused_seconds(problem, H200))
        memory = (model.standard_memory(problem), model.fused_memory(problem))
        entries = [{"kernels": n, "ms": 2e3 * t, "peak_bytes": m} for n, t, m in zip((6, 1), times, memory)]
        standard = None if problem.seqlen == 16384 else entries[0]
        row = {"seqlen": problem.seqlen, "head_dim": problem.head_dim, "causal": problem.causal}
        rows.append({**row, "standard": standard, "fused": entries[1]})
    origin = {"device": {"name": "GPU"}, "build": {"commit": "0123456789abcdef"}, "read_ceiling": {"gbs": 4600.0}}
    return {**origin, "rows": rows}


def test_predictions_are_told_from_measurements():
    alone, both = (theory_report.speed_block(H200, result) for result in (None, measured()))
    assert "measured" not in alone[0] and "measured ms: standard" in both[0]
    assert "Measured on an GPU, commit 0123456789ab" in " ".join(both)
    assert len(alone[2].split("|")) + 6 == len(both[2].split("|"))
    assert both[2].endswith("| 6 / 1 | 4.59 | 0.278 | 16.5× | 3072 / 66 | 50% |")
    assert [line for line in both if "| 16384 |" in line and "| – / 1 | – |" in line and "out of memory / 66" in line]


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert len(theory_report.points(H200, measured(), "standard", 64)) == len(model.SEQLENS) - 1
    for name, result in (("predicted", None), ("measured", measured())):
        theory_report.draw(tmp_path / f"{name}.png", H200, result)
        assert (tmp_path / f"{name}.png").stat().st_size > 10000


def test_measuring_needs_a_place_for_the_result(capsys):
    with pytest.raises(SystemExit):
        theory.main(["--measure"])
    assert "--measure needs --out FILE.json" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_six_kernels_and_two_on_a_gpu():
    from timing import Budget, CudaTimer

    device, problem = torch.device("cuda"), model.Problem(1024, 64, True)
    row = theory.measure(torch, problem, CudaTimer(device), Budget(3, 1.0, 1.0), device)
    # A small kernel that clears the tile counter comes before a causal forward.
    assert row["standard"]["kernels"] in (6, None) and row["fused"]["kernels"] in (2, None)
    for name, predicted in (("standard", model.standard_memory), ("fused", model.fused_memory)):
        assert predicted(problem) <= row[name]["peak_bytes"] <= 1.1 * predicted(problem) + 2**21
    assert row["standard"]["ms"] > row["fused"]["ms"] > 0
    json.dumps(row)
