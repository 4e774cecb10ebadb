"""Adapters of context parallelism: models of transformers and MHA, their tokens on ranks that are threads."""

from __future__ import annotations

import copy

import pytest
import torch

from flash_attn.context_parallel import CpPlan, LocalGroup
from flash_attn.modules.mha import MHA

pytestmark = pytest.mark.devices("cpu")

LENGTHS = (17, 1, 0, 9)  # of packed documents
BOUNDS = (0, 17, 18, 18, 27)


def summed(results):
    """The sum over ranks of every entry of {name: tensor}."""
    return {name: sum(result[name] for result in results) for name in results[0]}


def assert_same(ours, theirs, tolerance=1e-10):
    assert ours.keys() == theirs.keys()
    different = [name for name, x in ours.items() if not torch.allclose(x, theirs[name], tolerance, tolerance)]
    assert not different


# ---- MHA ----

MODULES = {
    "causal": {"causal": True},
    "grouped, no mask": {"num_heads_kv": 2},
    "rotary": {"rotary_emb_dim": 8, "causal": True},
    "rotary interleaved, grouped": {"rotary_emb_dim": 4, "rotary_emb_interleaved": True, "num_heads_kv": 1},
    "xpos, window": {"rotary_emb_dim": 8, "rotary_emb_scale_base": 16.0, "window_size": (5, 0), "causal": True},
    "alibi": {"use_alibi": True, "causal": True},
    "checkpointing, residual": {"checkpointing": True, "return_residual": True, "rotary_emb_dim": 8, "causal": True},
}


def mha(**options):
    torch.manual_seed(3)
    return MHA(32, 4, use_flash_attn=True, dtype=torch.float64, **options)


def out_of(result):
    return result[0] if isinstance(result, tuple) else result


def gradients(module, out, dout):
    grads = torch.autograd.grad(out, list(module.parameters()), dout)
    return dict(zip((name for name, _ in module.named_parameters()), grads))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_mha_of_a_group(device, name, ranks):
    module = mha(**MODULES[name])
    x, dout = torch.randn(2, 2, 10 * ranks, 32, dtype=torch.float64)
    layout = "contiguous" if "window" in name else "zigzag"

    def run(rank):
        own = copy.deepcopy(module)
        own.set_context_parallel_group(rank, layout=layout)
        plan = CpPlan.dense(x.shape[1], group=rank, layout=layout)
        for _ in range(2):
            out = out_of(own(plan.shard(x, 1)))
        return plan.unshard(out.detach(), 1), gradients(own, out, plan.shard(dout, 1))

    results = LocalGroup(ranks).run(run)
    out = out_of(module(x))
    torch.testing.assert_close(results[0][0], out, atol=1e-10, rtol=0)
    assert_same(summed([grads for _, grads in results]), gradients(module, out, dout))


@pytest.mark.parametrize("name", ["rotary", "xpos, window", "alibi"])
def test_mha_of_a_packed_plan(device, name):
    """Beside each document alone, for without a plan cu_seqlens does without rotary embedding."""
    module = mha(**MODULES[name])
    x, dout = torch.randn(2, BOUNDS[-1], 32, dtype=torch.float64)

    def run(rank):
        plan = CpPlan.varlen(BOUNDS, group=rank)
        out = module(plan.shard(x, 0), cp_plan=plan)
        return plan.unshard(out.detach(), 0), gradients(module, out, plan.shard(dout, 0))

    results = LocalGroup(2).run(run)
    out = torch.cat([module(part[None])[0] for part in x.split(LENGTHS) if len(part)])
    tolerance = 1e-5 if "xpos" in name else 1e-10  # of its tables, in float32, centred in each document here
    torch.testing.assert_close(results[0][0], out, atol=tolerance, rtol=0)
    assert_same(summed([grads for _, grads in results]), gradients(module, out, dout), tolerance)


def test_mha_takes_a_process_group(device):
    module = mha(causal=True)
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    expected = out_of(module(x))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module.set_context_parallel_group(torch.distributed.group.WORLD)
        out = out_of(module(x))
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)


def test_mha_makes_one_plan_for_a_length(device, monkeypatch):
    module = mha(causal=True)
    made = []
    dense = CpPlan.dense
    monkeypatch.setattr(CpPlan, "dense", lambda seqlen, **options: made.append(seqlen) or dense(seqlen, **options))

    def run(rank):
        module.set_context_parallel_group(rank)
        for tokens in (6, 6, 8, 8, 8):
            module(torch.zeros(1, tokens, 32, dtype=torch.float64))
        module.set_context_parallel_group(None)
        module(torch.zeros(1, 5, 32, dtype=torch.float64))

    LocalGroup(1).run(run)
    assert made == [6, 8]


def test_mha_refuses(device):
    x = torch.zeros(1, 6, 32, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 6], dtype=torch.int32)

    def run(rank):
        module = mha(layer_idx=0)
        with pytest.raises(TypeError, match="^cp_plan: expected a CpPlan, got"):
            module(x, cp_plan=3)
        module.set_context_parallel_group(rank)
        with pytest.raises(RuntimeError, match="^inference_params: expected None with context parallelism"):
            module(x, inference_params=object())
        with pytest.raises(RuntimeError, match="^cu_seqlens: expected None with context parallelism"):
            module(x[0], cu_seqlens=cu_seqlens, max_seqlen=6)
        with pytest.raises(RuntimeError, match=r"^x: expected \(batch, tokens, embed_dim\)"):
            module(x[0])
        expected = r"^x: expected \(batch, num_tokens, embed_dim\) with the 6 tokens" if rank.rank else "on ranks"
        with pytest.raises(RuntimeError, match=expected):
            module(x[:, : 6 - rank.rank], cp_plan=CpPlan.dense(12, group=rank))
        with pytest.raises(RuntimeError, match="^CpPlan: expected the same on every rank"):
            module(x[:, : 6 - rank.rank])
        for options in ({"cross_attn": True, "use_flash_attn": True}, {}):
            with pytest.raises(RuntimeError, match="^group: expected None with"):
                MHA(32, 4, **options).set_context_parallel_group(rank)

    LocalGroup(2).run(run)


def test_mha_errors_of_one_rank_raise_on_all(device):
    x = torch.zeros(1, 6, 32, dtype=torch.float64)

    def run(rank):
        is_bad = rank.rank == 1

        def raises(error, message):
            told = rf"got errors on ranks \[1\] \(rank 1: {error.__name__}: {message}"
            return pytest.raises(error if is_bad else RuntimeError, match=message if is_bad else told)

        module = mha()
        plan = CpPlan.dense(12, group=rank)
        with raises(TypeError, "cp_plan: expected a CpPlan, got 3"):
            module(x, cp_plan=3 if is_bad else plan)
        with raises(RuntimeError, "x: expected embed_dim 32"):
            module(x[..., :-1] if is_bad else x, cp_plan=plan)
        with raises(RuntimeError, "key_padding_mask: expected None"):
            module(x, cp_plan=plan, key_padding_mask=x if is_bad else None)
        module.set_context_parallel_group(rank)
        for _ in range(2):  # before and after the module has a plan
            with raises(RuntimeError, r"x: expected \(batch, tokens, embed_dim\)"):
                module(x[0] if is_bad else x)
            assert module(x).shape == x.shape
        return True

    assert LocalGroup(2, timeout=30).run(run) == [True] * 2


# ---- transformers ----


@pytest.fixture
def models():
    """`build` of transformers_models, with both attention functions registered."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("transformers.masking_utils", reason="this transformers has no AttentionMaskInterface")
    import transformers_models

    import flash_attn.integrations.transformers as ours
    import flash_attn.integrations.transformers_cp as ours_cp

    ours.register()
    ours_cp.register_context_parallel()
    return transformers_models


def whole_batch(models, packed):
    """(ids, labels, keyword arguments) for all tokens in one process."""
    torch.manual_seed(4)
    ids = torch.randint(1, models.VOCABULARY, (1, BOUNDS[-1]) if packed else (2, 37))
    labels = torch.randint(1, models.VOCABULARY, ids.shape)
    labels[0, 5:8] = -100
    positions = None
    if packed:
        labels[:, [17, 18]] = -100  # the first of a document is no label of the last one's end
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return ids, labels, {"input_ids": ids, "labels": labels, "position_ids": positions, "use_cache": False}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_transformers(models, device, name, packed, ranks):
    """Logits, the loss and the gradients of all parameters; the model itself is not changed."""
    import flash_attn.integrations.transformers as ours
    import flash_attn.integrations.transformers_cp as ours_cp

    dtype = torch.float32 if name in ("gpt_oss", "deepseek_v3") else torch.float64  # experts know no float64
    model = models.build(name, ours.NAME, dtype=dtype)
    ids, labels, whole = whole_batch(models, packed)
    expected = model(**whole)
    expected.loss.backward()

    def run(rank):
        own = copy.deepcopy(model)
        own.zero_grad()
        own.set_attn_implementation(ours_cp.NAME)
        plan = CpPlan.varlen(BOUNDS, group=rank) if packed else CpPlan.dense(ids.shape[1], group=rank)
        found = own(**ours_cp.context_parallel_inputs(plan, ids, labels))
        found.loss.backward()
        grads = {key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in own.named_parameters()}
        return plan.unshard(found.logits.detach(), 1), {**grads, "loss": found.loss.detach()}

    results = LocalGroup(ranks).run(run)
    tolerance = 1e-4 if dtype is torch.float32 else 1e-5  # norms, rotary embedding and the loss are float32
    torch.testing.assert_close(results[0][0], expected.logits, atol=tolerance, rtol=tolerance)
    grads = {key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in model.named_parameters()}
    assert_same(summed([result for _, result in results]), {**grads, "loss": expected.loss.detach()}, tolerance)
    if name == "gpt_oss":
        assert any("sinks" in key and x.norm() > 1e-5 for key, x in grads.items())


def test_transformers_passes_over_checkpoints_and_masks_of_ones(models, device):
    """Gradient checkpointing, an empty cache, a mask without padding, and inputs that are made by hand."""
    import flash_attn.integrations.transformers as ours

    model = models.build("mistral", ours.NAME, dtype=torch.float64).train()
    ids, _, _ = whole_batch(models, False)
    weights = torch.randn(2, 37, models.VOCABULARY, dtype=torch.float64)
    grads = torch.autograd.grad(model(input_ids=ids).logits, list(model.parameters()), weights)

    def run(rank):
        own = copy.deepcopy(model)
        own.set_attn_implementation("fa_cp")
        own.gradient_checkpointing_enable({"use_reentrant": False})
        plan = CpPlan.dense(37, group=rank, method="ring", layout="contiguous")
        inputs = {"input_ids": plan.shard(ids, 1), "position_ids": plan.positions()[None], "cp_plan": plan}
        mask = torch.ones_like(inputs["input_ids"])
        with torch.no_grad():
            logits = own.eval()(**inputs).logits
        trained = own.train()(**inputs, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(trained, logits, atol=1e-10, rtol=0)
        return dict(enumerate(torch.autograd.grad(trained, list(own.parameters()), plan.shard(weights, 1))))

    assert_same(summed(LocalGroup(2).run(run)), dict(enumerate(grads)), 1e-5)


def test_transformers_compares_positions_that_were_written(models, device):
    """Those of context_parallel_inputs too, which are known to be the plan's until then."""
    import flash_attn.integrations.transformers_cp as ours_cp

    model = models.build("llama", "fa_cp").eval()
    ids = torch.randint(1, models.VOCABULARY, (2, 12))

    def run(rank):
        plan = CpPlan.dense(12, group=rank)
        inputs = ours_cp.context_parallel_inputs(plan, ids)
        model(**inputs)
        inputs["position_ids"].add_(1)
        with pytest.raises(RuntimeError, match=r"^position_ids: expected plan.positions\(\)"):
            model(**inputs)
        inputs["position_ids"].sub_(1)
        model(**inputs)

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            LocalGroup(1).run(run)


def test_labels_are_shifted_over_the_ranks(models, device):
    import flash_attn.integrations.transformers_cp as ours_cp

    ids = torch.arange(27)[None]

    def run(rank):
        plan = CpPlan.varlen(BOUNDS, group=rank, layout="zigzag")
        inputs = ours_cp.context_parallel_inputs(plan, ids, ids)
        assert inputs["num_items_in_batch"] == 27 - 3
        own, labels = plan.token_indices(), inputs["shift_labels"][0]
        last = torch.isin(own, torch.tensor([16, 17, 26]))
        assert torch.equal(labels, torch.where(last, -100, own + 1))
        assert torch.equal(inputs["position_ids"][0], plan.positions())
        with pytest.raises(RuntimeError, match="^labels: expected shape"):
            ours_cp.context_parallel_inputs(plan, ids, ids[:, 1:])
        with pytest.raises(TypeError, match="^plan: expected a CpPlan"):
            ours_cp.context_parallel_inputs(None, ids)

    LocalGroup(2).run(run)


def test_transformers_refuses(models, device):
    import flash_attn.integrations.transformers_cp as ours_cp

    with pytest.raises(ValueError, match="^name: expected one without"):
        ours_cp.register_context_parallel("flash_cp")
    model = models.build("llama", "fa_cp")
    ids = torch.randint(1, models.VOCABULARY, (2, 12))
    with pytest.raises(TypeError, match="^cp_plan: expected a CpPlan among the keyword arguments of the model"):
        model(input_ids=ids)

    def run(rank):
        plan = CpPlan.dense(12, group=rank)
        inputs = ours_cp.context_parallel_inputs(plan, ids)
        own, positions = inputs["input_ids"], inputs.pop("position_ids")
        padding = torch.ones_like(own)
        padding[0, 0] = 0
        with torch.no_grad():
            for mask in (padding, torch.ones_like(ids)):
                with pytest.raises(
                    NotImplementedError, match="^attention_mask: expected None with context parallelism"
                ):
                    model(**inputs, position_ids=positions, attention_mask=mask)
            with pytest.raises(NotImplementedError, match="^attention_mask: expected None with context parallelism"):
                model(**inputs, position_ids=positions, attention_mask=torch.zeros(2, 1, 6, 6))
            cache = model(**{**inputs, "use_cache": True}, position_ids=positions).past_key_values
            with pytest.raises(NotImplementedError, match="^past_key_values: expected None or an empty one"):
                model(**inputs, position_ids=positions, **{models.cache_argument(): cache})
            for given in ({}, {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}):
                with pytest.raises(RuntimeError, match=r"^position_ids: expected plan.positions\(\) of this rank"):
                    model(**inputs, **given)
            with pytest.raises(RuntimeError, match="^query: expected the 6 tokens of rank"):
                model(input_ids=ids, cp_plan=plan)
            cu_seqlens = torch.tensor([0, 6, 12], dtype=torch.int32)
            with pytest.raises(NotImplementedError, match="^cu_seq_lens_q: expected None with context parallelism"):
                model(**inputs, position_ids=positions, cu_seq_lens_q=cu_seqlens)
            packed = ours_cp.context_parallel_inputs(CpPlan.varlen([0, 5, 12], group=rank), ids)
            with pytest.raises(RuntimeError, match="^query: expected a batch of 1 with a packed plan, got 2"):
                model(**packed)
            others = positions if rank.rank else positions + 1  # what one rank does is told to all
            with pytest.raises(
                RuntimeError, match="expected valid arguments on every rank" if rank.rank else "position"
            ):
                model(**inputs, position_ids=others)
            is_bad = rank.rank == 1  # before the plan is known
            for given, name in (
                ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]] * 2)}, "attention_mask"),
                ({"cp_plan": None}, "cp_plan"),
            ):
                told = rf"got errors on ranks \[1\] \(rank 1: [A-Za-z]+: {name}: expected"
                with pytest.raises((NotImplementedError, TypeError, RuntimeError), match=name if is_bad else told):
                    model(**{**inputs, **(given if is_bad else {})}, position_ids=positions)
            assert model(**inputs, position_ids=positions).logits.shape == (2, 6, models.VOCABULARY)

    LocalGroup(2, timeout=60).run(run)
