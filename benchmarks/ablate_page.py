"""The block of docs/tuning/ablation.md: what was predicted beside what an ablation found, then all of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ablate_report
from markdown_tables import markdown_table, rewritten

PAGE = Path("docs", "tuning", "ablation.md")
RESULT = ablate_report.RESULT


@dataclass(frozen=True)
class Prediction:
    """Change of speed in percent, low to high: of a step of the ladder to the row before it, of a switch to the design
    in use. mask: over its cells alone. lowest: no other switch of the kernel is as slow, instead of a range."""

    family: str
    head_dim: int
    kind: str
    label: str
    low: float = float("-inf")
    high: float = float("inf")
    mask: str = ""
    lowest: bool = False

    @property
    def told(self):
        if self.lowest:
            return "the slowest of all"
        if self.low == float("-inf"):
            return f"{self.high:+g} or less"
        return f"{self.low:+g} or more" if self.high == float("inf") else f"{self.low:+g} to {self.high:+g}"


def both_dims(*arguments, **named):
    return [Prediction("mma_sync", head_dim, *arguments, **named) for head_dim in (64, 128)]


PREDICTIONS = (
    *both_dims("switch", "rows not swizzled", lowest=True),
    *both_dims("switch", "rows padded", -1, 1),
    *both_dims("ladder", "cp.async", 0, 5),
    Prediction("mma_sync", 64, "ladder", "K and V loaded early", low=15),
    Prediction("mma_sync", 64, "ladder", "lagging row max", 2.5, 4),
    Prediction("mma_sync", 128, "ladder", "lagging row max", 5, 8),
    *both_dims("switch", "fragments whole", -2, 2),
    Prediction("wgmma", 64, "switch", "a CTA for each tile", -10, -5, mask="full"),
    Prediction("wgmma", 64, "switch", "a CTA for each tile", high=-10, mask="causal"),
    Prediction("wgmma", 64, "switch", "192 × 128, 2 stages", -5, -2),
    Prediction("wgmma", 64, "switch", "no speculative exponentials", -5, -3),
    Prediction("wgmma", 128, "switch", "full: a CTA for each tile", -10, -5),
    Prediction("wgmma", 128, "switch", "causal: a CTA for each tile", high=-10),
    Prediction("wgmma", 128, "switch", "full: 192 × 80, 2 stages", -5, -2),
    Prediction("wgmma", 128, "switch", "full: no speculative exponentials", -5, -3),
    Prediction("wgmma", 128, "switch", "causal: no speculative exponentials", -5, -3),
)


def changes(prediction, found):
    """{label: % of speed} of the entries of the prediction's kind that were measured."""
    entries, base, speeds = ablate_report.measured(found, prediction.kind), ablate_report.in_use(found), {}
    for index, entry in enumerate(entries):
        if prediction.kind == "ladder":
            base = ablate_report.row_before(index, entries)
        own = ablate_report.of_mask(entry, prediction.mask) if prediction.mask else entry
        ratio = ablate_report.speed(own, base)
        if ratio is not None:
            speeds[entry["label"]] = 100 * (ratio - 1)
    return speeds


def row(prediction, result):
    """Cells: kernel, change, predicted, measured, whether it holds."""
    kernel = f"{ablate_report.TITLES[prediction.family]}, d {prediction.head_dim}"
    label = prediction.label + (f" ({prediction.mask})" if prediction.mask else "")
    cells = [kernel, label, prediction.told]
    found = result["families"].get(prediction.family, {}).get(str(prediction.head_dim))
    speeds = changes(prediction, found) if found else {}
    if prediction.label not in speeds:
        return [*cells, "–", "–"]
    value = round(speeds[prediction.label], 1)
    holds = value <= round(min(speeds.values()), 1) if prediction.lowest else prediction.low <= value <= prediction.high
    return [*cells, f"{value:+.1f}", "yes" if holds else "no"]


def predicted(result):
    """A table of all predictions."""
    rows = [row(prediction, result) for prediction in PREDICTIONS]
    title = "Speed, %: a step of the ladder against the row before, a switch against the design in use."
    header = ["kernel", "step or switch", "predicted", "measured", "holds"]
    return "\n".join(["### Predicted and measured", "", title, "", *markdown_table(header, rows)])


def block(result):
    """The lines between the markers; without a result no figure."""
    if result is None:
        return ["Not measured yet: `python benchmarks/lab.py ablate` does."]
    families = result["families"]
    links = [f"![{ablate_report.TITLES[family]}](../../{ablate_report.PLOTS}/{family}.png)" for family in families]
    return ["\n\n".join([predicted(result), ablate_report.report(result), *links])]


def page(text, result):
    """docs/tuning/ablation.md's `text` with its block written anew."""
    return rewritten(text, "ablation", block(result))
