"""The adapters inside the real servers' packages, each in a separate process, which takes its platform as it likes.

The packages are too large for the extra `test`. tests/servers/README.md says how to put them where they are found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = Path(os.environ.get("FLASH_ATTN_SERVERS") or ROOT / "build/servers")


@pytest.mark.parametrize("server", ("vllm", "sglang"))
def test_in_the_package(server):
    folder = PACKAGES / server
    if not (folder / server).exists():
        pytest.skip(f"no {folder / server}: pip install --no-deps --target {folder} -r tests/servers/{server}.txt")
    path = os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--device", "cpu", f"tests/servers/in_{server}.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
