"""Behaviour of a call on the GPU apart from its results: streams, graphs, devices, synchronisation."""

from __future__ import annotations

import threading

import pytest
import torch
from cases import Case
from harness import backend_forward, captured, check_forward, expected, make_problem, no_synchronisation, run
from reference import assert_accurate

from flash_attn import backends, dropout_mask, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _flash_attn_forward

pytestmark = [pytest.mark.devices("cuda"), pytest.mark.by_both_paths]


def problem_of(kind="packed", page_size=16, device="cuda", **options):
    case = Case(4, 150, 300, 4, 2, 64, "bfloat16", True, kind=kind, page_size=page_size, **options)
    return make_problem(case, device)


@pytest.mark.parametrize("kind,page_size", [("dense", 0), ("packed", 0), ("seqused", 16), ("leftpad", 7)])
@pytest.mark.parametrize("dropout", (0.0, 0.2))
def test_no_host_synchronisation(device, kind, page_size, dropout):
    problem = problem_of(kind, page_size, dropout=dropout, softcap=10.0, alibi="batch")
    run(problem)
    with no_synchronisation():
        run(problem)
        run(problem, return_attn_probs=False)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_lengths_on_the_device_are_not_read_by_the_host(device, dtype):
    """max_seqlen as 0-d CUDA tensors, cu_seqlens of either width."""
    problem = problem_of(page_size=0)
    maxima = [torch.tensor(n, device=device, dtype=dtype) for n in (problem.max_seqlen_q, problem.max_seqlen_k)]
    problem.cu_seqlens_q, problem.cu_seqlens_k = problem.cu_seqlens_q.to(dtype), problem.cu_seqlens_k.to(dtype)
    with no_synchronisation():
        out, lse, _ = run(problem, max_seqlen_q=maxima[0], max_seqlen_k=maxima[1])
    check_forward(problem, out, lse)


def test_side_stream(device):
    """The call runs on the current stream: its inputs are filled there by a slow predecessor."""
    stream = torch.cuda.Stream()
    problem = problem_of("dense", 0)
    values = problem.q.clone()
    problem.q.fill_(float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        problem.q.copy_(values)
        out, lse, _ = run(problem)
        first = out.clone()
    torch.cuda.current_stream().wait_stream(stream)
    check_forward(problem, first, lse)


def in_new_thread(call):
    """The result of a call in a thread that has not called the CUDA runtime yet."""
    results = []

    def work():
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_first_call_of_a_thread(device, head_dim, causal):
    """With all memory cached by the call before, nothing but the call itself makes a context current in the thread:
    forward, backward, KV cache."""
    q, k, v, dout = (torch.randn(2, 700, 4, head_dim, device=device, dtype=torch.bfloat16) for _ in range(4))
    forward = backend_forward(q, k, v, causal=causal)
    out, lse = forward[0], forward[1]

    def backward():
        grads = [torch.empty_like(x) for x in (q, k, v)]
        backends.get(device).bwd(
            dout, q, k, v, out, lse, *grads, None, 0.0, head_dim**-0.5, causal, -1, -1, 0.0, True, None, None
        )  # fmt: skip
        return grads

    calls = {
        "forward": lambda: backend_forward(q, k, v, causal=causal)[:2],
        "backward": backward,
        "cache": lambda: [flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=300, causal=causal)],
    }
    for name, call in calls.items():
        wanted = call()
        call()  # leaves the memory that the thread's call gets
        torch.cuda.synchronize()
        result = in_new_thread(call)
        assert all(torch.equal(a, b) for a, b in zip(wanted, result)), name


def test_two_threads_on_two_streams(device):
    problem = problem_of("dense", 0)
    wanted = run(problem)[0]
    torch.cuda.synchronize()
    results = {}

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            results[index] = [run(problem)[0] for _ in range(20)]
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and all(torch.equal(wanted, out) for outs in results.values() for out in outs)


def check_replays_with_changed_inputs(problem):
    graph, (out, lse, _) = captured(lambda: run(problem))
    for _ in range(3):
        for x in (problem.q, problem.k, problem.v):
            x.normal_()
        graph.replay()
        check_forward(problem, out, lse)


def test_graph_replay_with_changed_inputs(device):
    check_replays_with_changed_inputs(problem_of("dense", 0))


@pytest.mark.parametrize("kind,page_size", [("packed", 0), ("padded", 0), ("packed", 16), ("leftpad", 16)])
def test_graph_replay_with_changed_lengths(device, kind, page_size):
    """One graph computes every split of the same rows into sequences, zero lengths and padding rows included."""
    case = Case(4, 0, 0, 4, 2, 64, "bfloat16", True, kind=kind, page_size=page_size)
    splits = [[(150, 300), (1, 100), (0, 70), (200, 9)], [(0, 0), (351, 400), (0, 79), (0, 0)],
              [(80, 100), (80, 100), (80, 100), (111, 179)], [(3, 2), (0, 1), (1, 0), (0, 5)]]  # fmt: skip
    static = make_problem(case, device, splits[0])
    static.q = torch.cat([static.q, torch.zeros_like(static.q)])[:400].contiguous()
    static.k, static.v = (torch.cat([x, torch.zeros_like(x)]) for x in (static.k, static.v))
    if page_size:
        table = torch.full((4, 40), -1, dtype=torch.int32, device=device)
        table[:, : static.block_table.shape[1]] = static.block_table
        static.block_table = table
    graph, (out, lse, _) = captured(lambda: run(static, max_seqlen_q=400, max_seqlen_k=600))
    for lengths in splits:
        problem = make_problem(case, device, lengths)
        for name in ("q", "k", "v"):
            target, source = getattr(static, name), getattr(problem, name)
            target.fill_(float("nan"))
            target[: len(source)] = source
        for name in ("cu_seqlens_q", "cu_seqlens_k", "leftpad_k"):
            if getattr(problem, name) is not None:
                getattr(static, name).copy_(getattr(problem, name))
        if page_size:
            static.block_table.fill_(-1)
            static.block_table[:, : problem.block_table.shape[1]] = problem.block_table
        graph.replay()
        rows = len(problem.q)
        check_forward(problem, out[:rows], lse[:, :rows])
        assert (out[rows:] == 0).all() and torch.isposinf(lse[:, rows:]).all()


def test_graph_replay_draws_new_dropout_masks(device):
    """Each replay advances the generator; rng_state tells the mask of that replay."""
    p = 0.3
    problem = problem_of("dense", 0, dropout=p)
    q, k, v = problem.q, problem.k, problem.v
    graph, (out, lse, dmask, rng_state) = captured(
        lambda: _flash_attn_forward(q, k, v, p, 0.125, True, -1, -1, 0.0, None, True)
    )
    states = []
    for _ in range(3):
        graph.replay()
        keep = dropout_mask(rng_state, p, 4, 4, 150, 300)
        assert torch.equal(dmask[:, :, :150, :300] >= 0, keep)
        check_forward(problem, out, lse, keep=keep)
        states.append(tuple(rng_state.tolist()))
    assert len(set(states)) == 3


def test_graph_and_eager_agree_bitwise(device):
    problem = problem_of()
    eager = run(problem)
    graph, results = captured(lambda: run(problem))
    graph.replay()
    assert torch.equal(eager[0], results[0]) and torch.equal(eager[1], results[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ("dense", "packed"))
def test_device_that_is_not_the_current_one(device, kind):
    with torch.cuda.device(0):
        problem = problem_of(kind, 0, device="cuda:1", dropout=0.2)
        out, lse, dmask = run(problem)
        assert out.device == lse.device == problem.q.device and torch.cuda.current_device() == 0
        check_forward(problem, out, lse, keep=dmask >= 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_two_devices_are_an_error(device):
    q = torch.randn(1, 4, 2, 64, device="cuda:0", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"^k: expected a tensor on q's device \(cuda:0\), got one on cuda:1"):
        flash_attn_func(q, q.to("cuda:1"), q)


def test_no_gpu_error_remains(device):
    """After refused calls the next one works and the device reports no error."""
    q = torch.randn(1, 4, 2, 64, device=device, dtype=torch.bfloat16)
    for wrong in (q[:, :, :1], q.float(), q[:, :3]):
        with pytest.raises(RuntimeError):
            flash_attn_func(q, q, wrong)
    flash_attn_func(q, q, q)
    torch.cuda.synchronize()


def test_cpu_and_cuda_agree(device):
    """The same tensors, and the same mask of the same random state, on both backends."""
    problem = make_problem(Case(2, 100, 140, 4, 2, 64, "bfloat16", True, softcap=10.0, alibi="heads"), device)
    out, lse, _ = run(problem)
    on_cpu = flash_attn_func(*(x.cpu() for x in (problem.q, problem.k, problem.v)), causal=True, softcap=10.0,
                             alibi_slopes=problem.alibi_slopes.cpu(), return_attn_probs=True)  # fmt: skip
    plain, reference = expected(problem, torch.bfloat16), expected(problem)
    assert_accurate(out, reference.out, plain.out)
    assert_accurate(on_cpu[0].cuda(), reference.out, plain.out)
    assert (lse.cpu() - on_cpu[1]).abs().max() < 1e-4


def test_results_survive_reuse_of_the_inputs(device):
    """Inputs freed right after the call, their memory taken by others on the same stream."""
    wanted = None
    for _ in range(5):
        torch.manual_seed(1)
        q = torch.randn(2, 300, 4, 64, device=device, dtype=torch.bfloat16)
        out = flash_attn_varlen_func(
            q.flatten(0, 1), q.flatten(0, 1), q.flatten(0, 1),
            torch.tensor([0, 300, 600], device=device, dtype=torch.int32),
            torch.tensor([0, 300, 600], device=device, dtype=torch.int32), 300, 300, causal=True,
        )  # fmt: skip
        del q
        torch.full((4, 300, 4, 64), float("nan"), device=device, dtype=torch.bfloat16)
        torch.full((3,), 10**6, device=device, dtype=torch.int32)
        wanted = out if wanted is None else wanted
        assert torch.equal(out, wanted)
