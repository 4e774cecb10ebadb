# pip install '.[examples]'
"""Text with images in Gemma 3: the tokens of an image see each other both ways, all others the tokens before them.

transformers' Gemma 3, small and random, takes a training step with eager attention and with "fa_native", which makes
ranges of keys of the model's masks: two numbers a token instead of a score for each pair. The exit status is 1 if the
losses differ. `--device cuda` runs it on a GPU.
"""

import argparse
import sys

import torch
import transformers

import flash_attn.integrations.transformers

IMAGES = ((6, 22), (30, 46))  # tokens [begin, end) of each row
LENGTH, VOCABULARY, WINDOW = 64, 64, 12


def make_model(attention):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = {
        "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"], "initializer_range": 0.2, **sizes,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config={"image_size": 28, "patch_size": 14, **sizes}, image_token_id=VOCABULARY - 1
    )
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=attention)


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args(arguments).device
    flash_attn.integrations.transformers.register()
    torch.manual_seed(1)
    tokens = torch.randint(1, VOCABULARY - 1, (2, LENGTH), device=device)
    is_image = torch.zeros_like(tokens)  # whose features would take the places of these tokens' embeddings
    for begin, end in IMAGES:
        is_image[:, begin:end] = 1
    losses = {}
    for attention in ("eager", flash_attn.integrations.transformers.NAME):
        model = make_model(attention).to(device, torch.bfloat16 if device == "cuda" else torch.float32).train()
        loss = model(input_ids=tokens, token_type_ids=is_image, labels=tokens).loss
        loss.backward()
        losses[attention] = loss.item()
    eager, ours = losses.values()
    good = abs(eager - ours) < (3e-2 if device == "cuda" else 1e-4)
    print(f"loss with eager attention {eager:.4f}, with fa_native {ours:.4f}", "ok" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
