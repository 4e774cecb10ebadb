"""Context parallelism in processes: gloo on CPU tensors, NCCL where there are GPUs enough."""

import cp_workers
import pytest
import torch
import torch.distributed as dist


def run(device, size, *work):
    """Each (function, arguments...) of work in `size` processes."""
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    if not dist.is_available() or not getattr(dist, f"is_{backend}_available")():
        pytest.skip(f"torch.distributed has no {backend}")
    cp_workers.run_processes(_each, size, backend, work)


def _each(device, work):
    for function, *arguments in work:
        function(device, *arguments)


@pytest.mark.parametrize("size", [2, 3])
def test_attention(device, size):
    """One start of processes for all, which costs more than the attention."""
    run(device, size, (cp_workers.attention, size), (cp_workers.mismatches,), (cp_workers.random_plans, 1, 6))


def test_four_ranks_and_meshes(device):
    run(device, 4, (cp_workers.meshes,), (cp_workers.random_plans, 2, 6))


@pytest.mark.devices("cuda")
def test_two_hundred_random_plans(device):
    run(device, 2, (cp_workers.random_plans, 3, 200))
