"""Other tiles of the kernels in use: `python benchmarks/lab/sweep.py --out sweep.json`.

Both forwards, every head dim in bf16 and one in fp16; the tiles are data, tile_designs.py. Compiles what is missing on
all cores, compares each kernel with float64 attention, times those of a group in turns, writes the JSON and prints the
tables. Needs the same as ablate.py.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # absent under PYTHONSAFEPATH

import study
import study_report
import tile_designs
from kernel_library import BuildError

SEQLENS = (1024, 8192)


def sizes(group):
    return {"kernel": group.kernel, "head_dim": group.head_dim, "dtype": group.dtype, "masks": list(group.masks)}


def store(groups, result, title, found):
    """Adds the result of a group of {title: Group}."""
    result.setdefault("groups", []).append({**sizes(groups[title]), **found})


def main(argv=None):
    parser = study.parser(__doc__, "sweep", min_ms=15.0)
    kernels = tile_designs.KERNELS
    parser.add_argument("--kernels", nargs="+", choices=kernels, default=list(kernels), help="default: all")
    parser.add_argument("--head-dims", nargs="+", type=int, help="default: all")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(study.TORCH_DTYPES), default=list(study.TORCH_DTYPES))
    options = parser.parse_args(argv)
    try:
        found = tile_designs.groups(options.kernels, options.head_dims, options.dtypes)
        todo, groups = {g.title: entries for g, entries in found.items()}, {g.title: g for g in found}
        study.run(options, todo, SEQLENS, partial(store, groups), study_report.sweep)
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
