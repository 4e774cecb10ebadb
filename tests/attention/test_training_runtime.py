"""Training steps apart from their results: checkpoints, compilation, CUDA graphs, lengths on the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import Case
from harness import captured, check_gradients, make_problem, no_synchronisation, run
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func

pytestmark = pytest.mark.by_both_paths

DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


def leaves_of(problem):
    """The problem on leaves that require gradients, and the leaves."""
    leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    return dataclasses.replace(problem, q=leaves[0], k=leaves[1], v=leaves[2]), leaves


def same(results, others):
    return len(results) == len(others) and all(torch.equal(a, b) for a, b in zip(results, others))


class Model(torch.nn.Module):
    """Two attention layers with dropout, and dropout of torch between and after them."""

    def __init__(self, device, cu_seqlens=None):
        super().__init__()
        self.project = torch.nn.Linear(32, 96, device=device, dtype=getattr(torch, DTYPE[device]))
        self.dropout, self.cu_seqlens = torch.nn.Dropout(0.2), cu_seqlens

    def layer(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).unbind(-3)
        options = {"dropout_p": 0.3, "causal": True, "deterministic": True}
        if self.cu_seqlens is None:
            out = flash_attn_func(q, k, v, **options)
        else:
            length = torch.tensor(12, device=x.device)
            out = flash_attn_varlen_func(q, k, v, self.cu_seqlens, self.cu_seqlens, length, length, **options)
        return x + self.dropout(out.flatten(-2))

    def forward(self, x, layer=None):
        for _ in range(2):
            x = self.layer(x) if layer is None else layer(x)
        return x


def model_and_input(device, varlen):
    cu = torch.tensor([0, 5, 5, 17], dtype=torch.int64, device=device) if varlen else None
    shape = (17, 32) if varlen else (2, 12, 32)
    return Model(device, cu), torch.randn(shape, device=device, dtype=getattr(torch, DTYPE[device]), requires_grad=True)


def training_step(model, x, **options):
    torch.manual_seed(6)
    out = model(x, **options)
    return out, *torch.autograd.grad(out.square().sum(), (x, *model.parameters()))


@pytest.mark.parametrize("varlen", (False, True))
def test_checkpointed_layers_repeat_their_dropout(device, varlen):
    """Every layer recomputed in the backward, its random numbers restored amid those of others."""
    model, x = model_and_input(device, varlen)
    expected = training_step(model, x)
    again = training_step(model, x, layer=lambda x: checkpoint(model.layer, x, use_reentrant=False))
    assert same(again, expected)

    torch.manual_seed(6)
    out = model(x, layer=lambda x: checkpoint(model.layer, x, use_reentrant=True, preserve_rng_state=True))
    out.square().sum().backward()
    assert same((out, x.grad, *(p.grad for p in model.parameters())), expected)


def test_checkpoint_without_the_random_state_draws_another_mask(device):
    """The test above can tell: with preserve_rng_state=False the recomputed mask is another one."""
    model, x = model_and_input(device, False)

    def layer(x):
        return checkpoint(model.layer, x, use_reentrant=False, preserve_rng_state=False)

    expected, other = training_step(model, x), training_step(model, x, layer=layer)
    assert torch.equal(other[0], expected[0]) and not torch.equal(other[1], expected[1])


def test_compiled_checkpoint_repeats_the_dropout(device):
    """The gradient of out with respect to v is that under the mask of the forward, which out tells for v = 1."""
    q, k = (torch.randn(1, 16, 1, 16, device=device, dtype=getattr(torch, DTYPE[device])) for _ in "qk")
    v = torch.eye(16, device=device, dtype=q.dtype).view(1, 16, 1, 16).requires_grad_()  # out is the dropped P itself

    def block(v):
        return flash_attn_func(q, k, v, dropout_p=0.5)

    torch._dynamo.reset()
    compiled = torch.compile(lambda v: checkpoint(block, v, use_reentrant=False), backend="aot_eager", fullgraph=True)
    out = compiled(v)
    (dv,) = torch.autograd.grad(out, v, torch.eye(16, device=device, dtype=q.dtype).view(1, 16, 1, 16))
    assert (out == 0).any()
    torch.testing.assert_close(dv[0, :, 0], out[0, :, 0].t())


def assert_compiled_equals_eager(function, inputs, backend, dynamic=None):
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)

    def call(function):
        torch.manual_seed(4)
        out = function(*inputs)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    assert same(call(compiled), call(function))


@pytest.mark.parametrize("kind", ("dense", "packed", "varlen"))
def test_compiled_dropout_gradients_equal_eager(device, kind):
    dtype = getattr(torch, DTYPE[device])
    options = {"dropout_p": 0.3, "causal": True, "deterministic": True}
    if kind == "packed":
        qkv = torch.randn(2, 9, 3, 2, 16, device=device, dtype=dtype, requires_grad=True)
        assert_compiled_equals_eager(lambda x: flash_attn_qkvpacked_func(x, **options), (qkv,), "inductor")
        return
    shape = (2, 9, 2, 16) if kind == "dense" else (14, 2, 16)
    qkv = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in "qkv"]
    if kind == "dense":
        assert_compiled_equals_eager(lambda q, k, v: flash_attn_func(q, k, v, **options), qkv, "inductor")
        return
    cu = torch.tensor([0, 5, 5, 14], device=device)

    def varlen(q, k, v, cu):
        return flash_attn_varlen_func(q, k, v, cu, cu, 9, 9, **options)

    assert_compiled_equals_eager(varlen, (*qkv, cu), "inductor", dynamic=True)


@pytest.mark.parametrize("kind", ("dense", "packed", "varlen"))
@pytest.mark.needs_torch((2, 11), "recompiles")
def test_compiled_training_of_other_lengths_does_not_recompile(device, kind):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(qkv, cu):
        if kind == "dense":
            return flash_attn_func(*qkv.unbind(2), causal=True, deterministic=True)
        if kind == "packed":
            return flash_attn_qkvpacked_func(qkv, causal=True, deterministic=True)
        q, k, v = qkv.flatten(0, 1).unbind(1)
        return flash_attn_varlen_func(q, k, v, cu, cu, cu[-1], cu[-1], causal=True, deterministic=True)

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for batch, seqlen in ((5, 7), (6, 12), (4, 33)):  # no two axes of one length, which would be a guard
        shape = (batch, seqlen, 3, 2, 16)
        qkv = torch.randn(shape, device=device, dtype=getattr(torch, DTYPE[device]), requires_grad=True)
        cu = torch.arange(batch + 1, device=device, dtype=torch.int32) * seqlen
        results = [(out, torch.autograd.grad(out.sum(), qkv)[0]) for out in (compiled(qkv, cu), call(qkv, cu))]
        assert same(*results)
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3


def test_exported_module_takes_other_lengths(device):
    """A module for inference: packed and varlen attention, batch and lengths dynamic."""

    class Module(torch.nn.Module):
        def forward(self, qkv, cu_seqlens):
            q, k, v = qkv.unbind(-3)
            return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 64, 64, causal=True), (
                flash_attn_qkvpacked_func(qkv[None], window_size=(4, 0))
            )

    def inputs(lengths):
        cu = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
        return torch.randn(sum(lengths), 3, 2, 16, device=device, dtype=getattr(torch, DTYPE[device])), cu

    total, count = torch.export.Dim("total", min=2, max=64), torch.export.Dim("count", min=2, max=9)
    module, example = Module().eval(), inputs((5, 9))
    program = torch.export.export(module, example, dynamic_shapes=({0: total}, {0: count}))
    for lengths in ((5, 9), (3, 0, 20, 7)):
        arguments = inputs(lengths)
        assert same(program.module()(*arguments), module(*arguments))


@pytest.mark.parametrize("kind", ("packed", "padded"))
def test_forms_of_lengths_give_the_same_gradients(device, kind):
    """max_seqlen as an int, a 0-d tensor, a loose bound or far too small; cu_seqlens int32 or int64."""
    problem, leaves = leaves_of(make_problem(Case(4, 60, 90, 4, 2, 64, DTYPE[device], True, kind=kind), device))
    dout = torch.randn_like(problem.q)
    expected = None
    for dtype in (torch.int32, torch.int64):
        cu = {name: getattr(problem, name).to(dtype) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        longest = [torch.tensor(n, dtype=dtype) for n in (problem.max_seqlen_q, problem.max_seqlen_k)]
        forms = [
            (problem.max_seqlen_q, problem.max_seqlen_k), longest, [x.to(device) for x in longest],
            (10**6, 10**6), (1, 1),
        ]  # fmt: skip
        for max_seqlen_q, max_seqlen_k in forms:
            out, lse, _ = run(problem, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, deterministic=True, **cu)
            actual = (out, lse, *torch.autograd.grad(out, leaves, dout))
            expected = expected or actual
            assert same(actual, expected)
    check_gradients(problem, dout, expected[2:])


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("kind", ("dense", "packed"))
@pytest.mark.parametrize("dropout", (0.0, 0.2))
@pytest.mark.parametrize("deterministic", (False, True))
def test_no_host_synchronisation_in_training(device, kind, dropout, deterministic):
    case = Case(4, 150, 300, 4, 2, 64, "bfloat16", True, kind=kind, dropout=dropout, softcap=10.0, alibi="batch")
    problem, leaves = leaves_of(make_problem(case, device))
    lengths = {}
    if kind == "packed":
        lengths = {"cu_seqlens_q": problem.cu_seqlens_q.long(), "cu_seqlens_k": problem.cu_seqlens_k.long()}
        lengths |= {"max_seqlen_q": torch.tensor(150, device=device), "max_seqlen_k": torch.tensor(300, device=device)}
    dout = torch.randn_like(problem.q)

    def step():
        out = run(problem, return_attn_probs=False, deterministic=deterministic, **lengths)
        return torch.autograd.grad(out, leaves, dout)

    step()
    with no_synchronisation():
        step()


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("kind", ("dense", "packed"))
def test_graph_of_a_training_step(device, kind):
    """Forward and backward in one graph: each replay draws a new mask, and its gradients are those under that mask."""
    case = Case(2, 100, 140, 4, 2, 64, "bfloat16", True, kind=kind, dropout=0.3)
    problem, leaves = leaves_of(make_problem(case, device))
    dout = torch.randn_like(problem.q)

    def step():
        out, lse, dmask = run(problem)
        return out, dmask, torch.autograd.grad(out, leaves, dout)

    graph, (out, dmask, grads) = captured(step)
    masks = []
    for _ in range(3):
        with torch.no_grad():
            for x in (*leaves, dout):
                x.copy_(torch.randn_like(x).masked_fill(x.isnan(), float("nan")))
        graph.replay()
        masks.append(dmask >= 0)
        check_gradients(problem, dout, grads, masks[-1])
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("dropout", (0.0, 0.3))
def test_graphed_callable(device, dropout):
    """torch.cuda.make_graphed_callables: forward and backward as two graphs, the random state carried between them."""
    problem, leaves = leaves_of(make_problem(Case(2, 80, 80, 4, 2, 64, "bfloat16", True, dropout=dropout), device))
    options = {"causal": True, "dropout_p": dropout, "deterministic": True, "return_attn_probs": True}

    def call(q, k, v):
        out, _, dmask = flash_attn_func(q, k, v, **options)
        return out, dmask

    graphed = torch.cuda.make_graphed_callables(call, tuple(x.detach().clone().requires_grad_() for x in leaves))
    masks = []
    for _ in range(3):
        dout = torch.randn_like(problem.q)
        out, dmask = graphed(*leaves)
        grads = torch.autograd.grad(out, leaves, dout)
        keep = dmask[:, :, :80, :80].clone() >= 0 if dropout else None
        check_gradients(problem, dout, grads, keep)
        masks.append(keep)
        if not dropout:
            eager = flash_attn_func(*leaves, **options)[0]
            assert torch.equal(out, eager) and same(grads, torch.autograd.grad(eager, leaves, dout))
    if dropout:
        assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
