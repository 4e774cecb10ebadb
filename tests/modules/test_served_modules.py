"""Modules of flash_attn 2.8.3 outside attention: against plain PyTorch in float64, and the names of parameters."""

from __future__ import annotations

import importlib

import cp_workers
import pytest
import torch
import torch.nn.functional as F
from reference import assert_accurate, assert_gradient_accurate
from torch import nn

from flash_attn.modules.block import Block, ParallelBlock, StochasticDepth
from flash_attn.modules.embedding import BertEmbeddings, GPT2Embeddings
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import FusedMLP, GatedMlp, Mlp
from flash_attn.ops import activations, layer_norm, rms_norm
from flash_attn.ops.fused_dense import FusedDense
from flash_attn.ops.triton.layer_norm import RMSNorm
from flash_attn.utils import benchmark, distributed

DIM = 48


def tensors_of(result):
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


def gradients(function, inputs, weights):
    """(results, gradients of inputs) of the sum of results, each times its weight."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    results = tensors_of(function(*inputs))
    loss = sum((y.to(w.dtype) * w).sum() for y, w in zip(results, weights))
    return results, torch.autograd.grad(loss, inputs)


def assert_computes(function, definition, inputs):
    """`function` of the inputs is as accurate as its definition in their dtype, gradients included."""
    wide = [x.double() for x in inputs]
    weights = [torch.randn_like(y) for y in tensors_of(definition(*wide))]
    expected, expected_grads = gradients(definition, wide, weights)
    plain, plain_grads = gradients(definition, inputs, weights)
    results, grads = gradients(function, inputs, weights)
    assert len(results) == len(expected)
    for result, y, p in zip(results, expected, plain):
        assert_accurate(result, y, p)
    for i, (grad, y, p) in enumerate(zip(grads, expected_grads, plain_grads)):
        assert_gradient_accurate(grad, y, p, f"gradient {i}")


def randn(device, *shapes, dtype=torch.bfloat16):
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


ACTIVATIONS = {
    "gelu_fwd": lambda x: F.gelu(x, approximate="tanh"),
    "fast_gelu_impl": lambda x: F.gelu(x, approximate="tanh"),
    "sqrelu_fwd": lambda x: x.clamp(min=0) ** 2,
    "bias_gelu": lambda y, bias: F.gelu(y + bias, approximate="tanh"),
    "bias_gelu_impl": lambda y, bias: F.gelu(y + bias, approximate="tanh"),
    "swiglu": lambda x, y: x / (1 + torch.exp(-x)) * y,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(device, name):
    shapes = ((4, 9, DIM), (DIM,) if "bias" in name else (4, 9, DIM))
    inputs = randn(device, *shapes[: ACTIVATIONS[name].__code__.co_argcount])
    assert_computes(getattr(activations, name), ACTIVATIONS[name], inputs)


@pytest.mark.parametrize(
    "backward,forward",
    [("gelu_bwd", "gelu_fwd"), ("sqrelu_bwd", "sqrelu_fwd"), ("relu_bwd", None), ("swiglu_bwd", "swiglu_fwd")],
)
def test_backwards_by_name(device, backward, forward):
    forward = F.relu if forward is None else getattr(activations, forward)
    x, y, g = (x.requires_grad_() for x in randn(device, *[(5, DIM)] * 3, dtype=torch.float64))
    inputs = (x, y) if backward == "swiglu_bwd" else (x,)
    expected = torch.autograd.grad(forward(*inputs), inputs, g.detach())
    function = getattr(activations, backward)
    result = function(x, y, g) if backward == "swiglu_bwd" else (function(g, x),)
    torch.testing.assert_close(result, expected)


def test_swiglu_is_differentiable_twice_and_by_functional_transforms(device):
    x, y = (x.requires_grad_() for x in randn(device, *[(3, 5)] * 2, dtype=torch.float64))
    assert torch.autograd.gradgradcheck(activations.swiglu, (x, y))
    rows = torch.func.vmap(torch.func.grad(lambda x, y: activations.swiglu(x, y).sum()))(x, y)
    torch.testing.assert_close(rows, torch.autograd.grad(activations.swiglu(x, y).sum(), x)[0])


def add_norm(is_rms, prenorm=False, layerscale=False, rowscale=None):
    """The definition of dropout_add_*_norm without dropout."""

    def definition(x0, residual, weight, bias, *scale):
        total = x0 if rowscale is None else x0 * rowscale.to(x0.dtype)[..., None]
        total = (total * scale[0] if layerscale else total) + residual
        if is_rms:
            normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight + bias
        else:
            normed = F.layer_norm(total, total.shape[-1:], weight, bias, 1e-5)
        return (normed, total) if prenorm else normed

    return definition


@pytest.mark.parametrize("is_rms", (False, True))
@pytest.mark.parametrize("prenorm,layerscale", [(False, False), (True, True)])
def test_norm_of_a_sum(device, is_rms, prenorm, layerscale):
    function = rms_norm.dropout_add_rms_norm if is_rms else layer_norm.dropout_add_layer_norm
    rowscale = torch.rand(3, 7, device=device).bfloat16()

    def ours(x0, residual, weight, bias, *scale):
        return function(
            x0, residual, weight, bias, 0.0, 1e-5, rowscale=rowscale, layerscale=scale[0] if scale else None,
            prenorm=prenorm,
        )  # fmt: skip

    inputs = randn(device, *[(3, 7, DIM)] * 2, *[(DIM,)] * (3 if layerscale else 2))
    assert_computes(ours, add_norm(is_rms, prenorm, layerscale, rowscale), inputs)


@pytest.mark.parametrize("module", (layer_norm, rms_norm))
def test_two_norms_of_a_sum(device, module):
    kind = "rms" if module is rms_norm else "layer"
    function = getattr(module, f"dropout_add_{kind}_norm_parallel_residual")
    one = getattr(module, f"dropout_add_{kind}_norm")
    x0, x1, residual = randn(device, *[(3, 7, DIM)] * 3, dtype=torch.float64)
    w0, w1, b0, b1 = randn(device, *[(DIM,)] * 4, dtype=torch.float64)
    out0, out1, total = function(x0, x1, residual, w0, b0, w1, b1, 0.0, 1e-5, prenorm=True)
    torch.testing.assert_close(total, x0 + x1 + residual)
    torch.testing.assert_close(out0, one(total, None, w0, b0, 0.0, 1e-5))
    torch.testing.assert_close(out1, one(total, None, w1, b1, 0.0, 1e-5))
    out0, out1, mask0, mask1 = function(x0, None, None, w0, b0, None, None, 0.5, 1e-5, return_dropout_mask=True)
    assert out1 is None and mask1.all() and 0 < mask0.sum() < mask0.numel()
    torch.testing.assert_close(out0, one(x0 * mask0 / 0.5, None, w0, b0, 0.0, 1e-5))


def test_norms_name_the_argument(device):
    x, w = torch.ones(2, DIM, device=device), torch.ones(DIM + 1, device=device)
    with pytest.raises(RuntimeError, match="^weight0: expected"):
        layer_norm.dropout_add_layer_norm_parallel_residual(x, None, None, w, None, None, None, 0.0, 1e-5)
    with pytest.raises(RuntimeError, match="^layerscale: expected shape"):
        rms_norm.dropout_add_rms_norm(x, None, w[1:], None, 0.0, 1e-5, layerscale=w)


@pytest.mark.parametrize("kind", (rms_norm.DropoutAddRMSNorm, layer_norm.DropoutAddLayerNorm))
def test_norm_modules(device, kind):
    """Dropout in training alone; weight and bias (none for RMS norms) are those of state_dict."""
    module = kind(DIM, prenorm=True, p=0.5, device=device)
    assert list(module.state_dict()) == (["weight"] if kind is rms_norm.DropoutAddRMSNorm else ["weight", "bias"])
    x = torch.randn(4, DIM, device=device)
    out, total = module.eval()(x)
    assert torch.equal(total, x)
    definition = add_norm(kind is rms_norm.DropoutAddRMSNorm)
    torch.testing.assert_close(out, definition(x, torch.zeros_like(x), torch.ones_like(x[0]), torch.zeros_like(x[0])))
    assert (module.train()(x)[1] == 0).any()


MLPS = {
    "Mlp": (lambda **o: Mlp(DIM, **o), lambda m, x: m.fc2(F.gelu(m.fc1(x)))),
    "GatedMlp": (
        lambda **o: GatedMlp(DIM, activation=F.silu, multiple_of=32, **o),
        lambda m, x: m.fc2(m.fc1(x).chunk(2, -1)[0] * F.silu(m.fc1(x).chunk(2, -1)[1])),
    ),
    "GatedMlp glu": (lambda **o: GatedMlp(DIM, 100, **o), lambda m, x: m.fc2(F.glu(m.fc1(x), -1))),
    **{
        f"FusedMLP {name} {level}": (
            lambda name=name, level=level, **o: FusedMLP(DIM, activation=name, checkpoint_lvl=level, **o),
            lambda m, x, act=act: m.fc2(act(m.fc1(x))),
        )
        for name, level, act in (
            ("gelu_approx", 0, lambda x: F.gelu(x, approximate="tanh")),
            ("relu", 1, F.relu),
            ("sqrelu", 2, lambda x: F.relu(x) ** 2),
        )
    },
}


@pytest.mark.parametrize("name", MLPS)
def test_mlps(device, name):
    make, definition = MLPS[name]
    module = make(device=device, dtype=torch.float64)
    assert list(module.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    x = torch.randn(2, 5, DIM, device=device, dtype=torch.float64, requires_grad=True)
    expected = definition(module, x)
    out = module(x)
    torch.testing.assert_close(out, expected)
    wanted = [x, *module.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), wanted), torch.autograd.grad(expected.square().sum(), wanted)
    )
    same, residual = make(device=device, dtype=torch.float64, return_residual=True)(x)
    assert residual is x and same.shape == x.shape


def test_sizes_of_gated_mlps():
    """Hidden features: 8/3 of the input's, rounded up to multiple_of."""
    assert GatedMlp(100).fc2.in_features == 384
    assert GatedMlp(100, 130, multiple_of=16, bias1=False).fc1.weight.shape == (2 * 144, 100)


def test_fused_dense(device):
    module = FusedDense(DIM, 8, return_residual=True, device=device)
    x = torch.randn(3, DIM, device=device)
    out, residual = module(x)
    assert torch.equal(out, F.linear(x, module.weight, module.bias)) and residual is x
    with pytest.raises(NotImplementedError, match="^process_group: expected None"):
        module(x, process_group=object())


def mixer(dim):
    return MHA(dim, 4, causal=True, use_flash_attn=True)


BLOCK_KEYS = {
    "mixer": [f"mixer.{layer}.{kind}" for layer in ("Wqkv", "out_proj") for kind in ("weight", "bias")],
    "norm1": ["norm1.weight", "norm1.bias"],
    "mlp": [f"mlp.{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")],
    "norm2": ["norm2.weight", "norm2.bias"],
}


@pytest.mark.parametrize("fused", (False, True))
@pytest.mark.parametrize("norm", (nn.LayerNorm, RMSNorm))
def test_prenorm_block(device, fused, norm):
    """Two blocks, their last sum and gradients, in float64."""
    dtype = torch.float64
    blocks = nn.ModuleList(
        Block(DIM, mixer, norm_cls=norm, fused_dropout_add_ln=fused) for _ in range(2)
    ).to(device, dtype)  # fmt: skip
    if norm is nn.LayerNorm:
        assert list(blocks[0].state_dict()) == sum(BLOCK_KEYS.values(), [])
    if device == "cuda":
        for block in blocks:
            block.mixer = nn.Linear(DIM, DIM, device=device, dtype=dtype)  # attention takes half precision
    x = torch.randn(2, 9, DIM, device=device, dtype=dtype, requires_grad=True)
    hidden, residual = x, None
    for block in blocks:
        hidden, residual = block(hidden, residual)
    total, step = x, 0
    for block in blocks:
        total = total + step
        total = total + block.mixer(block.norm1(total))
        step = block.mlp(block.norm2(total))
    torch.testing.assert_close((hidden, residual), (step, total))
    wanted = [x, *blocks.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad((hidden + residual).square().sum(), wanted),
        torch.autograd.grad((step + total).square().sum(), wanted),
    )


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("fused", (False, True))
def test_postnorm_block(device, fused):
    block = Block(DIM, mixer, prenorm=False, fused_dropout_add_ln=fused).double()
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    first = block.norm1(block.mixer(x) + x)
    torch.testing.assert_close(block(x), block.norm2(block.mlp(first) + first))
    with pytest.raises(RuntimeError, match="^residual: expected None without prenorm"):
        block(x, x)


@pytest.mark.devices("cpu")
def test_block_without_mlp_and_with_a_subset(device):
    block = Block(DIM, lambda dim: MHA(dim, 4, cross_attn=True), nn.Identity).double()
    assert not hasattr(block, "norm2")
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    hidden, residual = block(x, mixer_subset=slice(0, 1))
    assert torch.equal(residual, x[:, :1])
    torch.testing.assert_close(hidden, block.mixer(block.norm1(x), mixer_subset=slice(0, 1)))
    assert block.mixer.num_heads == 4
    cache = Block(128).allocate_inference_cache(2, 10)
    assert cache.shape == (2, 10, 2, 2, 64)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("fused", (False, True))
@pytest.mark.parametrize("tied", (False, True))
def test_parallel_block(device, fused, tied):
    block = ParallelBlock(DIM, mixer, tied_norm=tied, fused_dropout_add_ln=fused).double()
    keys = [key for part, keys in BLOCK_KEYS.items() if part != "norm2" or not tied for key in keys]
    assert list(block.state_dict()) == keys
    x1, x2, residual = (torch.randn(2, 9, DIM, dtype=torch.float64) for _ in range(3))
    for second, given in ((x2, residual), (None, None)):
        total = x1 + (0 if second is None else second) + (0 if given is None else given)
        out1, out2, new = block(x1, second, given)
        norm2 = block.norm1 if tied else block.norm2
        expected = block.mixer(block.norm1(total)), block.mlp(norm2(total)), total
        torch.testing.assert_close((out1, out2, new), expected)


@pytest.mark.parametrize("fused", (False, True))
def test_residual_in_fp32_and_dropped_paths(device, fused):
    """A sample that is dropped from the first sum has residual 0; the others are divided by 1 - p."""
    block = Block(
        DIM, mixer, norm_cls=RMSNorm, drop_path1=0.5, residual_in_fp32=True, fused_dropout_add_ln=fused
    ).to(device, torch.bfloat16)  # fmt: skip
    x = torch.ones(64, 3, DIM, device=device, dtype=torch.bfloat16)
    _, residual = block(x)
    assert residual.dtype == torch.float32
    total = block(x, torch.zeros_like(x, dtype=torch.float32))[1] - block.eval()(x)[1]
    assert total.shape == x.shape
    block.train()
    block.mixer = nn.Identity()
    block.mlp = nn.Identity()
    del block.norm2, block.dropout2, block.drop_path2
    values = block(x)[1].float().unique().tolist()
    assert values == [0.0, 2.0]


def test_stochastic_depth(device):
    x = torch.ones(400, 2, 3, device=device)
    path = StochasticDepth(0.25)
    out = path(x)
    kept = out[:, 0, 0] != 0
    assert torch.equal(out, (kept / 0.75)[:, None, None].expand_as(out)) and 200 < kept.sum() < 390
    assert path.eval()(x) is x
    assert (StochasticDepth(1.0)(x) == 0).all()


@pytest.mark.devices("cpu")
def test_fused_norms_are_checked(device):
    with pytest.raises(RuntimeError, match="^fused_dropout_add_ln: expected a norm_cls"):
        Block(DIM, mixer, norm_cls=lambda dim: nn.GroupNorm(1, dim), fused_dropout_add_ln=True)
    with pytest.raises(RuntimeError, match="^residual_in_fp32: expected False without prenorm"):
        Block(DIM, mixer, prenorm=False, residual_in_fp32=True)
    block = ParallelBlock(DIM, mixer, resid_dropout1=0.1, resid_dropout2=0.2, fused_dropout_add_ln=True)
    x = torch.randn(1, 2, DIM)
    with pytest.raises(RuntimeError, match="^fused_dropout_add_ln: expected resid_dropout2"):
        block(x, x)


def test_embeddings(device):
    tokens = torch.randint(11, (2, 5), device=device)
    kinds = torch.randint(2, (2, 5), device=device)
    gpt = GPT2Embeddings(DIM, 11, 7, word_embed_proj_dim=16, device=device)
    assert list(gpt.state_dict()) == ["word_embeddings.weight", "project_in.weight", "position_embeddings.weight"]
    positions = torch.tensor([[6, 0, 1, 2, 3]], device=device).expand(2, 5)
    words = gpt.word_embeddings.weight[tokens] @ gpt.project_in.weight.T
    torch.testing.assert_close(gpt(tokens), words + gpt.position_embeddings.weight[:5])
    torch.testing.assert_close(gpt(tokens, positions), words + gpt.position_embeddings.weight[positions])
    bert = BertEmbeddings(DIM, 11, 7, 2, device=device)
    names = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    assert list(bert.state_dict()) == [f"{name}.weight" for name in names]
    words, places, types = (getattr(bert, name).weight for name in names)
    torch.testing.assert_close(bert(tokens), words[tokens] + places[:5] + types[0])
    torch.testing.assert_close(bert(tokens, token_type_ids=kinds), words[tokens] + places[:5] + types[kinds])
    bare = BertEmbeddings(DIM, 11, 0, 0, device=device)
    assert torch.equal(bare(tokens), bare.word_embeddings.weight[tokens])


REFUSED = [
    ("flash_attn.modules.mha", "ParallelMHA"),
    ("flash_attn.modules.mlp", "ParallelMLP"),
    ("flash_attn.modules.mlp", "ParallelGatedMlp"),
    ("flash_attn.modules.embedding", "VocabParallelEmbedding"),
    ("flash_attn.ops.fused_dense", "ColumnParallelLinear"),
]


@pytest.mark.parametrize("module,name", REFUSED)
def test_tensor_parallel_classes_name_their_replacement(module, name):
    with pytest.raises(NotImplementedError, match=f"^{name}: expected .* with torch.distributed.tensor.parallel"):
        getattr(importlib.import_module(module), name)(8, 8, None)


@pytest.mark.parametrize("module", ("flash_attn.models", "flash_attn.models.gpt"))
def test_models_name_their_replacement(module):
    with pytest.raises(ModuleNotFoundError, match="transformers"):
        importlib.import_module(module)


def test_parts_of_ranks():
    parts = [distributed.get_dim_for_local_rank(40, 3, rank, multiple_of=8) for rank in range(3)]
    assert parts == [16, 16, 8]
    with pytest.raises(RuntimeError, match="^dim: expected a multiple of multiple_of"):
        distributed.get_dim_for_local_rank(41, 3, 0, multiple_of=8)


def exchange(device):
    """Values and gradients of the collectives between two processes, and what marked parameters get."""
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    x = torch.full((2, 3), rank + 1.0, device=device, requires_grad=True)
    rows = torch.arange(4.0, device=device)[:, None].expand(4, 3)
    gathered = distributed.all_gather(x, group)
    assert gathered[:, 0].tolist() == [1, 1, 2, 2]
    grad = torch.autograd.grad((gathered * rows * (rank + 1)).sum(), x)[0]
    assert torch.equal(grad, 3 * rows[2 * rank : 2 * rank + 2])
    parts = rows.clone().requires_grad_()
    scattered = distributed.reduce_scatter(parts * (rank + 1), group)
    assert torch.equal(scattered, 3 * rows[2 * rank : 2 * rank + 2])
    grad = torch.autograd.grad((scattered * (rank + 1)).sum(), parts)[0]
    assert torch.equal(grad, (rank + 1) * torch.ones_like(rows) * torch.tensor([1, 1, 2, 2], device=device)[:, None])
    assert (distributed.all_reduce(x, group) == 3).all() and (x == rank + 1).all()
    block = Block(DIM, mixer, sequence_parallel=True, mark_shared_params=True).to(device)
    for p in block.parameters():
        torch.nn.init.constant_(p, rank)
        p.grad = torch.full_like(p, rank + 1.0)
    distributed.sync_shared_params(block, group)
    distributed.allreduce_sequence_parallel_grad(block, group)
    for name, p in block.named_parameters():
        marked = name in BLOCK_KEYS["norm1"] + BLOCK_KEYS["norm2"]
        assert (p == (0 if marked else rank)).all() and (p.grad == (3 if marked else rank + 1)).all()


def test_collectives(device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    if not (torch.distributed.is_available() and getattr(torch.distributed, f"is_{backend}_available")()):
        pytest.skip(f"torch.distributed has no {backend}")
    cp_workers.run_processes(exchange, 2, backend)


def test_benchmark_helpers(device, capsys, tmp_path):
    x = torch.randn(8, 8, device=device, requires_grad=True)
    results = benchmark.benchmark_all(torch.mm, x, x, repeats=2, desc="product")
    assert len(results) == 3 and all(measurement.mean > 0 for _, measurement in results)
    assert "product - Forward + Backward pass" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="^grad: expected shape"):
        benchmark.benchmark_backward(torch.mm, x, x, grad=x[0])
    benchmark.pytorch_profiler(torch.mm, x, x, backward=True, verbose=False, trace_filename=str(tmp_path / "t.json"))
    assert (tmp_path / "t.json").exists()
