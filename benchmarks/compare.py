"""Score of a result against a peer measured in the same run, or against an earlier result.

python benchmarks/compare.py NEW.json                        against every peer of the same run
python benchmarks/compare.py NEW.json --peer sdpa_flash      against one of them
python benchmarks/compare.py NEW.json OLD.json               ours now against ours then (add --peer for a peer of OLD)

With --min-mean and --min-worst the exit status is 1 when a score is lower.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

from report import environment_line, geometric_mean, load, modes, ratios, score_line


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new")
    parser.add_argument("old", nargs="?")
    parser.add_argument("--name", default="ours", help="the implementation that is judged")
    parser.add_argument("--peer", help="the implementation it is judged against")
    parser.add_argument("--group", default="cells", help="the group of rows, or all")
    parser.add_argument("--min-mean", type=float, default=0.0, help="least geometric mean")
    parser.add_argument("--min-worst", type=float, default=0.0, help="least single ratio")
    parser.add_argument("--rows", action="store_true", help="print every row's ratio")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    new = load(options.new)
    old = load(options.old) if options.old else new
    if options.old:
        peers = [options.peer or options.name]
        print(f"new: {environment_line(new)}\nold: {environment_line(old)}")
    else:
        peers = [options.peer] if options.peer else [entry for entry in new["implementations"] if entry != options.name]
    groups = new["groups"] if options.group == "all" else [options.group]
    compared, failed = 0, False
    for mode, group, peer in itertools.product(modes(new), groups, peers):
        found = ratios(new, old, peer, mode, group, options.name)
        if not found:
            continue
        compared += 1
        if options.rows:
            print("\n".join(f"{label:<44} {ratio:.3f}x" for label, ratio in found))
        values = [ratio for _, ratio in found]
        failed |= geometric_mean(values) < options.min_mean or min(values) < options.min_worst
        against = f"{peer} of the old result" if options.old else peer
        print(score_line(found, f"{group} {mode}, {options.name} vs {against}"))
    if not compared:
        print(f"no common rows of group {options.group} for {options.name} and {', '.join(peers)}")
    return 1 if failed or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
