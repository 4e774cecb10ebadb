"""The module flash_attn_2_cuda of an install without kernels: it can be imported; its functions say what is missing.

tests/build/test_install.py: that such an install has it, and no other.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import fresh_process
import pytest

ROOT = Path(__file__).resolve().parents[2]

# Transformer Engine (006b3360) pytorch/attention/dot_product_attention/backends.py, unguarded in an else branch.
TRANSFORMER_ENGINE = """
from packaging.version import Version
import flash_attn
if Version("2.1.1") <= Version(flash_attn.__version__) <= Version("2.8.3"):
    from flash_attn_2_cuda import varlen_bwd as flash_attn_cuda_bwd
    from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
    from flash_attn.flash_attn_interface import _flash_attn_forward as _flash_attn_fwd
    from flash_attn.flash_attn_interface import _flash_attn_backward as _flash_attn_bwd
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward as _flash_attn_varlen_fwd
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward as _flash_attn_varlen_bwd
print("imported")
try:
    flash_attn_cuda_bwd()
except RuntimeError as error:
    print(error)
"""
LOOK_UP = """
import torch, flash_attn
from flash_attn import backends
from flash_attn.flash_attn_interface import flash_attn_gpu
print(backends.cuda_extension(), flash_attn.__build__["backends"], flash_attn_gpu.__name__)
try:
    backends.get("cuda")
except RuntimeError as error:
    print(error)
q = torch.randn(1, 3, 2, 8)
print(flash_attn.flash_attn_func(q, q, q).shape)
"""


@pytest.fixture
def site(tmp_path):
    """What a CPU-only install leaves in site-packages, as far as it differs from a checkout."""
    shutil.copyfile(ROOT / "tools" / "cpu_only_module.py", tmp_path / "flash_attn_2_cuda.py")
    return tmp_path


def run(site, code):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "CUDA_VISIBLE_DEVICES": ""}
    result = fresh_process.run(code, env=environment, cwd=site)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_transformer_engine_imports_it(site):
    first, message = run(site, TRANSFORMER_ENGINE).splitlines()
    assert first == "imported"
    assert message.startswith("flash_attn_2_cuda.varlen_bwd: this flash_attn was installed without its CUDA kernels")
    assert "nvcc" in message and "pip install" in message


def test_our_own_look_up_is_not_fooled(site):
    found, message, shape = run(site, LOOK_UP).splitlines()
    assert found == "None ['cpu'] flash_attn.cpu" and shape == "torch.Size([1, 3, 2, 8])"
    assert message.startswith("q: expected a CPU tensor, got one on cuda: this flash_attn has only the CPU backend")


def test_the_report_says_that_nothing_is_wrong(site):
    code = "from flash_attn import __main__; assert __main__.main(['--json']) == 0"
    report = json.loads(run(site, code))
    assert report["ok"] and report["build"]["backends"] == ["cpu"]
    assert report["build"]["extension"] == "not installed: this flash_attn has its CPU backend only"


def test_it_has_the_functions_of_the_extension_and_no_others(site):
    program = (
        "import flash_attn_2_cuda as m; print(*sorted(n for n, x in vars(m).items() if callable(x) and n[0] != '_'))"
    )
    assert run(site, program).split() == ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
