"""Nothing of a call outlives it: first calls inside of captures and compiled graphs, streams without number, lengths
that change under a running kernel.

Each first call needs a separate process.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from cases import Case
from harness import captured, check_forward, make_problem, run

pytestmark = pytest.mark.devices("cuda")

PRELUDE = """
import threading, torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
q, k, v = (torch.randn(4, 1500, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
def attend(q, k, v):
    return flash_attn_func(q, k, v, causal=True)
def step(function):
    return torch.autograd.grad(function(q, k, v).float().square().sum(), (q, k, v))
"""


def run_alone(program):
    """The program after PRELUDE in a new process, which must end well."""
    source = PRELUDE + textwrap.dedent(program)
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("training", (False, True))
def test_first_call_is_compiled_into_a_cuda_graph(device, training):
    """Memory from the graph's pool that lives on would be "not tracked"."""
    run_alone(f"""
        compiled = torch.compile(attend, mode="reduce-overhead", fullgraph=True)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            if {training}:
                grads = [x.clone() for x in step(compiled)]
            else:
                with torch.no_grad():
                    out = compiled(q, k, v).clone()
        if {training}:
            for ours, eager in zip(grads, step(attend)):
                assert (ours.float() - eager.float()).abs().max() < 0.05
        else:
            assert torch.equal(out, attend(q, k, v))
    """)


@pytest.mark.parametrize("mode", ("thread_local", "relaxed"))
def test_first_call_while_another_thread_captures(device, mode):
    run_alone(f"""
        x = torch.randn(256, 256, device="cuda")
        y = x @ x
        torch.cuda.synchronize()
        begun, called = threading.Event(), threading.Event()
        def capture():
            try:
                x @ x  # the thread's own handle of cuBLAS, whose memory must not be asked for in a capture
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="{mode}"):
                    y.copy_(x @ x)
                    begun.set()
                    called.wait()
            finally:
                begun.set()  # an error of one thread must not leave the other waiting
        graph = torch.cuda.CUDAGraph()
        thread = threading.Thread(target=capture)
        thread.start()
        begun.wait()
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                out = attend(q, k, v)
        finally:
            called.set()
            thread.join()
        torch.cuda.synchronize()
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, x @ x) and torch.equal(out, attend(q, k, v))
    """)


def test_first_call_is_captured(device):
    run_alone("""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.no_grad():
            with torch.cuda.graph(graph):
                out = attend(q, k, v)
            graph.replay()
            assert torch.equal(out, attend(q, k, v))
    """)


def test_memory_does_not_grow_with_streams(device):
    problem = make_problem(Case(2, 700, 700, 16, 16, 128, "bfloat16", causal=True), device)
    wanted = run(problem)[0]
    stream = torch.cuda.Stream()  # of torch's pool; the device has no more than its 32
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(1100):
        handle = torch.cuda.ExternalStream(stream.cuda_stream)
        with torch.cuda.stream(handle):
            out = run(problem)[0]
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
    del out, handle
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("deterministic", (False, True))
def test_lengths_that_change_under_a_running_kernel(device, deterministic):
    """Calls in between change the lengths; later calls with unchanged lengths are right."""
    case = Case(9, 700, 900, 16, 4, 128, "bfloat16", causal=True, kind="packed")
    problem = make_problem(case, device)
    lengths = problem.cu_seqlens_q
    kept = lengths.clone()
    leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    problem.q, problem.k, problem.v = leaves
    out, lse, _ = run(problem, deterministic=deterministic)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(other):
            for i in range(60):
                lengths.copy_(kept // (i % 4 + 1))
        result = run(problem, deterministic=deterministic)[0]
        torch.autograd.grad(result, leaves, torch.ones_like(result))
    torch.cuda.synchronize()
    lengths.copy_(kept)
    for _ in range(2):
        again, again_lse, _ = run(problem, deterministic=deterministic)
        assert torch.equal(again, out) and torch.equal(again_lse, lse)
    check_forward(problem, out, lse)


def test_streams_threads_and_graphs_at_once(device):
    """Two threads, each on two streams, calls of several grids and replays of graphs in between."""
    cases = [
        Case(4, 1000, 1000, 16, 4, 128, "bfloat16", causal=True),
        Case(9, 700, 900, 16, 4, 64, "bfloat16", causal=True, kind="packed"),
        Case(2, 300, 300, 4, 4, 64, "bfloat16"),
    ]
    problems = [make_problem(case, device) for case in cases]
    wanted = [run(problem)[:2] for problem in problems]
    graphs = [[captured(lambda p=problem: run(p)) for problem in problems] for _ in range(2)]
    torch.cuda.synchronize()
    wrong, done = [], []

    def work(index):
        streams = [torch.cuda.Stream() for _ in range(2)]
        results = []
        for turn in range(12):
            with torch.cuda.stream(streams[turn % 2]):
                for i, problem in enumerate(problems):
                    results.append((i, run(problem)[:2]))
        with torch.cuda.stream(streams[0]):
            for i, (graph, (out, lse, _)) in enumerate(graphs[index]):
                graph.replay()
                results.append((i, (out.clone(), lse.clone())))
        for stream in streams:
            stream.synchronize()
        wrong.extend(i for i, result in results if not all(torch.equal(a, b) for a, b in zip(result, wanted[i])))
        done.append(len(results))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [39, 39] and not wrong
