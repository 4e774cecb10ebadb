"""Other tiles of the Hopper forward: `python benchmarks/lab/sweep.py --out sweep.json`.

Every head dim in bf16 and one in fp16; the tiles are OTHER_TILES of sm90_designs.py. Compiles what is missing on all
cores, compares each kernel with float64 attention, times those of a group in turns, writes the JSON and prints the
table. Needs the same as ablate.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # absent under PYTHONSAFEPATH

import study
import study_report
from sm80_designs import Entry
from sm90_designs import OTHER_TILES, shipped, tile_entries

SEQLENS = (1024, 8192)
FP16_HEAD_DIM = 128
MOST_OTHERS = {"bf16": 2, "fp16": 1}  # tiles besides the one in use


def groups(head_dims=None, dtypes=tuple(MOST_OTHERS)):
    """{title: [Entry]} of each kernel, the tile in use first."""
    found = {}
    for dtype in dtypes:
        for (dim, variant, masks), others in OTHER_TILES.items():
            if (head_dims and dim not in head_dims) or (dtype == "fp16" and dim != FP16_HEAD_DIM):
                continue
            base = replace(shipped(dim, variant, masks), dtype=dtype)
            label = f"{base.block_m} × {base.block_n}, {base.kv_stages} stages"
            title = f"d {dim} {dtype}" + (f", {masks[0]}" if len(masks) == 1 else "")
            found[title] = [Entry("in use", label, base), *tile_entries(base, others[: MOST_OTHERS[dtype]])]
    return found


def store(result, title, found):
    result.setdefault("groups", []).append({"title": title, **found})


def main(argv=None):
    parser = study.parser(__doc__, "sweep", min_ms=15.0)
    parser.add_argument("--head-dims", nargs="+", type=int, help="default: all")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(MOST_OTHERS), default=tuple(MOST_OTHERS))
    options = parser.parse_args(argv)
    study.run(options, groups(options.head_dims, options.dtypes), SEQLENS, store, study_report.sweep)


if __name__ == "__main__":
    main()
