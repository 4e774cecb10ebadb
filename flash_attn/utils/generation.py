"""The state of a generation, as the layers of a model share it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch


@dataclass
class InferenceParams:
    """The progress of a generation, and the caches of its layers.

    Attributes:
        max_seqlen: int, the longest sequence, prompt included.
        max_batch_size: int.
        seqlen_offset: int, the number of tokens in the caches. The model's caller advances it.
        batch_size_offset: int, the row of the caches that belongs to the first sequence.
        key_value_memory_dict: layer_idx -> cache (max_batch_size, max_seqlen, 2, nheads_k, head_dim).
        lengths_per_sample: int32 (max_batch_size,) or None: the number of tokens of each sequence, where they differ
            or where a captured graph must read it from memory.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    lengths_per_sample: torch.Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begin a new generation with the same caches."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()
