"""Which tokens of a batch are no padding, from masks and positions that are read once for all layers of a model.

Reading a mask or positions waits for the GPU, and a model gives the same tensor to every layer: the first layer reads
it and the result is kept for the others. In the next forward the first layer reads again, so that a buffer may be
refilled by any means between forwards, also by means that torch does not see.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

from flash_attn.ops.rows import equal_steps

Tokens = tuple[torch.Tensor, torch.Tensor]  # (indices, cu_seqlens), as `tokens_of` has them
_State = tuple[object, ...]
_Reader = tuple[int, int]
_Value = TypeVar("_Value")


class _Kept(NamedTuple):
    tensor: weakref.ref[torch.Tensor]  # that was read
    state: _State  # of the tensor, and the other inputs of the value
    reader: _Reader | None  # the layer that read the tensor; None: the value was known when the tensor was made
    value: Any


_kept: dict[int, _Kept] = {}  # by the id of the tensor, as long as it lives


def once_a_pass(x: torch.Tensor, module: torch.nn.Module, about: Hashable, read: Callable[[], _Value]) -> _Value:
    """read(), which reads x, or its result for an earlier layer of this pass over the layers of a model.

    A pass ends where the layer that read x asks again or another model asks, and when x is written. A layer that a
    model uses several times in a forward reads each time.

    Arguments:
        module: the layer that asks.
        about: the other inputs of the value.
    """
    state, reader, kept = _state(x, about), _identity(module), _kept.get(id(x))
    if kept is not None and kept.tensor() is x and kept.state == state and _same_pass(kept.reader, reader):
        known: _Value = kept.value
        return known
    value = read()
    _store(x, state, reader, value)
    return value


def keep(x: torch.Tensor, about: Hashable, value: object) -> None:
    """Let once_a_pass return value until x is written; not for inference tensors, whose writes are not counted."""
    if not x.is_inference():
        _store(x, _state(x, about), None, value)


def _store(x: torch.Tensor, state: _State, reader: _Reader | None, value: object) -> None:
    key = id(x)
    _kept[key] = _Kept(weakref.ref(x, lambda _: _kept.pop(key, None)), state, reader, value)


def _state(x: torch.Tensor, about: Hashable) -> _State:
    version = None if x.is_inference() else x._version
    return version, x.data_ptr(), x.shape, x.stride(), about


def _identity(module: torch.nn.Module) -> _Reader:
    """(the model, the layer) as numbers; layers of models with a cache are numbered."""
    number = getattr(module, "layer_idx", None)
    return id(getattr(module, "config", None)), id(module) if number is None else number


def _same_pass(reader: _Reader | None, asking: _Reader) -> bool:
    return reader is None or (reader[0] == asking[0] and reader[1] != asking[1])


def _execution(x: torch.Tensor) -> tuple[Hashable, ...]:
    """Mode and stream of tensors that are made of x: training cannot use tensors of inference mode."""
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
    return torch.is_inference_mode_enabled(), stream


def is_traced() -> bool:
    """Whether no value of a tensor may be read: in compiled code and in the capture of a CUDA graph."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def runs(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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

    def __init__(self, mask: torch.Tensor) -> None:
        self.first, self.stop = runs(mask)
        contiguous = (self.stop - self.first == mask.sum(1)).all()
        self.full, self.contiguous, self.ends_last = torch.stack([mask.all(), contiguous, mask[:, -1].all()]).tolist()
        self._tokens: dict[int, Tokens] = {}

    @classmethod
    def of(cls, mask: torch.Tensor, module: torch.nn.Module) -> PaddingLayout:
        """The layout of a mask for a layer."""
        return once_a_pass(mask, module, _execution(mask), lambda: cls(mask))

    def tokens(self, mask: torch.Tensor, columns: int) -> Tokens:
        """(indices, cu_seqlens) of the tokens in the last columns of its mask, as `tokens_of` has them."""
        if columns not in self._tokens:
            self._tokens[columns] = tokens_of(mask[:, mask.shape[1] - columns :])
        return self._tokens[columns]


def tokens_of(mask: torch.Tensor) -> Tokens:
    """(indices, cu_seqlens) of the tokens of a mask, bool (batch, columns); waits for the GPU."""
    lengths = mask.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return mask.flatten().nonzero().flatten(), torch.nn.functional.pad(lengths, (1, 0))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_sequences(
    position_ids: torch.Tensor, batch: int, seqlen: int, module: torch.nn.Module
) -> torch.Tensor | None:
    """cu_seqlens of the sequences that position_ids (batch or 1, seqlen) number, over all rows; None: one in each row.

    A sequence begins where a position is not one more than the one before. module: the layer that asks.
    """
    about = (batch, *_execution(position_ids))
    return once_a_pass(position_ids, module, about, lambda: _read_sequences(position_ids, batch, seqlen))


def _read_sequences(position_ids: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor | None:
    begins = torch.nn.functional.pad(position_ids.diff() != 1, (1, 0), value=True).expand(batch, seqlen)
    starts = begins.flatten().nonzero().flatten().int()
    end = starts.new_full((1,), batch * seqlen)
    return torch.cat([starts, end]) if starts.numel() > batch else None


def as_pages(batch: int, seqlen: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(block_table, cu_seqlens_k) of keys (batch, seqlen, heads, head_dim) taken as pages, one for each row."""
    return torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(1), equal_steps(batch, seqlen, device)
