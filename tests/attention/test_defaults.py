"""PyTorch's default device and dtype are for tensors that users make: results live where the inputs do."""

from __future__ import annotations

import ast
from contextlib import contextmanager
from pathlib import Path

import fresh_process
import pytest
import torch
from public_calls import CALLS, Inputs
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
FLOATS = {"empty", "linspace", "ones", "rand", "randn", "zeros"}  # factories of the default dtype


@contextmanager
def foreign_defaults():
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def results_of(name, inputs):
    torch.manual_seed(3)
    return tree_leaves(CALLS[name](inputs))


@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_defaults(device, name):
    expected = results_of(name, Inputs(device))
    with foreign_defaults():
        results = results_of(name, Inputs(device, scope=lambda: torch.device("meta")))
    assert len(results) == len(expected)
    for ours, theirs in zip(results, expected):
        if isinstance(theirs, torch.Tensor):
            assert ours.dtype == theirs.dtype and ours.device == theirs.device
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert ours == theirs


def test_import_under_another_default_device():
    command = "import torch; torch.set_default_device('meta'); import flash_attn.modules.mha"
    fresh_process.run(command, check=True)


def factories(tree):
    """The calls torch.f(...) in a module of functions that a default device redirects, with their keywords."""
    names = {function.__name__ for function in _device_constructors()} | {"as_tensor"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
                yield node, {keyword.arg for keyword in node.keywords}


def test_factories_name_device_and_dtype():
    """Also those that only some GPU reaches."""
    wrong = []
    for path in [path for folder in ("flash_attn", "flash_attn_3") for path in sorted((ROOT / folder).rglob("*.py"))]:
        for node, keywords in factories(ast.parse(path.read_text())):
            if "device" not in keywords or (node.func.attr in FLOATS and "dtype" not in keywords):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)
