"""compile_commands.json for clangd and other tools, in each build folder and, by `make compile_commands`, at the root.

The root's file holds every source once, with the flags of the build that ninja was last run for.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "compile_commands.json"


def compiler_arguments(entry: dict) -> list[str]:
    """The compiler's own command line: tools do not look after a wrapper's `--`."""
    words = shlex.split(entry["command"])
    if "--" not in words:
        return words
    return [*words[words.index("--") + 1 :], "-c", entry["file"], "-o", entry["output"]]


def write_compile_commands(ninja: list[str], folder: Path) -> None:
    """Write what `folder`/build.ninja compiles to `folder`/compile_commands.json. ninja: its command."""
    listing = subprocess.run([*ninja, "-C", str(folder), "-t", "compdb"], capture_output=True, text=True, check=True)
    text = listing.stdout[listing.stdout.index("[") :]  # "ninja: Entering directory" is before it
    entries = [
        {"directory": entry["directory"], "file": entry["file"], "arguments": compiler_arguments(entry)}
        for entry in json.loads(text)
        if entry["output"].endswith(".o")
    ]
    (folder / NAME).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def merged(databases: list[Path]) -> list[dict]:
    """The entries of all databases; a file that several hold is taken from the newest."""
    entries = {}
    for database in sorted(databases, key=lambda path: path.stat().st_mtime):
        entries |= {entry["file"]: entry for entry in json.loads(database.read_text(encoding="utf-8"))}
    return list(entries.values())


def main() -> None:
    databases = list((ROOT / "build").rglob(NAME))
    if not databases:
        sys.exit("error: nothing was built yet: make kernels, or pip install -e . where nvcc is")
    entries = merged(databases)
    (ROOT / NAME).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    print(f"{NAME}: {len(entries)} files of {len(databases)} builds")


if __name__ == "__main__":
    main()
