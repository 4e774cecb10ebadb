"""Functions that the processes of the distributed tests run; `run_processes` starts them."""

from __future__ import annotations

import os
import tempfile
import traceback

import pytest
import torch
import torch.distributed as dist
from cases import Case
from cp_harness import check_result, make_plan, run_rank, self_attention
from torch.multiprocessing import get_context, start_processes

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.context_parallel import CpCache, CpPlan, flash_attn_cp_func, flash_attn_cp_kvcache
from flash_attn.context_parallel.plan.steps import CHUNK_METHODS, KEY_METHODS, METHODS

SECONDS = 120  # for all processes of one test


def _forkserver():
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "cp_workers"])
    return context


def spawn(function, args=(), nprocs=1) -> None:
    """torch.multiprocessing.spawn() without an import of torch in each process."""
    _forkserver()
    start_processes(_spawned, (function, *args), nprocs, start_method="forkserver")


def _spawned(rank, function, *args):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    function(rank, *args)


def run_processes(function, size: int, backend: str, *arguments) -> None:
    """function(*arguments) in `size` processes with an initialised group; raises the errors of processes."""
    context = _forkserver()
    with tempfile.TemporaryDirectory() as folder:
        errors = context.SimpleQueue()
        processes = [
            context.Process(target=_main, args=(function, rank, size, backend, f"{folder}/store", errors, *arguments))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        texts = []
        while not errors.empty():
            texts.append(errors.get())
        assert not hanging and not texts, f"hanging: {hanging}; " + "\n".join(texts)
        assert [process.exitcode for process in processes] == [0] * size


def _main(function, rank, size, backend, store, errors, *arguments):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        device = "cuda" if "nccl" in backend else "cpu"
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
        function(device, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        errors.put(f"rank {rank}: {traceback.format_exc()}")
        raise


def attention(device: str, seed: int) -> None:
    """Every method and layout, dense and packed, against the reference on every rank."""
    dtype = "float64" if device == "cpu" else "bfloat16"
    cases = [
        Case(2, 37, 37, 4, 2, 16, dtype, causal=True, sinks=True),
        Case(4, 0, 0, 4, 4, 8, dtype, causal=True, window=(9, 0), softcap=15.0, kind="packed"),
        Case(1, 30, 30, 2, 1, 8, dtype, alibi="heads", dropout=0.2 if device == "cpu" else 0.0, causal=True),
    ]
    torch.manual_seed(seed)
    layouts = ("zigzag", "contiguous", "balanced")
    for index, case in enumerate(cases):
        for shift, method in enumerate(METHODS):
            if device == "cuda" and case.alibi != "none" and method in CHUNK_METHODS:
                continue
            problem, weights = self_attention(case, device)
            result = run_rank(problem, weights, None, method=method, layout=layouts[(index + shift) % 3])
            for dsinks in result.grads[3:]:
                dist.all_reduce(dsinks)
            check_result(problem, weights, result)


def equal_bits(device: str) -> None:
    """Two runs have bitwise equal results and gradients, although messages may arrive in different orders."""
    torch.manual_seed(0)
    problem, weights = self_attention(Case(2, 130, 130, 4, 2, 32, "bfloat16", causal=True), device)
    for method in METHODS:
        first, second = (run_rank(problem, weights, None, deterministic=True, method=method) for _ in range(2))
        for a, b in zip((first.out, first.lse, *first.grads), (second.out, second.lse, *second.grads)):
            assert torch.equal(a, b), method


def compiled(device: str) -> None:
    """Compiled code without graph breaks equals eager code, for two batches."""
    torch.manual_seed(2)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16

    def layer(q, k, v, plan):
        return flash_attn_cp_func(q * 2, k, v, plan=plan, causal=True, deterministic=True)

    traced = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for method in METHODS:
        for bounds in ([0, 40, 64], [0, 11, 50]):
            plan = CpPlan.varlen(bounds, method=method)
            tensors = [torch.randn(bounds[-1], heads, 16, device=device, dtype=dtype) for heads in (4, 2, 2, 4)]
            *own, dout = (plan.shard(x, 0) for x in tensors)
            results = []
            for function in (traced, layer):
                leaves = [x.detach().requires_grad_() for x in own]
                out = function(*leaves, plan)
                results.append((out, *torch.autograd.grad(out, leaves, dout)))
            for a, b in zip(*results):
                torch.testing.assert_close(a, b, atol=1e-10 if device == "cpu" else 1e-2, rtol=0)


def graphs(device: str) -> None:
    """A captured forward and backward, replayed with other contents."""
    torch.manual_seed(3)
    for method in METHODS:
        plan = CpPlan.dense(512, method=method, check="plan")
        inputs = [torch.randn(1, plan.num_tokens, h, 64, device=device, dtype=torch.bfloat16) for h in (4, 2, 2)]
        leaves, dout = [x.requires_grad_() for x in inputs], torch.randn_like(inputs[0])

        def step(leaves=leaves, dout=dout, plan=plan):
            out = flash_attn_cp_func(*leaves, plan=plan, causal=True, deterministic=True)
            return (out, *torch.autograd.grad(out, leaves, dout))

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        for _ in range(20):
            with torch.no_grad():
                for x in (*leaves, dout):
                    x.normal_()
            graph.replay()
            for ours, expected in zip(captured, step()):
                assert torch.equal(ours, expected), method


def cache(device: str) -> None:
    """Decoding over a cache that is divided among the ranks equals decoding over the whole."""
    torch.manual_seed(1)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(2, n, h, 16, device=device, dtype=dtype) for n, h in ((3, 4), (21, 2), (21, 2)))
    shards = CpCache(interleave=2)
    rows = shards.rows(torch.arange(21, device=device))
    own = [x.new_full((2, 12, 2, 16), float("nan")) for x in (k, v)]
    for part, x in zip(own, (k, v)):
        part[:, rows[rows >= 0]] = x[:, rows >= 0]
    lengths = torch.tensor([21, 5], dtype=torch.int32, device=device)
    found = flash_attn_cp_kvcache(q, *own, lengths, causal=True, return_softmax_lse=True, shards=shards)
    expected = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, atol=1e-10 if device == "cpu" else 2e-2, rtol=0)


def rows_and_columns(device: str) -> None:
    """A DeviceMesh of two dimensions: attention by every method, and errors of one rank."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (size // 2, 2), mesh_dim_names=("ring", "ulysses"))
    dtype = "float64" if device == "cpu" else "bfloat16"
    cases = [
        Case(2, 37, 37, 4, 2, 16, dtype, causal=True, sinks=True),
        Case(4, 0, 0, 3, 1, 8, dtype, causal=True, window=(9, 0), softcap=15.0, kind="packed"),
        Case(1, 48, 48, 2, 2, 8, dtype, alibi="heads", dropout=0.2, causal=True),
    ]
    for seed, case in enumerate(cases):
        torch.manual_seed(seed)
        for method in KEY_METHODS:
            problem, weights = self_attention(case, device)
            result = run_rank(problem, weights, mesh, method=method)
            for dsinks in result.grads[3:]:
                dist.all_reduce(dsinks)
            check_result(problem, weights, result)
    with pytest.raises(RuntimeError, match="CpPlan: expected valid arguments on every rank" if rank else "layout: "):
        CpPlan.dense(10, mesh=mesh, layout="zigzag" if rank else "stripe")
    with pytest.raises(RuntimeError, match=r"CpPlan: expected the same on every rank, got others on ranks \[1\]"):
        CpPlan.dense(10 + (rank == 1), mesh=mesh)
    with pytest.raises(RuntimeError, match="mesh: expected ranks that ascend along both dimensions"):
        CpPlan.dense(10, mesh=DeviceMesh(device, torch.arange(size).flip(0).view(size // 2, 2)))
    cube = init_device_mesh(device, (2, 1, size // 2), mesh_dim_names=("data", "ring", "ulysses"))
    tokens = 10 + cube.get_local_rank("data")  # each data-parallel rank has its own batch
    plan = CpPlan.dense(tokens, mesh=cube["ring", "ulysses"])
    x = torch.arange(tokens, device=device)
    assert plan.size == size // 2 and torch.equal(plan.unshard(plan.shard(x, 0), 0), x)
    with pytest.raises(NotImplementedError, match="mesh: expected a DeviceMesh of one dimension or two"):
        CpPlan.dense(10, mesh=cube)
    with pytest.raises(NotImplementedError, match="mesh: expected a DeviceMesh of one dimension, got"):
        CpCache(mesh=mesh)


def meshes(device: str) -> None:
    """A DeviceMesh, and a group that is not all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    plan = CpPlan.dense(10, mesh=init_device_mesh(device, (size,)))
    assert plan.size == size
    with pytest.raises(TypeError, match="group: expected None, for mesh is given"):
        CpPlan.dense(10, mesh=init_device_mesh(device, (size,)), group=dist.group.WORLD)
    group = dist.new_group([size - 1, 0] if size > 1 else [0])
    if dist.get_rank() in (0, size - 1):
        plan = CpPlan.dense(10, group=group)
        x = torch.arange(10.0, device=device)
        assert plan.size == min(2, size) and torch.equal(plan.unshard(plan.shard(x, 0), 0), x)
    else:
        with pytest.raises(RuntimeError, match="group: expected a group that this rank belongs to"):
            CpPlan.dense(10, group=group)


def mismatches(device: str) -> None:
    """Different arguments on one rank raise on all; the group is usable afterwards."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    with pytest.raises(RuntimeError, match="CpPlan: expected the same on every rank"):
        CpPlan.dense(10 + (rank == last))
    with pytest.raises(RuntimeError, match="expected"):
        CpPlan.varlen([0, 5, 3] if rank == last else [0, 3, 5])
    plan = CpPlan.dense(9)
    q = torch.randn(1, plan.num_tokens, 2, 8, device=device, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="flash_attn_cp_func: expected the same on every rank"):
        flash_attn_cp_func(q, q, q, plan=plan, causal=rank == last)
    with pytest.raises(RuntimeError, match="expected"):
        short = q[:, :-1] if rank == last else q
        flash_attn_cp_func(short, q, q, plan=plan)
    assert flash_attn_cp_func(q, q, q, plan=plan).shape == q.shape
    if plan.communicator.checks_on_host:
        errors_before_the_comparison(device, rank == last, last)


def errors_before_the_comparison(device: str, is_bad: bool, rank: int) -> None:
    """Errors that a rank finds before it has a communicator or a plan raise on all."""
    plan, shards = CpPlan.dense(8), CpCache()
    x = torch.randn(1, plan.num_tokens, 2, 8, device=device, dtype=torch.bfloat16)
    world = dist.group.WORLD
    for call, error, message in (
        (lambda: CpPlan.dense(8, copies="x" if is_bad else False), "TypeError", "copies: expected"),
        (lambda: CpPlan.dense(8, group=world, mesh="x" if is_bad else None), "TypeError", "group: expected None"),
        (lambda: CpPlan.dense(8, group="x" if is_bad else None), "TypeError", "group: expected a ProcessGroup"),
        (lambda: CpCache(mesh="x" if is_bad else None), "NotImplementedError", "mesh: expected a DeviceMesh"),
        (lambda: flash_attn_cp_func(x, x, x, plan=None if is_bad else plan), "TypeError", "plan: expected a CpPlan"),
        (lambda: flash_attn_cp_kvcache(x, x, x, 3, shards=None if is_bad else shards), "TypeError", "shards: expected"),
    ):
        told = rf"got errors on ranks \[{rank}\] \(rank {rank}: {error}: {message}"
        with pytest.raises((RuntimeError, TypeError), match=message if is_bad else told):
            call()
    assert plan.unshard(x, 1).shape[1] == 8


def backward_orders(device: str) -> None:
    """Backwards of compiled code in different orders raise on all ranks."""
    plan = CpPlan.dense(8)
    layer = torch.compile(lambda *qkv: flash_attn_cp_func(*qkv, plan=plan), backend="aot_eager", fullgraph=True)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    leaves = [torch.randn(1, plan.num_tokens, 2, 8, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]
    outs = [layer(x, x, x) for x in leaves]
    with pytest.raises(RuntimeError, match="flash_attn_cp_func: expected the same on every rank"):
        outs[dist.get_rank() % 2].sum().backward()


def killed(device: str) -> None:
    """A rank dies while the others wait for its keys: they raise long before the group's timeout. Ends all ranks."""
    plan = CpPlan.dense(64, check="plan")
    q = torch.randn(1, plan.num_tokens, 2, 8, device=device)
    flash_attn_cp_func(q, q, q, plan=plan)  # compared now; the next call exchanges keys at once
    dist.barrier()
    if dist.get_rank() == 0:
        os._exit(0)
    with pytest.raises(RuntimeError):
        flash_attn_cp_func(q, q, q, plan=plan)
    os._exit(0)


def random_plans(device: str, seed: int, count: int) -> None:
    """Packed documents of random lengths equal one GPU's results, and no rank hangs."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        lengths = torch.randint(0, 60, (5,), generator=generator).tolist()
        case = Case(5, 0, 0, 2, 1, 8, "float64" if device == "cpu" else "bfloat16", causal=True, kind="packed")
        torch.manual_seed(index)
        problem, _ = self_attention(case, device, lengths)
        method, layout = METHODS[index % len(METHODS)], ("zigzag", "balanced")[index % 2]
        plan = make_plan(problem, None, method=method, layout=layout)
        own = [plan.shard(x, 0) for x in (problem.q, problem.k, problem.v)]
        out = plan.unshard(flash_attn_cp_func(*own, plan=plan, causal=True), 0)
        alone = problem.cu_seqlens_q
        longest = max(lengths)
        expected = flash_attn_varlen_func(
            problem.q, problem.k, problem.v, alone, alone, longest, longest, causal=True
        )  # fmt: skip
        torch.testing.assert_close(out, expected, atol=1e-10 if device == "cpu" else 2e-2, rtol=0)


def copies(device: str) -> None:
    """Results equal those with messages: several layers without synchronisation, growing buffers, dense and packed."""
    generator = torch.Generator(device).manual_seed(11)
    for lengths in ((256,), (4096,), (3000,), (700, 20, 5000), (8192,)):
        cu = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        shape = (cu[-1],) if len(lengths) > 1 else (1, cu[-1])
        axis = len(shape) - 1
        whole = [
            torch.randn(*shape, heads, 64, device=device, dtype=torch.bfloat16, generator=generator)
            for heads in (4, 2, 2, 4)
        ]
        found = []
        for given in ({"copies": True}, {}):
            kind = {"method": "all_gather", "check": "plan", **given}
            plan = CpPlan.varlen(cu, **kind) if len(lengths) > 1 else CpPlan.dense(cu[-1], **kind)
            *own, dout = (plan.shard(x, axis).requires_grad_() for x in whole)
            results, q = [], own[0]
            for _ in range(6):
                out = flash_attn_cp_func(q, *own[1:], plan=plan, causal=True, deterministic=True)
                results += [out.detach(), *torch.autograd.grad(out, own, dout.detach(), retain_graph=True)]
                q = (out + own[0]).contiguous()
            found.append(results)
        assert all(torch.equal(a, b) for a, b in zip(*found))


def no_copies_by_gloo(device: str) -> None:
    with pytest.raises(RuntimeError, match="copies: expected a group with NCCL"):
        CpPlan.dense(64, copies=True)
