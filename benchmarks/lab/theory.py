"""Attention in six kernels and in one: the bytes and FLOP of each kernel, and the time that a GPU needs at least.

python benchmarks/lab/theory.py [--machine h200]

Standard attention is what transformers' "eager" attention does: two products, scaling, mask, a softmax in float32 and
its rounding to 16 bits, each a kernel of PyTorch. A kernel takes the time of its scarcest resource, and kernels run one
after the other. benchmarks/run.py measures the same comparison (peer `naive`). Plain data, no torch.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # absent under PYTHONSAFEPATH

from markdown import markdown_table, wrapped
from scores import significant

BATCH, SEQLEN, HEADS, HEAD_DIM = 4, 4096, 16, 128  # of the table, causal
SCORES, ELEMENTS = BATCH * HEADS * SEQLEN**2, BATCH * HEADS * SEQLEN * HEAD_DIM


@dataclass(frozen=True)
class Machine:
    """Data sheet: SMs, clock, FLOP of the tensor cores (16-bit, dense) and exponentials per clock and SM, bytes per
    second of device memory."""

    name: str
    multiprocessors: int
    clock: float
    tensor_flop: int
    memory: float
    exponentials_per_clock: int = 16

    @property
    def flops(self):
        return self.multiprocessors * self.clock * self.tensor_flop

    @property
    def exponentials(self):
        return self.multiprocessors * self.clock * self.exponentials_per_clock


MACHINES = {
    "a100": Machine("A100 80GB SXM", 108, 1.41e9, 2048, 2.04e12),
    "h100": Machine("H100 SXM", 132, 1.83e9, 4096, 3.35e12),
    "h200": Machine("H200", 132, 1.83e9, 4096, 4.8e12),
}


def machine_of(result):
    """The machine on which a result was measured."""
    return next(machine for key, machine in MACHINES.items() if key in result["device"]["name"].lower())


@dataclass(frozen=True)
class Kernel:
    """Bytes of device memory for each score and for each element of Q, K, V or O; matrix products of 2 d FLOP a score;
    exponentials a score; computed: the part of the score matrix."""

    name: str
    score_bytes: int
    element_bytes: int = 0
    products: int = 0
    softmax: int = 0
    computed: float = 1.0

    @property
    def bytes(self):
        return self.score_bytes * SCORES + self.element_bytes * ELEMENTS

    @property
    def flop(self):
        return 2.0 * self.products * SCORES * self.computed * HEAD_DIM

    def seconds(self, machine):
        exponentials = self.softmax * SCORES * self.computed / machine.exponentials
        return max(self.bytes / machine.memory, self.flop / machine.flops, exponentials)


# A score has 2 bytes, 4 in float32; the mask is one matrix for all heads and not counted.
STANDARD = (
    Kernel("S = Q Kᵀ", score_bytes=2, element_bytes=4, products=1),
    Kernel("S · scale", score_bytes=2 + 2),
    Kernel("S + mask", score_bytes=2 + 2),
    Kernel("P = softmax(S) in float32", score_bytes=2 + 4, softmax=1),
    Kernel("P to 16 bits", score_bytes=4 + 2),
    Kernel("O = P V", score_bytes=2, element_bytes=4, products=1),
)
FUSED = Kernel("all in one", score_bytes=0, element_bytes=8, products=2, softmax=1, computed=0.5)


def row(name, kernels, machine):
    """The cells of kernels that run one after the other."""
    terms = ((sum(k.score_bytes for k in kernels), "s²"), (sum(k.element_bytes for k in kernels), "s d"))
    formula = " + ".join(f"{factor} {unit}" for factor, unit in terms if factor)
    flop = sum(kernel.flop for kernel in kernels)
    figures = [sum(k.bytes for k in kernels) / 1e9, flop / 1e12, 1e3 * sum(k.seconds(machine) for k in kernels)]
    return [name, formula, *(significant(x) if x else "–" for x in figures)]


def kernels_block(machine):
    rows = [row(kernel.name, [kernel], machine) for kernel in STANDARD]
    rows += [row("standard attention in all", STANDARD, machine), row(FUSED.name, [FUSED], machine)]
    told = f"The figures: b {BATCH}, s {SEQLEN}, h {HEADS}, d {HEAD_DIM}, causal, by the data sheet of an "
    told += f"{machine.name}: {machine.flops / 1e12:.0f} TFLOPS, {machine.memory / 1e12:.2f} TB/s, "
    told += f"{machine.exponentials / 1e12:.2f}e12 exponentials a second."
    return [*markdown_table(["kernel", "bytes of a head", "GB", "TFLOP", "ms at least"], rows), "", *wrapped(told)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=list(MACHINES), default="h200")
    print("\n".join(kernels_block(MACHINES[parser.parse_args().machine])))
