"""Signatures as the tests compare them."""

from __future__ import annotations

import inspect


def plain_signature(function) -> str:
    """Names, kinds and defaults of the parameters, without annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
