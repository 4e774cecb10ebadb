"""The generated tables of the laboratory's page (README.md) and of examples/minimal and examples/hopper."""

from __future__ import annotations

import sys

import study_report
import triton_report
from results import ROOT, run_line, stored


def ablation_ladder():
    result = stored("ablate")
    return [*study_report.ladder_table(result), "", run_line(result)]


def ablation_switches():
    result = stored("ablate")
    tables = [study_report.switch_table(result, family) for family in result["families"]]
    return [*tables[0], "", *tables[1]]


def sweep():
    result = stored("sweep")
    return [*study_report.summary(result), "", run_line(result)]


def triton_ladder():
    return triton_report.block(stored("triton_ladder"))


def minimal():
    return tables().table(stored("minimal")).splitlines()


def hopper():
    return tables().hopper_table(stored("minimal")).splitlines()


def tables():
    sys.path.append(str(ROOT / "examples" / "minimal"))
    import table

    return table


BLOCKS = {
    "benchmarks/lab/README.md": {
        "ablation_ladder": ablation_ladder,
        "ablation_switches": ablation_switches,
        "sweep": sweep,
        "triton_ladder": triton_ladder,
    },
    "examples/minimal/README.md": {"minimal": minimal},
    "examples/hopper/README.md": {"hopper": hopper},
}
