"""The autograd node in C++ of plain CUDA tensors: equal bits to FlashAttnFunc, which calls it leaves to that, and what
autograd, checkpoints, modes and profilers do with it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flash_attn import backends, flash_attn_func, set_batch_invariant
from flash_attn.ops import eager

ON_CUDA = pytest.mark.devices("cuda")


def inputs(device, *shapes, grad=True, dtype=torch.bfloat16):
    shapes = shapes or ((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64))
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad and dtype.is_floating_point)
        for shape in shapes
    ]


class Watched:
    """Counts the calls that the node takes, and turns it off."""

    def __init__(self, monkeypatch):
        self.calls, self.is_on, original = [], True, eager.attention

        def attention(*args):
            result = original(*args) if self.is_on else NotImplemented
            self.calls.append(result is not NotImplemented)
            return result

        monkeypatch.setattr(eager, "attention", attention)

    def both(self, call):
        """The results of a call by the node and by FlashAttnFunc, in this order."""
        results = []
        for self.is_on in (True, False):
            self.calls.clear()
            torch.manual_seed(11)  # of dropout
            results.append(call())
            assert all(served is self.is_on for served in self.calls) and self.calls
        self.is_on = True
        return results


@pytest.fixture
def node(monkeypatch):
    return Watched(monkeypatch)


def assert_equal(results):
    actual, expected = results
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


OPTIONS = (
    {},
    {"causal": True, "softmax_scale": 0.3},
    {"window_size": (20, 2**40), "softcap": 7.0},
    {"dropout_p": 0.2, "causal": True},
)
SHAPES = (
    ((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64)),
    ((1, 300, 3, 192), (1, 300, 3, 192), (1, 300, 3, 128)),
    ((2, 1, 8, 128), (2, 600, 2, 128), (2, 600, 2, 128)),
    ((0, 7, 2, 64), (0, 7, 2, 64), (0, 7, 2, 64)),
)


@ON_CUDA
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equal_bits(device, node, options, shapes, dtype):
    leaves = inputs(device, *shapes, dtype=dtype)
    dout = torch.randn(*shapes[0][:-1], shapes[2][-1], device=device).to(dtype)

    def call():
        out = flash_attn_func(*leaves, deterministic=True, **options)
        assert type(out.grad_fn).__name__ == out.grad_fn.name() == "FlashAttnFuncBackward"
        assert isinstance(out.grad_fn, torch.autograd.graph.Node)
        with torch.no_grad():
            plain = flash_attn_func(*leaves, deterministic=True, **{**options, "dropout_p": 0.0})
        return [out, plain, *torch.autograd.grad(out, leaves, dout)]

    assert_equal(node.both(call))


@ON_CUDA
def test_layouts_and_one_tensor_twice(device, node):
    """Views, expanded heads, transposed gradients of the output, some inputs without gradient, one given twice."""
    (packed,) = inputs(device, (2, 60, 3, 4, 64))
    (one_head,) = inputs(device, (2, 60, 1, 64))
    for q, k, v in (
        packed.unbind(2),
        (packed[:, :, 0], one_head.expand(-1, -1, 4, -1), packed[:, :, 2].detach()),
        (packed[:, :, 1],) * 3,
        (packed[:, 5:, 0], packed[:, ::2, 1], packed[:, ::2, 2]),
    ):
        for transposed in (False, True):

            def call(q=q, k=k, v=v, transposed=transposed):
                out = flash_attn_func(q, k, v, deterministic=True)
                loss = out.transpose(-1, -2).contiguous().square() if transposed else out
                return torch.autograd.grad(loss.sum(), (packed, one_head), allow_unused=True, materialize_grads=True)

            assert_equal(node.both(call))


@ON_CUDA
def test_batch_invariant_blocks_reach_the_node(device, node):
    leaves = inputs(device, *[(2, 40, 2, 128)] * 3)

    def call():
        with set_batch_invariant(True):
            out = flash_attn_func(*leaves)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    assert_equal(node.both(call))


class Subclass(torch.Tensor):
    pass


class Dispatch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def _dual(q, k, v):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(flash_attn_func(forward_ad.make_dual(q, q), k, v)).tangent


def _within(context):
    def call(q, k, v):
        with context():
            return flash_attn_func(q, k, v)

    return call


LEFT_TO_PYTHON = {
    "subclass": lambda q, k, v: flash_attn_func(q.as_subclass(Subclass), k, v),
    "float32 under autocast": lambda q, k, v: flash_attn_func(q.float(), k.float(), v.float()),
    "head dim 36": lambda q, k, v: flash_attn_func(q[..., :36], k[..., :36], v[..., :36]),
    "rows with strides": lambda q, k, v: flash_attn_func(q[..., ::2], k[..., ::2], v[..., ::2]),
    "window as a list": lambda q, k, v: flash_attn_func(q, k, v, window_size=[3, -1]),
    "scale as a tensor": lambda q, k, v: flash_attn_func(q, k, v, softmax_scale=torch.tensor(0.5)),
    "causal as an int": lambda q, k, v: flash_attn_func(q, k, v, causal=1),
    "alibi": lambda q, k, v: flash_attn_func(q, k, v, alibi_slopes=torch.ones(4, device=q.device)),
    "lse": lambda q, k, v: flash_attn_func(q, k, v, return_attn_probs=True)[1],
    "dispatch mode": _within(Dispatch),
    "function mode": _within(Function),
    "profiler": _within(lambda: profile(activities=[ProfilerActivity.CPU])),
    "grad": lambda q, k, v: torch.func.grad(lambda q: flash_attn_func(q, k, v).float().sum())(q),
    "vmap": lambda q, k, v: torch.func.vmap(lambda q: flash_attn_func(q, k, v))(q[None])[0],
    "tangent": _dual,
    "trace": lambda q, k, v: torch.jit.trace(flash_attn_func, (q, k, v), check_trace=False)(q, k, v),
}


@ON_CUDA
@pytest.mark.parametrize("name", LEFT_TO_PYTHON)
def test_calls_left_to_python(device, node, name):
    leaves = inputs(device)
    with torch.autocast(device, torch.bfloat16, enabled="autocast" in name):
        result = LEFT_TO_PYTHON[name](*[x.detach() for x in leaves])
    assert result.isfinite().all() and not any(node.calls)


@ON_CUDA
def test_autocast_leaves_half_precision_to_the_node(device, node):
    leaves = inputs(device)
    with torch.autocast(device, torch.float16):
        assert flash_attn_func(*leaves).dtype == torch.bfloat16 and node.calls == [True]


def test_the_extension_leaves_cpu_tensors_to_python(node):
    is_served = backends.cuda_extension() is None  # then by flash_attn.ops.eager_cpu
    assert flash_attn_func(*inputs("cpu")).requires_grad and node.calls == [is_served]


BAD = {
    "heads": lambda q, k, v: (q[:, :, :3], k, v),
    "batch": lambda q, k, v: (q, k[:1], v[:1]),
    "rank": lambda q, k, v: (q[0], k, v),
    "dtype": lambda q, k, v: (q, k.half(), v),
    "device": lambda q, k, v: (q, k, v.cpu()),
    "value": lambda q, k, v: (q, k, v[:, 1:]),
    "dropout_p": lambda q, k, v: (q, k, v, 1.5),
    "softmax_scale": lambda q, k, v: (q, k, v, 0.0, float("nan")),
    "window_size": lambda q, k, v: (q, k, v, 0.0, None, False, (0, 2**70)),
    "softcap": lambda q, k, v: (q, k, v, 0.0, None, False, (-1, -1), -1.0),
    "inference": lambda q, k, v: (q, torch.inference_mode()(lambda: k + 1)(), v),
}


@ON_CUDA
@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_the_function(device, node, name):
    texts = []
    for node.is_on in (True, False):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            flash_attn_func(*BAD[name](*inputs(device)))
        texts.append((type(caught.value), str(caught.value).splitlines()[0]))
    assert texts[0] == texts[1]


# ---- autograd ----


@ON_CUDA
def test_hooks_see_what_a_backward_keeps(device):
    leaves, saved = inputs(device), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x.cpu(), lambda x: x.to(device)):
        out = flash_attn_func(*leaves, deterministic=True)
        count = len(saved)
        flash_attn_func(*leaves, dropout_p=0.1)
    shapes = [*(x.shape for x in leaves), out.shape, (2, 4, 70)]
    assert [x.shape for x in saved] == [*shapes, *shapes, (2,)] and count == len(shapes)
    assert_equal([torch.autograd.grad(x.sum(), leaves) for x in (out, flash_attn_func(*leaves, deterministic=True))])


@ON_CUDA
@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpoints(device, node, use_reentrant):
    leaves = inputs(device)

    def call():
        options = {"dropout_p": 0.3, "deterministic": True}
        out = checkpoint(lambda *args: flash_attn_func(*args, **options), *leaves, use_reentrant=use_reentrant)
        for leaf in leaves:
            leaf.grad = None
        out.float().square().sum().backward()
        return [out, *(leaf.grad for leaf in leaves)]

    assert_equal(node.both(call))


@ON_CUDA
def test_second_derivatives(device, node):
    leaves = inputs(device)

    def call():
        out = flash_attn_func(*leaves, causal=True, deterministic=True)
        first = torch.autograd.grad(out.float().square().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(x.float().square().sum() for x in first), leaves)]

    assert_equal(node.both(call))


def test_a_backward_in_python_has_the_gradients_of_the_function(device):
    """eager.backward, which a backward with a graph, a mode or a tangent is left to."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    leaves = inputs(device, dtype=dtype)
    for dropout_p in (0.0, 0.25):
        args = (*leaves, dropout_p, None, True, (30, -1), 0.0, None, True)
        torch.manual_seed(2)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            out = flash_attn_func(*args, return_attn_probs=True)[0]
        dout = torch.linspace(-1, 1, out.numel(), device=device, dtype=dtype).view_as(out)
        kept = [x.detach() for x in saved[:6]]
        with torch.no_grad():
            grads = eager.backward(dout, kept, dropout_p, 0.125, True, 30, -1, 0.0, True, False)
        assert_equal([grads, torch.autograd.grad(out, leaves, dout)])


@ON_CUDA
def test_who_takes_part_in_a_backward_sees_it(device):
    leaves = inputs(device)
    out = flash_attn_func(*leaves)
    with Dispatch() as mode:
        torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert any("flash_attn_core.bwd" in name for name in mode.seen)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    names = [event.key for event in profiled.key_averages()]
    assert "FlashAttnFuncBackward" in names and any(name.startswith("flash_attn.bwd") for name in names)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        assert forward_ad.unpack_dual(torch.autograd.grad(out, leaves, dual, retain_graph=True)[0]).tangent is not None
    with pytest.raises(NotImplementedError, match="got a batch of them"):
        torch.autograd.grad(out, leaves, torch.ones(2, *out.shape, device=device, dtype=out.dtype),
                            is_grads_batched=True)  # fmt: skip


@ON_CUDA
def test_compiled_autograd(device, node):
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    leaves = inputs(device)

    def call():
        out = flash_attn_func(*leaves, dropout_p=0.2, deterministic=True)
        for leaf in leaves:
            leaf.grad = None
        torch._dynamo.reset()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            out.float().square().sum().backward()
        return [out, *(leaf.grad for leaf in leaves)]

    assert_equal(node.both(call))


@ON_CUDA
def test_errors_of_a_backward(device):
    q, k, v = inputs(device)
    for change in (lambda x, _: x.mul_(2), lambda _, out: out.mul_(2)):
        x = k * 1
        out = flash_attn_func(q, x, v)
        change(x, out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    out = flash_attn_func(q, k, v).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()
    first = torch.autograd.grad(flash_attn_func(q, k, v).float().sum(), q, create_graph=True)[0]
    second = torch.autograd.grad(first.float().sum(), q, create_graph=True)[0]
    with pytest.raises((RuntimeError, NotImplementedError)):  # there is no third derivative
        torch.autograd.grad(second.float().sum(), q)


@ON_CUDA
def test_nothing_is_kept_after_a_step(device):
    gc.collect()
    gc.disable()
    try:
        leaves = inputs(device)
        out = flash_attn_func(*leaves)
        out.float().sum().backward()
        references = [weakref.ref(x) for x in (*leaves, out, *(x.grad for x in leaves))]
        del leaves, out
        assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()


@ON_CUDA
def test_without_gradients_nothing_is_recorded(device):
    leaves = inputs(device)
    with torch.no_grad():
        assert not flash_attn_func(*leaves).requires_grad
    with torch.inference_mode():
        assert flash_attn_func(*leaves).is_inference()
    assert flash_attn_func(*inputs(device, grad=False)).grad_fn is None
