"""The layers of the sources: who may include or import whom."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc" / "flash_attn"
SOURCES = sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh"))

# folder or file below csrc/flash_attn -> what no include of it may match
FORBIDDEN_INCLUDES = {
    "src": r"^(torch|ATen|c10|pybind11|Python\.h)\b",
    "plan": r"^(torch|ATen|c10|pybind11|Python\.h|cute|cutlass)\b|(^|/)(sm80|sm90|passes)/",
    "src/common": r"(^|/)(sm80|sm90|passes|instantiations)/",
    "src/sm80": r"(^|/)(sm90|instantiations)/|(^|/)flash_api",
    "src/sm90": r"(^|/)(sm80|instantiations)/|(^|/)flash_api",
    "src/flash.h": r"^(cute|cutlass)\b|(^|/)(sm80|sm90)/",
    "flash_api.cpp": r"^(cute|cutlass)\b|(^|/)(sm80|sm90|passes|instantiations)/|^torch/extension\.h|CUDAContext\.h",
    "checks.h": r"^(cute|cutlass)\b|(^|/)(sm80|sm90|passes|instantiations)/|^torch/extension\.h",
}


def includes(path):
    """Names in the #include lines of one file."""
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.MULTILINE)


def resolved_layer(path, include):
    """An include as a path below csrc/flash_attn if it is one of ours, so that "../sm80/x.h" is recognised."""
    for base in (path.parent, CSRC / "src", CSRC):
        target = (base / include).resolve()
        if target.is_file() and target.is_relative_to(CSRC):
            return target.relative_to(CSRC).as_posix()
    return include


def test_sources_are_found():
    assert any(p.suffix == ".cu" for p in SOURCES)
    assert CSRC / "flash_api.cpp" in SOURCES


@pytest.mark.parametrize("layer", FORBIDDEN_INCLUDES)
def test_includes(layer):
    pattern = re.compile(FORBIDDEN_INCLUDES[layer])
    place = CSRC / layer
    files = [p for p in SOURCES if p == place or place in p.parents]
    wrong = [
        f"{path.relative_to(ROOT)} includes {name}"
        for path in files
        for name in includes(path)
        if pattern.search(name) or pattern.search(resolved_layer(path, name))
    ]
    assert wrong == []


@pytest.mark.parametrize("namespace", ["torch", "at", "c10"])
def test_kernels_never_name_torch(namespace):
    """Nothing of torch below src/ and plan/, not even by a forward declaration."""
    use = re.compile(rf"(?<![\w:]){namespace}::|\bnamespace {namespace}\b")
    kernels = [p for p in SOURCES if CSRC / "src" in p.parents or CSRC / "plan" in p.parents]
    assert [str(p.relative_to(ROOT)) for p in kernels if use.search(p.read_text(encoding="utf-8"))] == []


def test_collective_builder_is_never_included():
    """It doubles the compile time of a file."""
    assert [p for p in SOURCES if any("collective_builder" in name for name in includes(p))] == []


def test_environment_is_read_under_the_gil():
    """os.environ changes the environment under it; a getenv beside that reads freed memory. The entry points read what
    they need before they release it, in one place."""
    readers = {
        p.relative_to(CSRC).as_posix(): len(re.findall(r"getenv", p.read_text(encoding="utf-8"))) for p in SOURCES
    }
    assert {name: count for name, count in readers.items() if count} == {"forward_family.h": 1}
    binding = (CSRC / "flash_api.cpp").read_text(encoding="utf-8")
    assert not re.search(r"call_guard<\s*py::gil_scoped_release", binding)
    guard = re.search(r"struct CallGuard \{(.*?)\};", binding, re.DOTALL).group(1)
    assert guard.index("ForcedFamily") < guard.index("py::gil_scoped_release")
    assert binding.count("py::call_guard<CallGuard>()") == binding.count("m.def(") - 1  # build_info needs none


def imported_modules(path):
    """Absolute names of the modules that one Python file imports, at any depth of the code."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def python_files(folder):
    return sorted((ROOT / "flash_attn" / folder).rglob("*.py"))


def test_cpu_backend_needs_neither_extension_nor_interface():
    above = ("flash_attn_2_cuda", "flash_attn.backends", "flash_attn.flash_attn_interface", "flash_attn.ops")
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files("cpu")
        for name in imported_modules(path)
        if name.startswith(above)
    ]
    assert python_files("cpu")
    assert wrong == []


def test_only_backends_imports_the_extension():
    importers = {
        path.relative_to(ROOT / "flash_attn").as_posix()
        for path in python_files(".")
        if any(name.split(".")[0] == "flash_attn_2_cuda" for name in imported_modules(path))
    }
    assert importers <= {"backends.py"}


def test_package_imports_nothing_of_the_repository_around_it():
    outside = ("tests", "tools", "benchmarks", "examples")
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files(".")
        for name in imported_modules(path)
        if name.split(".")[0] in outside
    ]
    assert wrong == []
