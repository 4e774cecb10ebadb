"""Attention as it is usually written and as one fused kernel: bytes, FLOP and exponentials of each kernel, and the time
that a machine's constants allow them. Plain data, no torch.

Times are lower bounds: each kernel takes what its scarcest resource takes, and all kernels run one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKENS, WIDTH = 16384, 2048  # batch * seqlen and heads * head dim, as in the cells of benchmarks/run.py
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Machine:
    """What data sheets say: SMs, clock, FLOP of the tensor cores (16-bit, dense) and exponentials per clock and SM,
    bytes per second of device memory."""

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


def machine_of(result, otherwise="h200"):
    """The machine that a result was measured on; `otherwise` before there is one."""
    name = result["device"]["name"].lower() if result else ""
    return MACHINES[next((key for key in MACHINES if key in name), otherwise)]


@dataclass(frozen=True)
class Problem:
    """Self-attention in a dtype of two bytes."""

    seqlen: int
    head_dim: int
    causal: bool

    @property
    def batch(self):
        return TOKENS // self.seqlen

    @property
    def heads(self):
        return WIDTH // self.head_dim

    @property
    def scores(self):
        """Numbers of the score matrices of all heads, masked ones included."""
        return self.batch * self.heads * self.seqlen**2

    @property
    def elements(self):
        """Of Q, of K, of V and of O."""
        return self.batch * self.seqlen * self.heads * self.head_dim

    @property
    def flop(self):
        """By the convention: half of the square when causal."""
        return 4 * self.scores * self.head_dim * (0.5 if self.causal else 1.0)


@dataclass(frozen=True)
class Kernel:
    """Device memory that a kernel reads and writes: so many bytes a score and an element of Q, K, V or O. products: how
    many matrix products of 2 d FLOP a score it computes; softmax: whether it takes an exponential of each."""

    name: str
    score_bytes: int
    element_bytes: int = 0
    products: int = 0
    softmax: bool = False

    def bytes(self, problem):
        return self.score_bytes * problem.scores + self.element_bytes * problem.elements

    def flop(self, problem):
        return 2.0 * self.products * problem.scores * problem.head_dim

    def seconds(self, problem, machine):
        return max(self.limits(problem, machine).values())

    def limits(self, problem, machine):
        """{resource: seconds}"""
        return {
            "memory": self.bytes(problem) / machine.memory,
            "tensor cores": self.flop(problem) / machine.flops,
            "exponentials": self.softmax * problem.scores / machine.exponentials,
        }


# Attention in plain operations, as transformers' "eager" attention has it: the softmax in float32, then back to 16
# bits. A score is 2 bytes, 4 in float32; the mask is one matrix for all heads and not counted.
STANDARD = (
    Kernel("S = Q Kᵀ", score_bytes=2, element_bytes=4, products=1),
    Kernel("S · scale", score_bytes=2 + 2),
    Kernel("S + mask", score_bytes=2 + 2),
    Kernel("P = softmax(S) in float32", score_bytes=2 + 4, softmax=True),
    Kernel("P to 16 bits", score_bytes=4 + 2),
    Kernel("O = P V", score_bytes=2, element_bytes=4, products=1),
)
FUSED = Kernel("all in one", score_bytes=0, element_bytes=8, products=2, softmax=True)
PEAK_SCORE_BYTES = 6  # P in float32 beside S before the softmax, or beside P in 16 bits after it


def standard_kernels(problem):
    """The kernels of standard attention; without a mask one less."""
    return tuple(kernel for kernel in STANDARD if problem.causal or kernel.name != "S + mask")


def standard_seconds(problem, machine):
    return sum(kernel.seconds(problem, machine) for kernel in standard_kernels(problem))


def standard_bytes(problem):
    return sum(kernel.bytes(problem) for kernel in standard_kernels(problem))


def fused_limits(problem, machine):
    """{resource: seconds}: causal kernels compute half of the square, and read all of Q, K, V."""
    share = 0.5 if problem.causal else 1.0
    limits = FUSED.limits(problem, machine)
    return {name: seconds * (1.0 if name == "memory" else share) for name, seconds in limits.items()}


def fused_seconds(problem, machine):
    return max(fused_limits(problem, machine).values())


def fused_bound(problem, machine):
    """Which resource the fused kernel is limited by."""
    limits = fused_limits(problem, machine)
    return max(limits, key=limits.get)


def lse_bytes(problem):
    return 4 * problem.batch * problem.heads * problem.seqlen


def standard_memory(problem):
    """Bytes that a call adds at its peak, the output included; what is freed before does not count."""
    return PEAK_SCORE_BYTES * problem.scores


def fused_memory(problem):
    return 2 * problem.elements + lse_bytes(problem)


def problems():
    """The problems of the tables."""
    return [Problem(s, d, causal) for d in HEAD_DIMS for causal in (False, True) for s in SEQLENS]
