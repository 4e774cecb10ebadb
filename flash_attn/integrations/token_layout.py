"""Which tokens of a batch are there, from masks and positions, once for all layers of a model.

A layout is kept as an attribute of the mask or the positions it was read from, which a model hands to every layer: the
host waits for the GPU once a forward, not once a layer.
"""

from __future__ import annotations

import torch

from flash_attn.ops.rows import equal_steps

_ATTRIBUTE = "_flash_attn_layout"


def is_traced() -> bool:
    """Whether no value of a tensor may be read: in compiled code and in the capture of a CUDA graph."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def runs(mask):
    """(first, stop), int32 (batch,): where the run of tokens of each row begins and ends; without tokens both are 0.

    mask: bool (batch, columns).
    """
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    stop = (mask * columns).amax(1)
    first = mask.shape[1] - (mask * columns.flip(0)).amax(1)
    return torch.minimum(first, stop).int(), stop.int()


class PaddingLayout:
    """A padding mask, bool (batch, columns), as the attention function asks for it.

    full: every column is a token. contiguous: the tokens of each row form one run, from `first` to `stop`.
    ends_last: the last column is a token in every row.
    """

    def __init__(self, mask):
        self.first, self.stop = runs(mask)
        contiguous = (self.stop - self.first == mask.sum(1)).all()
        self.full, self.contiguous, self.ends_last = torch.stack([mask.all(), contiguous, mask[:, -1].all()]).tolist()
        self._tokens = None

    @classmethod
    def of(cls, mask):
        layout = getattr(mask, _ATTRIBUTE, None)
        if layout is None:
            layout = cls(mask)
            setattr(mask, _ATTRIBUTE, layout)
        return layout

    def tokens(self, mask):
        """(indices in the flattened mask, cu_seqlens) of its tokens."""
        if self._tokens is None:
            self._tokens = tokens_of(mask)
        return self._tokens


def tokens_of(mask):
    """(indices, cu_seqlens) of the tokens of a mask, bool (batch, columns); waits for the GPU."""
    lengths = mask.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return mask.flatten().nonzero().flatten(), torch.nn.functional.pad(lengths, (1, 0))


@torch.compiler.disable
def packed_sequences(position_ids, batch, seqlen):
    """cu_seqlens of the sequences that position_ids (batch or 1, seqlen) number, over all rows; None: one in each row.

    A sequence begins where a position is not one more than the one before.
    """
    layout = getattr(position_ids, _ATTRIBUTE, None)
    if layout is None:
        begins = torch.nn.functional.pad(position_ids.diff() != 1, (1, 0), value=True).expand(batch, seqlen)
        starts = begins.flatten().nonzero().flatten().int()
        end = starts.new_full((1,), batch * seqlen)
        layout = (torch.cat([starts, end]) if starts.numel() > batch else None,)
        setattr(position_ids, _ATTRIBUTE, layout)
    return layout[0]


def as_pages(batch, seqlen, device):
    """(block_table, cu_seqlens_k) of keys (batch, seqlen, heads, head_dim) taken as pages, one for each row."""
    return torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(1), equal_steps(batch, seqlen, device)
