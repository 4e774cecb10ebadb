"""The registered operators: schemas, fakes, opcheck, torch.compile, and names that clients may replace."""

from __future__ import annotations

import inspect
import sys

import fresh_process
import pytest
import torch
from harness import Recorder
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from flash_attn import flash_attn_interface as interface
from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
from flash_attn.ops import library

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, HEADS_K, HEAD_DIM = 2, 9, 11, 4, 2, 16
CORE = torch.ops.flash_attn_core
OPTIONS = (0.0, 0.25, True, -1, -1, 0.0)  # dropout_p, softmax_scale, causal, window left and right, softcap


def tensor(device, *shape, grad=False):
    dtype = torch.float32 if device == "cpu" else torch.float16
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)


def dense_inputs(device, grad=False):
    q = tensor(device, BATCH, SEQLEN_Q, HEADS, HEAD_DIM, grad=grad)
    return q, *(tensor(device, BATCH, SEQLEN_K, HEADS_K, HEAD_DIM, grad=grad) for _ in "kv")


def varlen_inputs(device, grad=False):
    q = tensor(device, 14, HEADS, HEAD_DIM, grad=grad)
    k, v = (tensor(device, 17, HEADS_K, HEAD_DIM, grad=grad) for _ in "kv")
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 5, 5, 14], [0, 6, 8, 17]))
    return q, k, v, cu_q, cu_k


def dense_arguments(tensors, sinks=None, max_logit=False):
    return (*tensors, *(None,) * (9 - len(tensors)), sinks, 0, 0, *OPTIONS, False, False, max_logit)


def varlen_arguments(q, k, v, cu_q, cu_k, sinks=None, max_logit=False):
    return (q, k, v, cu_q, cu_k, None, None, None, None, sinks, 9, 9, *OPTIONS, False, False, max_logit)


def make_sinks(device, grad=False):
    return torch.randn(HEADS, device=device, requires_grad=grad)


def test_opcheck_forward(device):
    opcheck(CORE.fwd.default, dense_arguments(dense_inputs(device)))
    opcheck(CORE.fwd.default, varlen_arguments(*varlen_inputs(device)))


@pytest.mark.parametrize("packing", (1, 2, 3))
def test_opcheck_forward_with_gradient(device, packing):
    if packing == 1:
        tensors = (tensor(device, BATCH, SEQLEN_Q, 3, HEADS, HEAD_DIM, grad=True),)
    elif packing == 2:
        q, k, _ = dense_inputs(device, grad=True)
        tensors = (q, torch.stack([k, k], dim=2).detach().requires_grad_())
    else:
        tensors = dense_inputs(device, grad=True)
    opcheck(CORE.fwd.default, dense_arguments(tensors))


def test_opcheck_varlen_forward_with_gradient(device):
    opcheck(CORE.fwd.default, varlen_arguments(*varlen_inputs(device, grad=True)))


def test_opcheck_forward_with_sinks(device):
    opcheck(CORE.fwd.default, dense_arguments(dense_inputs(device), make_sinks(device)))
    opcheck(CORE.fwd.default, dense_arguments(dense_inputs(device), make_sinks(device, grad=True)))
    opcheck(CORE.fwd.default, varlen_arguments(*varlen_inputs(device, grad=True), make_sinks(device, grad=True)))


def test_opcheck_forward_with_max_logit(device):
    opcheck(CORE.fwd.default, dense_arguments(dense_inputs(device, grad=True), make_sinks(device, grad=True), True))
    opcheck(CORE.fwd.default, varlen_arguments(*varlen_inputs(device, grad=True), None, True))


@pytest.mark.parametrize("with_dlse", (False, True))
@pytest.mark.parametrize("with_sinks", (False, True))
def test_opcheck_backward(device, with_dlse, with_sinks):
    q, k, v = dense_inputs(device)
    sinks = make_sinks(device) if with_sinks else None
    out, lse, _, rng_state, _ = CORE.fwd(*dense_arguments((q, k, v), sinks))
    dlse = torch.randn_like(lse) if with_dlse else None
    saved = (q, k, v, out, lse, rng_state)
    arguments = (torch.randn_like(out), dlse, *saved, None, None, None, sinks, 0, 0, *OPTIONS, False)
    opcheck(CORE.bwd.default, arguments)


def test_opcheck_batch_invariant(device):
    opcheck(CORE.fwd.default, (*dense_arguments(dense_inputs(device, grad=True)), True))
    opcheck(CORE.fwd.default, (*varlen_arguments(*varlen_inputs(device, grad=True)), True))
    q, k, v = dense_inputs(device)
    out, lse, _, rng_state, _ = CORE.fwd(*dense_arguments((q, k, v)), batch_invariant=True)
    saved = (q, k, v, out, lse, rng_state)
    opcheck(CORE.bwd.default, (torch.randn_like(out), None, *saved, *(None,) * 4, 0, 0, *OPTIONS, True, True))


def test_opcheck_public_forward(device):
    q, k, v = dense_inputs(device)
    opcheck(interface._flash_attn_forward, (q, k, v, *OPTIONS, None, False))
    tensors = varlen_inputs(device)
    opcheck(interface._flash_attn_varlen_forward, (*tensors, 9, 9, *OPTIONS[:3]), {"window_size_left": 3})


@pytest.mark.parametrize("given", (False, True))
def test_opcheck_public_backward(device, given):
    q, k, v = dense_inputs(device)
    out, lse, _, rng_state = interface._flash_attn_forward(q, k, v, *OPTIONS, None, False)
    grads = [torch.empty_like(x) if given else None for x in (q, k, v)]
    arguments = (torch.randn_like(out), q, k, v, out, lse, *grads, *OPTIONS, None, False, rng_state)
    opcheck(interface._flash_attn_backward, arguments)

    q, k, v, cu_q, cu_k = varlen_inputs(device)
    forward = interface._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, 9, 9, *OPTIONS)
    grads = [torch.empty_like(x) if given else None for x in (q, k, v)]
    arguments = (torch.randn_like(q), q, k, v, *forward[:2], *grads, cu_q, cu_k, 9, 9, *OPTIONS, None, False)
    opcheck(interface._flash_attn_varlen_backward, arguments)


def written_arguments(op):
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def test_schemas_tell_what_is_written():
    public = torch.ops.flash_attn
    assert written_arguments(public._flash_attn_backward.default) == ["dq", "dk", "dv"]
    assert written_arguments(public._flash_attn_varlen_backward.default) == ["dq", "dk", "dv"]
    for op in (public._flash_attn_forward, public._flash_attn_varlen_forward, CORE.fwd, CORE.bwd):
        assert written_arguments(op.default) == []


PUBLIC_PARAMETERS = {
    "_flash_attn_forward": "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap "
    "alibi_slopes return_softmax",
    "_flash_attn_varlen_forward": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale "
    "causal window_size_left=-1 window_size_right=-1 softcap=0.0 alibi_slopes=None return_softmax=False "
    "block_table=None leftpad_k=None seqused_k=None zero_tensors=False num_splits=0",
    "_flash_attn_backward": "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left "
    "window_size_right softcap alibi_slopes deterministic rng_state=None",
    "_flash_attn_varlen_backward": "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q "
    "max_seqlen_k dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
    "deterministic rng_state=None zero_tensors=False",
}


@pytest.mark.parametrize("name", PUBLIC_PARAMETERS)
def test_public_operator_parameters(name):
    op = getattr(interface, name)
    parameters = inspect.signature(op._init_fn).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert " ".join(shown) == PUBLIC_PARAMETERS[name]
    assert getattr(interface, f"_wrapped{name}") is op


def test_public_forward_equals_the_function(device):
    q, k, v = dense_inputs(device)
    expected = flash_attn_func(q, k, v, softmax_scale=0.25, causal=True, return_attn_probs=True)
    out, lse, dmask, rng_state = interface._flash_attn_forward(
        q=q, k=k, v=v, dropout_p=0.0, softmax_scale=0.25, causal=True, window_size_left=-1, window_size_right=-1,
        softcap=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert dmask.shape == (0,) and rng_state.dtype == torch.int64 and rng_state.shape == (2,)


def test_public_backward_writes_any_strides(device):
    """Gradients land in strided slices, in transposed memory, from a transposed LSE and an expanded dout."""
    q, k, v = dense_inputs(device)
    out, lse, _, rng_state = interface._flash_attn_forward(q, k, v, *OPTIONS, None, False)
    dout = tensor(device, 1, 1, 1, HEAD_DIM).expand(out.shape)
    plain = [torch.empty_like(x) for x in (q, k, v)]
    tail = (*OPTIONS, None, False, rng_state)
    softmax_d = interface._flash_attn_backward(dout, q, k, v, out, lse, *plain, *tail)

    dq = torch.empty(BATCH, HEADS, HEAD_DIM, SEQLEN_Q, device=device, dtype=q.dtype).permute(0, 3, 1, 2)
    dkv = torch.full((BATCH, SEQLEN_K, 3, HEADS_K, HEAD_DIM), 7.0, device=device, dtype=q.dtype)
    lse_t = lse.transpose(1, 2).contiguous().transpose(1, 2)
    interface._flash_attn_backward(dout, q, k, v, out, lse_t, dq, dkv[:, :, 0], dkv[:, :, 2], *tail)
    assert torch.equal(dq, plain[0])
    assert torch.equal(dkv[:, :, 0], plain[1]) and torch.equal(dkv[:, :, 2], plain[2])
    assert (dkv[:, :, 1] == 7).all()
    assert softmax_d.shape == (BATCH, HEADS, 128) and softmax_d.dtype == torch.float32


def test_public_varlen_backward_equals_autograd(device):
    q, k, v, cu_q, cu_k = varlen_inputs(device, grad=True)
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 9, softmax_scale=0.25, causal=True)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        out, lse, _, rng_state = interface._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, 9, 9, *OPTIONS)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        tail = (cu_q, cu_k, 9, 9, *OPTIONS, None, False, rng_state)
        softmax_d = interface._flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, *tail)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected))
    assert softmax_d.shape == (HEADS, 14 + 128 * 3)


REREGISTERING_CLIENT = """
import sys
sys.path[:] = {path!r}
import torch
from flash_attn import flash_attn_func

Tensor = torch.Tensor
q, k, v = (torch.randn(2, 17, 2, 16, device={device!r}, dtype=torch.bfloat16) for _ in range(3))
expected = flash_attn_func(q, k, v)

def broken(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raise AssertionError("called")

torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())(broken)
assert torch.equal(flash_attn_func(q, k, v), expected)
compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
assert torch.equal(compiled(q, k, v), expected)
print("not noticed")
"""


def test_public_operators_are_not_used_by_the_functions(device):
    """Clients register flash_attn::_flash_attn_forward anew; the public functions must not notice. In a process of its
    own: torch frees the operator that was there before, which other tests of this process still hold."""
    script = REREGISTERING_CLIENT.format(path=sys.path, device=device)
    done = fresh_process.run(script)
    assert done.returncode == 0 and done.stdout.strip() == "not noticed", done.stderr


def test_fakes_size_s_dmask(device):
    q, k, v = dense_inputs("meta")
    results = CORE.fwd(*dense_arguments((q, k, v))[:12], 0.1, *OPTIONS[1:], False, True, True)
    out, lse, dmask, rng_state, max_logit = results
    assert max_logit.shape == (HEADS,) and max_logit.dtype == torch.float32
    assert dmask.shape == (BATCH, HEADS, 128, 128) and dmask.dtype == q.dtype
    assert lse.shape == (BATCH, HEADS, SEQLEN_Q) and lse.dtype == torch.float32
    assert out.shape == q.shape and rng_state.dtype == torch.int64
    real = flash_attn_func(*dense_inputs(device), dropout_p=0.1, return_attn_probs=True, return_max_logit=True)
    assert [x.shape for x in real] == [out.shape, lse.shape, dmask.shape, max_logit.shape]


def compiled(function, backend, dynamic=None):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


def assert_same(function, inputs, backend, dynamic=None):
    """Compiled equals eager bitwise: outputs, and gradients of the inputs that require them."""
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]

    def run(call):
        outputs = call(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if not leaves:
            return outputs
        torch.manual_seed(1)
        weights = [torch.randn_like(x) for x in outputs if x.requires_grad]
        return *outputs, *torch.autograd.grad([x for x in outputs if x.requires_grad], leaves, weights)

    expected, actual = run(function), run(compiled(function, backend, dynamic))
    assert len(expected) == len(actual)
    for a, b in zip(actual, expected):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


BACKENDS = ("aot_eager", "inductor")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", (False, True))
def test_compiled_forward(device, backend, dynamic):
    assert_same(lambda q, k, v: flash_attn_func(q, k, v, causal=True) * 2, dense_inputs(device), backend, dynamic)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", (False, True))
def test_compiled_gradients(device, backend, dynamic):
    def dense(q, k, v):
        return flash_attn_func(q, k, v, window_size=(3, 1), softcap=5.0, return_attn_probs=True)[:2]

    assert_same(dense, dense_inputs(device, grad=True), backend, dynamic)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_compiled_sinks(device, backend, dtype):
    """Gradients of sinks too, and of the LSE that holds them; half precision sinks are converted within."""
    inputs = dense_inputs(device, grad=True)
    sinks = make_sinks(device).to(dtype).requires_grad_()

    def dense(q, k, v, sinks):
        return flash_attn_func(q, k, v, causal=True, return_attn_probs=True, sinks=sinks)[:2]

    assert_same(dense, (*inputs, sinks), backend)
    q, k, v, cu_q, cu_k = varlen_inputs(device, grad=True)
    assert_same(lambda *x: flash_attn_varlen_func(*x[:5], 9, 9, sinks=x[5]), (q, k, v, cu_q, cu_k, sinks), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_max_logit(device, backend):
    def dense(q, k, v):
        return flash_attn_func(q, k, v, causal=True, return_max_logit=True)

    assert_same(dense, dense_inputs(device, grad=True), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_packed_gradients(device, backend):
    qkv = tensor(device, BATCH, SEQLEN_Q, 3, HEADS, HEAD_DIM, grad=True)
    assert_same(lambda x: flash_attn_qkvpacked_func(x, causal=True), (qkv,), backend)
    q = tensor(device, BATCH, SEQLEN_Q, HEADS, HEAD_DIM, grad=True)
    kv = tensor(device, BATCH, SEQLEN_K, 2, HEADS_K, HEAD_DIM, grad=True)
    assert_same(lambda q, kv: flash_attn_kvpacked_func(q, kv), (q, kv), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_varlen_with_one_cu_seqlens_tensor(device, backend):
    """q and k share cu_seqlens, which an autograd.Function could not take twice under torch.compile."""
    q, k, v = (tensor(device, 14, HEADS, HEAD_DIM, grad=True) for _ in "qkv")
    cu_seqlens = torch.tensor([0, 5, 5, 14], dtype=torch.int32, device=device)

    def varlen(q, k, v, cu_seqlens):
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 9, 9, causal=True)

    assert_same(varlen, (q, k, v, cu_seqlens), backend)
    # One tensor as q, k and v: its three gradients are summed outside of our operators, by inductor without rounding in
    # between, so that only a backend without fusion repeats eager's bits in half precision.
    assert_same(lambda x, cu: flash_attn_varlen_func(x, x, x, cu, cu, 9, 9), (q, cu_seqlens), "aot_eager")
    qkv = tensor(device, 14, 3, HEADS, HEAD_DIM, grad=True)
    assert_same(lambda x, cu: flash_attn_varlen_qkvpacked_func(x, cu, 9), (qkv, cu_seqlens), backend)


def test_compiled_varlen_with_tensor_max_seqlen(device):
    q, k, v, cu_q, cu_k = varlen_inputs(device)
    longest = torch.tensor(9, device=device, dtype=torch.int32)
    assert_same(flash_attn_varlen_func, (q, k, v, cu_q.long(), cu_k.long(), longest, longest), "aot_eager")


@pytest.mark.needs_torch((2, 11), "recompiles")
def test_compiled_dynamic_shapes_do_not_recompile(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(flash_attn_func, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for seqlen in (7, 12, 33):
        q, k, v = (tensor(device, 2, seqlen, HEADS, HEAD_DIM) for _ in "qkv")
        assert torch.equal(function(q, k, v), flash_attn_func(q, k, v))
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_dropout_draws_from_the_default_generator(device, backend):
    q, k, v = dense_inputs(device)

    def call(function):
        torch.manual_seed(5)
        return function(q, k, v, dropout_p=0.3), function(q, k, v, dropout_p=0.3)

    expected, actual = call(flash_attn_func), call(compiled(flash_attn_func, backend))
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert not torch.equal(actual[0], actual[1])


def test_export(device):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn_func(q, k, v, causal=True)

    inputs = dense_inputs(device)
    program = torch.export.export(Attention(), inputs)
    assert any(node.target is CORE.fwd.default for node in program.graph.nodes)
    assert torch.equal(program.module()(*inputs), flash_attn_func(*inputs, causal=True))


def test_dispatch_modes_see_the_operator(device):
    """Selective checkpointing, FLOP counters and fake tensors work on operators, so they must get them."""

    with Recorder() as recorder:
        flash_attn_func(*dense_inputs(device))
    assert library._forward_op in recorder.seen

    with torch._subclasses.FakeTensorMode():
        out, lse, _ = flash_attn_func(*dense_inputs(device), return_attn_probs=True)
    assert isinstance(out, torch._subclasses.FakeTensor) and lse.shape == (BATCH, HEADS, SEQLEN_Q)
