"""flash_attn.explain(): all functions, by the arguments that reach the backend, and the CPU backend's own plans.

What the plans of CUDA kernels say is in test_explain.py.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import flash_attn
from flash_attn import backends, explanation
from flash_attn.cpu import backward, forward, torch_flash
from flash_attn.ops import calls

CUMULATIVE = (0, 9, 30)
NO_MEMORY = 1 << 60
WITHOUT_CONVERSION = ("flash_attn_qkvpacked_func",)
VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def random(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


def sequences(dtype=torch.int32):
    cu_seqlens = torch.tensor(CUMULATIVE, dtype=dtype)
    return dict(zip(VARLEN, (cu_seqlens, cu_seqlens, 21, 21)))


def examples(grad=False):
    """Arguments for each public function, nearly all with conversions on the way to the backend."""
    q, k = random(2, 30, 4, 16, grad=grad), random(2, 30, 2, 16)
    qkv, kv = random(2, 30, 3, 4, 16, grad=grad), random(2, 30, 2, 2, 16)
    cu_seqlens = torch.tensor(CUMULATIVE)  # int64
    k_cache, new = random(2, 64, 2, 16), random(2, 16, 2, 3).transpose(1, 3)  # new: of a strided head dim
    options = {"causal": True, "window_size": (9, 9)}
    return {
        "flash_attn_func": {"q": q.transpose(1, 3).contiguous().transpose(1, 3), "k": k, "v": k, **options},
        "flash_attn_qkvpacked_func": {"qkv": qkv, "dropout_p": 0.2, **options},
        "flash_attn_kvpacked_func": {"q": q, "kv": kv, "sinks": torch.zeros(4).half(), **options},
        "flash_attn_varlen_func": {"q": q[0], "k": k[0], "v": k[1], **sequences(torch.int64), **options},
        "flash_attn_varlen_qkvpacked_func": {"qkv": qkv[0], "cu_seqlens": cu_seqlens, "max_seqlen": 21, **options},
        "flash_attn_varlen_kvpacked_func": {
            "q": q[0], "kv": kv[0], **sequences(torch.int64), "dropout_p": 0.2, **options
        },
        "flash_attn_with_kvcache": {
            "q": q[:, :3], "k_cache": k_cache, "v_cache": k_cache.clone(), "k": new, "v": new, "cache_seqlens": 7,
            **options,
        },
    }  # fmt: skip


FUNCTIONS = tuple(examples())


class Reached(Exception):
    pass


class Backend:
    """Answers a request for a plan with one, and a call with an exception; keeps the arguments of both."""

    NAMES = ("fwd", "varlen_fwd", "bwd", "varlen_bwd", "kvcache")

    def __init__(self):
        self.seen = []

    def __getattr__(self, name):
        explains = name.startswith("explain_")
        kind = name.replace("explain_", "").replace("fwd_kvcache", "kvcache")
        assert kind in self.NAMES

        def call(*args, **named):
            self.seen.append((kind, (*args, *named.values())))
            if not explains:
                raise Reached
            return {"direction": kind, "kernel": "stub", "grid": 12 * len(self.seen)}

        return call


@pytest.fixture
def backend(monkeypatch):
    stub = Backend()
    monkeypatch.setattr(backends, "get", lambda device_type, name="q": stub)
    return stub


def explain_as_on_a_gpu(monkeypatch):
    """The CPU in the place of a GPU, whose memory is not touched."""
    if not hasattr(torch._C, "_construct_storage_from_data_pointer"):
        pytest.skip("this torch has no CUDA")
    monkeypatch.setattr(explanation._Explaining, "device_type", "cpu")
    limits = torch.iinfo(torch.int32)
    monkeypatch.setattr(calls, "_to_int32", lambda _, x: x.clamp(limits.min, limits.max).to(torch.int32))


def assert_same(ours, theirs):
    """All that a plan may depend on, but for addresses."""
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    else:
        assert ours == theirs


def state(arguments):
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    return [(x._version, x.grad_fn, x.is_leaf, x.requires_grad, x.detach().clone()) for x in tensors]


@pytest.mark.parametrize("without_memory", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_backend_is_asked_with_the_arguments_of_the_call(backend, monkeypatch, name, without_memory):
    """without_memory: conversions are those of CUDA tensors, by layout alone."""
    if without_memory:
        explain_as_on_a_gpu(monkeypatch)
    function, arguments = getattr(flash_attn, name), examples()[name]
    plans = flash_attn.explain(function, **arguments)
    with pytest.raises(Reached):
        function(**arguments)
    (kind, explained), (called_kind, called) = backend.seen
    assert kind == called_kind and len(explained) == len(called)
    given = {x.untyped_storage().data_ptr() for x in arguments.values() if isinstance(x, torch.Tensor)}
    for ours, theirs in zip(explained, called):
        assert_same(ours, theirs)
        if isinstance(theirs, torch.Tensor):
            converted = theirs.untyped_storage().data_ptr() not in given
            assert (ours.data_ptr() >= NO_MEMORY) == (converted and without_memory)
            assert converted or ours.data_ptr() == theirs.data_ptr()
    assert any(isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given for x in called) == (
        name not in WITHOUT_CONVERSION
    )
    assert plans["forward"] == {"backend": "cpu", "direction": kind, "kernel": "stub", "grid": 12}


@pytest.mark.parametrize("name", FUNCTIONS[:-1])
def test_the_backward_is_asked_with_the_arguments_of_the_call(monkeypatch, name):
    function, arguments = getattr(flash_attn, name), examples(grad=True)[name]
    out = function(**arguments)
    stub = Backend()
    monkeypatch.setattr(backends, "get", lambda device_type, name="q": stub)
    with pytest.raises(Reached):
        out.backward(torch.ones_like(out))
    plans = flash_attn.explain(function, **arguments)
    (called_kind, called), _, (kind, explained) = stub.seen
    assert kind == called_kind == plans["backward"]["direction"] and plans["forward"]["grid"] == 24
    assert plans["backward"] == {"backend": "cpu", "direction": kind, "kernel": "stub", "grid": 36}
    for ours, theirs in zip(explained, called):
        assert_same(ours, theirs)


OPERATORS = {
    "pad": lambda x: torch.nn.functional.pad(x, (0, 3)),
    "dtype": lambda x: x.to(torch.float16),
    "no dtype": lambda x: x.to(torch.float32),
    "contiguous": lambda x: x.contiguous(),
    "factory": lambda x: torch.full((3,), 7, dtype=torch.int32, device=x.device),
    "unbind": lambda x: x[..., None].expand(-1, -1, -1, 3).unbind(-1)[1],
    "empty_like": lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    "slice of a copy": lambda x: x.clone()[..., 1:],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_conversions_have_the_layout_of_the_operators(monkeypatch, name):
    explain_as_on_a_gpu(monkeypatch)
    x = random(2, 5, 4).transpose(0, 1).requires_grad_(name == "pad")
    expected = OPERATORS[name](x)
    with explanation._Explaining():
        first, second = OPERATORS[name](x), OPERATORS[name](x)
    for result in (first, second):
        assert_same(result, expected)
        assert result.requires_grad == expected.requires_grad and result.device == expected.device
    if name in ("unbind", "no dtype"):
        assert first.data_ptr() == expected.data_ptr()
    else:
        assert first.data_ptr() >= NO_MEMORY
        assert second.data_ptr() - first.data_ptr() >= expected.untyped_storage().nbytes()


def test_numbers_are_read(monkeypatch):
    """softmax_scale and the like may be tensors."""
    explain_as_on_a_gpu(monkeypatch)
    with explanation._Explaining():
        assert float(torch.tensor([2.0, 3.0])[1]) == 3.0


def test_three_tensors_are_those_of_flash_attn_func(backend):
    q = random(1, 8, 2, 16)
    assert flash_attn.explain(q, q, q, 0.1, causal=True)["forward"]["direction"] == "fwd"
    assert flash_attn.explain(q=q, k=q, v=q)["backward"] is None
    assert backend.seen[0][1][5] == 0.1 and backend.seen[0][1][7] is True


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_explaining_leaves_everything_as_it_is(name, grad):
    function, arguments = getattr(flash_attn, name), examples(grad)[name]
    before, random_state = state(arguments), torch.get_rng_state()
    plans = flash_attn.explain(function, **arguments)
    assert torch.equal(torch.get_rng_state(), random_state)
    for (*ours, value), (*theirs, expected) in zip(state(arguments), before):
        assert ours == theirs and torch.equal(value, expected)
    assert plans["forward"]["backend"] == "cpu" and plans["forward"]["dtype"] == "fp32"
    assert plans["forward"]["threads"] == torch.get_num_threads()
    if name == "flash_attn_with_kvcache":
        assert set(plans) == {"forward"} and plans["forward"]["appends"]
    else:
        assert (plans["backward"] is not None) == grad


def test_a_cache_with_a_history_keeps_it():
    arguments = examples()["flash_attn_with_kvcache"]
    cache = arguments["k_cache"].requires_grad_() * 2
    history = cache.grad_fn
    flash_attn.explain(flash_attn.flash_attn_with_kvcache, **{**arguments, "k_cache": cache})
    assert cache.grad_fn is history and cache._version == 0
    cache.sum().backward()
    assert arguments["k_cache"].grad is not None


def test_a_cache_is_written_by_nothing_that_autograd_counts():
    q, cache = random(2, 1, 4, 16), random(2, 64, 2, 16)
    lengths, out = torch.tensor([5, 7], dtype=torch.int32), torch.full((2, 1, 4, 16), 3.0)
    plan = flash_attn.KvCachePlan(lengths, 1, 4, 2, 16, 64, seqlen_new=1)
    written = (out, cache, plan.tensor)
    before = [(x._version, x.clone()) for x in written]
    new = {"k": q[:, :, :2], "v": q[:, :, 2:], "cache_seqlens": lengths, "out": out, "plan": plan}
    flash_attn.explain(flash_attn.flash_attn_with_kvcache, q, cache, cache.clone(), **new)
    for x, (version, value) in zip(written, before):
        assert x._version == version and torch.equal(x, value)


def test_no_backward_where_none_is_recorded():
    q = random(1, 40, 2, 16, grad=True)
    assert flash_attn.explain(q, q, q)["backward"]["direction"] == "backward"
    with torch.no_grad():
        assert flash_attn.explain(q, q, q)["backward"] is None
    used = torch.tensor([9, 21], dtype=torch.int32)
    call = (flash_attn.flash_attn_varlen_func, q[0, :30], q[0, :30], q[0, :30])
    assert flash_attn.explain(*call, **sequences())["backward"] is not None
    assert flash_attn.explain(*call, **sequences(), seqused_k=used)["backward"] is None


@torch.inference_mode()
def made_in_inference_mode(*shape):
    return torch.zeros(*shape)


WRONG = {
    "heads": ("flash_attn_func", {"k": random(2, 30, 3, 16), "v": random(2, 30, 3, 16)}),
    "a number": ("flash_attn_func", {"softcap": "much"}),
    "a gradient": ("flash_attn_func", {"alibi_slopes": torch.ones(4, requires_grad=True)}),
    "packing": ("flash_attn_qkvpacked_func", {"qkv": random(2, 30, 2, 4, 16)}),
    "lengths": ("flash_attn_varlen_func", {"cu_seqlens_k": torch.tensor([0, 2**40, 2**41])}),
    "capacity": ("flash_attn_with_kvcache", {"cache_seqlens": torch.tensor([7, 64], dtype=torch.int32)}),
    "a leaf": ("flash_attn_with_kvcache", {"k_cache": random(2, 64, 2, 16, grad=True)}),
    "an inference tensor": ("flash_attn_with_kvcache", {"k_cache": made_in_inference_mode(2, 64, 2, 16)}),
    "device": ("flash_attn_func", {"q": torch.empty(2, 30, 4, 16, device="meta")}),
    "unknown": ("flash_attn_func", {"nonsense": 1}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_calls_are_refused_as_the_call_is(wrong):
    name, arguments = WRONG[wrong]
    function, arguments = getattr(flash_attn, name), {**examples()[name], **arguments}
    with pytest.raises((RuntimeError, TypeError, NotImplementedError)) as refused:
        function(**arguments)
    with pytest.raises(refused.type, match=f"^{re.escape(str(refused.value))}$"):
        flash_attn.explain(function, **arguments)


def test_other_functions_are_refused():
    q = random(1, 8, 2, 16)
    with pytest.raises(TypeError, match="^function: expected an attention function of flash_attn, got softmax$"):
        flash_attn.explain(torch.softmax, q, -1)
    with pytest.raises(TypeError, match="got flash_attn_combine$"):
        flash_attn.explain(flash_attn.flash_attn_combine, q, q)


def test_prints_as_a_table(backend):
    q = random(1, 8, 2, 16, grad=True)
    plans = flash_attn.explain(q, q, q)
    assert isinstance(plans, dict) and repr(plans) == repr(dict(plans))
    assert str(plans).splitlines() == [
        "           forward  backward",
        "backend    cpu      cpu",
        "direction  fwd      bwd",
        "kernel     stub     stub",
        "grid       12       24",
    ]


# ---- the CPU backend's plans are what it does ----


class Counter:
    def __init__(self, monkeypatch, owner, name):
        self.count, function = 0, getattr(owner, name)

        def counted(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)


CPU_CALLS = {
    "plain": ((2, 700, 4, 2, 700), {}),
    "causal": ((2, 700, 4, 2, 700), {"causal": True}),
    "corner": ((1, 700, 4, 4, 300), {"causal": True}),
    "softcap": ((3, 40, 6, 3, 9000), {"softcap": 8.0}),
    "dropout": ((2, 100, 2, 1, 90), {"dropout_p": 0.3}),
    "max_logit": ((2, 100, 2, 1, 90), {"return_max_logit": True}),
    "invariant": ((3, 100, 2, 1, 90), {"batch_invariant": True, "window_size": (20, 0)}),
    "no keys": ((1, 20, 2, 1, 0), {}),
    "no queries": ((1, 0, 2, 1, 20), {}),
}


@pytest.mark.parametrize("name", CPU_CALLS)
def test_the_cpu_does_as_its_plan_says(monkeypatch, name):
    (batch, sq, heads, heads_k, sk), options = CPU_CALLS[name]
    q, k = random(batch, sq, heads, 8, grad=True), random(batch, sk, heads_k, 8)
    plans = flash_attn.explain(q, k, k, **options)
    counters = {
        "forward": (Counter(monkeypatch, torch_flash, "_FORWARD"), Counter(monkeypatch, forward, "_RowState")),
        "backward": (Counter(monkeypatch, torch_flash, "_BACKWARD"), Counter(monkeypatch, backward, "_QueryBlock")),
    }
    out = flash_attn.flash_attn_func(q, k, k, **options)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    for direction, (fused, tiles) in counters.items():
        kernel = "torch_flash" if fused.count else "tiled" if tiles.count else "none"
        assert plans[direction]["kernel"] == kernel
        assert plans[direction].get("num_work_tiles", 0) == tiles.count


@pytest.mark.parametrize("sq, sk, causal", [(1, 70, False), (9, 70, False), (70, 50, False), (60, 60, True)])
def test_groups_where_torch_takes_none(monkeypatch, sq, sk, causal):
    """Few queries of a group are rows of one head; the operators of old releases need K and V for each head."""
    q, k, v = random(2, sq, 6, 8, grad=True), random(2, sk, 2, 8, grad=True), random(2, sk, 2, 8, grad=True)
    results = []
    for heads in ((q, k, v), (q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2))):
        out = flash_attn.flash_attn_func(*heads, causal=causal)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    monkeypatch.setattr(torch_flash, "_takes_groups", lambda: False)
    out = flash_attn.flash_attn_func(q, k, v, causal=causal)
    results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for ours, expected, without in zip(*results):
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(without, expected)


def test_packed_sequences_on_the_cpu(monkeypatch):
    q, k = random(1000, 4, 8), random(1000, 2, 8)
    cu_seqlens = torch.tensor([0, 0, 300, 1000], dtype=torch.int32)
    arguments = (q, k, k, cu_seqlens, cu_seqlens, 700, 700)
    plan = flash_attn.explain(flash_attn.flash_attn_varlen_func, *arguments, softcap=3.0)["forward"]
    tiles = Counter(monkeypatch, forward, "_RowState")
    flash_attn.flash_attn_varlen_func(*arguments, softcap=3.0)
    assert plan["kernel"] == "tiled" and plan["num_work_tiles"] == tiles.count
    assert (plan["block_m"], plan["block_n"]) == (128, 512)


def test_a_cache_on_the_cpu():
    q, cache = random(2, 3, 4, 8), random(2, 600, 2, 8)
    lengths = torch.tensor([500, -1], dtype=torch.int32)

    def plan(**options):
        call = (flash_attn.flash_attn_with_kvcache, q, cache, cache.clone())
        return flash_attn.explain(*call, cache_seqlens=lengths, causal=True, **options)["forward"]

    assert plan()["kernel"] == "tiled" and not plan()["appends"]
    invariant = plan(batch_invariant=True)
    assert (invariant["kernel"], invariant["block_m"], invariant["block_n"]) == ("by_row", 1, 256)
    assert invariant["num_work_tiles"] == 3


def test_other_threads_compute_while_one_explains(monkeypatch):
    """The mode that explains is that of a thread, and ends with the call, whose error it may be."""
    q = random(1, 5, 2, 16)
    expected = flash_attn.flash_attn_func(q, q, q)
    found = []
    forward_plan = explanation._plan

    def plan_while_another_computes(*given):
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(flash_attn.flash_attn_func, q, q, q).result(60))
        return forward_plan(*given)

    monkeypatch.setattr(explanation, "_plan", plan_while_another_computes)
    flash_attn.explain(q, q, q)
    with pytest.raises(RuntimeError):
        flash_attn.explain(q, q, q[:, :, :1])
    assert found and all(torch.equal(out, expected) for out in (*found, flash_attn.flash_attn_func(q, q, q)))
