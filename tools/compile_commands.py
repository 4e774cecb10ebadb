"""compile_commands.json at the root, for clangd: every source with the flags of its newest build."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

from ninja_file import ninja_command

ROOT = Path(__file__).resolve().parent.parent


def entries_of(folder: Path) -> list[dict]:
    """What `folder`/build.ninja compiles: the compiler's own command lines, since tools do not look after a wrapper's
    `--`."""
    command = [*ninja_command(), "-C", str(folder), "-t", "compdb"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = []
    for entry in json.loads(listing[listing.index("[") :]):  # "ninja: Entering directory" is before it
        words = shlex.split(entry["command"])
        if entry["output"].endswith(".o"):
            if "--" in words:
                words = [*words[words.index("--") + 1 :], "-c", entry["file"], "-o", entry["output"]]
            found.append({"directory": entry["directory"], "file": entry["file"], "arguments": words})
    return found


def main() -> None:
    builds = sorted((ROOT / "build").rglob("build.ninja"), key=lambda path: path.stat().st_mtime)
    if not builds:
        sys.exit("error: nothing was built yet: make kernels, or pip install -e . where nvcc is")
    entries = {entry["file"]: entry for build in builds for entry in entries_of(build.parent)}
    (ROOT / "compile_commands.json").write_text(json.dumps([*entries.values()], indent=1) + "\n", encoding="utf-8")
    print(f"compile_commands.json: {len(entries)} files of {len(builds)} builds")


if __name__ == "__main__":
    main()
