"""Turns the result of the former benchmarks/fp8_forward.py into one of benchmarks/run.py --groups fp8.

python benchmarks/convert_fp8.py OLD.json NEW.json
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from measure import describe
from rows import select

NAMES = {"bf16": "ours", "fp8": "ours_fp8", "fp8 fast": "ours_fp8_fast", "cudnn": "cudnn_fp8"}


def main(old, new):
    result = json.loads(Path(old).read_text())
    by_id = {row["id"]: row for row in result["rows"]}
    rows = []
    for row in select(["fp8"], False, "cuda", "bfloat16"):
        found = by_id.pop(replace(row, timing="event").id)
        entries = {NAMES[name]: {"ms": ms, "tflops": found["tflops"][name]} for name, ms in found["ms"].items()}
        rows.append({**describe(row, "fwd"), "sm_mhz": found["sm_mhz"], "results": entries})
    ((name, products),) = by_id.items()
    size = int(name.removeprefix("matmul-"))
    result.update(dtype="bfloat16", groups=["fp8"], rows=rows, implementations={NAMES[n]: "" for n in NAMES})
    result["fp8_products"] = {"size": size, "tflops": products["tflops"]}
    Path(new).write_text(json.dumps(result))


main(*sys.argv[1:])
