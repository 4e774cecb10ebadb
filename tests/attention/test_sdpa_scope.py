"""`flash_attn.sdpa.use`: torch.nn.functional.scaled_dot_product_attention within a scope."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from sdpa_harness import LAYOUTS, check, make, recorded, run_with_gradients
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flash_attn.sdpa
from flash_attn.dropout import dropout_mask

BOTH = ("cuda", "cpu")
ORIGINAL = F.scaled_dot_product_attention
LENGTHS = ((50, 50), (50, 31), (31, 50), (1, 40), (40, 1))


@pytest.fixture
def scope():
    with flash_attn.sdpa.use(BOTH):
        yield
    assert F.scaled_dot_product_attention is ORIGINAL


def sdpa(q, k, v, *args, **options):
    return F.scaled_dot_product_attention(q, k, v, *args, enable_gqa=True, **options)


def served(device, function, *args, **options):
    """The result, and whether the forward of a backend computed it."""
    with recorded(device, "fwd") as calls:
        return function(*args, **options), len(calls) == 1


def as_torch_alone(q, k, v, **options):
    """torch's own SDPA in float64, by its mathematical definition."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return ORIGINAL(q.double(), k, v, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, scope, layout):
    inputs = make(device, layout=layout)
    out, ours = served(device, sdpa, *inputs)
    assert ours
    check(out, inputs)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_causal_is_top_left(device, scope, lengths):
    """Against torch itself, forward and backward."""
    inputs = make(device, *lengths)
    out, ours = served(device, sdpa, *inputs, is_causal=True)
    assert ours
    dout = torch.randn_like(out)
    reference = as_torch_alone(*inputs, is_causal=True)
    grads = zip(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(reference, inputs, dout.double()))
    torch.testing.assert_close(out.double(), reference, atol=2e-3, rtol=0)
    for a, b in grads:
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_causal_biases(device, scope, lengths):
    inputs = make(device, *lengths)
    out, ours = served(device, sdpa, *inputs, attn_mask=causal_lower_right(*lengths))
    assert ours
    check(out, inputs, causal=True)
    upper, ours = served(device, sdpa, *inputs, attn_mask=causal_upper_left(*lengths))
    assert ours and torch.equal(upper, sdpa(*inputs, is_causal=True))


MASKS = {  # heads, rows and columns of a mask in the first batch entry
    "full": (2, 4, 31, 50),
    "of batches": (2, 1, 31, 50),
    "of heads": (4, 31, 50),
    "of scores": (31, 50),
    "of keys": (2, 1, 1, 50),
    "of rows": (2, 1, 31, 1),
    "of one number": (1, 1),
}


@pytest.mark.each
@pytest.mark.parametrize("kind", ("bool", "numbers", "float32", "expanded"))
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.needs_torch((2, 5), "makes NaN of rows without keys")
def test_masks(device, scope, name, kind):
    """Against torch itself, with the gradient of numbers; rows without keys are among those of bool masks."""
    inputs, shape = make(device, 31, 50), MASKS[name]
    mask = torch.randn(shape, device=device, dtype=inputs[0].dtype)
    leaves = [*inputs]
    if kind == "bool":
        mask = mask > -0.5
        if mask.shape[-2] > 1:
            mask[..., 5, :] = False
    elif kind in ("numbers", "float32"):
        mask = mask.float() if kind == "float32" else mask
        leaves.append(mask.requires_grad_())
    else:
        mask = (mask > -0.5).expand(2, 4, 31, 50)
    out, ours = served(device, sdpa, *inputs, mask, scale=0.3)
    assert ours
    wide = mask if mask.dtype == torch.bool else mask.double()
    reference = as_torch_alone(*inputs, attn_mask=wide, scale=0.3)
    reference = reference.nan_to_num(0.0)  # of rows without keys, in older versions of torch
    torch.testing.assert_close(out.double(), reference, atol=4e-3, rtol=1e-2)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(reference, leaves, dout.double())
    for mine, right in zip(*grads):
        torch.testing.assert_close(mine, right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_masks_under_autocast_and_compiled(device, scope, backend):
    q, k, v = (x.detach().float() for x in make(device, heads_k=4))
    mask = torch.randn(40, 40, device=device)

    def step(mask):
        with torch.autocast(device, torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v, mask)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for given in (mask, mask > 0):
        out, ours = served(device, step, given)
        assert ours and out.dtype == torch.bfloat16
        torch.testing.assert_close(compiled(given), out)
        with flash_attn.sdpa.use(()):
            torch.testing.assert_close(out, step(given), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("value_dim", (8, 16, 40))
@pytest.mark.parametrize("scale", (None, -0.2, 0.7))
def test_scales_and_value_dims(device, scope, value_dim, scale):
    inputs = make(device, value_dim=value_dim)
    out, ours = served(device, sdpa, *inputs, scale=scale)
    assert ours
    check(out, inputs, scale=scale)


@pytest.mark.parametrize("dim", (1, 20, 256, 512))
def test_head_dims(device, scope, dim):
    inputs = make(device, 20, 20, dim=dim, dtype=torch.bfloat16)
    out, ours = served(device, sdpa, *inputs, is_causal=True)
    assert ours
    check(out, inputs, causal=True)


def test_dropout(device, scope):
    inputs = make(device, 70, 90)
    torch.manual_seed(3)
    out, ours = served(device, sdpa, *inputs, dropout_p=0.3)
    assert ours
    torch.manual_seed(3)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    rng_state = flash_attn.flash_attn_interface._flash_attn_forward(
        q, k, v, 0.3, 0.25, False, -1, -1, 0.0, None, False
    )[3]  # fmt: skip
    keep = dropout_mask(rng_state, 0.3, 2, 4, 70, 90)
    check(out, inputs, keep=keep, rp_dropout=1 / 0.7)


def not_served(device):
    """Calls that are torch's: (name, arguments, options)."""
    q, k, v = (x.detach() for x in make(device, heads_k=4))
    mask = torch.rand(40, 40, device=device) > 0.2
    single = [x.float() for x in (q, k, v)]
    bias = torch.randn(40, 40, device=device, dtype=q.dtype)
    return {
        "mask": (single, {"attn_mask": mask}),
        "bias": ((*single, bias.float()), {}),
        "bias of three dimensions": (single, {"attn_mask": bias.float()[None]}),
        "float32": (single, {"is_causal": True}),
        "float64": ([x.double() for x in single], {}),
        "three dimensions": ((q[0], k[0], v[0]), {}),
        "five dimensions": ((q[None], k[None], v[None]), {}),
        "broadcast batch": ((q, k[:1], v[:1]), {}),
        "head dim": ([torch.cat([x] * 33, -1) for x in (q, k, v)], {}),
        "no keys": ((q, k[:, :, :0], v[:, :, :0]), {}),
        "no queries": ((q[:, :, :0], k, v), {}),
        "causal bias in float32": ((*single, causal_lower_right(40, 40)), {}),
        "lower right in float32": ((single[0][:, :, :30], *single[1:], causal_lower_right(30, 40)), {}),
    }  # fmt: skip


@pytest.mark.parametrize("name", not_served("cpu"))
def test_falls_back_to_torch(device, name):
    args, options = not_served(device)[name]
    expected = ORIGINAL(*args, **options)
    with flash_attn.sdpa.use(BOTH):
        out, ours = served(device, F.scaled_dot_product_attention, *args, **options)
    assert not ours
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("options", ({}, {"enable_gqa": True}))
@pytest.mark.needs_torch((2, 5), "has no enable_gqa")
def test_errors_are_those_of_torch(device, options):
    inputs = [x.detach() for x in make(device, heads_k=3)]
    messages = []
    for function in (ORIGINAL, flash_attn.sdpa.scope._replacement(ORIGINAL)):
        with flash_attn.sdpa.use(BOTH), pytest.raises(RuntimeError) as error:
            function(*inputs, **options)
        messages.append(str(error.value).splitlines()[0])
    assert messages[0] == messages[1]


@pytest.mark.devices("cpu")  # on CUDA what this is depends on the backend that torch chooses
@pytest.mark.needs_torch((2, 5), "has no enable_gqa")
def test_dropout_of_one_falls_back(device, scope):
    inputs = make(device)
    out, ours = served(device, sdpa, *inputs, dropout_p=1.0)
    assert not ours and (out == 0).all()


def test_transforms_fall_back(device):
    """torch.func and forward-mode differentiation have no rule for our operators."""
    inputs = [x.detach().float() for x in make("cpu", heads_k=4)]
    inputs = [x.to(device).bfloat16() for x in inputs]
    stacked = [torch.stack([x, x]) for x in inputs]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), flash_attn.sdpa.use(BOTH):
        out, ours = served(device, torch.func.vmap(F.scaled_dot_product_attention), *stacked)
        assert not ours and out.shape == (2, 2, 4, 40, 16)
        (_, tangent), ours = served(
            device, torch.func.jvp, F.scaled_dot_product_attention, tuple(inputs), tuple(inputs)
        )
        assert not ours and tangent.shape == inputs[0].shape


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.needs_torch((2, 5), "has no enable_gqa")
def test_autocast(device, scope, dtype):
    """As torch's SDPA, which casts whatever is not float64: float32, and half precision of the other kind."""
    inputs = make(device, dtype=torch.float32)
    inputs[1] = inputs[1].detach().bfloat16().requires_grad_()
    with torch.autocast(device, dtype):
        out, ours = served(device, sdpa, *inputs, is_causal=True)
        assert ours and out.dtype == dtype == ORIGINAL(*inputs, enable_gqa=True).dtype
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
        _, ours = served(device, sdpa, *(x.double() for x in inputs))
        assert not ours
    assert [g.dtype for g in grads] == [x.dtype for x in inputs]
    assert torch.equal(out, sdpa(*(x.to(dtype) for x in inputs), is_causal=True))


@pytest.mark.each
@pytest.mark.parametrize("options", ({}, {"is_causal": True}, {"is_causal": True, "dropout_p": 0.4}))
@pytest.mark.parametrize("lengths", ((40, 40), (30, 50), (50, 30)))
def test_compile(device, scope, lengths, options):
    """No graph breaks, the bits of eager mode, gradients too."""

    def function(q, k, v):
        return sdpa(q * 1.5, k, v, **options)

    inputs = make(device, *lengths)
    dout = torch.randn_like(inputs[0])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    with recorded(device, "fwd") as calls:
        results = run_with_gradients(compiled, inputs, dout)
    assert len(calls) == 1
    for a, b in zip(results, run_with_gradients(function, inputs, dout)):
        assert torch.equal(a, b)


@pytest.mark.needs_torch((2, 5), "has no enable_gqa")
def test_compiled_function_enters_and_leaves(device):
    """A function compiled outside of a scope comes here inside of one, and the other way round."""
    torch.compiler.reset()
    inputs = [x.detach() for x in make(device)]
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v), backend="eager", fullgraph=True)
    for inside in (False, True, False, True):
        if inside:
            with flash_attn.sdpa.use(BOTH):
                _, ours = served(device, compiled, *inputs)
        else:
            _, ours = served(device, compiled, *inputs)
        assert ours == inside


def test_deterministic_flag(device, scope):
    inputs = make(device)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        with recorded(device, "bwd") as calls:
            sdpa(*inputs).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert [args[16] for args in calls] == [True]


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpoint(device, scope, use_reentrant):
    """The threads of the backward recompute in the scope that it was called in."""

    def function(q, k, v):
        return sdpa(q, k, v, dropout_p=0.4, is_causal=True)

    inputs = [x.contiguous().detach().requires_grad_() for x in make(device)]
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(7)
        with recorded(device, "fwd") as calls:
            if checkpointed:
                out = torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=use_reentrant)
            else:
                out = function(*inputs)
            out.square().sum().backward()
        assert len(calls) == 1 + checkpointed
        grads.append([x.grad for x in inputs])
        for x in inputs:
            x.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*grads))


# ---- where the scope reaches ----


@pytest.mark.needs_torch((2, 5), "has no enable_gqa")
def test_devices(device):
    inputs = make(device)
    with flash_attn.sdpa.use():
        assert served(device, sdpa, *inputs)[1] == (device == "cuda")
        with flash_attn.sdpa.use(("cpu",)):
            assert served(device, sdpa, *inputs)[1] == (device == "cpu")
        assert served(device, sdpa, *inputs)[1] == (device == "cuda")
    with (
        pytest.raises(RuntimeError, match="devices: expected .cuda., .cpu. or several of them, got .tpu."),
        flash_attn.sdpa.use(("tpu",)),
    ):
        pass
    assert F.scaled_dot_product_attention is ORIGINAL


@pytest.mark.needs_torch((2, 5), "has no enable_gqa")
def test_other_threads_are_outside(device):
    """Scopes of two threads overlap; each sees its own."""
    inputs = [x.detach() for x in make(device)]
    entered, leave, results = threading.Event(), threading.Event(), {}

    def other():
        results["before"] = served(device, sdpa, *inputs)[1]
        with flash_attn.sdpa.use(BOTH):
            entered.set()
            leave.wait(60)
            results["inside"] = served(device, sdpa, *inputs)[1]

    with flash_attn.sdpa.use(BOTH):
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(60)
    assert F.scaled_dot_product_attention is not ORIGINAL  # the other thread's scope is open
    assert not served(device, sdpa, *inputs)[1]
    leave.set()
    thread.join(60)
    assert results == {"before": False, "inside": True}
    assert F.scaled_dot_product_attention is ORIGINAL


def test_compiled_code_of_two_threads(device):
    """Compiled in a scope, it goes to torch in a thread that is in none, and the other way round."""
    torch.compiler.reset()
    inputs = [x.detach() for x in make(device)]
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v), backend="eager", fullgraph=True)

    def call():
        return served(device, compiled, *inputs)[1]

    with flash_attn.sdpa.use(BOTH):
        found = [call()]
        for _ in range(2):
            with ThreadPoolExecutor(1) as pool:
                found.append(pool.submit(call).result(60))
            found.append(call())
    assert found == [True, False, True, False, True]


@pytest.mark.needs_torch((2, 5), "has no enable_gqa")
def test_tasks_have_separate_scopes(device):
    inputs = [x.detach() for x in make(device)]

    async def inside():
        with flash_attn.sdpa.use(BOTH):
            await asyncio.sleep(0.01)
            return served(device, sdpa, *inputs)[1]

    async def outside():
        await asyncio.sleep(0.005)
        return served(device, sdpa, *inputs)[1]

    async def both():
        return await asyncio.gather(inside(), outside())

    assert asyncio.run(both()) == [True, False]


@pytest.mark.needs_torch((2, 5), "has no enable_gqa")
def test_another_replacement_stays(device, monkeypatch):
    """A function that another package puts there, before, within or after a scope, is called and comes back."""
    calls = []

    def wrapped(function):
        def replacement(*args, **options):
            calls.append(1)
            return function(*args, **options)

        return replacement

    inputs = [x.detach() for x in make(device)]
    monkeypatch.setattr(F, "scaled_dot_product_attention", wrapped(ORIGINAL))
    before = F.scaled_dot_product_attention
    with flash_attn.sdpa.use(BOTH):
        assert served(device, sdpa, *inputs)[1] and calls == []
        monkeypatch.setattr(F, "scaled_dot_product_attention", wrapped(F.scaled_dot_product_attention))
        within = F.scaled_dot_product_attention
        assert served(device, sdpa, *inputs)[1] and len(calls) == 1
    assert F.scaled_dot_product_attention is within
    with flash_attn.sdpa.use(BOTH):
        assert served(device, sdpa, *inputs)[1]
    assert F.scaled_dot_product_attention is within
    assert not served(device, sdpa, *inputs)[1] and len(calls) == 3
    monkeypatch.setattr(F, "scaled_dot_product_attention", before)


def test_exception_leaves_the_scope(device):
    with pytest.raises(ValueError), flash_attn.sdpa.use(BOTH):
        raise ValueError
    assert F.scaled_dot_product_attention is ORIGINAL


def test_multihead_attention(device, scope):
    """torch's own module looks the function up in its module."""
    module = torch.nn.MultiheadAttention(32, 2, batch_first=True, device=device, dtype=torch.bfloat16)
    x = torch.randn(2, 20, 32, device=device, dtype=torch.bfloat16)
    _, ours = served(device, module, x, x, x, need_weights=False)
    assert ours


@pytest.mark.devices("cuda")
def test_padded_value_dims_192_128(device, scope):
    """The shape of DeepSeek's models, which SDPA's flash backend refuses."""
    inputs = make(device, 300, 300, dim=192, value_dim=128, dtype=torch.bfloat16)
    out, ours = served(device, sdpa, *inputs, is_causal=True)
    assert ours
    check(out, inputs, causal=True)
