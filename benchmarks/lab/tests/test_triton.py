"""The Triton comparator and its ladder against float64 attention: by Triton's interpreter, on a GPU."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import fresh_process
import pytest
import torch
from cases import Case
from reference import assert_accurate, assert_gradient_accurate, attention

import flash_attn

LAB = Path(__file__).resolve().parents[1]
sys.path += [str(LAB), str(LAB.parent)]

import implementations
import measure
import rows
import triton_ladder
from triton_variants import RUNGS

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
# Triton's interpreter has no bfloat16.
TRITON_CASES = [  # sq, sk, heads, K/V heads, head dim, causal
    (40, 40, 2, 2, 64, False),
    (37, 53, 4, 2, 64, True),
    (53, 37, 2, 1, 96, True),
    (1, 70, 2, 2, 40, False),
    (33, 33, 1, 1, 128, True),
    (16, 0, 1, 1, 64, False),
]


def attention_and_gradients(tensors, dout, causal, dtype):
    """(out, lse, dq, dk, dv) of plain attention computed in `dtype`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    found = attention(*leaves, causal=causal, dtype=dtype)
    return found.out, found.lse, *torch.autograd.grad(found.out, leaves, dout.to(dtype))


def triton_inputs(case, dtype, device, strided):
    """([q, k, v], dout) of an entry of TRITON_CASES; strided: heads before positions, dout with strides 0."""
    sq, sk, h, h_k, d, _ = case
    tensors = [torch.randn(2, s, n, d, dtype=dtype, device=device) for s, n in ((sq, h), (sk, h_k), (sk, h_k))]
    dout = torch.randn_like(tensors[0])
    if strided:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
        dout = dout.new_ones(()).expand(dout.shape)
    return [x.requires_grad_() for x in tensors], dout


def check_triton(triton_attention, device, dtype, variant, cases=TRITON_CASES, layouts=(False, True)):
    """A variant of the comparator against float64 at small cases, by the error criterion: output, log-sum-exp and
    gradients. layouts: for triton_inputs."""
    for case, strided in itertools.product(cases, layouts):
        tensors, dout = triton_inputs(case, dtype, device, strided)
        causal = case[-1]
        out, lse = triton_attention.triton_attention(*tensors, causal=causal, variant=variant)
        found = (out, lse, *torch.autograd.grad(out, tensors, dout))
        expected, plain = (attention_and_gradients(tensors, dout, causal, t) for t in (torch.float64, dtype))
        assert [x.dtype for x in found] == [dtype, torch.float32, dtype, dtype, dtype]
        for name, *triple in zip(("out", "lse"), found, expected, plain):
            assert_accurate(*triple, name)
        for name, *triple in zip(("dq", "dk", "dv"), found[2:], expected[2:], plain[2:]):
            assert_gradient_accurate(*triple, name)


def run_interpreted(code):
    """Runs code of this folder's modules by Triton's interpreter, in a separate process; returns its output."""
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip("the patch of the interpreter is made for Triton 3.6")
    folders = (Path(flash_attn.__file__).parents[1], LAB.parents[1] / "tests", Path(__file__).parent)
    paths = os.pathsep.join(map(str, folders))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = fresh_process.run(code, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_triton_on_the_gpu(dtype, device="cuda"):
    pytest.importorskip("triton")
    import triton_attention

    for tma in {False, torch.cuda.get_device_capability()[0] >= 9}:
        check_triton(triton_attention, device, dtype, triton_attention.Variant(tma))
    for head_dim, causal in itertools.product((64, 128, 256), (False, True)):
        row = rows.Row("cells", Case(2, 1000, 1000, 8, 2, head_dim, "bfloat16", causal=causal))
        inputs = implementations.make_inputs(row, torch.device(device), requires_grad=True)
        implementation = implementations.IMPLEMENTATIONS["triton"]
        _, facts = measure.probe(implementation, row, inputs, "fwd+bwd", torch.device(device))
        assert facts["relative_error"] < 1e-2


def interpret(folder):
    """What test_the_program_and_its_rungs_by_the_interpreter runs in a separate process."""
    import timing
    import triton_attention

    timing.FEWEST_ROUNDS = 1
    options = ["--device", "cpu", "--head-dims", "64", "--seqlens", "1024"]
    assert triton_ladder.main([*options, "--out", f"{folder}/ladder.json"]) == 0
    torch.manual_seed(0)
    variants = (*(rung.variant for rung in RUNGS), triton_attention.Variant(use_tma=False), RUNGS[-1].variant)
    for i, (variant, case) in enumerate(zip(variants, TRITON_CASES)):  # with and without descriptors, strided or not
        check_triton(triton_attention, "cpu", torch.float16, variant, (case,), (i // 2 % 2 == 0,))


def test_the_program_and_its_rungs_by_the_interpreter(tmp_path):
    run_interpreted(f"import test_triton; test_triton.interpret({str(tmp_path)!r})")
    result = json.loads((tmp_path / "ladder.json").read_text())
    assert {"device", "versions", "git", "started"} <= set(result) and len(result["rows"]) == 4
    for row in result["rows"]:
        rungs = {rung.name for rung in RUNGS if row["mode"] in rung.modes}
        assert set(row["results"]) == rungs | {"ours", "sdpa_flash"} and row["failed"] == []
        assert all(found["relative_error"] < 2e-3 for found in row["results"].values())
