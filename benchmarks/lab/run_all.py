"""The laboratory: every experiment whose figures the documents quote, and the command that measures it again.

python benchmarks/lab.py                        the list: what each shows, its time, what it writes and who reads it
python benchmarks/lab.py theory minimal         run some, in this order, and collect their results in --out
python benchmarks/lab.py --all [--dry-run]      all that documents read and need one GPU; --dry-run prints the commands
python benchmarks/lab.py --all --small          the same in miniature on a CPU, those that can; tells whether they run

One run in several sittings, its kernels compiled where there is no GPU:
python benchmarks/lab.py --all --build-only                                   writes build/lab/kernels.tar.xz
python benchmarks/lab.py --all --resume --within 480 --kernels build/lab/kernels.tar.xz --archive RUN.tgz
...                                             again, until nothing is left for another sitting: --resume passes over
                                                what --out (build/lab/run) holds already, RUN.tgz unpacked
python benchmarks/lab_publish.py build/lab/run  into benchmarks/results, with plots, and from there into the documents

Results are named as those in benchmarks/results, after the GPU that measured them. The seconds are those that the GPU
is held: of the measurement, of starting Python, and of what is compiled there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

from lab_progress import under_way

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "lab" / "run"
ARCHIVE = ROOT / "build" / "lab" / "kernels.tar.xz"
PREBUILT = "FLASH_ATTN_LAB_KERNELS"  # as lab_build.py, which needs more than this program
STATE = "lab.json"  # in the folder of results: {experiment: how it ended}
MMA_SYNC = {"FLASH_ATTN_FAMILY": "mma_sync"}
START_SECONDS = 12  # Python, torch, the GPU's context, clocks
GRACE_SECONDS = 15  # of --within, to write what there is
MOST_TRIES = 6  # of a program whose kernels may hang: one is left out each time
CPU_SECONDS = 900


@dataclass(frozen=True)
class Experiment:
    """command: of the repository's root, with {python}, {out} (the folder of results) and {gpu} (like h200) in it.
    seconds: of its measurement; compiles: what it compiles on the machine of the GPU takes beside that.
    result: the JSON it leaves in {out}, of {gpu} too; written: how the program itself calls that file, where it has no
    say. document: what quotes the result, if anything does. small: what --small adds, if a CPU can run it at all."""

    name: str
    shows: str
    command: str
    seconds: int
    result: str
    document: str
    written: str = ""
    gpus: int = 1
    environment: tuple[tuple[str, str], ...] = ()
    compiles: int = 0
    small: str = ""

    @property
    def total_seconds(self):
        return self.seconds + self.compiles + START_SECONDS

    @property
    def of_the_run(self):
        """Whether the documents' figures need it."""
        return self.gpus == 1 and bool(self.document)

    def words(self, out, gpu, python=sys.executable):
        """The command's words."""
        values = {"python": python, "out": str(out), "gpu": gpu}
        return [word.format(**values) for word in shlex.split(self.command)]

    def result_path(self, out, gpu):
        return out / self.result.format(gpu=gpu)


def grid(name, shows, modes, groups, peers, seconds, document="docs/benchmarks.md", environment=(), more=""):
    """An experiment of benchmarks/run.py. `seconds` is its budget, what its implementations compile included."""
    command = f"{{python}} benchmarks/run.py --mode {modes} --groups {groups} --peers {peers} --budget {seconds}"
    command += f" --out {{out}} --name {{gpu}}_{name}{more}"
    result, small = f"{{gpu}}_{name}.json", "--device cpu --quick --peers sdpa_flash --min-ms 1 --min-rounds 1"
    return Experiment(name, shows, command, seconds, result, document, environment=tuple(environment), small=small)


EVERYONE = "sdpa_flash sdpa_cudnn flex triton naive"
SHORT = " --min-rounds 8 --min-ms 25"
EXPERIMENTS = (
    Experiment(
        "triton_ladder", "the Triton comparator step by step, beside SDPA and ours",
        "{python} benchmarks/triton_ladder.py --budget 75 --out {out}/{gpu}_triton_ladder.json", 75,
        "{gpu}_triton_ladder.json", "docs/tuning/triton.md", compiles=90,
    ),
    grid("grid", "every implementation on the same cells, naive and Triton too: the README's figures",
         "fwd bwd fwd+bwd", "cells gqa", EVERYONE, 240, more=SHORT),
    grid("decode", "attention over a KV cache, of 16 and of 8 bits", "fwd",
         "decode decode_layers decode_eager decode_tokens decode_append decode_invariant decode_8bit decode_features "
         "prefill_cache", "sdpa_flash", 36),
    grid("grid_b4h8", "every implementation at batch 4 and 8 heads", "fwd bwd fwd+bwd", "b4h8", EVERYONE, 130,
         more=SHORT),
    grid("fwd_other", "what features, packing and small problems cost", "fwd",
         "gqa window varlen varlen_equal features value_dim small one_wave small_eager", "sdpa_flash sdpa_cudnn", 45),
    grid("deterministic", "the deterministic backward", "bwd", "deterministic", "sdpa_flash", 22),
    grid("fwd_bwd", "the mma.sync forward and backward", "fwd bwd", "cells dims gqa window varlen features",
         "sdpa_flash sdpa_cudnn", 60, environment=MMA_SYNC.items()),
    Experiment(
        "minimal", "what each technique of the teaching kernel gives, beside the library",
        "bash examples/minimal/run.sh {out}/minimal", 45, "{gpu}_minimal.json", "examples/minimal/README.md",
        written="minimal/minimal.json",
    ),
    Experiment(
        "theory", "six kernels against one: bytes, FLOP, predicted and measured speed-up, memory",
        "{python} benchmarks/theory.py --measure --out {out}/{gpu}_theory.json", 60, "{gpu}_theory.json",
        "docs/theory.md", small="--device cpu",
    ),
    Experiment(
        "ablate", "each technique of both forwards switched off, and a ladder to today",
        "{python} benchmarks/ablate.py --out {out}/{gpu}_ablate.json", 55, "{gpu}_ablate.json",
        "docs/tuning/ablation.md",
    ),
    Experiment(
        "sweep", "other tiles of all four kernels in use",
        "{python} benchmarks/sweep.py --out {out}/{gpu}_sweep.json", 75, "{gpu}_sweep.json", "docs/tuning/sweeps.md",
    ),
    Experiment(
        "fp8_forward", "the e4m3 forward beside bf16",
        "{python} benchmarks/fp8_forward.py --out {out}/{gpu}_fp8_forward.json", 60, "{gpu}_fp8_forward.json",
        "docs/fp8.md", small="--device cpu --head-dims 64",
    ),
    Experiment(
        "sdpa_step", "training steps of a transformers model by SDPA",
        "{python} benchmarks/sdpa_step.py --steps 10 --out {out}/{gpu}_sdpa_step.json", 55, "{gpu}_sdpa_step.json",
        "docs/benchmarks.md", small="--device cpu --steps 2",
    ),
    Experiment(
        "train_char_lm", "the loss of a model trained with each attention",
        "{python} examples/train_char_lm.py --out {out}/train_char_lm", 45, "{gpu}_train_char_lm.json",
        "docs/benchmarks.md", written="train_char_lm/train_char_lm.json", small="--device cpu --steps 10",
    ),
    Experiment(
        "triton_sweep", "other tiles of the Triton comparator: how its lists were found",
        "{python} benchmarks/triton_sweep.py --out {out}/{gpu}_triton_sweep.json", 60, "{gpu}_triton_sweep.json", "",
        compiles=90,
    ),
    Experiment(
        "cp_virtual", "one rank's kernels of several GPUs, without the transfers",
        "{python} benchmarks/cp_virtual.py --out {out}/{gpu}_cp_virtual.json", 60, "{gpu}_cp_virtual.json",
        "docs/context_parallel.md", small="--device cpu --quick --rounds 2",
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
    """What each experiment is, four lines each, and the time of all."""
    lines = []
    for experiment in EXPERIMENTS:
        reader = experiment.document or "no document"
        several = f", {experiment.gpus} GPUs or more" if experiment.gpus > 1 else ""
        lines += [
            f"{experiment.name}: {experiment.shows}",
            f"    {experiment.total_seconds} s of a GPU, {experiment.seconds} s of them measuring{several}",
            f"    {command_line(experiment, Path('OUT'), gpu, 'python')}",
            f"    writes {experiment.result_path(Path('OUT'), gpu)}, read by {reader}",
        ]
    total = sum(experiment.total_seconds for experiment in EXPERIMENTS if experiment.of_the_run)
    return [*lines, f"--all, what documents read and one GPU measures: {total} s"]


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
    """A run of experiments into one folder. within: seconds that it may take; archive: a copy of the folder, packed
    after every experiment; small: on a CPU."""

    def __init__(self, out, gpu, within=None, archive=None, small=False):
        self.out, self.gpu, self.archive, self.small = out, gpu, archive, small
        self.started, self.within = time.monotonic(), within
        out.mkdir(parents=True, exist_ok=True)
        path = out / STATE
        self.state = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def left(self):
        return float("inf") if self.within is None else self.within - (time.monotonic() - self.started)

    def is_done(self, experiment):
        ended = self.state.get(experiment.name, {})
        return ended.get("good", False) and experiment.result_path(self.out, self.gpu).is_file()

    def attempt(self, experiment):
        """Why it failed, or None; again without what ended the program, where it goes on where it stood."""
        command = experiment.words(self.out, self.gpu) + (shlex.split(experiment.small) if self.small else [])
        environment = {**os.environ, **dict(experiment.environment)}
        environment.setdefault("PYTHON", sys.executable)
        path = experiment.result_path(self.out, self.gpu)
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
        print(f"== {experiment.name}: {command_line(experiment, self.out, self.gpu)}", flush=True)
        start = time.monotonic()
        reason = self.attempt(experiment)
        seconds = round(time.monotonic() - start, 1)
        self.state[experiment.name] = {"good": reason is None, "reason": reason, "seconds": seconds}
        (self.out / STATE).write_text(json.dumps(self.state, indent=1) + "\n", encoding="utf-8")
        told = f"FAILED, {reason}" if reason else str(experiment.result_path(self.out, self.gpu))
        print(f"== {experiment.name}: {told} ({seconds:.0f} s, {experiment.total_seconds} planned)", flush=True)
        self.pack()
        return reason is None

    def pack(self):
        """The results, without what the programs need beside them."""
        if self.archive is None:
            return
        unfinished = self.archive.with_name(self.archive.name + ".unfinished")
        with tarfile.open(unfinished, "w:gz") as packed:
            for path in sorted(self.out.rglob("*.json")):
                packed.add(path, path.relative_to(self.out))
        os.replace(unfinished, self.archive)

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


def run(experiments, options, out, gpu):
    """Runs them with what was compiled before, if anything; returns the exit status."""
    sitting = Sitting(out, gpu, options.within, options.archive, options.small)
    with tempfile.TemporaryDirectory() as folder:
        if options.kernels:
            import lab_archive

            lab_archive.unpack(options.kernels, folder)
            os.environ[PREBUILT] = folder
        return 0 if sitting.run_all(experiments, options.resume) else 1


def build(experiments, options):
    import lab_archive

    archive = options.kernels or ARCHIVE
    names = [experiment.name for experiment in experiments]
    return 0 if lab_archive.build(names, archive, jobs=options.jobs) else 1


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(by_name())}; none: print the list")
    parser.add_argument("--all", action="store_true", help="what documents read and one GPU measures")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--small", action="store_true", help="in miniature on a CPU, those that can")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results (build/lab/run)")
    parser.add_argument("--gpu", help="the GPU in the names of results, like h200 (default: what nvidia-smi says)")
    parser.add_argument("--resume", action="store_true", help="pass over what --out holds already")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="start nothing that would take longer")
    parser.add_argument("--archive", type=Path, metavar="FILE.tgz", help="pack the results there after each experiment")
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
    gpu, out = options.gpu or visible_gpu(), options.out.resolve()
    chosen = [by_name()[name] for name in options.names]
    if options.all:
        chosen = [experiment for experiment in EXPERIMENTS if experiment.of_the_run]
    if options.small:
        chosen = [experiment for experiment in chosen if experiment.small]
    if not chosen:
        print("\n".join(listing(gpu)))
    elif options.dry_run:
        print("\n".join(command_line(experiment, out, gpu) for experiment in chosen))
    elif options.build_only:
        return build(chosen, options)
    else:
        return run(chosen, options, out, gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())
