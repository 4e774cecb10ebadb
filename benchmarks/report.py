"""The report of results: tables, scores, plots, comparisons, and the figures of the documents.

python benchmarks/report.py RESULT.json                 print the table and the scores of a run
python benchmarks/report.py --publish FOLDER            take the results of a run into benchmarks/results, then --docs
python benchmarks/report.py --docs [--check]            write the generated blocks of the documents, or compare them

--publish keeps medians and ranges (results.py) and draws the plots that a page shows.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

import pages
from plots import write_plots
from results import RESULTS, ROOT, device_name, environment_line, load, measured_commit, store
from scores import judged_pairs, memory_lines, modes, overhead_lines, ratios, rows_of, score_line

LAB = ROOT / "benchmarks" / "lab"
PLOTS = {"grid": ("fwd_d128.png", "bwd_d128.png"), "triton_b4h8": ("triton_b4h8_fwd_bwd_d128.png",)}  # of pages
OF_SEVERAL_GPUS = ("context_parallel",)  # may be of another commit than all others


def missing_lines(result):
    """What was not measured and why, one line per implementation."""
    reasons = {}
    for row in result["rows"]:
        for name, reason in row.get("notes", {}).items():
            reasons.setdefault(name, Counter())[f"{row['mode']}: {reason}"] += 1
    return [
        f"not measured: {name}, " + "; ".join(f"{count} rows {reason}" for reason, count in counts.items())
        for name, counts in reasons.items()
    ]


def full_report(result):
    """The whole report; the scores are the last lines."""
    lines = []
    for group, mode in ((group, mode) for group in result["groups"] for mode in modes(result)):
        if rows_of(result, group, mode):
            lines += [*pages.row_table(result, group, mode), ""]
    lines += [*missing_lines(result), environment_line(result), *overhead_lines(result), *memory_lines(result)]
    return [*lines, "", *score_lines(result)]


def score_lines(result):
    """A line for every group, mode and pair."""
    each = itertools.product(result["groups"], modes(result), judged_pairs(result))
    found = [(*key, ratios(result, key[2][1], key[1], key[0], key[2][0])) for key in each]
    return [score_line(x, f"{group} {mode}, {ours} vs {peer}") for group, mode, (ours, peer), x in found if x]


# ---- publishing ------------------------------------------------------------------------------------------------------


def disagreement(results):
    """Why results are not of one run, or None."""
    for what, read in (("commit", measured_commit), ("GPU", device_name)):
        found = {name: read(result) for name, result in results.items() if name not in OF_SEVERAL_GPUS}
        if len(set(found.values())) > 1:
            return f"expected results of one {what}, got {found}"
    return None


def publish(folder, target=RESULTS):
    """Stores the compact form of each result in `folder`, and draws the plots that pages show.

    Returns the paths. SystemExit unless all are of one commit and one GPU.
    """
    results = {path.stem: load(path) for path in sorted(Path(folder).glob("*.json"))}
    reason = disagreement(results) if results else f"{folder}: no results"
    if reason:
        sys.exit(f"error: {reason}")
    paths = [store(name, result, target) for name, result in results.items()]
    for name in [name for name in PLOTS if name in results]:
        caption, prefix = environment_line(results[name]), "" if name == "grid" else f"{name}_"
        paths += write_plots(results[name], target / "plots", caption, PLOTS[name], prefix)
    return paths


def lab_page():
    sys.path.append(str(LAB))
    import lab_page

    return lab_page


def docs(check=False, root=ROOT):
    """Writes the blocks of the documents anew, or only says which differ; returns the exit status."""
    found = pages.pages({**pages.BLOCKS, **lab_page().BLOCKS}, root)
    differing = {path: written for path, (text, written) in found.items() if text != written}
    for path, written in differing.items():
        if not check:
            path.write_text(written, encoding="utf-8")
        print(f"{path.relative_to(root)}: {'differs from benchmarks/results' if check else 'written'}")
    return 1 if check and differing else 0


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", nargs="?", type=Path, help="JSON written by benchmarks/run.py")
    parser.add_argument("--publish", type=Path, metavar="FOLDER", help="results of a run, NAME.json each")
    parser.add_argument("--docs", action="store_true", help="write the generated blocks of the documents")
    parser.add_argument("--check", action="store_true", help="with --docs: only compare")
    options = parser.parse_args(arguments)
    if options.result is None and not (options.docs or options.publish):
        parser.error("expected a result, --docs or --publish FOLDER")
    return options


def main(arguments=None):
    options = parse(arguments)
    if options.publish:
        print("\n".join(str(path.relative_to(ROOT)) for path in publish(options.publish)))
    if options.publish or options.docs:
        return docs(options.check)
    print("\n".join(full_report(load(options.result))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
