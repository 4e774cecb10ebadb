"""Embeddings of tokens and positions: sums of `nn.Embedding`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_attn.utils.refused import tensor_parallel_class


class _PositionEmbeddings(nn.Module):
    """The sum of token embeddings and learned ones of positions, where max_position_embeddings is above 0."""

    max_position_embeddings: int
    position_embeddings: nn.Embedding

    def _add_positions(self, embeddings: Tensor, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        if self.max_position_embeddings <= 0:
            return embeddings
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], dtype=torch.int64, device=input_ids.device)
        positions: Tensor = self.position_embeddings(position_ids)
        return embeddings + positions


class GPT2Embeddings(_PositionEmbeddings):
    """Embeddings of tokens, projected from word_embed_proj_dim features where that is given, and of positions.

    Arguments:
        embed_dim, vocab_size: int.
        max_position_embeddings: int; at most 0: no positions.
        padding_idx: int or None, a token whose embedding stays 0.
        word_embed_proj_dim: int or None.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        padding_idx: int | None = None,
        word_embed_proj_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width = embed_dim if word_embed_proj_dim is None else word_embed_proj_dim
        self.word_embeddings = nn.Embedding(vocab_size, width, padding_idx=padding_idx, device=device, dtype=dtype)
        self.project_in = None
        if word_embed_proj_dim is not None:
            self.project_in = nn.Linear(width, embed_dim, bias=False, device=device, dtype=dtype)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, device=device, dtype=dtype)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """input_ids, position_ids: int64 (batch, seqlen) -> (batch, seqlen, embed_dim)."""
        embeddings = self.word_embeddings(input_ids)
        if self.project_in is not None:
            embeddings = self.project_in(embeddings)
        return self._add_positions(embeddings, input_ids, position_ids)


class BertEmbeddings(_PositionEmbeddings):
    """Embeddings of tokens, positions and token types.

    Arguments:
        embed_dim, vocab_size: int.
        max_position_embeddings, type_vocab_size: int; at most 0: none.
        padding_idx: int or None, a token whose embedding stays 0.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        type_vocab_size: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, embed_dim, padding_idx=padding_idx, device=device, dtype=dtype)
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, device=device, dtype=dtype)
        if type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(type_vocab_size, embed_dim, device=device, dtype=dtype)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """All int64 (batch, seqlen) -> (batch, seqlen, embed_dim). Default: positions 0, 1, ...; type 0."""
        embeddings = self._add_positions(self.word_embeddings(input_ids), input_ids, position_ids)
        if self.type_vocab_size <= 0:
            return embeddings
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        types: Tensor = self.token_type_embeddings(token_type_ids)
        return embeddings + types


_STYLES = "RowwiseParallel"
VocabParallelEmbedding = tensor_parallel_class("VocabParallelEmbedding", "nn.Embedding", _STYLES)
ColumnParallelEmbedding = tensor_parallel_class("ColumnParallelEmbedding", "nn.Embedding", "ColwiseParallel")
ParallelGPT2Embeddings = tensor_parallel_class("ParallelGPT2Embeddings", "GPT2Embeddings", _STYLES)
