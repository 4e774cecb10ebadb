"""Tables and plot of docs/theory.md: what theory_model.py predicts, beside what theory.py has measured."""

from __future__ import annotations

import textwrap
from pathlib import Path

import theory_model as model
from markdown_tables import markdown_table, rewritten
from scores import measured_commit, significant, stored_path

PAGE = Path("docs", "theory.md")
RESULT = stored_path("theory")
PLOT = Path("benchmarks", "results", "plots_theory", "roofline.png")
MACHINE = "h200"  # of the predictions without a measurement
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
        formula = " + ".join(
            f"{bytes_} {unit}" for bytes_, unit in ((score_bytes, "s²"), (element_bytes, "s d")) if bytes_
        )
        rows.append(
            [name, formula, gigabytes(count), significant(flop / 1e12) if flop else "–", significant(1e3 * seconds)]
        )
    header = ["kernel", "bytes of a head", "GB", "TFLOP", "ms at least"]
    told = (
        f"The figures: b {problem.batch}, s {problem.seqlen}, h {problem.heads}, d {problem.head_dim}, causal, by the "
    )
    told += f"data sheet of an {machine.name}: {machine.flops / 1e12:.0f} TFLOPS, {machine.memory / 1e12:.2f} TB/s, "
    told += f"{machine.exponentials / 1e12:.2f}e12 exponentials a second."
    return [*markdown_table(header, rows), "", *textwrap.wrap(told, 118, break_on_hyphens=False)]


def found(result, problem):
    """The measured row of a problem, or None."""
    key = (problem.seqlen, problem.head_dim, problem.causal)
    rows = result["rows"] if result else ()
    return next((row for row in rows if (row["seqlen"], row["head_dim"], row["causal"]) == key), None)


def measured_cells(row, problem, machine):
    """Kernels, ms of both, speed-up, and what part of the fused kernel's time the bound is."""
    if row is None:
        return ["–"] * 5
    fused = row["fused"]
    standard = row["standard"] or {}
    gain = f"{standard['ms'] / fused['ms']:.1f}×" if standard else "–"
    kernels = f"{standard.get('kernels') or '–'} / {fused['kernels'] or '–'}"
    share = f"{1e3 * model.fused_seconds(problem, machine) / fused['ms']:.0%}"
    first = significant(standard["ms"]) if standard else "out of memory"
    return [kernels, first, significant(fused["ms"]), gain, share]


def speed_block(machine, result):
    """A row a problem: the predictions, and beside them what was measured."""
    header = ["d", "mask", "s", "FLOP a byte: standard", "fused", "ms: standard", "fused", "bound of fused", "speed-up"]
    if result:
        header += ["kernels", "measured ms: standard", "fused", "speed-up", "bound ÷ measured"]
    rows = []
    for problem in model.problems():
        standard, fused = model.standard_seconds(problem, machine), model.fused_seconds(problem, machine)
        intensity = [problem.flop / count for count in (model.standard_bytes(problem), model.FUSED.bytes(problem))]
        cells = [str(problem.head_dim), "causal" if problem.causal else "full", str(problem.seqlen)]
        cells += [*map(significant, intensity), significant(1e3 * standard), significant(1e3 * fused)]
        cells += [model.fused_bound(problem, machine), f"{standard / fused:.1f}×"]
        rows.append(cells + (measured_cells(found(result, problem), problem, machine) if result else []))
    return [*markdown_table(header, rows), "", *origin_lines(machine, result)]


def origin_lines(machine, result):
    told = (
        f"Predictions by the data sheet of an {machine.name}, 16-bit, {model.TOKENS} tokens, heads · d = {model.WIDTH}."
    )
    if result:
        ceiling = result.get("read_ceiling", {}).get("gbs", 0.0) / 1e3
        told += f" Measured on an {result['device']['name']}, commit {measured_commit(result)}, "
        told += f"whose device memory was read at {ceiling:.2f} TB/s in the same run."
    else:
        told += " Nothing of this table is measured yet."
    return textwrap.wrap(told, 118, break_on_hyphens=False)


def memory_block(machine, result):
    """MiB that a call adds, per length, at the head dim of the example."""
    header = ["s", "score matrices' numbers", "standard, MiB", "fused, MiB", "standard ÷ fused"]
    header += ["measured: standard, MiB", "fused, MiB"] if result else []
    rows = []
    for seqlen in model.SEQLENS:
        problem = model.Problem(seqlen, EXAMPLE.head_dim, causal=True)
        standard, fused = model.standard_memory(problem), model.fused_memory(problem)
        cells = [str(seqlen), f"{problem.scores / 2**20:.0f} · 2²⁰", f"{standard / 2**20:.0f}", f"{fused / 2**20:.1f}"]
        cells.append(f"{standard / fused:.0f}×")
        row = found(result, problem)
        if result:
            pair = [row and row[name] for name in ("standard", "fused")]
            cells += [f"{entry['peak_bytes'] / 2**20:.1f}" if entry else "–" for entry in pair]
        rows.append(cells)
    told = f"{model.TOKENS} tokens, {EXAMPLE.heads} heads of d {EXAMPLE.head_dim}, 16-bit, causal; predicted"
    told += " and measured." if result else ", not measured yet."
    return [*markdown_table(header, rows), "", told]


def page(text, result):
    """docs/theory.md's `text` with its blocks written anew."""
    machine = model.machine_of(result, MACHINE)
    blocks = {
        "theory_kernels": kernels_block(machine),
        "theory_speed": speed_block(machine, result),
        "theory_memory": memory_block(machine, result),
    }
    for name, block in blocks.items():
        text = rewritten(text, name, block)
    return text


def draw(path, machine, result):
    """The roofline with the fused kernel and standard attention, predicted and, of a result, measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(model.HEAD_DIMS), sharey=True)
    for axes, head_dim in zip(panels, model.HEAD_DIMS):
        draw_roofs(axes, machine, head_dim)
        for index, name in enumerate(("standard", "fused")):
            draw_points(axes, points(machine, None, name, head_dim), f"{name}, predicted", f"C{index}", "none")
            if result:
                draw_points(
                    axes, points(machine, result, name, head_dim), f"{name}, measured", f"C{index}", f"C{index}"
                )
        axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of device memory", title=f"d {head_dim}, full")
        axes.set_ylim(10, 3000)
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("TFLOPS")
    panels[-1].legend(loc="lower right", fontsize=8)
    figure.suptitle(f"{machine.name}, s {model.SEQLENS[0]} to {model.SEQLENS[-1]}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


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
