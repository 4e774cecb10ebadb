"""What the benchmarks share with the tests, the table of cases and the reference, and among themselves."""

import sys
from itertools import count

from results import ROOT

sys.path.append(str(ROOT / "tests"))

from cases import BENCH_CELLS, BENCH_GROUPS, Case, accuracy_cases, bench_cells, cache_groups
from reference import attention, attention_by_rows

__all__ = [
    "BENCH_CELLS", "BENCH_GROUPS", "ROOT", "Case", "accuracy_cases", "attention", "attention_by_rows", "bench_cells",
    "cache_groups", "row_teller",
]  # fmt: skip


def row_teller(total):
    """A function that tells what a row gave, in a line on standard error."""
    numbers = count(1)
    return lambda text: print(f"{next(numbers)}/{total} {text}", file=sys.stderr, flush=True)
