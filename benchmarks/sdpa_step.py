"""Training steps of a transformers model with attn_implementation="sdpa": PyTorch's attention and this package's.

python benchmarks/sdpa_step.py --out FILE.json [--device cuda] [--steps 12]

The model is Llama's, with random weights, in the sizes of SIZES; a step is forward, backward and AdamW under autocast
to bfloat16, as examples/sdpa.py does it. The ways take turns step by step on one model, after some steps of each;
the median is reported. `torch` leaves the choice of a backend to PyTorch, `flash` allows its flash attention
only, `provider` and `scope` are the two ways of `flash_attn.sdpa`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

import torch
from environment import describe_origin
from shared import ROOT, row_bar
from timing import Budget, HostTimer, interleave

SIZES = (
    {"layers": 8, "dim": 2048, "heads": 16, "heads_k": 4, "seqlen": 2048, "batch": 4},
    {"layers": 8, "dim": 2048, "heads": 16, "heads_k": 4, "seqlen": 8192, "batch": 1},
    {"layers": 8, "dim": 2048, "heads": 16, "heads_k": 4, "seqlen": 16384, "batch": 1},
    {"layers": 8, "dim": 2048, "heads": 32, "heads_k": 8, "seqlen": 8192, "batch": 1},
)
TINY = ({"layers": 1, "dim": 64, "heads": 2, "heads_k": 1, "seqlen": 64, "batch": 1},)  # on the CPU
WARMUP_MS = 300.0


def load_example():
    spec = importlib.util.spec_from_file_location("sdpa_example", ROOT / "examples" / "sdpa.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_step(example, size, device):
    """A function that makes one step."""
    model = example.make_model(argparse.Namespace(**size, llama=True, device=device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(example.VOCABULARY, (size["batch"], size["seqlen"] + 1), device=device)
    return lambda: example.train_step(model, optimizer, tokens)


def measure(example, size, device, steps):
    """{way: median milliseconds of a step}."""
    step = make_step(example, size, device)
    calls = {name: (context, step) for name, context in example.ways(device).items()}
    times, _ = interleave(HostTimer(torch.device(device)), calls, Budget(steps, 0.0, WARMUP_MS))
    return {name: statistics.median(taken) for name, taken in times.items()}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    import transformers

    example, sizes = load_example(), SIZES if options.device == "cuda" else TINY
    result = {**describe_origin(torch.device(options.device)), "rows": []}
    result["versions"]["transformers"] = transformers.__version__
    with row_bar(len(sizes)) as done:
        for size in sizes:
            ms = measure(example, size, options.device, options.steps)
            result["rows"].append({**size, "ms": ms})
            done(f"{size}: " + ", ".join(f"{name} {value:.1f} ms" for name, value in ms.items()))
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
