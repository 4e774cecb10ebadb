"""Online softmax by hand: two queries, two keys, one key a step: `python examples/minimal/worked_example.py [--write]`.

Prints the state of each step, and the softmax over both keys at once; --write puts it into the README.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

from table import README, write_block

# Head dim 1 and scale 1, so that a score is q · k.
Q = (1.0, -1.0)
K = (1.0, 3.0)
V = (10.0, 20.0)


def steps(q):
    """[(score, new maximum, correction, p, sum, output)] of one query, a key at a time."""
    maximum, total, out, found = -math.inf, 0.0, 0.0, []
    for key, value in zip(K, V):
        score = q * key
        raised = max(maximum, score)
        correction = math.exp(maximum - raised)  # 0 at the first key
        p = math.exp(score - raised)
        total = total * correction + p
        out = out * correction + p * value
        maximum = raised
        found.append((score, maximum, correction, p, total, out))
    return found


def at_once(q):
    """The output by the definition: the softmax of all scores, then the weighted sum."""
    weights = [math.exp(q * key) for key in K]
    return sum(weight * value for weight, value in zip(weights, V)) / sum(weights)


def block():
    """The example as Markdown."""
    lines = [
        f"q = {Q}, k = {K}, v = {V}; a tile is one key:",
        "",
        "| query | key | s | m | correction | p | l | O |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, q in enumerate(Q):
        for key, figures in enumerate(steps(q)):
            lines.append(f"| {row} | {key} | " + " | ".join(f"{value:.4f}" for value in figures) + " |")
    lines.append("")
    for row, q in enumerate(Q):
        *_, total, out = steps(q)[-1]
        lines.append(f"Query {row}: O / l = {out / total:.4f}, at once {at_once(q):.4f}.")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put it into {README.name}")
    print(block())
    if parser.parse_args().write:
        write_block(block(), "worked_example")


if __name__ == "__main__":
    main()
