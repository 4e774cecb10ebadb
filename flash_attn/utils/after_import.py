"""Imports that follow the import of another module, which this package does not import itself."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder(MetaPathFinder):
    """Finds `awaited` as usual, once, and imports `name` after it has run."""

    def __init__(self, awaited: str, name: str) -> None:
        self._awaited, self._name = awaited, name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._awaited:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_both(module: ModuleType) -> None:
                run(module)
                importlib.import_module(self._name)

            spec.loader.exec_module = run_both  # type: ignore[method-assign]
        return spec


def import_after(awaited: str, name: str) -> None:
    """Import the module `name` as soon as `awaited` has been imported: now, if it has."""
    if awaited in sys.modules:
        importlib.import_module(name)
    else:
        sys.meta_path.insert(0, _Finder(awaited, name))
