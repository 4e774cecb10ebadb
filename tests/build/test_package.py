"""The package as others see it: typed, and installed together with flash-attn-4's flash_attn.cute."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import fresh_process
import pytest

import flash_attn

PACKAGE = Path(flash_attn.__file__).parent
PUBLIC_MODULES = (
    "flash_attn",
    "flash_attn.backends",
    "flash_attn.batch_invariance",
    "flash_attn.bert_padding",
    "flash_attn.context_parallel.compat.ring_flash_attn",
    "flash_attn.dropout",
    "flash_attn.flash_attn_interface",
    "flash_attn.inference",
    "flash_attn.integrations.serving",
    "flash_attn.integrations.sglang",
    "flash_attn.integrations.transformers",
    "flash_attn.integrations.transformers_cp",
    "flash_attn.integrations.vllm",
    "flash_attn.kvcache_plan",
    "flash_attn.layers.rotary",
    "flash_attn.losses.cross_entropy",
    "flash_attn.modules.block",
    "flash_attn.modules.embedding",
    "flash_attn.modules.inner_attention",
    "flash_attn.modules.mha",
    "flash_attn.modules.mlp",
    "flash_attn.ops.activations",
    "flash_attn.ops.fused_dense",
    "flash_attn.ops.layer_norm",
    "flash_attn.ops.rms_norm",
    "flash_attn.ops.triton.cross_entropy",
    "flash_attn.ops.triton.layer_norm",
    "flash_attn.ops.triton.rotary",
    "flash_attn.utils.benchmark",
    "flash_attn.utils.distributed",
    "flash_attn.utils.generation",
)


def public_functions():
    """(name, function) of every public function, and of the methods of every public class, that the package defines."""
    found = {}
    for module_name in PUBLIC_MODULES:
        for name, value in vars(importlib.import_module(module_name)).items():
            if name.startswith("_") or getattr(value, "__module__", None) not in PUBLIC_MODULES:
                continue
            if inspect.isfunction(value):
                found[f"{value.__module__}.{value.__qualname__}"] = value
            elif inspect.isclass(value):
                for method_name, method in vars(value).items():
                    method = getattr(method, "__func__", method)  # of a staticmethod
                    public = method_name == "__init__" or not method_name.startswith("_")
                    if public and inspect.isfunction(method) and method.__module__ == value.__module__:
                        found[f"{value.__module__}.{value.__qualname__}.{method_name}"] = method
    return found


FUNCTIONS = public_functions()


def test_public_functions_are_found():
    assert {
        "flash_attn.flash_attn_interface.flash_attn_func",
        "flash_attn.inference.flash_attn_with_kvcache",
        "flash_attn.flash_attn_interface.FlashAttnFunc.forward",
        "flash_attn.modules.mha.MHA.forward",
        "flash_attn.kvcache_plan.KvCachePlan.__init__",
        "flash_attn.bert_padding.unpad_input",
    } <= set(FUNCTIONS)


def test_annotations_can_be_evaluated():
    for function in FUNCTIONS.values():
        assert typing.get_type_hints(function), function


CLIENT = """
import torch
from flash_attn import KvCachePlan, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import FlashAttnFunc

q = torch.randn(1, 2, 3, 4)
lengths = torch.zeros(1, dtype=torch.int32)
out: torch.Tensor = flash_attn_func(q, q, q, causal=True, window_size=[4, 0])
out, lse, dmask = flash_attn_func(q, q, q, return_attn_probs=True)
flash_attn_func(q, q, q).sum().backward()
flash_attn_varlen_func(q[0], q[0], q[0], lengths, lengths, 2, lengths.max()).mean()
flash_attn_with_kvcache(q, q, q, cache_seqlens=1, plan=KvCachePlan(lengths, 2, 3, 3, 4, 2)).mean()
FlashAttnFunc.apply(q, q, q, 0.0, None, True, (-1, -1), 0.0, None, False, False, True).mean()
"""
WRONG = {
    'flash_attn_func(q, q, q, dropout_p="much")': 'has incompatible type "str"; expected "float"',
    "flash_attn_func(q, q)": 'Missing positional argument "v"',
    "flash_attn_func(q, q, q, window=(1, 1))": 'Unexpected keyword argument "window"',
}
# Without torch, whose own sources take mypy most of a minute; the style step reads them.
MYPY_CONFIG = """
[mypy]
follow_imports = silent
[mypy-torch.*]
follow_imports = skip
follow_imports_for_stubs = True
"""


def test_type_checkers_see_the_annotations(tmp_path):
    pytest.importorskip("mypy.api", reason="mypy is not installed")
    client = tmp_path / "client.py"
    client.write_text(CLIENT + "\n".join(WRONG) + "\n", encoding="utf-8")
    config = tmp_path / "mypy.ini"
    config.write_text(MYPY_CONFIG, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--no-incremental", f"--config-file={config}", str(client)]
    # mypy finds an installed package by itself, and refuses its folder in this variable.
    found = {} if PACKAGE.parent.name == "site-packages" else {"MYPYPATH": str(PACKAGE.parent)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **found})
    errors = [line for line in result.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(WRONG), result.stdout
    for error, (call, message) in zip(errors, WRONG.items()):
        assert message in error, call


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def import_beside(other, program, first=False):
    """Run a program with `other` on sys.path, before the package's own folder or after it."""
    folders = [str(other), str(PACKAGE.parent)] if first else [str(PACKAGE.parent), str(other)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    elsewhere = Path(sys.executable).parent  # the working directory comes first on sys.path
    return fresh_process.run(program, env=environment, cwd=elsewhere, check=True).stdout.split()


@pytest.mark.parametrize("first", (False, True))
def test_flash_attn_cute_lives_in_another_folder(tmp_path, first):
    cute = tmp_path / "flash_attn" / "cute"
    cute.mkdir(parents=True)
    (cute / "__init__.py").write_text("from flash_attn.cute.interface import ANSWER\n", encoding="utf-8")
    (cute / "interface.py").write_text("ANSWER = 42\n", encoding="utf-8")
    program = "import flash_attn, flash_attn.cute as cute; print(cute.ANSWER, cute.__file__, flash_attn.__file__)"
    answer, file, own = import_beside(tmp_path, program, first)
    assert answer == "42" and Path(file) == cute / "__init__.py"
    assert Path(own) == PACKAGE / "__init__.py"


def test_our_own_modules_are_never_shadowed(tmp_path):
    other = tmp_path / "flash_attn"
    (other / "ops").mkdir(parents=True)
    for name in ("__init__.py", "backends.py", "bert_padding.py", "ops/__init__.py", "ops/library.py"):
        (other / name).write_text("raise ImportError('the other one')\n", encoding="utf-8")
    program = (
        "import flash_attn.backends, flash_attn.bert_padding, flash_attn.ops.library as library; "
        "print(flash_attn.backends.__file__, flash_attn.bert_padding.__file__, library.__file__)"
    )
    for file in import_beside(tmp_path, program):
        assert PACKAGE in Path(file).parents


def test_without_another_folder_there_is_no_cute(tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as error:
        import_beside(tmp_path, "import flash_attn.cute")
    assert "No module named 'flash_attn.cute'" in error.value.stderr


def modules_of_migration_table():
    """(module, "supported", "refused" or "absent") of each row of the table of modules."""
    text = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([`*]flash_attn.*?) \| (supported|refused|absent) \|", text, re.MULTILINE)
    return [(module, state) for names, state in rows for module in re.findall(r"[\w.]+", names)]


def test_the_migration_table_is_true():
    table = modules_of_migration_table()
    assert {state for _, state in table} == {"supported", "refused", "absent"} and len(table) > 30
    for module, state in table:
        if state == "supported":
            importlib.import_module(module)
            continue
        with pytest.raises(ModuleNotFoundError) as error:
            importlib.import_module(module)
        assert ("transformers" in str(error.value)) == (state == "refused"), module
    served = {module for module, state in table if state == "supported"}
    assert {module for module in PUBLIC_MODULES if ".modules." in module or ".layers." in module} <= served | {
        "flash_attn.modules.inner_attention"
    }
