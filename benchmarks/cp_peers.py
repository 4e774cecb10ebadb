"""Context parallelism of other packages, where they are installed: functions of a rank's q, k, v, causal and dense.

Each maker takes (problem, rank, ranks) and returns (function, q, k, v, dout) of this rank's tokens in the layout that
the package wants. ring-flash-attention and yunchang find this package's kernels under FlashAttention-2's names.
"""

from __future__ import annotations

import functools
import sys
from unittest.mock import MagicMock

import torch


def _leave_out_adapters() -> None:
    """ring-flash-attention's adapter to transformers, which it imports, knows older versions alone."""
    sys.modules.setdefault("ring_flash_attn.adapters", MagicMock())


def _only_causal(problem, ranks):
    if problem.kind != "causal" or problem.tokens % (2 * ranks):
        raise NotImplementedError("causal sequences whose length 2 * ranks divides")


def _zigzag(problem, rank, ranks):
    chunks = [x.chunk(2 * ranks, dim=1) for x in problem.whole]
    return [torch.cat([parts[rank], parts[2 * ranks - 1 - rank]], dim=1) for parts in chunks]


def ring_flash_attn_zigzag(problem, rank, ranks):
    _leave_out_adapters()
    from ring_flash_attn import zigzag_ring_flash_attn_func

    _only_causal(problem, ranks)
    return (lambda q, k, v: zigzag_ring_flash_attn_func(q, k, v, causal=True)), *_zigzag(problem, rank, ranks)


def ring_flash_attn_llama3(problem, rank, ranks):
    """Packed documents: contiguous slices, all-gathered keys."""
    _leave_out_adapters()
    from ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func

    if problem.cu is None or problem.tokens % ranks:
        raise NotImplementedError("packed documents whose sum ranks divides")
    cu_q, cu_k, longest_q, longest_k, local_k = llama3_flash_attn_prepare_cu_seqlens(
        problem.cu_tensor, causal=True, rank=rank, world_size=ranks
    )
    own = [x.chunk(ranks)[rank].contiguous() for x in problem.whole]

    def function(q, k, v):
        return llama3_flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, longest_q, longest_k, heads_k_stride=k.shape[1], local_k_slice=local_k, causal=True
        )

    return function, *own


def yunchang_usp(problem, rank, ranks):
    """Ulysses over all ranks, a ring of one."""
    from yunchang import LongContextAttention, set_seq_parallel_pg

    _only_causal(problem, ranks)
    set_seq_parallel_pg(ranks, 1, rank, ranks)
    attention = LongContextAttention(ring_impl_type="zigzag")
    own = [x.chunk(ranks, dim=1)[rank].contiguous() for x in problem.whole]
    return (lambda q, k, v: attention(q, k, v, causal=True)), *own


@functools.cache
def _open_torch_context(ranks):
    """Never left: backwards need it too, and no other peer calls what it replaces.

    It wants a buffer to divide, without one it raises IndexError; q, k and v are this rank's already.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh, buffer = init_device_mesh("cuda", (ranks,)), torch.zeros(2 * ranks, device="cuda")
    context = context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer})
    context.__enter__()
    return context


def torch_context_parallel(problem, rank, ranks):
    """torch's ring over scaled_dot_product_attention; K and V are repeated, as it takes no groups of heads."""
    _only_causal(problem, ranks)
    if not problem.whole[0].is_cuda:
        raise NotImplementedError("CUDA tensors")
    _open_torch_context(ranks)
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in _zigzag(problem, rank, ranks))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))

    def function(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return function, q, k, v, dout


PEERS = {
    "ring_flash_attn_zigzag": ring_flash_attn_zigzag,
    "ring_flash_attn_llama3": ring_flash_attn_llama3,
    "yunchang_usp": yunchang_usp,
    "torch_context_parallel": torch_context_parallel,
}
