"""Other libraries around these kernels, each in a real call against its own attention: diffusers, accelerate, peft,
sentence-transformers. On the CPU in float32; on a GPU in bfloat16, where errors are measured from float32."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("transformers.masking_utils", reason="this transformers has no AttentionMaskInterface")

from sdpa_harness import recorded
from transformers_models import VOCABULARY, build

import flash_attn.integrations.transformers as ours

NAME = "fa_native"


@pytest.fixture(autouse=True)
def _registered():
    ours.register()


def dtype_of(device):
    return torch.float32 if device == "cpu" else torch.bfloat16


def assert_as_exact(mine, other, exact):
    """No further from exact than twice the other, but for rounding in float32."""
    mine, other, exact = (x.detach().double().cpu() for x in (mine, other, exact))
    error = (mine - exact).norm()
    assert error <= 2 * (other - exact).norm() + 1e-5 * exact.norm(), (error, exact.norm())


def test_diffusers(device):
    """A diffusion transformer by its attention backend "flash", with gradients."""
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).to(device)  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 12, 4, device=device),
        "encoder_hidden_states": torch.randn(1, 5, 32, device=device),
        "pooled_projections": torch.randn(1, 32, device=device),
        "timestep": torch.full((1,), 0.5, device=device),
        "img_ids": torch.randn(12, 3, device=device).round(),
        "txt_ids": torch.zeros(5, 3, device=device),
    }

    def run(backend, dtype):
        copied = copy.deepcopy(model).to(dtype)
        copied.set_attention_backend(backend)
        out = copied(**{name: x.to(dtype) for name, x in inputs.items()}).sample
        out.float().square().sum().backward()
        return out, copied.x_embedder.weight.grad

    with recorded(device, "fwd") as forwards:
        mine = run("flash", dtype_of(device))
    assert len(forwards) == 2  # of the two blocks
    native, exact = run("native", dtype_of(device)), run("native", torch.float32)
    for results in zip(mine, native, exact):
        assert_as_exact(*results)


def gradients_of_training(attention, device, prepare, dtype):
    """Those of the first of three steps, whose losses fall."""
    backward, parameters = prepare(build("llama", attention, device, dtype).train())
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    tokens = torch.randint(1, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(3)).to(device)
    losses, gradients = [], None
    for _ in range(3):
        losses.append(backward(tokens).item())
        if gradients is None:
            gradients = torch.cat([p.grad.flatten() for p in parameters])
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    return gradients


def check_training(device, prepare):
    results = [gradients_of_training(name, device, prepare, dtype_of(device)) for name in (NAME, "eager")]
    assert_as_exact(*results, gradients_of_training("eager", device, prepare, torch.float32))


def test_accelerate(device):
    """A model that it prepares, its backward and its clipping."""
    accelerate = pytest.importorskip("accelerate")

    def prepare(model):
        accelerator = accelerate.Accelerator(cpu=device == "cpu")
        model = accelerator.prepare(model)
        parameters = list(model.parameters())

        def backward(tokens):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(parameters, 1.0)
            return loss

        return backward, parameters

    check_training(device, prepare)


def test_peft(device):
    """LoRA of all projections: the adapters alone learn."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")

    def prepare(model):
        torch.manual_seed(5)
        model = peft.get_peft_model(model, config)
        trained = [p for p in model.parameters() if p.requires_grad]
        assert len(trained) == 2 * 4 * 2  # two layers, four projections, two factors

        def backward(tokens):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            return loss

        return backward, trained

    check_training(device, prepare)


def test_sentence_transformers(device, tmp_path):
    """Embeddings of sentences of different lengths, which the encoder pads and we do not compute."""
    library = pytest.importorskip("sentence_transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"the cat sat on a mat and saw another dog".split()]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(7)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        initializer_range=0.2,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path)
    transformers.BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    sentences = ["the cat sat on a mat", "another dog", "a cat and another dog saw the mat on the cat"]

    def encode(attention, dtype):
        options = {"attn_implementation": attention, "dtype": dtype}
        model = library.SentenceTransformer(str(tmp_path), model_kwargs=options, device=device)
        assert model[0].auto_model.config._attn_implementation == attention
        return model.encode(sentences, convert_to_tensor=True, show_progress_bar=False)

    assert_as_exact(*(encode(name, dtype_of(device)) for name in (NAME, "eager")), encode("eager", torch.float32))
