"""A Triton kernel that reads a buffer of device memory and does next to nothing else; imported only with a GPU."""

import torch
import triton
import triton.language as tl

BLOCK = 4096
PROGRAMS_PER_SM = 8


@triton.jit
def sum_blocks(in_ptr, out_ptr, blocks, BLOCK: tl.constexpr):
    """Program i adds up the blocks i, i + programs, ... of float32 and writes the sum to out_ptr[i]."""
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        total += tl.load(in_ptr + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def make_reader(buffer):
    """A function that reads all of a float32 buffer, whose size is a multiple of BLOCK."""
    programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(buffer.device).multi_processor_count
    sums = torch.empty(programs, dtype=torch.float32, device=buffer.device)
    return lambda: sum_blocks[(programs,)](buffer, sums, buffer.numel() // BLOCK, BLOCK=BLOCK, num_warps=8)
