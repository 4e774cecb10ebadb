"""A Triton kernel that reads the clocks of the SMs. Imported only where there is a GPU."""

import triton
import triton.language as tl


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
