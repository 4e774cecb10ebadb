"""Theory and measurement: tables of what theory_model.py predicts and theory.py measured, and the roofline."""

from __future__ import annotations

import theory_model as model
from markdown import markdown_table, mask, wrapped
from plots import DPI, new_figure
from results import measured_commit
from scores import significant

SHOWN = (1024, 4096, 16384)  # sequence lengths of the table
EXAMPLE = model.Problem(seqlen=4096, head_dim=128, causal=True)


def gigabytes(count):
    return significant(count / 1e9)


def kernels_block(machine, problem=EXAMPLE):
    """Bytes and FLOP of each kernel, as formulas and as figures of one problem."""
    rows = []
    for kernel in (*model.standard_kernels(problem), None, model.FUSED):
        if kernel is None:
            score_bytes = sum(entry.score_bytes for entry in model.STANDARD)
            element_bytes = sum(entry.element_bytes for entry in model.STANDARD)
            count, seconds = model.standard_bytes(problem), model.standard_seconds(problem, machine)
            flop, name = sum(entry.flop(problem) for entry in model.STANDARD), "standard attention in all"
        else:
            score_bytes, element_bytes, name = kernel.score_bytes, kernel.element_bytes, kernel.name
            fused = kernel is model.FUSED
            count, flop = kernel.bytes(problem), problem.flop if fused else kernel.flop(problem)
            seconds = model.fused_seconds(problem, machine) if fused else kernel.seconds(problem, machine)
        terms = ((score_bytes, "s²"), (element_bytes, "s d"))
        formula = " + ".join(f"{factor} {unit}" for factor, unit in terms if factor)
        work = significant(flop / 1e12) if flop else "–"
        rows.append([name, formula, gigabytes(count), work, significant(1e3 * seconds)])
    header = ["kernel", "bytes of a head", "GB", "TFLOP", "ms at least"]
    told = f"The figures: b {problem.batch}, s {problem.seqlen}, h {problem.heads}, d {problem.head_dim}, causal, by "
    told += (
        f"the data sheet of an {machine.name}: {machine.flops / 1e12:.0f} TFLOPS, {machine.memory / 1e12:.2f} TB/s, "
    )
    told += f"{machine.exponentials / 1e12:.2f}e12 exponentials a second."
    return [*markdown_table(header, rows), "", *wrapped(told)]


def found(result, problem):
    """The measured row of a problem, or None."""
    key = (problem.seqlen, problem.head_dim, problem.causal)
    rows = result["rows"] if result else ()
    return next((row for row in rows if (row["seqlen"], row["head_dim"], row["causal"]) == key), None)


def measured_cells(row, problem, machine):
    """Kernels, ms of both, speed-up, MiB of both, and what part of the fused kernel's time the bound is."""
    if row is None:
        return ["–"] * 6
    fused, standard = row["fused"], row["standard"] or {}
    kernels = f"{standard.get('kernels') or '–'} / {fused['kernels'] or '–'}"
    first, gain = (significant(standard["ms"]), f"{standard['ms'] / fused['ms']:.1f}×") if standard else ("–", "–")
    share = f"{1e3 * model.fused_seconds(problem, machine) / fused['ms']:.0%}"
    memory = [f"{entry['peak_bytes'] / 2**20:.0f}" if entry else "out of memory" for entry in (standard, fused)]
    return [kernels, first, significant(fused["ms"]), gain, " / ".join(memory), share]


def speed_block(machine, result):
    """A row a problem: the predictions, and what was measured."""
    header = ["d", "mask", "s", "FLOP a byte", "predicted ms", "bound of fused", "speed-up"]
    if result:
        header += ["kernels", "measured ms: standard", "fused", "speed-up", "MiB", "bound ÷ measured"]
    rows = []
    for problem in [problem for problem in model.problems() if problem.seqlen in SHOWN]:
        standard, fused = model.standard_seconds(problem, machine), model.fused_seconds(problem, machine)
        intensity = [problem.flop / count for count in (model.standard_bytes(problem), model.FUSED.bytes(problem))]
        cells = [str(problem.head_dim), mask(problem.causal), str(problem.seqlen)]
        cells += [" / ".join(map(significant, pair)) for pair in (intensity, (1e3 * standard, 1e3 * fused))]
        cells += [model.fused_bound(problem, machine), f"{standard / fused:.1f}×"]
        rows.append(cells + (measured_cells(found(result, problem), problem, machine) if result else []))
    told = f"Predictions by the data sheet of an {machine.name}, 16-bit, {model.TOKENS} tokens, "
    told += f"heads · d = {model.WIDTH}."
    if result:
        told += f" Measured on an {result['device']['name']}, commit {measured_commit(result)}, whose device memory "
        told += f"was read at {result.get('read_ceiling', {}).get('gbs', 0.0) / 1e3:.2f} TB/s in the same run."
    told += " Two figures in a cell: standard / fused."
    return [*markdown_table(header, rows), "", *wrapped(told)]


def draw(path, machine, result):
    """The roofline with the fused kernel and standard attention, predicted and, of a result, measured."""
    figure = new_figure(11, 4.8)
    panels = figure.subplots(1, len(model.HEAD_DIMS), sharey=True)
    for axes, head_dim in zip(panels, model.HEAD_DIMS):
        draw_roofs(axes, machine, head_dim)
        for index, name in enumerate(("standard", "fused")):
            draw_points(axes, points(machine, None, name, head_dim), f"{name}, predicted", f"C{index}", "none")
            if result:
                measured = points(machine, result, name, head_dim)
                draw_points(axes, measured, f"{name}, measured", f"C{index}", f"C{index}")
        axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of device memory", title=f"d {head_dim}, full")
        axes.set_ylim(10, 3000)
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("TFLOPS")
    panels[-1].legend(loc="lower right", fontsize=8)
    figure.suptitle(f"{machine.name}, s {model.SEQLENS[0]} to {model.SEQLENS[-1]}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def draw_roofs(axes, machine, head_dim):
    """What memory and tensor cores allow, and the exponentials of one head dim."""
    intensities = [1.0, machine.flops / machine.memory, 1e4]
    roof = [min(x * machine.memory, machine.flops) / 1e12 for x in intensities]
    axes.plot(intensities, roof, color="black", linewidth=1.6, label="memory, tensor cores")
    ceiling = 4 * head_dim * machine.exponentials / 1e12
    axes.axhline(ceiling, color="gray", linestyle="--", linewidth=1.2, label="exponentials")


def points(machine, result, name, head_dim):
    """[(FLOP per byte, TFLOPS)] by length, of full attention; predicted without a result."""
    pairs = []
    for problem in (model.Problem(seqlen, head_dim, False) for seqlen in model.SEQLENS):
        count = model.standard_bytes(problem) if name == "standard" else model.FUSED.bytes(problem)
        predict = model.standard_seconds if name == "standard" else model.fused_seconds
        entry = (found(result, problem) or {}).get(name) if result else None
        seconds = entry["ms"] / 1e3 if entry else None if result else predict(problem, machine)
        if seconds:
            pairs.append((problem.flop / count, problem.flop / seconds / 1e12))
    return pairs


def draw_points(axes, pairs, label, color, fill):
    intensities, tflops = zip(*pairs) if pairs else ((), ())
    axes.plot(intensities, tflops, "o-", markersize=5, color=color, markerfacecolor=fill, linewidth=0.8, label=label)
