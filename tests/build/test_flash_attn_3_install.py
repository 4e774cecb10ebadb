"""The distribution flash_attn_3 as installed, and the look-ups by which clients find it.

Each look-up runs in a new process, with the distribution in a separate folder on the path.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import fresh_process
import pytest

import flash_attn

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "flash_attn_3"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder for sys.path into which pip installed the distribution, without network."""
    for tool in ("pip", "setuptools", "wheel"):
        if find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", str(folder), str(SOURCE)], check=True, capture_output=True, text=True)
    return folder


def python(installed, code, check=True):
    """Runs code in a process that finds the installed distribution and this flash_attn."""
    path = [str(installed), str(Path(flash_attn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    result = fresh_process.run(code, cwd=installed, env=environment)
    assert not check or result.returncode == 0, result.stderr
    return result


def test_files(installed):
    modules = {"flash_attn_interface.py", "flash_attn_config.py"}
    modules |= {f"flash_attn_3/{path.name}" for path in (SOURCE / "flash_attn_3").glob("*.py")}
    assert {name for name in modules if not (installed / name).is_file()} == set()
    info = installed / "flash_attn_3-3.0.0.dist-info"
    metadata = (info / "METADATA").read_text(encoding="utf-8")
    assert re.search(r"^Requires-Dist: flash[-_]attn ?==2\.8\.3$", metadata, re.MULTILINE)
    assert re.search(r"^License(-Expression)?: BSD-3-Clause$", metadata, re.MULTILINE)
    assert any(path.name == "LICENSE" for path in info.rglob("*"))
    assert "Root-Is-Purelib: true" in (info / "WHEEL").read_text()


def test_both_names_are_one_module(installed):
    """Transformer Engine and Megatron import flash_attn_3.flash_attn_interface, most others the top-level module."""
    code = """if True:
        import flash_attn_3, flash_attn_3.flash_attn_interface as inner, flash_attn_interface as outer
        import flash_attn_3._C, flash_attn_3.flash_attn_config, torch
        assert flash_attn_3.__version__ == "3.0.0"
        for name in [*outer.__all__, "_flash_attn_forward", "_flash_attn_backward"]:
            assert getattr(inner, name) is getattr(outer, name), name
        print(outer.__file__, torch.ops.flash_attn_3.fwd.default._schema.name)
    """
    out = python(installed, code).stdout.split()
    assert out == [str(installed / "flash_attn_interface.py"), "flash_attn_3::fwd"]


def test_the_operators_alone(installed):
    """xformers imports flash_attn_3._C first and nothing else."""
    code = (
        "import flash_attn_3._C, torch; q = torch.ones(1, 2, 1, 8); print(torch.ops.flash_attn_3.fwd(q, q, q)[0].sum())"
    )
    assert python(installed, code).stdout.strip() == "tensor(16.)"


def test_another_flash_attn_is_named(installed, tmp_path):
    other = tmp_path / "flash_attn"
    other.mkdir()
    (other / "__init__.py").write_text("__version__ = '2.8.3'\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import flash_attn_3"
    result = python(installed, code, check=False)
    assert result.returncode != 0
    assert "ImportError: flash_attn_3: expected the flash_attn of the repository" in result.stderr


def names_of_distributions():
    return {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}


def test_the_repository_root_is_no_installed_distribution():
    """The folder's name is that of the package: on its own it must not look installed."""
    code = """if True:
        import importlib.metadata, importlib.util
        spec = importlib.util.find_spec("flash_attn_3")
        assert spec is None or spec.origin is None
        assert importlib.util.find_spec("flash_attn_interface") is None
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if "flash_attn_3" in {name.replace("-", "_") for name in names_of_distributions()}:
        pytest.skip("the distribution is installed here")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---- clients ----


def test_transformers_finds_it(installed):
    """is_flash_attn_3_available wants the module owned by the distribution, and CUDA, which is granted here."""
    pytest.importorskip("transformers")
    code = """if True:
        from transformers.utils import import_utils
        import_utils.is_torch_cuda_available = lambda: True
        from transformers import modeling_flash_attention_utils as gates
        assert gates.FLASH_ATTENTION_COMPATIBILITY_MATRIX[3]["pkg_availability_check"]()
        assert import_utils.is_flash_attn_3_available()
        import flash_attn_interface as fa3
        functions, processors = gates.lazy_import_flash_attention("flash_attention_3")
        processors = processors if isinstance(processors, tuple) else (processors,)  # of the varlen function, the cache
        assert functions[:2] == (fa3.flash_attn_func, fa3.flash_attn_varlen_func)
        for process in processors:
            supported = process.keywords["supports_mapping"]
            assert all(supported[name] for name in ("s_aux", "softcap", "window_size")), supported
        assert all(process.keywords["supports_mapping"]["page_table"] for process in processors[1:])
        print("found")
    """
    assert python(installed, code).stdout.split()[-1] == "found"


def test_diffusers_finds_it(installed):
    """diffusers 0.42.1 utils/import_utils.py:237: find_spec("flash_attn_3") and a distribution so named."""
    code = """if True:
        import importlib.metadata, importlib.util
        assert importlib.util.find_spec("flash_attn_3") is not None
        assert importlib.metadata.version("flash_attn_3") == importlib.metadata.version("flash-attn-3") == "3.0.0"
        from flash_attn_interface import flash_attn_func, flash_attn_varlen_func
        if importlib.util.find_spec("diffusers"):
            from diffusers.models import attention_dispatch as dispatch
            assert dispatch._CAN_USE_FLASH_ATTN_3 and dispatch.flash_attn_3_func is flash_attn_func
            for backend in ("_flash_3", "_flash_varlen_3"):
                dispatch._check_attention_backend_requirements(dispatch.AttentionBackendName(backend))
            import torch
            q = torch.randn(2, 5, 2, 16, dtype=torch.bfloat16)
            out, lse = dispatch._wrapped_flash_attn_3._init_fn(q, q, q, causal=True)
            assert torch.equal(out, flash_attn_func(q, q, q, causal=True)) and lse.shape == (2, 5, 2)
        print("found")
    """
    assert python(installed, code).stdout.split()[-1] == "found"


def test_transformer_engine_and_megatron_find_it(installed):
    """Transformer Engine (d0067d0d) backends.py:147: a version that is no beta of 3.0.0; Megatron: the module."""
    code = """if True:
        from importlib.metadata import version
        from packaging.version import Version
        assert not Version("3.0.0b") < Version(version("flash-attn-3")) < Version("3.0.0")
        from flash_attn_3.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
        from flash_attn_3.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        print("found")
    """
    assert python(installed, code).stdout.split()[-1] == "found"


def test_xformers_finds_it(installed):
    """xformers 0.0.35 ops/fmha/flash3.py: its own check of the schemas where it is installed, else of the operators."""
    code = """if True:
        import importlib.util
        assert importlib.util.find_spec("flash_attn_3") and importlib.util.find_spec("flash_attn_3._C")
        import flash_attn_3._C, torch
        assert hasattr(torch.ops.flash_attn_3, "fwd") and hasattr(torch.ops.flash_attn_3, "bwd")
        if importlib.util.find_spec("xformers"):
            from xformers.ops.fmha import flash3
            assert flash3._flash_attention3_incompatible_reason() is None
            assert flash3._C_flashattention3 is torch.ops.flash_attn_3
        print("found")
    """
    assert python(installed, code).stdout.split()[-1] == "found"


def test_torch_finds_it(installed):
    """torch 2.10 and newer: the import and the operators; activating it is for GPUs of compute capability 9.0."""
    pytest.importorskip("torch.nn.attention._fa3")
    code = """if True:
        from torch.nn.attention import _fa3
        _fa3._fa3_import_module("flash_attn_interface")
        import torch
        assert _fa3._FA3_CUDA_FWD is torch.ops.flash_attn_3.fwd and _fa3._FA3_CUDA_BWD is torch.ops.flash_attn_3.bwd
        print("found")
    """
    assert python(installed, code).stdout.split()[-1] == "found"
