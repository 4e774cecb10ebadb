"""What the forward and the backward of the Triton comparator share: tiles, loads, and the choice of a tile."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton_variants import Tile

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None

LONG_SEQUENCE = 2048
LOG2_E = math.log2(math.e)
INTERPRETER_TILE = Tile(32, 16, 4, 1)


def patch_interpreter():
    """NumPy 2.4 and newer refuse int() of the arrays of one element that the interpreter keeps scalars in."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


@triton.jit
def load_tile(
    source, strides, batch, head, start, length, head_dim, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + ROWS of one head of a (b, s, h, d) tensor, as (ROWS, BLOCK_D); zeros outside of it.

    source: a tensor descriptor if USE_TMA, else a pointer, to which `strides`, those of (b, s, h), belong. Of a
    tile that stays for the whole loop the compiler keeps a pointer's load in shared memory and a descriptor's load in
    registers, which the backward has none left of.
    """
    if USE_TMA:
        tile = source.load([batch, start, head, 0]).reshape(ROWS, BLOCK_D)
    else:
        rows = start + tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK_D)
        base = source + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
        inside = (rows < length)[:, None] & (columns < head_dim)[None, :]
        tile = tl.load(base + rows.to(tl.int64)[:, None] * strides[1] + columns[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(target, strides, batch, head, start, length, head_dim, tile, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores (ROWS, BLOCK_D) to where load_tile reads it, in the target's dtype; rows and columns outside are left."""
    rows = start + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    base = target + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
    inside = (rows < length)[:, None] & (columns < head_dim)[None, :]
    pointers = base + rows.to(tl.int64)[:, None] * strides[1] + columns[None, :]
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def keys_of_tile(tile, seqlen_q, seqlen_k, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(unmasked_end, end) of a tile of queries: it sees the keys before `end`, and whole blocks of keys, without any
    mask, before unmasked_end, a multiple of BLOCK_N."""
    end = seqlen_k
    seen_by_all = seqlen_k
    if CAUSAL:
        offset = seqlen_k - seqlen_q
        end = tl.maximum(0, tl.minimum(seqlen_k, (tile + 1) * BLOCK_M + offset))
        seen_by_all = tl.maximum(0, tl.minimum(seqlen_k, tile * BLOCK_M + 1 + offset))
    return seen_by_all // BLOCK_N * BLOCK_N, end


def describable(tensor):
    """Whether a TMA descriptor can hold the tensor: 16-byte aligned base and strides, no stride 0, contiguous last
    dimension."""
    strides = tensor.stride()
    aligned = all(stride > 0 and stride * tensor.element_size() % 16 == 0 for stride in strides[:-1])
    return tensor.data_ptr() % 16 == 0 and strides[-1] == 1 and aligned


def can_use_tma(*tensors):
    if TensorDescriptor is None or not all(describable(tensor) for tensor in tensors):
        return False
    device = tensors[0].device
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def padded_head_dim(head_dim):
    return max(16, triton.next_power_of_2(head_dim))


def outer_strides(tensor):
    """The strides of (b, s, h)."""
    return tensor.stride()[:3]


def row_size(tile, side):
    return tile.block_m if side == "m" else tile.block_n


class Launch:
    """A launch of `kernel` with a tile still to be chosen.

    sources: ((tensor, side), …): the tensors (b, s, h, d) that the kernel reads by descriptors if use_tma, its first
    arguments, with the side of the tile that their rows are on, "m" (queries) or "n" (keys).
    arguments: its further ones, up to the constants.
    owner: (tensor, side) of the tensor whose rows are shared out among the thread blocks, head by head.
    constants: those of the kernel that have a default.
    """

    def __init__(self, kernel, sources, arguments, owner, causal, use_tma, **constants):
        self.kernel, self.sources, self.arguments = kernel, sources, arguments
        self.owner, self.causal, self.use_tma, self.constants = owner, causal, use_tma, constants
        self.block_d = padded_head_dim(owner[0].shape[-1])

    def described(self, tile):
        """The sources as the kernel takes them."""
        if not self.use_tma:
            return [tensor for tensor, _ in self.sources]
        return [
            TensorDescriptor(x, list(x.shape), list(x.stride()), [1, row_size(tile, side), 1, self.block_d])
            for x, side in self.sources
        ]

    def options(self, tile):
        constants = {"CAUSAL": self.causal, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": self.block_d}
        constants.update(self.constants, USE_TMA=self.use_tma)
        return {**constants, "num_warps": tile.num_warps, "num_stages": tile.num_stages}

    def grid(self, tile):
        tensor, side = self.owner
        batch, seqlen, heads, _ = tensor.shape
        return (triton.cdiv(seqlen, row_size(tile, side)) * batch * heads,)

    def run(self, tile):
        self.kernel[self.grid(tile)](*self.described(tile), *self.arguments, **self.options(tile))

    @property
    def kernel_key(self):
        """Launches of one key and one tile are of one compiled kernel, as far as the benchmarks go."""
        constants = tuple(sorted(self.constants.items()))
        return self.kernel.__name__, self.block_d, self.causal, self.use_tma, constants

    @property
    def tuning_key(self):
        """Launches of one key share a tile."""
        tensor, _ = self.sources[-1]
        return *self.kernel_key, tensor.device, tensor.dtype, tensor.shape[1] > LONG_SEQUENCE


tuned_tiles = {}  # {(tuning key, candidates): tile}
not_compiled = set()  # {(kernel key, tile)}: never to be tried


def chosen_tile(launch, tiles):
    """The fastest of `tiles` for launches like this one; under Triton's interpreter a small one."""
    if type(launch.kernel).__name__ == "InterpretedFunction":
        return INTERPRETER_TILE
    key = launch.tuning_key, tiles
    if key not in tuned_tiles:
        candidates = [tile for tile in tiles if (launch.kernel_key, tile) not in not_compiled]
        if not candidates:
            raise RuntimeError(f"{launch.kernel.__name__}: expected a tile that compiles, of {len(tiles)} none does")
        times = milliseconds(launch, candidates) if len(candidates) > 1 else {candidates[0]: 0.0}
        tuned_tiles[key] = min(times, key=times.get)
    return tuned_tiles[key]


def milliseconds(launch, tiles):
    """{tile: median ms}; infinite for a tile that does not fit the GPU."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    times = {}
    for tile in tiles:
        try:
            times[tile] = do_bench(lambda tile=tile: launch.run(tile), warmup=5, rep=20, return_mode="median")
        except OutOfResources:
            times[tile] = float("inf")
    return times
