# pip install '.[examples]'
"""T5 learns to reverse words, with its learned position biases in our kernels: transformers' model with "fa_native".

The bias of each distance is added to the scores and gets its gradient there, so that no matrix of scores is ever in
memory. Trained with eager attention too, from the same weights; the exit status is 1 if the losses differ or do not
fall. `--device cuda` runs it on a GPU.
"""

import argparse
import sys

import torch
import transformers

import flash_attn.integrations.transformers

LETTERS, LENGTH = 20, 12
FIRST = 2  # after padding and the end of a sequence


def make_model(attention):
    config = transformers.T5Config(
        vocab_size=FIRST + LETTERS, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=16, relative_attention_max_distance=32, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration._from_config(config, attn_implementation=attention)


def words(batch, generator, device):
    """Words of different lengths, padded, and their mask."""
    letters = torch.randint(FIRST, FIRST + LETTERS, (batch, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (batch, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    return letters.masked_fill(~mask, 0).to(device), mask.to(device)


def train(attention, device, steps):
    model = make_model(attention).to(device).train()
    optimizer, generator, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator(), []
    generator.manual_seed(1)
    for _ in range(steps):
        tokens, mask = words(16, generator, device)
        labels = tokens.flip(1).masked_fill(~mask.flip(1), -100)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args(arguments)
    flash_attn.integrations.transformers.register()
    eager, ours = (train(name, options.device, options.steps) for name in ("eager", "fa_native"))
    difference = max(abs(a - b) for a, b in zip(eager, ours))
    good = difference < (5e-2 if options.device == "cuda" else 1e-3) and ours[-1] < ours[0]
    print(f"loss {ours[0]:.3f} to {ours[-1]:.3f}, eager differs by {difference:.1e}", "ok" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
