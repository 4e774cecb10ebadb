# pip install '.[examples]'
"""transformers' Trainer with these kernels: a small model of gpt-oss's shape learns a book, packed instead of padded.

    python examples/train_transformers.py [--device cuda] [--steps 12] [--batch 4]

One registration and one name are all that differs from any other training (`register`, attn_implementation). Trained
twice from the same weights on the same passages, whose lengths differ: padded with eager attention, and packed into one
row with "fa_native", which computes no padding. The losses agree but for rounding; the exit status is 1 if they do not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import flash_attn.integrations.transformers

TEXT = Path(__file__).resolve().parent / "data" / "alice.txt"
ALLOWED = {"cpu": 1e-3, "cuda": 5e-2}  # difference of the losses; on a GPU autocast rounds to bfloat16


def passages(count, longest):
    """Token ids of `count` passages of the book, of different lengths; and how many different tokens there are."""
    text = TEXT.read_text(encoding="ascii")
    index = {character: i + 1 for i, character in enumerate(sorted(set(text)))}  # 0 is padding
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        length = int(torch.randint(longest // 8, longest, (1,), generator=generator))
        begin = int(torch.randint(0, len(text) - length, (1,), generator=generator))
        found.append({"input_ids": [index[c] for c in text[begin : begin + length]]})
    return found, len(index) + 1


class Padding:
    """Pads the passages of a batch on the right."""

    def __call__(self, features):
        longest = max(len(x["input_ids"]) for x in features)
        rows = [x["input_ids"] + [0] * (longest - len(x["input_ids"])) for x in features]
        ids = torch.tensor(rows)
        mask = (ids != 0).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(attention, collator, data, vocabulary, options):
    """The loss of every step."""
    transformers.set_seed(1)
    config = transformers.GptOssConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"], sliding_window=16, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=options.batch, learning_rate=3e-3,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=options.device == "cpu",
            bf16=options.device == "cuda",
        )  # fmt: skip
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # without torchrun Trainer would split a packed batch, which is one row, over all GPUs
        trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=collator)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in {"steps": 12, "batch": 4, "longest": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    flash_attn.integrations.transformers.register()
    data, vocabulary = passages(options.steps * options.batch, options.longest)
    padded = train("eager", Padding(), data, vocabulary, options)
    packed = train("fa_native", transformers.DataCollatorWithFlattening(), data, vocabulary, options)
    difference = max(abs(a - b) for a, b in zip(padded, packed))
    print(f"eager, padded:     loss {padded[0]:.4f} -> {padded[-1]:.4f}")
    print(f"fa_native, packed: loss {packed[0]:.4f} -> {packed[-1]:.4f}")
    good = difference <= ALLOWED[options.device] and packed[-1] < packed[0]
    print(f"largest difference {difference:.1e}: {'training ok' if good else 'training FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
