"""A model of context-parallel attention: what each method should take, from the kernels' speed and the links'.

Causal and even work. A kernel takes its floating-point operations at the peak rate, a time per tile and one per launch,
fitted to the benchmark's rows of 512 to 4096 tokens; a transfer its bytes and a latency. Upper bounds: ranks never wait
for each other's jitter.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

MULTIPROCESSORS = 132
TILE_ROWS = 128
LAUNCH_SECONDS = 5e-6
MEMORY_BANDWIDTH = 4.0e12
COMBINE_BYTES = 18  # read and written for each element of out by `PartialSums.add`
MOST_PARTS = 4  # of out, that are combined at once
DQ_BYTES = (6, 10)  # read and written for each element of dq to add a part of two, or of more
SUM_BYTES = 4  # zeros and sums of dk and dv in float32, for each element of dq, of which there are more


@dataclass(frozen=True)
class Machine:
    """Rates in FLOP/s, bytes/s; seconds of a tile and of a message."""

    forward: float = 790e12
    backward: float = 660e12
    forward_tile: float = 2.4e-6
    backward_tile: float = 10e-6
    link: float = 330e9
    message: float = 8e-6


@dataclass(frozen=True)
class Shape:
    """Heads of the queries, of keys and values, and their dim, in a dtype of two bytes."""

    heads: int = 32
    heads_k: int = 8
    head_dim: int = 128

    @property
    def key_bytes(self) -> int:
        """K and V of one token."""
        return 2 * 2 * self.heads_k * self.head_dim

    @property
    def query_bytes(self) -> int:
        return 2 * self.heads * self.head_dim

    def operations(self, pairs: float, backward: bool) -> float:
        """Of so many visible (query, key) pairs."""
        return 4.0 * pairs * self.heads * self.head_dim * (2.5 if backward else 1.0)


def kernel_seconds(machine: Machine, shape: Shape, pairs: float, rows: float, backward: bool) -> float:
    """One call. rows: queries, in the backward keys: what the tiles divide."""
    rate = machine.backward if backward else machine.forward
    tile = machine.backward_tile if backward else machine.forward_tile
    tiles = -(-rows // TILE_ROWS) * shape.heads
    return shape.operations(pairs, backward) / rate + tiles * tile / MULTIPROCESSORS + LAUNCH_SECONDS


def one_gpu_seconds(machine: Machine, shape: Shape, pairs: float, tokens: int, backward: bool) -> float:
    return kernel_seconds(machine, shape, pairs, tokens, backward)


def transfer_seconds(machine: Machine, count: float) -> float:
    return count / machine.link + machine.message if count else 0.0


def _all_gather(machine, shape, pairs, tokens, ranks, received, backward):
    """Of two ranks the first has rows that need none of what it receives, and the other waits for half as much; of
    more all compute with their own keys first. The backward is that of own keys before and after the others'."""
    rows, own = tokens / ranks, pairs / ranks
    keys = transfer_seconds(machine, shape.key_bytes * received)
    if not backward and ranks == 2:
        return keys / 2 + kernel_seconds(machine, shape, own, rows, False)
    if not backward:
        first, others = (kernel_seconds(machine, shape, part, rows, False) for part in (own / ranks, own - own / ranks))
        combined = 6 * rows * shape.heads * shape.head_dim / MEMORY_BANDWIDTH
        return max(first, keys) + others + combined
    early, late = _divided_own(machine, shape, own / ranks, rows)
    others = kernel_seconds(machine, shape, own - own / ranks, received, True)
    back = transfer_seconds(machine, 2 * shape.key_bytes * received)
    waits = max(0.0, back / (ranks - 1) - late) + back * (ranks - 2) / (ranks - 1)  # one distance at a time
    summed = DQ_BYTES[0] * rows * shape.heads * shape.head_dim + 4 * shape.key_bytes * (received + rows)
    return max(early, keys) + others + late + waits + summed / MEMORY_BANDWIDTH


def _divided_own(machine, shape, pairs, rows):
    """Backward of own keys as two calls, a quarter of the work and the rest."""
    return tuple(kernel_seconds(machine, shape, part * pairs, rows / 2, True) for part in (0.25, 0.75))


def _ring(machine, shape, pairs, tokens, ranks, received, backward):
    """Each step hides the next one's transfer. Few results are combined at once, more by passes over float32."""
    rows, per_step = tokens / ranks, received / max(1, ranks - 1)
    size = rows * shape.heads * shape.head_dim / MEMORY_BANDWIDTH
    transfer = transfer_seconds(machine, shape.key_bytes * per_step)
    own_pairs = pairs / ranks / ranks
    step = kernel_seconds(machine, shape, own_pairs, rows, backward)
    if not backward:
        combined = COMBINE_BYTES * size if ranks > MOST_PARTS else 0.0
        at_once = 0.0 if ranks > MOST_PARTS else 2 * (ranks + 1) * size
        return max(step + combined, transfer) * (ranks - 1) + step + combined + at_once
    transfer *= 3  # the last step's gradients beside the next one's keys
    step += (DQ_BYTES[ranks > 2] + SUM_BYTES) * size
    early, late = _divided_own(machine, shape, own_pairs, rows)
    return max(early, transfer / 3) + max(step, transfer) * (ranks - 2) + step + max(late, 2 / 3 * transfer)


def _ulysses(machine, shape, pairs, tokens, ranks, received, backward):
    """All tokens of heads / ranks; two all-to-alls and copies that rearrange what they move."""
    own = Shape(max(1, shape.heads // ranks), max(1, shape.heads_k // ranks), shape.head_dim)
    compute = kernel_seconds(machine, own, pairs, tokens, backward)
    moved = (2 * shape.query_bytes + shape.key_bytes) * tokens / ranks * (ranks - 1) / ranks
    return compute + moved / machine.link + 2 * machine.message + 4 * moved / MEMORY_BANDWIDTH


METHODS = {"all_gather": _all_gather, "ring": _ring, "ulysses": _ulysses}


def seconds(method, machine, shape, pairs, tokens, ranks, received, backward) -> float:
    """Of one pass. pairs: visible ones of all tokens; received: tokens whose keys the busiest rank receives."""
    if ranks == 1:
        return one_gpu_seconds(machine, shape, pairs, tokens, backward)
    return METHODS[method](machine, shape, pairs, tokens, ranks, received, backward)


def efficiency(method, machine, shape, pairs, tokens, ranks, received, with_backward) -> float:
    """Speed per GPU over that of one GPU with all tokens, of a forward or of forward and backward."""
    passes = (False, True) if with_backward else (False,)
    alone = sum(one_gpu_seconds(machine, shape, pairs, tokens, p) for p in passes)
    together = sum(seconds(method, machine, shape, pairs, tokens, ranks, received, p) for p in passes)
    return alone / ranks / together


def causal_zigzag(tokens: int, ranks: int):
    """(visible pairs, tokens that the first rank, which needs most, receives)."""
    return tokens * (tokens + 1) / 2, (2 * ranks - 2) * tokens / (2 * ranks)


def predicted_table(machine: Machine, shape: Shape, sizes, rank_counts) -> str:
    """Markdown: forward / forward and backward, in percent."""
    lines = ["| GPUs | method | " + " | ".join(f"{size >> 10}k" for size in sizes) + " |"]
    lines.append("|---" * (len(sizes) + 2) + "|")
    for ranks in rank_counts:
        for method in METHODS:
            cells = []
            for tokens in sizes:
                pairs, received = causal_zigzag(tokens, ranks)
                both = [efficiency(method, machine, shape, pairs, tokens, ranks, received, b) for b in (False, True)]
                cells.append(" / ".join(f"{100 * value:.0f}" for value in both))
            lines.append(f"| {ranks} | {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link", type=float, default=330, help="GB/s per GPU and direction")
    arguments = parser.parse_args()
    sizes = [1 << n for n in (14, 15, 16, 17, 18, 20)]
    print(predicted_table(Machine(link=arguments.link * 1e9), Shape(), sizes, (2, 8)))


if __name__ == "__main__":
    main()
