"""Taps: any inner tensor of a step by its name, at no cost when nobody asks.

Names are those of the golden files, `L{layer}.{tensor}` or a plain name of the model; `*` and `?` match as in
a file name, so that "L5.*" is all of layer 5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase

from torch import Tensor


class Taps:
    """Collects the wanted tensors of one run.  A tap that takes work to compute is given as a function."""

    def __init__(self, wanted: Collection[str] = ()) -> None:
        self._exact = frozenset(name for name in wanted if not any(c in name for c in "*?["))
        self._patterns = tuple(name for name in wanted if name not in self._exact)
        self.values: dict[str, Tensor] = {}

    def wants(self, name: str) -> bool:
        return name in self._exact or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def __call__(self, name: str, value: Tensor | Callable[[], Tensor]) -> None:
        if (self._exact or self._patterns) and self.wants(name):
            self.values[name] = (value() if callable(value) else value).detach().clone()
