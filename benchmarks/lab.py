"""The laboratory: every experiment whose figures the documents quote, and the command that measures it again.

python benchmarks/lab.py                        the list: what each shows, its GPU time, what it writes and who reads it
python benchmarks/lab.py theory minimal         run some, in this order, and collect their results in --out
python benchmarks/lab.py --all [--dry-run]      all that need one GPU; --dry-run prints the commands only

Results are named as those in benchmarks/results, after the GPU that measured them: copy them and the folders of plots
there, then `python benchmarks/report.py --docs` writes the documents, and
`python examples/minimal/table.py RESULT.json --write` the README of the teaching kernels. The seconds are of the GPU;
compiling comes on top.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "lab"
MMA_SYNC = {"FLASH_ATTN_FAMILY": "mma_sync"}


@dataclass(frozen=True)
class Experiment:
    """command: of the repository's root, with {python}, {out} (the folder of results) and {gpu} (like h200) in it.
    result: the JSON it leaves in {out}, of {gpu} too; written: how the program itself calls that file, where it has no
    say. document: what quotes the result, if anything does yet."""

    name: str
    shows: str
    command: str
    seconds: int
    result: str
    document: str
    written: str = ""
    gpus: int = 1
    environment: tuple[tuple[str, str], ...] = ()

    def words(self, out, gpu, python=sys.executable):
        """The command's words."""
        values = {"python": python, "out": str(out), "gpu": gpu}
        return [word.format(**values) for word in shlex.split(self.command)]

    def result_path(self, out, gpu):
        return out / self.result.format(gpu=gpu)


def grid(name, shows, modes, groups, peers, seconds, document="docs/benchmarks.md", environment=(), more=""):
    """An experiment of benchmarks/run.py."""
    command = f"{{python}} benchmarks/run.py --mode {modes} --groups {groups} --peers {peers} --budget {seconds}"
    command += f" --out {{out}} --name {{gpu}}_{name}{more}"
    result = f"{{gpu}}_{name}.json"
    return Experiment(name, shows, command, seconds, result, document, environment=tuple(environment))


EXPERIMENTS = (
    Experiment(
        "minimal", "what each technique of the teaching kernel gives, beside the library",
        "bash examples/minimal/run.sh {out}/minimal", 45, "{gpu}_minimal.json", "examples/minimal/README.md",
        written="minimal/minimal.json",
    ),
    Experiment(
        "theory", "six kernels against one: bytes, FLOP, predicted and measured speed-up, memory",
        "{python} benchmarks/theory.py --measure --out {out}/{gpu}_theory.json --plot {out}/plots_theory/roofline.png",
        60, "{gpu}_theory.json",
        "docs/theory.md",
    ),
    grid("grid", "every implementation on the same two grids, naive and Triton too: the README's figures",
         "fwd bwd fwd+bwd", "cells b4h8 gqa", "sdpa_flash sdpa_cudnn flex triton naive", 270,
         more=" --min-rounds 8 --min-ms 25 --plots"),
    grid("fwd_other", "what features, packing and small problems cost", "fwd",
         "gqa window varlen varlen_equal features value_dim small one_wave small_eager", "sdpa_flash sdpa_cudnn", 80),
    grid("decode", "attention over a KV cache", "fwd",
         "decode decode_layers decode_eager decode_tokens decode_append decode_invariant decode_features prefill_cache",
         "sdpa_flash", 40),
    grid("decode_8bit", "8-bit caches", "fwd", "decode decode_8bit", "sdpa_flash", 40, "docs/tuning/decode.md"),
    grid("bwd_triton", "backward beside Triton, deterministic too", "bwd", "cells deterministic", "sdpa_flash triton",
         75),
    grid("fwd_peers", "the mma.sync forward beside every peer", "fwd", "cells", "all", 100,
         environment=MMA_SYNC.items()),
    grid("fwd_bwd", "the mma.sync forward and backward", "fwd bwd fwd+bwd",
         "cells dims gqa window varlen features small small_eager", "sdpa_flash sdpa_cudnn", 70,
         environment=MMA_SYNC.items()),
    Experiment(
        "ablate", "each technique of both forwards switched off, and a ladder to today; compiles for minutes first",
        "{python} benchmarks/ablate.py --out {out}/{gpu}_ablate.json", 40, "{gpu}_ablate.json",
        "docs/tuning/ablation.md",
    ),
    Experiment(
        "sweep", "other tiles of all four kernels in use; compiles for minutes first, less behind an ablation",
        "{python} benchmarks/sweep.py --out {out}/{gpu}_sweep.json", 75, "{gpu}_sweep.json", "docs/tuning/sweeps.md",
    ),
    Experiment(
        "triton_sweep", "other tiles of the Triton comparator",
        "{python} benchmarks/triton_sweep.py --out {out}/{gpu}_triton_sweep.json", 90, "{gpu}_triton_sweep.json",
        "docs/tuning/triton.md",
    ),
    Experiment(
        "triton_ladder", "the Triton comparator step by step, beside SDPA and ours; compiles for a minute or two first",
        "{python} benchmarks/triton_ladder.py --budget 60 --out {out}/{gpu}_triton_ladder.json "
        "--plot {out}/plots_triton/ladder.png",
        75, "{gpu}_triton_ladder.json", "docs/tuning/triton.md",
    ),
    Experiment(
        "fp8_forward", "the e4m3 forward beside bf16",
        "{python} benchmarks/fp8_forward.py --out {out}/{gpu}_fp8_forward.json", 80, "{gpu}_fp8_forward.json",
        "docs/fp8.md",
    ),
    Experiment(
        "sdpa_step", "training steps of a transformers model by SDPA",
        "{python} benchmarks/sdpa_step.py --out {out}/{gpu}_sdpa_step.json", 60, "{gpu}_sdpa_step.json",
        "docs/benchmarks.md",
    ),
    Experiment(
        "train_char_lm", "the loss of a model trained with each attention",
        "{python} examples/train_char_lm.py --out {out}/train_char_lm", 60, "{gpu}_train_char_lm.json",
        "docs/benchmarks.md", written="train_char_lm/train_char_lm.json",
    ),
    Experiment(
        "context_parallel", "one sequence on two GPUs",
        "{python} benchmarks/context_parallel.py --ranks 2 --out {out}/{gpu}x2_context_parallel.json", 480,
        "{gpu}x2_context_parallel.json", "docs/context_parallel.md", gpus=2,
    ),
)  # fmt: skip


def by_name():
    return {experiment.name: experiment for experiment in EXPERIMENTS}


def gpu_slug(name):
    """h200 of "NVIDIA H200", h100 of "NVIDIA H100 80GB HBM3"; "gpu" where the name has no such word."""
    found = re.search(r"\b(?:RTX )?([A-Z]*\d{2,}\w*)\b", name)
    return found[1].lower() if found else "gpu"


def visible_gpu():
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return gpu_slug(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout)
    except (OSError, subprocess.SubprocessError):
        return "gpu"


def command_line(experiment, out, gpu, python=sys.executable):
    settings = [f"{name}={value}" for name, value in experiment.environment]
    return shlex.join([*settings, *experiment.words(out, gpu, python)])


def listing(gpu):
    """What each experiment is, five lines each, and the GPU time of all."""
    lines = []
    for experiment in EXPERIMENTS:
        reader = experiment.document or "no document yet"
        several = f", {experiment.gpus} GPUs or more" if experiment.gpus > 1 else ""
        lines += [
            f"{experiment.name}: {experiment.shows}",
            f"    {experiment.seconds} s of GPU time{several}",
            f"    {command_line(experiment, Path('OUT'), gpu, 'python')}",
            f"    writes {experiment.result_path(Path('OUT'), gpu)}, read by {reader}",
        ]
    total = sum(experiment.seconds for experiment in EXPERIMENTS if experiment.gpus == 1)
    return [*lines, f"all that need one GPU: {total} s"]


def run(experiment, out, gpu):
    """Runs one experiment; returns why it failed, or None."""
    environment = {**os.environ, **dict(experiment.environment)}
    environment.setdefault("PYTHON", sys.executable)
    done = subprocess.run(experiment.words(out, gpu), cwd=ROOT, env=environment)
    if done.returncode:
        return f"exit status {done.returncode}"
    path = experiment.result_path(out, gpu)
    if experiment.written:
        shutil.copyfile(out / experiment.written, path)
    return None if path.is_file() else f"{path} was not written"


def run_all(experiments, out, gpu):
    """Runs them one after the other, also after a failure; returns whether all were good."""
    out.mkdir(parents=True, exist_ok=True)
    failures = 0
    for experiment in experiments:
        print(f"== {experiment.name}: {command_line(experiment, out, gpu)}", flush=True)
        start = time.monotonic()
        reason = run(experiment, out, gpu)
        failures += reason is not None
        told = f"FAILED, {reason}" if reason else str(experiment.result_path(out, gpu))
        print(f"== {experiment.name}: {told} ({time.monotonic() - start:.0f} s)", flush=True)
    return failures == 0


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(by_name())}; none: print the list")
    parser.add_argument("--all", action="store_true", help="every experiment that needs one GPU")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results (build/lab)")
    parser.add_argument("--gpu", help="the GPU in the names of results, like h200 (default: what nvidia-smi says)")
    options = parser.parse_args(arguments)
    known = by_name()
    unknown = [name for name in options.names if name not in known]
    if unknown or (options.all and options.names):
        parser.error(f"expected --all or names of {', '.join(known)}; got {' '.join(unknown or options.names)}")
    gpu, out = options.gpu or visible_gpu(), options.out.resolve()
    chosen = [known[name] for name in options.names]
    if options.all:
        chosen = [experiment for experiment in EXPERIMENTS if experiment.gpus == 1]
    if not chosen:
        print("\n".join(listing(gpu)))
    elif options.dry_run:
        print("\n".join(command_line(experiment, out, gpu) for experiment in chosen))
    elif not run_all(chosen, out, gpu):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
