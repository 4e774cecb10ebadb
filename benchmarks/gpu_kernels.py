"""Triton kernels of the benchmarks: clocks of the SMs, a read of device memory. Imported only where there is a GPU."""

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


@triton.jit
def read_clocks(out_ptr):
    """Each block writes (SM index, cycles, nanoseconds) to its row of `out_ptr`, int64 (blocks, 3)."""
    sm, cycles, nanoseconds = tl.inline_asm_elementwise(
        """{
        .reg .u32 smid;
        mov.u32 smid, %smid;
        cvt.u64.u32 $0, smid;
        mov.u64 $1, %clock64;
        mov.u64 $2, %globaltimer;
        }""",
        "=l,=l,=l,l",
        [tl.program_id(0).to(tl.int64)],
        dtype=(tl.int64, tl.int64, tl.int64),
        is_pure=False,
        pack=1,
    )
    row = out_ptr + 3 * tl.program_id(0)
    tl.store(row, sm)
    tl.store(row + 1, cycles)
    tl.store(row + 2, nanoseconds)
