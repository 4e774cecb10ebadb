"""The layers of the sources: who may include or import whom."""

import ast
import re
from pathlib import Path

import pytest

from flash_attn.limits import MAX_HEAD_DIM

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc" / "flash_attn"
SOURCES = sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh"))

KERNELS = ["core", "params", "plan", "kernels/common"]
# layer of csrc/flash_attn -> the other layers that it may include
LAYERS = {
    "core": [],
    "params": ["core"],
    "plan": ["core", "params"],
    "kernels/common": ["core", "params", "plan"],
    "kernels/tma": ["core", "params", "kernels/common"],
    "kernels/sm80": KERNELS,
    "kernels/sm90": [*KERNELS, "kernels/tma"],
    "kernels/decode": [*KERNELS, "kernels/tma", "kernels/sm80", "kernels/sm90"],
    "kernels/mla": [*KERNELS, "kernels/tma", "kernels/sm80", "kernels/sm90", "kernels/decode"],
    "kernels/auxiliary": KERNELS,
    "instantiations": ["kernels/sm80", "kernels/sm90", "kernels/decode", "kernels/mla"],
    "api": ["core", "params", "plan"],
    "flash_api.cpp": ["core", "params", "plan", "api"],
}
TORCH = r"^(torch|ATen|c10|pybind11|Python\.h)\b"
CUTE = r"^(cute|cutlass)\b"
# layer -> headers of others that it may not include
FORBIDDEN_HEADERS = {
    "core": rf"{TORCH}|{CUTE}|^cuda",
    "params": rf"{TORCH}|{CUTE}",
    "plan": rf"{TORCH}|{CUTE}|^cuda",
    "kernels": TORCH,
    "instantiations": TORCH,
    "api": rf"{CUTE}|^torch/extension\.h|CUDAContext\.h",
    "flash_api.cpp": rf"{CUTE}|^torch/extension\.h|CUDAContext\.h",
}


def includes(path):
    """Names in the #include lines of one file."""
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.MULTILINE)


def own_path(path, include):
    """An include as a path below csrc/flash_attn, or None if it is not one of ours."""
    for base in (path.parent, CSRC):
        target = (base / include).resolve()
        if target.is_file() and target.is_relative_to(CSRC):
            return target.relative_to(CSRC).as_posix()
    return None


def layer_of(name):
    """The layer of a path below csrc/flash_attn."""
    found = [layer for layer in LAYERS if name == layer or name.startswith(layer + "/")]
    assert len(found) == 1, f"{name} belongs to no layer"
    return found[0]


def test_sources_are_found():
    assert any(p.suffix == ".cu" for p in SOURCES)
    assert CSRC / "flash_api.cpp" in SOURCES
    assert {layer_of(p.relative_to(CSRC).as_posix()) for p in SOURCES} == set(LAYERS)


def test_no_layer_knows_what_is_above_it():
    """An order exists: each layer includes only those before it."""
    for i, (layer, below) in enumerate(LAYERS.items()):
        assert set(below) <= set(list(LAYERS)[:i]), layer


@pytest.mark.parametrize("layer", LAYERS)
def test_includes(layer):
    wrong = []
    for path in SOURCES:
        if layer_of(path.relative_to(CSRC).as_posix()) != layer:
            continue
        own = {name: own_path(path, name) for name in includes(path)}
        wrong += [
            f"{path.relative_to(ROOT)} includes {name}"
            for name, target in own.items()
            if target and layer_of(target) not in (layer, *LAYERS[layer])
        ]
        # One way to write each include, from csrc/flash_attn, so that a reader sees the layer.
        wrong += [
            f"{path.relative_to(ROOT)}: {name} is {target}"
            for name, target in own.items()
            if target not in (None, name)
        ]
    assert wrong == []


@pytest.mark.parametrize("layer", FORBIDDEN_HEADERS)
def test_headers_of_others(layer):
    pattern = re.compile(FORBIDDEN_HEADERS[layer])
    files = [p for p in SOURCES if f"{p.relative_to(CSRC).as_posix()}/".startswith(f"{layer}/")]
    assert files
    assert [
        f"{p.relative_to(ROOT)} includes {name}" for p in files for name in includes(p) if pattern.search(name)
    ] == []


@pytest.mark.parametrize("namespace", ["torch", "at", "c10"])
def test_kernels_never_name_torch(namespace):
    """Nothing of torch but in the binding, not even by a forward declaration."""
    use = re.compile(rf"(?<![\w:]){namespace}::|\bnamespace {namespace}\b")
    kernels = [p for p in SOURCES if CSRC / "api" not in p.parents and p.name != "flash_api.cpp"]
    assert [str(p.relative_to(ROOT)) for p in kernels if use.search(p.read_text(encoding="utf-8"))] == []


def test_collective_builder_is_never_included():
    """It doubles the compile time of a file."""
    assert [p for p in SOURCES if any("collective_builder" in name for name in includes(p))] == []


def test_score_modifiers_are_applied_where_their_header_says():
    kernels, header = CSRC / "kernels", "common/score_mod.h"
    texts = {p.relative_to(kernels).as_posix(): p.read_text("utf-8") for p in SOURCES if kernels in p.parents}
    users = {name for name, text in texts.items() if re.search(r"\bScoreMod(\(| \w+\(|::\w)", text)} - {header}
    lse_only = {name for name in users if set(re.findall(r"\bScoreMod\W+\w+", texts[name])) == {"ScoreMod::kLog2e"}}
    named = set(re.findall(r"\w[\w/]+\.(?:h|cu)\b", texts[header].partition("#pragma")[0]))
    assert users - lse_only == named


def test_environment_is_read_under_the_gil():
    """os.environ changes the environment under it; a getenv at that time reads freed memory. The entry points read what
    they need before they release it, in one place."""
    readers = {
        p.relative_to(CSRC).as_posix(): len(re.findall(r"getenv", p.read_text(encoding="utf-8"))) for p in SOURCES
    }
    assert {name: count for name, count in readers.items() if count} == {"api/device.h": 4}
    binding = (CSRC / "flash_api.cpp").read_text(encoding="utf-8")
    assert not re.search(r"call_guard<\s*py::gil_scoped_release", binding)
    environment = (CSRC / "api" / "device.h").read_text(encoding="utf-8")
    guard = re.search(r"struct CallGuard \{(.*?)\};", environment, re.DOTALL).group(1)
    assert guard.index("CallEnvironment") < guard.index("py::gil_scoped_release")
    binding += (CSRC / "api" / "signatures.h").read_text(encoding="utf-8")
    guarded = binding.count("py::call_guard<CallGuard>()") + binding.count("const CallGuard guard;")
    assert guarded == binding.count("m.def(") - 1  # build_info needs none
    eager = "".join((CSRC / "api" / name).read_text(encoding="utf-8") for name in ("eager.h", "eager_inference.h"))
    calls = re.compile(r"\b(?:mha_[fb]wd\w*|packed_mla<Tensors>)\(").findall
    assert [len(calls(part)) for part in eager.split("const CallGuard guard;")] == [0, 1, 1, 2, 2]


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


def test_the_largest_head_dim_is_one_on_both_sides():
    tiles = (CSRC / "plan" / "tiles.h").read_text(encoding="utf-8")
    assert int(re.search(r"constexpr int kMaxHeadDim = (\d+);", tiles).group(1)) == MAX_HEAD_DIM


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


CP_LAYERS = ("plan", "exchange", "compute")  # folders of flash_attn/context_parallel, from the lowest to the highest


def test_context_parallel_layers_import_downwards():
    """Each folder imports only those before it, the plan no torch, and no function imports a module of the package."""
    package = "flash_attn.context_parallel."
    wrong = []
    for number, layer in enumerate(CP_LAYERS):
        assert python_files(f"context_parallel/{layer}")
        allowed = tuple(package + name for name in CP_LAYERS[: number + 1])
        for path in python_files(f"context_parallel/{layer}"):
            for name in imported_modules(path):
                is_above = name.startswith(package) and not name.startswith(allowed)
                if is_above or (layer == "plan" and name.split(".")[0] == "torch"):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    for path in python_files("context_parallel"):
        functions = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.FunctionDef)]
        late = [n for f in functions for n in ast.walk(f) if isinstance(n, ast.ImportFrom)]
        wrong += [f"{path.relative_to(ROOT)} imports {n.module} late" for n in late if n.module.startswith(package)]
    assert wrong == []
