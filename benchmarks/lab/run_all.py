"""Every experiment whose figures the documents quote, and the command that measures it again.

python benchmarks/lab/run_all.py                        the list: what each shows, its time, which page reads it
python benchmarks/lab/run_all.py ablate minimal         run some, in this order, and collect their results in --out
python benchmarks/lab/run_all.py --all                  all that pages read and one GPU measures
python benchmarks/lab/run_all.py --all --small          the same in miniature on a CPU: tells whether they run
python benchmarks/report.py --publish build/lab/run     takes the results into benchmarks/results and the documents

One run in several sittings, its kernels compiled where there is no GPU:
python benchmarks/lab/run_all.py --all --build-only     writes build/lab/kernels.tar.xz
python benchmarks/lab/run_all.py --all --resume --within 480 --kernels build/lab/kernels.tar.xz
...                                                     again, until nothing is left for another sitting: --resume
                                                        skips what --out (build/lab/run) holds

The seconds of the list are those for which the GPU is held: starting Python, compiling there, measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # absent under PYTHONSAFEPATH

from results import ROOT
from resumable import under_way

OUT = ROOT / "build" / "lab" / "run"
ARCHIVE = ROOT / "build" / "lab" / "kernels.tar.xz"
PREBUILT = "FLASH_ATTN_LAB_KERNELS"  # as kernel_library.py, which needs more than this program
STATE = "state.json"  # in the folder of results: {experiment: how it ended}
START_SECONDS = 12  # Python, torch, the GPU's context, clocks
GRACE_SECONDS = 15  # of --within, to write what there is
MOST_TRIES = 6  # of a program whose kernels may hang: each try leaves one out
CPU_SECONDS = 900


@dataclass(frozen=True)
class Experiment:
    """command: in the repository's root, with {python}, {out} (the folder of results) and {result} (NAME.json in it).
    seconds: of its measurement, without what it compiles on the machine of the GPU (compiles). written: what the
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
EVERYONE = "sdpa_flash sdpa_cudnn flex triton naive"
SHORT = " --min-rounds 8 --min-ms 25"
EXPERIMENTS = (
    Experiment(
        "triton_ladder", "the Triton comparator step by step, in turns with SDPA and ours",
        "{python} benchmarks/lab/triton_ladder.py --budget 75 --out {result}", 75, LAB_PAGE, compiles=90,
    ),
    grid("grid", "every implementation on the same cells: the README's figures", "fwd bwd fwd+bwd", "cells gqa",
         EVERYONE, 240, SHORT),
    grid("decode", "attention over a KV cache, of 16 and of 8 bits", "fwd",
         "decode decode_layers decode_eager decode_tokens decode_append decode_invariant decode_8bit decode_features "
         "prefill_cache", "sdpa_flash", 36),
    grid("grid_b4h8", "every implementation at batch 4 and 8 heads", "fwd bwd fwd+bwd", "b4h8", EVERYONE, 130, SHORT),
    grid("fwd_other", "what features, packing and small problems cost", "fwd",
         "gqa window varlen varlen_equal features value_dim small one_wave small_eager", "sdpa_flash sdpa_cudnn", 45),
    grid("deterministic", "the deterministic backward", "bwd", "deterministic", "sdpa_flash", 22),
    grid("fwd_bwd", "the mma.sync forward and backward", "fwd bwd", "cells dims gqa window varlen features",
         "sdpa_flash sdpa_cudnn", 60, environment=(("FLASH_ATTN_FAMILY", "mma_sync"),)),
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
        "sweep", "other tiles of all four kernels in use", "{python} benchmarks/lab/sweep.py --out {result}", 75,
        LAB_PAGE,
    ),
    Experiment(
        "sdpa_step", "training steps of a transformers model by SDPA",
        "{python} benchmarks/sdpa_step.py --steps 10 --out {result}", 55, small="--device cpu --steps 2",
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


class Sitting:
    """A run of experiments into one folder. within: seconds that it may take; small: on a CPU."""

    def __init__(self, out, within=None, small=False):
        self.out, self.small = out, small
        self.started, self.within = time.monotonic(), within
        out.mkdir(parents=True, exist_ok=True)
        path = out / STATE
        self.state = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def left(self):
        return float("inf") if self.within is None else self.within - (time.monotonic() - self.started)

    def is_done(self, experiment):
        ended = self.state.get(experiment.name, {})
        return ended.get("good", False) and experiment.path(self.out).is_file()

    def attempt(self, experiment):
        """Why it failed, or None. A program that a hanging kernel ended is run again, and leaves that kernel out."""
        command = experiment.words(self.out) + (shlex.split(experiment.small) if self.small else [])
        environment = {**os.environ, **dict(experiment.environment)}
        environment.setdefault("PYTHON", sys.executable)
        path = experiment.path(self.out)
        reason = None
        for _ in range(MOST_TRIES):
            limit = min(max(1.0, self.left() - GRACE_SECONDS), CPU_SECONDS)
            code = call(command, environment, limit)
            if code is None:
                under_way(path).unlink(missing_ok=True)  # the time was up, no kernel hung
                reason = f"not finished after {limit:.0f} s"
                break
            reason = f"exit status {code}" if code else None
            if not code or not under_way(path).is_file():
                break
        if experiment.written and (self.out / experiment.written).is_file():
            shutil.copyfile(self.out / experiment.written, path)
        return reason or (None if path.is_file() else f"{path} was not written")

    def run(self, experiment):
        """Runs one and keeps how it ended; returns whether it was good."""
        print(f"== {experiment.name}: {command_line(experiment, self.out)}", flush=True)
        start = time.monotonic()
        reason = self.attempt(experiment)
        seconds = round(time.monotonic() - start, 1)
        self.state[experiment.name] = {"good": reason is None, "reason": reason, "seconds": seconds}
        (self.out / STATE).write_text(json.dumps(self.state, indent=1) + "\n", encoding="utf-8")
        told = f"FAILED, {reason}" if reason else str(experiment.path(self.out))
        print(f"== {experiment.name}: {told} ({seconds:.0f} s, {experiment.total_seconds} planned)", flush=True)
        return reason is None

    def run_all(self, experiments, resume=False):
        """Runs them in turn, also after a failure, as far as the time goes; returns whether all were good."""
        good, waiting = True, []
        for experiment in experiments:
            if resume and self.is_done(experiment):
                print(f"== {experiment.name}: measured already", flush=True)
            elif self.left() < experiment.total_seconds + GRACE_SECONDS and not self.small:
                waiting.append(experiment.name)
            else:
                good &= self.run(experiment)
        if waiting:
            print(f"== for another sitting: {' '.join(waiting)}", flush=True)
        return good


def run(experiments, options):
    """Runs them with the kernels of --kernels, if given; returns the exit status."""
    sitting = Sitting(options.out.resolve(), options.within, options.small)
    with tempfile.TemporaryDirectory() as folder:
        if options.kernels:
            import kernel_archive

            kernel_archive.unpack(options.kernels, folder)
            os.environ[PREBUILT] = folder
        return 0 if sitting.run_all(experiments, options.resume) else 1


def build(experiments, options):
    import kernel_archive

    names = [experiment.name for experiment in experiments]
    return 0 if kernel_archive.build(names, options.kernels or ARCHIVE, jobs=options.jobs) else 1


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(by_name())}; none: print the list")
    parser.add_argument("--all", action="store_true", help="what pages read and one GPU measures")
    parser.add_argument("--small", action="store_true", help="in miniature on a CPU, those that can")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results (build/lab/run)")
    parser.add_argument("--resume", action="store_true", help="skip what --out holds already")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="start nothing that would take longer")
    parser.add_argument("--build-only", action="store_true", help="compile the kernels into --kernels; needs no GPU")
    parser.add_argument("--kernels", type=Path, metavar="FILE.tar.xz", help="compiled kernels, of --build-only")
    parser.add_argument("--jobs", type=int, help="compilers at a time; default: what cores and memory carry")
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
    if not chosen:
        print("\n".join(listing()))
    elif options.build_only:
        return build(chosen, options)
    else:
        return run(chosen, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
