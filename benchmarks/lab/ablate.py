"""What each technique of the forward is worth: `python benchmarks/lab/ablate.py --out ablate.json`.

Measures every entry of sm80_designs.py: the ladder from plain loads to the kernel in use, and the kernel in use with
one thing changed; full and causal. Then those of sm90_designs.py, the Hopper forward. Compiles what is missing on all
cores (build/lab/kernels keeps it), compares each kernel with float64 attention, times them in turns, writes the JSON
and prints the tables. Needs nvcc and the CUTLASS headers, torch and a GPU; --compile-only no GPU, --list nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # absent under PYTHONSAFEPATH

import sm80_designs
import sm90_designs
import study
import study_report
from gpu import gpu

FAMILIES = {"mma_sync": sm80_designs.entries, "wgmma": sm90_designs.entries}
SEQLENS = (1024, 4096)


def groups(families=tuple(FAMILIES), head_dims=sm80_designs.HEAD_DIMS):
    """{"family head_dim": [Entry]}"""
    return {f"{family} {dim}": FAMILIES[family](dim) for family in families for dim in head_dims}


def store(result, title, found):
    family, head_dim = title.split()
    result.setdefault("families", {}).setdefault(family, {})[head_dim] = found


def main(argv=None):
    parser = study.parser(__doc__, "ablate", min_ms=25.0)
    here = [family for family in FAMILIES if family != "wgmma" or gpu().arch == "90"]
    parser.add_argument("--family", nargs="+", choices=tuple(FAMILIES), default=here, help="default: what the GPU runs")
    parser.add_argument("--head-dims", nargs="+", type=int, choices=sm80_designs.HEAD_DIMS, default=[64, 128])
    options = parser.parse_args(argv)
    study.run(options, groups(options.family, options.head_dims), SEQLENS, store, study_report.ablation)


if __name__ == "__main__":
    main()
