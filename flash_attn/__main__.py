"""`python -m flash_attn`: what is installed here and whether it works, as an issue report wants it.

Exit status 0 if the self-check passes, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys

from flash_attn import _report


def main(arguments: list[str] | None = None) -> int:
    """Print the report -> the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flash_attn", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args(arguments)
    report = _report.collect()
    print(json.dumps(report, indent=2) if options.json else _report.text(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
