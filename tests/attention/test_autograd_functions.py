"""`FlashAttnFunc.apply` and its five sisters, by position as flash_attn 2.8 orders them: results of the functions."""

from __future__ import annotations

import pytest
import torch

from flash_attn import flash_attn_interface as interface
from flash_attn.ops import normalize

pytestmark = pytest.mark.by_both_paths

BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 9, 4, 16
LENGTHS = (5, 0, 13)
TOTAL, LONGEST = sum(LENGTHS), max(LENGTHS)

VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
# class: (function, inputs and what tells the sequences apart, arguments between return_softmax and is_grad_enabled)
FORMS = {
    "FlashAttnFunc": ("flash_attn_func", "q, k, v", ""),
    "FlashAttnQKVPackedFunc": ("flash_attn_qkvpacked_func", "qkv", ""),
    "FlashAttnKVPackedFunc": ("flash_attn_kvpacked_func", "q, kv", ""),
    "FlashAttnVarlenFunc": ("flash_attn_varlen_func", f"q, k, v, {VARLEN}", "block_table=None, "),
    "FlashAttnVarlenQKVPackedFunc": ("flash_attn_varlen_qkvpacked_func", "qkv, cu_seqlens, max_seqlen", ""),
    "FlashAttnVarlenKVPackedFunc": ("flash_attn_varlen_kvpacked_func", f"q, kv, {VARLEN}", ""),
}
# dropout_p, softmax_scale, causal, window_size, softcap, ALiBi, deterministic
OPTIONS = (
    (0.0, None, False, (-1, -1), 0.0, False, False),
    (0.0, 0.3, True, (4, -1), 0.0, True, True),
    (0.25, None, True, (-1, -1), 0.0, False, True),
    (0.0, None, False, (3, 2), 5.0, False, False),
)


def make(device, names, seed):
    """(positional arguments, those that get a gradient) for the names of FORMS, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if device == "cpu" else torch.float16
    rows = (TOTAL,) if "seqlen" in names else (BATCH, SEQLEN)

    def randn(*axes):
        x = torch.randn(*rows, *axes, HEADS, HEAD_DIM, generator=generator)
        return x.to(device, dtype).requires_grad_()

    cu = torch.tensor((0, *LENGTHS), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    values = {"qkv": (3,), "kv": (2,), "q": (), "k": (), "v": ()}
    args = [
        randn(*values[name]) if name in values else cu if name.startswith("cu_") else LONGEST
        for name in names.split(", ")
    ]
    return args, [x for x in args if torch.is_tensor(x) and x.requires_grad]


def options_on(device, options):
    *numbers, alibi, deterministic = options
    return (*numbers, torch.linspace(0.1, 0.4, HEADS, device=device) if alibi else None, deterministic)


@pytest.mark.parametrize("name", FORMS)
def test_autograd_records_the_class_of_the_function(device, name):
    function, names, _ = FORMS[name]
    args, _ = make(device, names, seed=5)
    assert issubclass(getattr(interface, name), torch.autograd.Function)
    assert type(getattr(interface, function)(*args).grad_fn).__name__ == f"{name}Backward"


@pytest.mark.each
@pytest.mark.parametrize("return_softmax", (False, True))
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", FORMS)
def test_results_and_gradients_are_those_of_the_function(device, name, options, return_softmax):
    function, names, extra = FORMS[name]
    options = options_on(device, options)
    results = []
    for call, last in (
        (getattr(interface, name).apply, ((None,) if extra else ()) + (True,)),
        (getattr(interface, function), ()),
    ):
        args, leaves = make(device, names, seed=5)
        torch.manual_seed(7)  # of the dropout
        result = call(*args, *options, return_softmax, *last)
        tensors = result if return_softmax else (result,)
        assert len(tensors) == (3 if return_softmax else 1)
        dout = torch.linspace(-1, 1, tensors[0].numel(), device=device, dtype=tensors[0].dtype).view_as(tensors[0])
        results.append([*tensors, *torch.autograd.grad(tensors[0], leaves, dout)])
    (out, *rest), expected = results
    assert len(rest) + 1 == len(expected) and out.abs().max() > 0
    for actual, wanted in zip((out, *rest), expected):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0 if options[-1] or device == "cpu" else 2e-2)


def test_dropout_is_applied(device):
    args, _ = make(device, "q, k, v", seed=5)
    *_, dmask = interface.FlashAttnFunc.apply(*args, 0.25, None, False, (-1, -1), 0.0, None, False, True, True)
    dropped = (dmask[..., :SEQLEN, :SEQLEN] < 0).float().mean()
    assert 0.1 < dropped < 0.4


def test_paged_keys_reach_the_forward(device):
    """block_table is between return_softmax and is_grad_enabled."""
    args, _ = make(device, f"q, k, v, {VARLEN}", seed=5)
    q, k, v, cu, *_ = (x.detach() if torch.is_tensor(x) else x for x in args)
    pages = [torch.zeros(len(LENGTHS), 16, HEADS, HEAD_DIM, device=device, dtype=q.dtype) for _ in "kv"]
    for page, rows in zip(pages, (k, v)):
        for i, length in enumerate(LENGTHS):
            page[i, :length] = rows[cu[i] : cu[i] + length]
    table = torch.arange(len(LENGTHS), dtype=torch.int32, device=device).view(-1, 1)
    tail = (0.0, None, True, (-1, -1), 0.0, None, False, False)
    plain = interface.FlashAttnVarlenFunc.apply(q, k, v, cu, cu, LONGEST, LONGEST, *tail, None, True)
    paged = interface.FlashAttnVarlenFunc.apply(q, *pages, cu, cu, LONGEST, LONGEST, *tail, table, True)
    torch.testing.assert_close(paged, plain, rtol=0, atol=1e-6 if device == "cpu" else 2e-3)


def test_nothing_is_recorded_without_is_grad_enabled(device):
    args, _ = make(device, "q, k, v", seed=5)
    tail = (0.0, None, True, (-1, -1), 0.0, None, False, False)
    assert interface.FlashAttnFunc.apply(*args, *tail, True).requires_grad
    assert not interface.FlashAttnFunc.apply(*args, *tail, False).requires_grad
    with torch.no_grad():
        assert not interface.FlashAttnFunc.apply(*args, *tail, True).requires_grad


def test_arguments_are_checked_by_name(device):
    args, _ = make(device, "qkv", seed=5)
    with pytest.raises(RuntimeError, match=r"qkv: expected shape \(batch, seqlen, 3, heads, head_dim\)"):
        interface.FlashAttnQKVPackedFunc.apply(args[0][:, :, :2], 0.0, None, False, (-1, -1), 0.0, None, False, False)


def test_compiled(device):
    args, leaves = make(device, "q, k, v", seed=5)

    def call(q, k, v):
        return interface.FlashAttnFunc.apply(q, k, v, 0.0, None, True, (-1, -1), 0.0, None, True, False, True)

    torch._dynamo.reset()
    out, expected = torch.compile(call, backend="aot_eager", fullgraph=True)(*args), call(*args)
    assert torch.equal(out, expected)
    for actual, wanted in zip(*(torch.autograd.grad(x, leaves, torch.ones_like(out)) for x in (out, expected))):
        assert torch.equal(actual, wanted)


def test_compiled_with_one_tensor_twice(device):
    """torch drops one of its gradients in compiled autograd functions: refused there, right in the public function."""
    (q, k, _), _ = make(device, "q, k, v", seed=5)
    tail = (0.0, None, True, (-1, -1), 0.0, None, True, False)

    def gradients(call):
        return torch.autograd.grad(call(q, k).sum(), (q, k))

    expected = gradients(lambda q, k: interface.FlashAttnFunc.apply(q, k, q, *tail))
    for call, fullgraph in (
        (lambda q, k: interface.flash_attn_func(q, k, q, *tail), True),
        (lambda q, k: interface.FlashAttnFunc.apply(q, k, q, *tail), False),  # leaves compiled code
    ):
        torch._dynamo.reset()
        actual = gradients(torch.compile(call, backend="aot_eager", fullgraph=fullgraph))
        assert all(torch.equal(a, b) for a, b in zip(actual, expected))


def test_padded_head_dims_are_undone(monkeypatch):
    """As for kernels that want whole 16 bytes; results and gradients have the shapes of the inputs."""
    for shapes in (
        ((2, 5, 4, 20), (2, 7, 2, 20), (2, 7, 2, 12)),
        ((2, 5, 3, 4, 20),),
        ((2, 5, 4, 20), (2, 7, 2, 2, 20)),
    ):
        names = {1: "FlashAttnQKVPackedFunc", 2: "FlashAttnKVPackedFunc", 3: "FlashAttnFunc"}
        function = getattr(interface, names[len(shapes)])
        inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        results = []
        for pads in (False, True):
            monkeypatch.setattr(normalize, "_pads", lambda q, pads=pads: pads)
            out, lse, _ = function.apply(*inputs, 0.0, None, True, (-1, -1), 0.0, None, False, True)
            results.append([out, lse, *torch.autograd.grad((out.square().sum(), lse.square().sum()), inputs)])
        monkeypatch.undo()
        for actual, expected in zip(*results):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("head_dim", (16, 12))
@pytest.mark.parametrize("autocast", (False, True))
def test_gradients_of_one_tensor_are_added_in_one_order(device, autocast, head_dim, monkeypatch):
    """From q to v, also where the kernels read converted copies of it."""
    monkeypatch.setattr(normalize, "_pads", lambda q: True)
    dtype = torch.float32 if autocast else torch.bfloat16
    leaves = [torch.randn(1, 64, 2, head_dim, device=device, dtype=dtype, requires_grad=True)]
    leaves += [leaves[0].detach().clone().requires_grad_() for _ in "kv"]
    gradients = []
    for inputs in (leaves, leaves[:1] * 3):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            out = interface.flash_attn_func(*inputs, deterministic=True)
        gradients.append(torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True))
    (dq, dk, dv), (total, *_) = gradients
    assert torch.equal(total, dq + dk + dv)
