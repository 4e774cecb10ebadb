"""What a multiprocessor of the GPU at hand holds; without a GPU, one of sm_90."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A CTA takes 1 KB of shared memory more than it asks for."""

    arch: str = "90"
    smem_per_sm: int = 228 * 1024
    smem_per_block: int = 227 * 1024
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048

    def problems(self, ctas, threads, smem_bytes):
        """The limits of an SM, other than registers, that this many CTAs at a time exceed."""
        fits = smem_bytes <= self.smem_per_block and ctas * (smem_bytes + 1024) <= self.smem_per_sm
        found = [] if fits else [f"shared memory: {ctas} CTAs of {smem_bytes} bytes do not fit an SM"]
        too_many = [f"threads: {ctas} CTAs of {threads} do not fit an SM"]
        return found + too_many * (ctas * threads > self.threads_per_sm)


@functools.lru_cache(None)
def gpu():
    import torch

    if not torch.cuda.is_available():
        return Gpu()
    found = torch.cuda.get_device_properties(0)
    return Gpu(
        f"{found.major}{found.minor}", found.shared_memory_per_multiprocessor, found.shared_memory_per_block_optin,
        found.regs_per_multiprocessor, found.max_threads_per_multi_processor,
    )  # fmt: skip
