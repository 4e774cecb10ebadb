"""What this installation was built for: the contents of `flash_attn.__build__`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from flash_attn import backends

RELEASE = "0.2.0"  # docs/releases.md


def build_info() -> dict[str, Any]:
    """Return release, backends, archs, head_dims, dtypes, cuda, torch and commit of this installation.

    Without the CUDA extension nothing was compiled: archs and head_dims are empty, cuda is None, dtypes are those of
    the CPU backend, torch is the version in use. commit is None in a checkout that was never installed.
    """
    info = {
        "release": RELEASE,
        "backends": ["cpu"],
        "archs": [],
        "head_dims": [],
        "dtypes": ["fp16", "bf16", "fp32", "fp64"],
        "cuda": None,
        "torch": torch.__version__,
        "commit": None,
    }
    installed = Path(__file__).with_name("_build_info.json")  # written by setup.py
    if installed.is_file():
        info["commit"] = json.loads(installed.read_text(encoding="utf-8"))["commit"]
    extension = backends.cuda_extension()
    if extension is not None:
        info.update(json.loads(extension.build_info()), backends=["cuda", "cpu"])
    return info
