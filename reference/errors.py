"""Typed errors of the testbed.

Each one names the field, what was expected of it, what was given, and what the caller can do. An error that
reports several faults at once carries them as `problems`, and its message lists every one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

SHOWN = 100  # problems that a message spells out


class Problem(NamedTuple):
    """One fault inside an error that lists several."""

    field: str
    expected: str
    actual: Any

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, got {self.actual}"


class DSV41Error(Exception):
    """Base of all errors raised on purpose."""

    def __init__(
        self,
        message: str | None = None,
        *,
        field: str | None = None,
        expected: Any = None,
        actual: Any = None,
        hint: str | None = None,
        problems: Iterable[Problem] = (),
    ) -> None:
        self.field, self.expected, self.actual, self.hint = field, expected, actual, hint
        self.problems = tuple(problems)
        if not self.problems and field is not None:
            self.problems = (Problem(field, str(expected), actual),)
        lines = [message] if message else []
        if len(self.problems) == 1:
            lines.append(str(self.problems[0]))
        elif self.problems:
            lines.append(f"{len(self.problems)} problems:")
            lines.extend(f"  - {problem}" for problem in self.problems[:SHOWN])
            if len(self.problems) > SHOWN:
                lines.append(f"  ... and {len(self.problems) - SHOWN} more, all in the error's `problems`")
        if hint:
            lines.append(hint)
        # one fault reads as one line, a list of faults as a list
        super().__init__(("\n" if len(self.problems) > 1 else "; ").join(lines))


class ConfigError(DSV41Error, ValueError):
    """A configuration that describes no V4.1 model. Correct the listed fields."""


class WeightsError(DSV41Error, ValueError):
    """A checkpoint that doesn't fit the configuration, or a tensor that doesn't exist."""


class InputError(DSV41Error, ValueError):
    """An argument of a call: token ids, positions, rows, shapes. Nothing was changed."""


class StateError(DSV41Error):
    """A sequence handle that is closed, foreign or at another length than stated. Nothing was changed."""


class CapacityError(DSV41Error):
    """No room: the sequence's capacity, the pool's slots or pages. Nothing was changed."""


class RollbackError(DSV41Error):
    """A length that the state can't be rewound to. Nothing was changed."""


class SnapshotError(DSV41Error):
    """A blob that is damaged, incomplete, foreign or too long. Nothing was changed."""


class UnsupportedError(DSV41Error):
    """An operation that this layer or engine declines. Ask its capability answers first."""


class AllocationError(DSV41Error):
    """Memory that couldn't be had. What was taken before the failure has been given back."""


class CaptureError(DSV41Error):
    """A graph that couldn't be captured or replayed. The step still ran, once, without a graph."""
