"""`python -m flash_attn`: the report, and a self-check that tells a working installation from a broken one."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import attention

import flash_attn
from flash_attn import __main__, _report, _self_check, backends
from flash_attn.ops import calls, eager

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import kernel_manifest


@pytest.fixture
def on_the_cpu_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


class Backend:
    """The CPU backend with one of its functions replaced; takes the place of flash_attn.backends in the calls."""

    def __init__(self, name, function):
        self.name, self.function = name, function

    def of(self, *_):
        return self

    def __getattr__(self, name):
        real = getattr(backends.get("cpu"), name)
        if name != self.name:
            return real
        return lambda *args, **named: self.function(functools.partial(real, **named), *args)


def test_text_of_a_working_installation():
    command, root = [sys.executable, "-m", "flash_attn"], Path(flash_attn.__file__).parent.parent
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    first, *lines = result.stdout.splitlines()
    release = flash_attn.__build__["release"]
    assert first == f"flash_attn {release}: not the Dao-AILab package, with the API of flash_attn 2.8.3"
    facts = dict(line.split(maxsplit=1) for line in lines if " " in line and not line.startswith(" "))
    assert Path(facts["location"]) == Path(flash_attn.__file__).parent
    assert facts["backends"] == ", ".join(flash_attn.__build__["backends"])
    assert facts["torch"].startswith(torch.__version__)
    assert [line.split()[0] for line in lines if line.startswith("  ")].count("cpu") == 3
    assert lines[-1] == "all checks passed"


def test_json_of_a_working_installation(capsys):
    assert __main__.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True and report["package"]["origin"] == "not the Dao-AILab package"
    build = flash_attn.__build__
    assert {name: report["build"][name] for name in ("backends", "archs", "head_dims", "dtypes", "cuda")} == {
        name: build[name] for name in ("backends", "archs", "head_dims", "dtypes", "cuda")
    }
    assert len(report["gpus"]) == torch.cuda.device_count()
    checked = {check["device"] for check in report["checks"]}
    gpus = [f"cuda:{gpu['index']}" for gpu in report["gpus"] if float(gpu["capability"]) >= 8]
    assert checked == {"cpu", *(gpus if "cuda" in build["backends"] else [])}
    assert all(check["ok"] and check["error"] is not None for check in report["checks"] if check["device"] == "cpu")


def test_every_call_is_checked(device):
    dtypes = (torch.float16, torch.bfloat16)
    results = _self_check.check_device(device, dtypes, (64, 128))
    assert {(r.call, r.dtype, r.head_dim) for r in results} == {
        (call, dtype, head_dim)
        for call in ("forward, backward", "packed batch", "KV cache")
        for dtype in ("float16", "bfloat16")
        for head_dim in (64, 128)
    }
    for result in results:
        assert result.ok and 0 < result.error <= _self_check.BOUNDS[getattr(torch, result.dtype)], result


@pytest.mark.parametrize("window", ((-1, -1), (-1, 0), (7, 0), (3, 2)))
def test_the_reference_is_that_of_the_tests(window):
    q, k, v = (torch.randn(2, rows, heads, 16) for rows, heads in ((9, 4), (13, 2), (13, 2)))
    expected = attention(q, k, v, window=window).out
    torch.testing.assert_close(_self_check.reference(q, k, v, window).double(), expected, rtol=0, atol=1e-5)


def wrong_scale(real, *args):
    out, *rest = real(*args)
    return [out * 1.2, *rest]


def not_a_number(real, *args):
    out, *rest = real(*args)
    out[..., -1] = float("nan")
    return [out, *rest]


def stale_cache(real, q, k_cache, v_cache, k, v, lengths, *rest):
    """Forgets the new key."""
    return real(q, k_cache, v_cache, None, None, lengths, *rest)


def no_kernel(real, *args):
    raise RuntimeError("flash_fwd: this build has no such kernel")


BROKEN = {
    "a wrong scale": ("fwd", wrong_scale, "forward, backward", "float32, head dim 64: error "),
    "NaN": ("varlen_fwd", not_a_number, "packed batch", "error nan"),
    "a wrong gradient": ("bwd", wrong_scale, "forward, backward", "float32, head dim 64: error 2.0e-01"),
    "a forgotten key": ("fwd_kvcache", stale_cache, "KV cache", "float32, head dim 64: error "),
    "a call that raises": ("fwd", no_kernel, "forward, backward", "RuntimeError: flash_fwd: this build has no such"),
}


@pytest.mark.parametrize("defect", BROKEN)
def test_a_broken_installation_fails(defect, on_the_cpu_alone, monkeypatch, capsys):
    name, function, call, reason = BROKEN[defect]
    monkeypatch.setattr(calls, "backends", Backend(name, function))
    monkeypatch.setattr(eager, "attention", lambda *arguments: NotImplemented)  # it passes by no backend
    assert __main__.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "SELF-CHECK FAILED"
    (failed,) = [line for line in lines if "FAILED " in line]
    assert call in failed
    assert any(reason in line for line in lines), lines
    assert __main__.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_head_dim_beyond_the_gpu_is_a_limit(on_the_cpu_alone, monkeypatch, capsys):
    def too_large(real, *args):
        raise RuntimeError("flash_bwd: this GPU has too little shared memory per block for this head dim")

    monkeypatch.setattr(calls, "backends", Backend("bwd", too_large))
    monkeypatch.setattr(eager, "attention", lambda *arguments: NotImplemented)  # it passes by no backend
    assert __main__.main([]) == 0
    assert "too little shared memory" in capsys.readouterr().out


def test_an_extension_that_cannot_be_imported_fails(on_the_cpu_alone, tmp_path, monkeypatch, capsys):
    (tmp_path / "flash_attn_2_cuda.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn_2_cuda", raising=False)
    backends.get.cache_clear()
    try:
        assert __main__.main([]) == 1
    finally:
        backends.get.cache_clear()
    out = capsys.readouterr().out
    assert "installed, but cannot be imported: undefined symbol: _ZN3c10" in out
    assert out.splitlines()[-1] == "SELF-CHECK FAILED"


def test_families_of_a_build():
    assert _report.kernel_families([]) == []
    assert _report.kernel_families(["80", "89"]) == ["mma_sync (sm_80 and newer)"]
    assert _report.kernel_families(["80", "90"]) == ["mma_sync (sm_80 and newer)", "wgmma (sm_90)"]


@pytest.mark.parametrize(
    "capability, code",
    [("8.0", "sm_80"), ("8.6", "sm_80"), ("8.7", "sm_80"), ("8.9", "sm_80"), ("9.0", "sm_90"), ("7.5", None),
     ("10.0", None), ("10.3", None), ("11.0", None), ("12.0", None), ("12.1", None)],
)  # fmt: skip
def test_machine_code_that_a_gpu_runs_of_the_default_build(capability, code):
    assert _report.machine_code(capability, kernel_manifest.DEFAULT_ARCHS) == code


def test_machine_code_is_the_newest_that_a_gpu_knows():
    archs = ["80", "86", "90", "100", "120"]
    expected = {"8.0": "sm_80", "8.6": "sm_86", "8.9": "sm_86", "10.3": "sm_100", "12.0": "sm_120", "12.1": "sm_120"}
    assert {capability: _report.machine_code(capability, archs) for capability in expected} == expected
    assert _report.machine_code("8.0", ["86"]) is None and _report.machine_code("9.0", []) is None


def test_variables_and_gpus_are_shown(monkeypatch):
    report = {
        "ok": True,
        "package": {"release": "0.1.0", "api": "2.8.3", "origin": _report.ORIGIN, "location": "/x", "commit": "abc"},
        "build": {
            "backends": ["cuda", "cpu"], "extension": "/x.so", "families": ["f", "g"], "archs": ["80", "90"],
            "head_dims": [64, 128], "dtypes": ["fp16"], "cuda": "12.8", "torch": "2.11.0",
        },
        "environment": {
            "torch": "2.11.0", "torch_cuda": "12.8", "python": "3.11", "platform": "Linux",
            "variables": {"FLASH_ATTN_FAMILY": "mma_sync"},
        },
        "gpus": [
            {"index": 0, "name": "A", "capability": "9.0", "multiprocessors": 132, "memory_gib": 79.1, "code": "sm_90"},
            {"index": 1, "name": "B", "capability": "12.0", "multiprocessors": 9, "memory_gib": 31.8, "code": None},
        ],
        "checks": [],
    }  # fmt: skip
    lines = _report.text(report).splitlines()
    assert "GPU 0        A, compute capability 9.0, 132 multiprocessors, 79.1 GiB, sm_90 machine code" in lines
    assert "GPU 1        B, compute capability 12.0, 9 multiprocessors, 31.8 GiB, no machine code" in lines
    assert "variable     FLASH_ATTN_FAMILY=mma_sync" in lines
    assert "built with   CUDA 12.8, torch 2.11.0" in lines
