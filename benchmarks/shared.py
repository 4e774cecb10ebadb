"""What the benchmarks share with the tests, the table of cases and the reference, and among themselves."""

import sys
from contextlib import contextmanager

from results import ROOT
from tqdm import tqdm

sys.path.append(str(ROOT / "tests"))

from cases import BENCH_CELLS, BENCH_GROUPS, Case, accuracy_cases, bench_cells, cache_groups
from reference import attention, attention_by_rows

__all__ = [
    "BENCH_CELLS", "BENCH_GROUPS", "ROOT", "Case", "accuracy_cases", "attention", "attention_by_rows", "bench_cells",
    "cache_groups", "row_bar",
]  # fmt: skip


@contextmanager
def row_bar(total):
    """Yields a function that tells what a row gave: a line on standard error, above a bar where that is a terminal."""
    with tqdm(total=total, unit="row", disable=None) as bar:
        count = 0

        def done(text):
            nonlocal count
            count += 1
            bar.write(f"{count}/{total} {text}", file=sys.stderr)
            bar.update()

        yield done
