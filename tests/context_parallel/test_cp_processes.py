"""Context parallelism in processes: gloo with CPU tensors, NCCL if there are enough GPUs."""

import cp_workers
import pytest
import torch
import torch.distributed as dist


def run(device, size, *work, on_both=False):
    """Each (function, arguments...) of work in `size` processes. on_both: the group has a CPU backend and NCCL."""
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    if not dist.is_available() or not getattr(dist, f"is_{backend}_available")():
        pytest.skip(f"torch.distributed has no {backend}")
    both = on_both and device == "cuda"
    cp_workers.run_processes(_each, size, "cpu:gloo,cuda:nccl" if both else backend, work)


def _each(device, work):
    for function, *arguments in work:
        function(device, *arguments)


@pytest.mark.parametrize("size", [2, 3])
def test_attention(device, size):
    """All in one start of processes, which takes longer than the attention."""
    run(device, size, (cp_workers.attention, size), (cp_workers.mismatches,), (cp_workers.random_plans, 1, 3))


@pytest.mark.parametrize("size", [2, 4])
def test_meshes_bits_and_caches(device, size):
    work = [(cp_workers.meshes,), (cp_workers.equal_bits,), (cp_workers.cache,), (cp_workers.random_plans, 2, 3)]
    run(device, size, *work, on_both=True)


def test_compiled_code(device):
    run(device, 2, (cp_workers.compiled,), (cp_workers.backward_orders,), on_both=True)


@pytest.mark.devices("cuda")
def test_captured_in_a_cuda_graph(device):
    run(device, 2, (cp_workers.graphs,))


@pytest.mark.devices("cuda")
def test_results_with_copies_equal_those_with_messages(device):
    run(device, 2, (cp_workers.copies,), on_both=True)


@pytest.mark.devices("cpu")
def test_copies_need_nccl(device):
    run(device, 2, (cp_workers.no_copies_by_gloo,))


@pytest.mark.devices("cpu")
def test_a_killed_rank_ends_the_others(device):
    run(device, 3, (cp_workers.killed,))


@pytest.mark.devices("cuda")
def test_two_hundred_random_plans(device):
    run(device, 2, (cp_workers.random_plans, 3, 200), on_both=True)
