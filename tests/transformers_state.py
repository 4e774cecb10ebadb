"""What transformers keeps of the flash attention that it loaded last."""

from __future__ import annotations

_FUNCTIONS = (
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_pad_fn",
    "_unpad_fn",
    "_process_flash_kwargs_fn",
    "_process_with_kvcache_kwargs_fn",
)


def keep_loaded_functions(gates, monkeypatch):
    """Let a test load an implementation anew; what was loaded comes back after it."""
    monkeypatch.setattr(gates, "_loaded_implementation", None)
    for name in _FUNCTIONS:
        monkeypatch.setattr(gates, name, getattr(gates, name))
