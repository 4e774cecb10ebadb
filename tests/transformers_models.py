"""Small, randomly initialised models of transformers, for the tests of flash_attn.integrations.transformers."""

from __future__ import annotations

import inspect

import torch

VOCABULARY, WINDOW = 61, 8
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "initializer_range": 0.2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
# Every token goes to every expert: a choice of experts would make a rounding a jump.
MLA = {
    "head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
MODELS = {
    "gpt_oss": ("GptOssConfig", {**LAYERS, "num_local_experts": 2, "num_experts_per_tok": 2}),
    "llama": ("LlamaConfig", {}),
    "gemma2": ("Gemma2Config", {**LAYERS, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 16}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "deepseek_v3": ("DeepseekV3Config", MLA),
}


def cache_argument():
    """The name under which models and mask functions take a cache: models ignore the other one without a word."""
    from transformers.masking_utils import create_causal_mask

    return "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def build(name, attention, device="cpu", dtype=torch.float32, **changes):
    """A model of the table with the same weights, rounded to bfloat16, whatever its attention and dtype."""
    import transformers

    config_class, options = MODELS[name]
    given = {key: value for key, value in {**COMMON, **options, **changes}.items() if value is not None}
    generator_state = torch.get_rng_state()
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config_class)(**given), attn_implementation=attention, dtype=torch.float32
    )
    torch.set_rng_state(generator_state)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    return model.to(device).eval()
