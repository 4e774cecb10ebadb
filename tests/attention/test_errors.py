"""Bad input: the message names the argument, what was expected and what it was; nothing is written."""

from __future__ import annotations

import re

import kernel_tables
import pytest
import torch
from cases import Case
from harness import backend_forward, backend_varlen_forward, make_problem

from flash_attn import backends, dropout_mask, flash_attn_func, flash_attn_varlen_func
from flash_attn.limits import MAX_HEAD_DIM

pytestmark = pytest.mark.by_both_paths

HALF = torch.bfloat16
B, SQ, SK, H, HK, D = 2, 5, 7, 4, 2, 16
TOTAL_Q, TOTAL_K = 13, 17


def fails(message: str, call, *args, error=RuntimeError, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    first_line = str(caught.value).splitlines()[0]
    assert first_line == message


def dense(device, dtype=HALF):
    q = torch.randn(B, SQ, H, D, device=device).to(dtype)
    k, v = (torch.randn(B, SK, HK, D, device=device).to(dtype) for _ in "kv")
    return {"q": q, "k": k, "v": v}


def varlen(device, page_size=0):
    case = Case(B, SQ, SK, H, HK, D, "bfloat16", kind="packed", page_size=page_size)
    return make_problem(case, device, [(5, 7), (8, 10)])


def other_device(device):
    return "cpu" if device == "cuda" else "meta"


def accepted_dtypes(device):
    return "float16 or bfloat16" if device == "cuda" else "float16, bfloat16, float32 or float64"


@pytest.mark.parametrize("dtype,name", [(torch.int32, "int32"), (torch.complex64, "complex64"), (torch.bool, "bool")])
def test_dtype_of_q(device, dtype, name):
    fails(
        f"q: expected dtype {accepted_dtypes(device)}, got {name}", backend_forward, **dense(device, dtype), scale=1.0
    )


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("dtype,name", [(torch.float32, "float32"), (torch.float64, "float64")])
def test_dtypes_of_the_cpu_only(device, dtype, name):
    fails(f"q: expected dtype float16 or bfloat16, got {name}", flash_attn_func, **dense(device, dtype))


@pytest.mark.parametrize("name", ("k", "v", "out"))
def test_dtype_of_the_others(device, name):
    tensors = dense(device)
    tensors[name] = (tensors["q"] if name == "out" else tensors[name]).half()
    fails(f"{name}: expected the dtype of q (bfloat16), got float16", backend_forward, **tensors)


def test_device_of_q():
    if torch.cuda.is_available():
        tensors = dense("cpu")
        extension = backends.cuda_extension() or pytest.skip("the extension is not installed")
        arguments = (None, None, 0.0, 1.0, False, -1, -1, 0.0, False, None)
        fails("q: expected a CUDA tensor, got one on cpu", extension.fwd, *tensors.values(), *arguments)
    fails("q: expected a tensor on cuda or cpu, got one on meta", flash_attn_func, **dense("meta"))


@pytest.mark.parametrize("name", ("k", "v", "out", "alibi"))
def test_device_of_dense_arguments(device, name):
    tensors = dense(device)
    tensors["out"], tensors["alibi"] = torch.empty_like(tensors["q"]), torch.ones(H, device=device)
    tensors[name] = tensors[name].to(other_device(device))
    argument = "alibi_slopes" if name == "alibi" else name
    own = str(tensors["q"].device)
    expected = f"{argument}: expected a tensor on q's device ({own}), got one on {other_device(device)}"
    fails(expected, backend_forward, **tensors)


@pytest.mark.parametrize("name", ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table"))
def test_device_and_dtype_of_lengths(device, name):
    problem = varlen(device, page_size=16)
    good = {"cu_seqlens_q": problem.cu_seqlens_q, "cu_seqlens_k": problem.cu_seqlens_k,
            "block_table": problem.block_table}.get(name, torch.ones(2, dtype=torch.int32, device=device))  # fmt: skip
    elsewhere, own = good.to(other_device(device)), str(problem.q.device)
    message = f"{name}: expected a tensor on q's device ({own}), got one on {other_device(device)}"
    fails(message, backend_varlen_forward, problem, **{name: elsewhere})
    fails(f"{name}: expected dtype int32, got int64", backend_varlen_forward, problem, **{name: good.long()})
    fails(f"{name}: expected dtype int32, got float32", backend_varlen_forward, problem, **{name: good.float()})


def test_rank(device):
    t = dense(device)
    axes = "4 dimensions (batch, seqlen, heads, head_dim)"
    fails(f"q: expected {axes}, got 3", backend_forward, t["q"][0], t["k"], t["v"])
    fails(f"k: expected {axes}, got 3", backend_forward, t["q"], t["k"][0], t["v"])
    problem = varlen(device)
    packed = "3 dimensions (total, heads, head_dim)"
    fails(f"q: expected {packed}, got 4", backend_varlen_forward, problem, q=problem.q[None])
    fails(f"k: expected {packed}, got 4", backend_varlen_forward, problem, k=problem.k[None])
    problem = varlen(device, page_size=16)
    pages = "4 dimensions (blocks, page_size, heads, head_dim)"
    fails(f"k: expected {pages}, got 3", backend_varlen_forward, problem, k=problem.k[0])


def test_shapes(device):
    t = dense(device)
    q, k, v = t.values()
    fails(f"k: expected shape [2, 7, 2, 16], got {[3, 7, 2, 16]}", backend_forward, q, k[:1].expand(3, -1, -1, -1), v)
    fails("k: expected shape [2, 7, 2, 16], got [2, 7, 2, 8]", backend_forward, q, k[..., :8], v)
    fails("v: expected shape [2, 7, 2, 16], got [2, 6, 2, 16]", backend_forward, q, k, v[:, :6])
    fails("v: expected shape [2, 7, 2, 16], got [2, 7, 1, 16]", backend_forward, q, k, v[:, :, :1])
    fails("out: expected shape [2, 5, 4, 16], got [2, 4, 4, 16]", backend_forward, q, k, v, torch.empty_like(q[:, 1:]))
    problem = varlen(device)
    fails("v: expected shape [26, 2, 16], got [25, 2, 16]", backend_varlen_forward, problem, v=problem.v[1:])
    fails(
        "out: expected shape [13, 4, 16], got [12, 4, 16]", backend_varlen_forward, problem, out=problem.q[1:].clone()
    )


def test_last_dimension_stride(device):
    t = dense(device)

    def spread(x):
        return torch.empty(*x.shape[:-1], 2 * D, device=device, dtype=HALF)[..., ::2]

    for name in ("q", "k", "v"):
        message = f"{name}: expected a contiguous last dimension (stride 1), got stride 2"
        fails(message, backend_forward, **{**t, name: spread(t[name])})
    problem = varlen(device)
    message = "q: expected a contiguous last dimension (stride 1), got stride 2"
    fails(message, backend_varlen_forward, problem, q=spread(problem.q))
    message = "out: expected a contiguous last dimension (stride 1), got stride 2"
    fails(message, backend_forward, **t, out=spread(t["q"]))


def test_last_dimension_of_size_one_may_have_any_stride(device):
    q = torch.randn(1, 4, 2, 3, device=device, dtype=HALF)[..., ::3]
    assert q.stride(-1) == 3
    assert torch.equal(flash_attn_func(q, q, q), flash_attn_func(*(q.contiguous(),) * 3))


def test_head_dim(device):
    most = MAX_HEAD_DIM
    wide = torch.randn(1, 3, 2, most + 8, device=device, dtype=HALF)
    message = f"q: expected a head dim of at most {most}, got {most + 8}"
    fails(message, backend_forward, wide, wide, wide)
    fails(message, flash_attn_func, wide, wide, wide)
    if device == "cuda":
        odd = wide[..., :37].contiguous()
        fails("q: expected a head dim that is a multiple of 8, got 37", backend_forward, odd, odd, odd)


def test_head_counts(device):
    t = dense(device)
    message = "q: expected a head count divisible by the K/V head count 2, got 3"
    fails(message, backend_forward, t["q"][:, :, :3], t["k"], t["v"])
    fails(message, flash_attn_func, t["q"][:, :, :3], t["k"], t["v"])
    problem = varlen(device)
    fails(message, backend_varlen_forward, problem, q=problem.q[:, :3].contiguous())


@pytest.mark.parametrize("p,text", [(1.0, "1"), (-0.5, "-0.5"), (1.5, "1.5"), (float("nan"), "nan")])
def test_dropout_probability(device, p, text):
    """1.0 may print as 1 or 1.0."""
    pattern = re.escape("dropout_p: expected a value in [0, 1), got ") + re.escape(text) + r"(\.0)?$"
    for call in (
        lambda: backend_forward(**dense(device), p=p),
        lambda: flash_attn_func(**dense(device), dropout_p=p),
        lambda: backend_varlen_forward(varlen(device), p=p),
        lambda: dropout_mask(torch.zeros(2, dtype=torch.int64, device=device), p, 1, 1, 2, 2),
    ):
        with pytest.raises(RuntimeError, match="^" + pattern):
            call()


@pytest.mark.parametrize("softcap", (-1.5, float("nan")))
def test_softcap(device, softcap):
    fails(f"softcap: expected a value >= 0, got {softcap}", backend_forward, **dense(device), softcap=softcap)
    message = f"softcap: expected a value >= 0, got {softcap}"
    fails(message, backend_varlen_forward, varlen(device), softcap=softcap)


@pytest.mark.parametrize("scale", (float("inf"), float("-inf"), float("nan")))
def test_softmax_scale(device, scale):
    fails(f"softmax_scale: expected a finite value, got {scale}", backend_forward, **dense(device), scale=scale)
    message = f"softmax_scale: expected a finite value, got {scale}"
    fails(message, flash_attn_func, **dense(device), softmax_scale=scale)


@pytest.mark.parametrize("name", ("cu_seqlens_k", "seqused_k", "leftpad_k"))
def test_shapes_of_lengths(device, name):
    size = 3 if name == "cu_seqlens_k" else 2
    wrong = torch.zeros(size + 1, dtype=torch.int32, device=device)
    fails(f"{name}: expected shape [{size}], got [{size + 1}]", backend_varlen_forward, varlen(device), **{name: wrong})


def test_shape_of_cu_seqlens_q(device):
    for shape in ([0], [2, 3]):
        wrong = torch.zeros(shape, dtype=torch.int32, device=device)
        with pytest.raises(RuntimeError, match=r"^cu_seqlens_q: expected shape \[.*\], got " + re.escape(str(shape))):
            backend_varlen_forward(varlen(device), cu_seqlens_q=wrong)


@pytest.mark.parametrize("name", ("cu_seqlens_q", "cu_seqlens_k"))
def test_strides_of_lengths(device, name):
    problem = varlen(device)
    strided = torch.stack([getattr(problem, name)] * 2, dim=1)[:, 0]
    with pytest.raises(RuntimeError, match=f"^{name}: expected a contiguous tensor"):
        backend_varlen_forward(problem, **{name: strided})


def test_alibi_slopes(device):
    t = dense(device)
    fails(
        "alibi_slopes: expected dtype float32, got bfloat16",
        backend_forward,
        **t,
        alibi=torch.ones(H, device=device, dtype=HALF),
    )
    for shape in ([3], [1, 4], [2, 3], [2, 4, 1]):
        slopes = torch.ones(shape, device=device)
        fails(f"alibi_slopes: expected shape [4] or [2, 4], got {shape}", backend_forward, **t, alibi=slopes)
    slopes = torch.ones(2, 4, 2, device=device)[..., 0]
    message = "alibi_slopes: expected a contiguous last dimension (stride 1), got stride 2"
    fails(message, backend_forward, **t, alibi=slopes)


@pytest.mark.parametrize("name", ("max_seqlen_q", "max_seqlen_k"))
def test_negative_max_seqlen(device, name):
    fails(f"{name}: expected a value >= 0, got -1", backend_varlen_forward, varlen(device), **{name: -1})


def test_rank_of_the_block_table(device):
    problem = varlen(device, page_size=16)
    for wrong in (problem.block_table[0], problem.block_table[:1]):
        with pytest.raises(RuntimeError, match=r"^block_table: expected shape \[2, .*\], got "):
            backend_varlen_forward(problem, block_table=wrong.contiguous())


def test_no_tensor_is_written_before_an_error(device):
    t = dense(device)
    out = torch.full_like(t["q"], 7.0)
    copies = {name: x.clone() for name, x in t.items()}
    with pytest.raises(RuntimeError):
        backend_forward(**t, out=out, p=1.0)
    with pytest.raises(RuntimeError):
        backend_forward(**t, out=out, softcap=-1.0)
    with pytest.raises(RuntimeError):
        backend_forward(**t, out=out, alibi=torch.ones(3, device=device))
    assert (out == 7.0).all() and all(torch.equal(t[name], copies[name]) for name in t)


@pytest.mark.parametrize("kind", ("dense", "varlen"))
def test_gradient_of_the_lse(device, kind):
    t = dense(device)
    lse_shape = [B, H, SQ]
    lengths = ()
    if kind == "varlen":
        t = {name: x.flatten(0, 1) for name, x in t.items()}
        lse_shape = [H, B * SQ]
        lengths = (*(torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (SQ, SK)),)
    lse = torch.zeros(lse_shape, device=device)
    dq = torch.full_like(t["q"], 7.0)
    maxima = (SQ, SK) if lengths else ()
    zero_tensors = (False,) if lengths else ()
    backend = backends.get(device)
    call = backend.varlen_bwd if lengths else backend.bwd

    def backward(dlse):
        call(t["q"], t["q"], t["k"], t["v"], t["q"], lse, dq, None, None, *lengths, None, *maxima, 0.0, 1.0,
             *zero_tensors, False, -1, -1, 0.0, False, None, None, dlse)  # fmt: skip

    fails("dlse: expected dtype float32, got bfloat16", backward, lse.to(HALF))
    fails(f"dlse: expected shape {lse_shape}, got {lse_shape[:-1]}", backward, lse[..., 0])
    own, elsewhere = str(t["q"].device), other_device(device)
    fails(f"dlse: expected a tensor on q's device ({own}), got one on {elsewhere}", backward, lse.to(elsewhere))
    assert (dq == 7.0).all()


def test_errors_draw_no_random_numbers(device):
    torch.manual_seed(3)
    expected = torch.rand(3, device=device)
    torch.manual_seed(3)
    t = dense("cpu")
    torch.manual_seed(3)
    t = {name: x.to(device) for name, x in t.items()}
    with pytest.raises(RuntimeError):
        backend_forward(t["q"], t["k"], t["v"][:, 1:], p=0.5)
    assert torch.equal(expected, torch.rand(3, device=device))


def test_not_a_tensor(device):
    q = dense(device)["q"]
    fails("q: expected a Tensor, got list", flash_attn_func, [1, 2], q, q, error=TypeError)
    fails("window_size: expected a pair (left, right), got 3", flash_attn_func, q, q, q, window_size=3, error=TypeError)


def test_mixed_devices_of_the_public_functions():
    """A message about the argument, not about the dispatcher."""
    t = dense("cpu")
    message = "k: expected a tensor on q's device (cpu), got one on meta"
    fails(message, flash_attn_func, t["q"], t["k"].to("meta"), t["v"])
    problem = varlen("cpu")
    with pytest.raises(RuntimeError, match="^cu_seqlens_q: expected a tensor on q's device"):
        flash_attn_varlen_func(problem.q, problem.k, problem.v, problem.cu_seqlens_q.to("meta"), problem.cu_seqlens_k,
                               8, 10)  # fmt: skip


@pytest.mark.devices("cuda")
def test_missing_instantiation_names_the_knob(device):
    """A build of a subset of head dims or dtypes says which variable to set."""
    import json

    info = json.loads(backends.get("cuda").build_info())
    missing = set(kernel_tables.MMA_SYNC) - set(info["head_dims"])
    if not missing:
        pytest.skip("the extension holds every head dim")
    d = max(missing)
    x = torch.randn(1, 4, 1, d, device=device, dtype=HALF)
    with pytest.raises(RuntimeError, match="FLASH_ATTN_HEAD_DIMS"):
        flash_attn_func(x, x, x)


def test_missing_extension_names_the_way_to_build(monkeypatch):
    """CUDA tensors in an install that has only the CPU backend."""
    monkeypatch.setitem(__import__("sys").modules, "flash_attn_2_cuda", None)
    backends.get.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="only the CPU backend.*nvcc.*pip install"):
            backends.get("cuda")
    finally:
        backends.get.cache_clear()
