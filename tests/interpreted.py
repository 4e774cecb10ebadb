"""Run a script under Triton's interpreter: the code of the kernels without a GPU."""

from __future__ import annotations

import os
from importlib.metadata import version

import fresh_process
import pytest

PRELUDE = """
import triton.runtime.interpreter as interpreter

# Triton 3.6 takes a loop bound by int() of an array of one element, which NumPy 2.4 refuses.
patch_tensor = interpreter._patch_lang_tensor

def patch_index(tensor, scope):
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

if sys.modules["triton"].__version__.startswith("3.6"):
    interpreter._patch_lang_tensor = patch_index
"""


def run_interpreted(script: str) -> None:
    """Run script, which has to print "equal" as its last line."""
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 6):
        pytest.skip(f"the interpreter of Triton {version('triton')} does not run these kernels")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = fresh_process.run(f"import sys\n{PRELUDE}\n{script}", env=environment)
    assert run.stdout.strip() == "equal", run.stderr
