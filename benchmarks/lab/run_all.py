"""Every experiment whose figures the documents quote, and the command that measures it again.

python benchmarks/lab/run_all.py                        the list: what each shows, its time, which page reads it
python benchmarks/lab/run_all.py ablate minimal         run some, in this order, and collect their results in --out
python benchmarks/lab/run_all.py --all                  all that pages read and one GPU measures
python benchmarks/lab/run_all.py --all --small          the same in miniature on a CPU: tells whether they run
python benchmarks/report.py --publish build/lab/run     takes the results into benchmarks/results and the documents

The seconds of the list: starting Python, compiling Triton's kernels, measuring.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # absent under PYTHONSAFEPATH

from results import ROOT

OUT = ROOT / "build" / "lab" / "run"
START_SECONDS = 12  # Python, torch, the GPU's context, clocks
LIMIT_SECONDS = 1800  # of one experiment


@dataclass(frozen=True)
class Experiment:
    """command: in the repository's root, with {python}, {out} (the folder of results) and {result} (NAME.json in it).
    seconds: of its measurement, without what it compiles (compiles). written: what the
    program itself calls its result, where it has no choice. page: what quotes the result. small: what --small adds."""

    name: str
    shows: str
    command: str
    seconds: int
    page: str = "docs/benchmarks.md"
    written: str = ""
    gpus: int = 1
    environment: tuple[tuple[str, str], ...] = ()
    compiles: int = 0
    small: str = ""

    @property
    def total_seconds(self):
        return self.seconds + self.compiles + START_SECONDS

    def path(self, out):
        return out / f"{self.name}.json"

    def words(self, out, python=sys.executable):
        """The command's words."""
        values = {"python": python, "out": str(out), "result": str(self.path(out))}
        return [word.format(**values) for word in shlex.split(self.command)]


def grid(name, shows, modes, groups, peers, seconds, more="", page="docs/benchmarks.md", environment=()):
    """An experiment of benchmarks/run.py. `seconds` is its budget, which covers what its implementations compile."""
    command = f"{{python}} benchmarks/run.py --mode {modes} --groups {groups} --peers {peers} --budget {seconds}"
    command += f" --out {{out}} --name {name}{more}"
    small = "--device cpu --quick --peers sdpa_flash --min-ms 1 --min-rounds 1"
    return Experiment(name, shows, command, seconds, page, environment=tuple(environment), small=small)


LAB_PAGE = "benchmarks/lab/README.md"
ALSO = "--also flash_attn_3 flash_attn_4"  # where they are installed
FASTEST = f"sdpa_flash sdpa_cudnn {ALSO}"
EVERYONE = f"sdpa_flash sdpa_cudnn flex triton naive {ALSO}"
SHORT = " --min-rounds 8 --min-ms 25"
EXPERIMENTS = (
    Experiment(
        "triton_ladder", "the Triton comparator step by step, in turns with SDPA and ours",
        "{python} benchmarks/lab/triton_ladder.py --budget 75 --out {result}", 75, LAB_PAGE, compiles=90,
    ),
    Experiment(
        "triton_b4h8", "the same at batch 4 and 8 heads, to a length for which plain attention has no memory",
        "{python} benchmarks/lab/triton_ladder.py --b4h8 --budget 60 --out {result}", 60, LAB_PAGE,
        compiles=10,  # the kernels of triton_ladder
    ),
    grid("grid", "every implementation on the same cells: the README's figures", "fwd bwd fwd+bwd", "cells gqa",
         EVERYONE, 250, SHORT),
    grid("decode", "attention over a KV cache, of 16 and of 8 bits", "fwd",
         "decode decode_layers decode_eager decode_tokens decode_append decode_invariant decode_8bit decode_features "
         "prefill_cache", FASTEST, 45),
    grid("grid_b4h8", "every implementation at batch 4 and 8 heads", "fwd bwd fwd+bwd", "b4h8", EVERYONE, 125, SHORT),
    grid("fwd_other", "what features, packing and small problems cost", "fwd",
         "gqa window varlen varlen_equal features value_dim small one_wave small_eager", FASTEST, 110),
    grid("deterministic", "the deterministic backward", "bwd", "deterministic", "sdpa_flash", 22),
    grid("fwd_bwd", "the mma.sync forward and backward", "fwd bwd", "cells dims gqa window varlen features",
         FASTEST, 70, environment=(("FLASH_ATTN_FAMILY", "mma_sync"),)),
    grid("fp8", "the e4m3 forward", "fwd", "fp8", "", 60, " --max-ms 900", page="docs/fp8.md"),
    Experiment(
        "minimal", "what each technique of the teaching kernel gives", "bash examples/minimal/run.sh {out}/minimal", 45,
        "examples/minimal/README.md", written="minimal/minimal.json",
    ),
    Experiment(
        "ablate", "each technique of both forwards switched off, and a ladder to the kernel in use",
        "{python} benchmarks/lab/ablate.py --out {result}", 55, LAB_PAGE,
    ),
    Experiment(
        "sweep", "other tiles of the Hopper forward", "{python} benchmarks/lab/sweep.py --out {result}", 75, LAB_PAGE,
    ),
    Experiment(
        "accuracy", "errors against float64, of these kernels and of peers",
        "{python} benchmarks/lab/accuracy.py --out {result}", 60, compiles=30, small="--device cpu --peers sdpa_flash",
    ),
    Experiment(
        "masks", "attention with masks and biases, of peers too, and the plan of a mask",
        "{python} benchmarks/lab/masks.py --out {result}", 60, "docs/masks.md", compiles=150, small="--device cpu",
    ),
    Experiment(
        "gains", "training steps and requests of a transformers model", "{python} examples/gains.py --out {result}", 75,
        "docs/gains.md", small="--device cpu --rounds 1",
    ),
    Experiment(
        "train_char_lm", "the loss of a model trained with each attention",
        "{python} examples/train_char_lm.py --out {out}/train_char_lm", 45, written="train_char_lm/train_char_lm.json",
        small="--device cpu --steps 10",
    ),
    Experiment(
        "context_parallel", "one sequence on two GPUs",
        "{python} benchmarks/context_parallel.py --ranks 2 --out {result}", 480, "docs/context_parallel.md", gpus=2,
    ),
)  # fmt: skip


def by_name():
    return {experiment.name: experiment for experiment in EXPERIMENTS}


def of_one_gpu():
    return [experiment for experiment in EXPERIMENTS if experiment.gpus == 1]


def command_line(experiment, out, python=sys.executable):
    settings = [f"{name}={value}" for name, value in experiment.environment]
    return shlex.join([*settings, *experiment.words(out, python)])


def listing():
    """What each experiment is, three lines each, and the time of all."""
    lines = []
    for experiment in EXPERIMENTS:
        several = f" of {experiment.gpus} GPUs" if experiment.gpus > 1 else ""
        lines += [
            f"{experiment.name}: {experiment.shows}",
            f"    {experiment.total_seconds} s{several}, for {experiment.page}",
            f"    {command_line(experiment, Path('OUT'), 'python')}",
        ]
    return [*lines, f"--all: {sum(experiment.total_seconds for experiment in of_one_gpu())} s of one GPU"]


def call(command, environment, seconds):
    """The exit status; None if the time did not suffice: then the command and all that it started have ended."""
    started = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return started.wait(seconds)
    except BaseException as error:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise


def attempt(experiment, out, small):
    """Why it failed, or None."""
    command = experiment.words(out) + (shlex.split(experiment.small) if small else [])
    environment = {"PYTHON": sys.executable, **os.environ, **dict(experiment.environment)}
    path = experiment.path(out)
    path.unlink(missing_ok=True)
    code = call(command, environment, LIMIT_SECONDS)
    if code is None:
        return f"not finished after {LIMIT_SECONDS:.0f} s"
    if experiment.written and (out / experiment.written).is_file():
        shutil.copyfile(out / experiment.written, path)
    return f"exit status {code}" if code else None if path.is_file() else f"{path} was not written"


def run(experiments, out, small=False):
    """Runs them in turn, also after a failure, whose result is deleted; returns the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    good = True
    for experiment in experiments:
        print(f"== {experiment.name}: {command_line(experiment, out)}", flush=True)
        start = time.monotonic()
        reason = attempt(experiment, out, small)
        if reason:
            experiment.path(out).unlink(missing_ok=True)
            good = False
        seconds, told = time.monotonic() - start, f"FAILED, {reason}" if reason else str(experiment.path(out))
        print(f"== {experiment.name}: {told} ({seconds:.0f} s, {experiment.total_seconds} planned)", flush=True)
    return 0 if good else 1


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(by_name())}; none: print the list")
    parser.add_argument("--all", action="store_true", help="what pages read and one GPU measures")
    parser.add_argument("--small", action="store_true", help="in miniature on a CPU, those that can")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results (build/lab/run)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in by_name()]
    if unknown or (options.all and options.names):
        expected = f"expected --all or names of {', '.join(by_name())}"
        parser.error(f"{expected}; got {' '.join(unknown or options.names)}")
    return options


def main(arguments=None):
    options = parse(arguments)
    chosen = of_one_gpu() if options.all else [by_name()[name] for name in options.names]
    if options.small:
        chosen = [experiment for experiment in chosen if experiment.small]
    if chosen:
        return run(chosen, options.out.resolve(), options.small)
    print("\n".join(listing()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
