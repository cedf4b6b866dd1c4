"""Checks of what a caller hands in, one home for every door: both engines and their layers.

Each raises its typed error before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reference.config import V41Config
from reference.errors import CapacityError, InputError


def check_model(config: V41Config, weights: V41Config) -> None:
    """The configuration of an engine is that of its weights. Raises InputError."""
    if config.digest() != weights.digest():
        raise InputError(
            field="weights.config",
            expected=f"the configuration {config.digest()[:12]}",
            actual=weights.digest()[:12],
            hint="build the weights from the configuration that the engine gets",
        )


def check_step(runs: Any) -> None:
    """A step is a list of runs, each with a sequence, token_ids and a start. Raises InputError."""
    if isinstance(runs, (str, bytes)) or not isinstance(runs, Sequence):
        raise InputError(
            field="runs", expected="a sequence of runs", actual=type(runs).__name__, hint="pass a list of Run"
        )
    if not runs:
        raise InputError(field="runs", expected="at least one run", actual=0, hint="a step needs tokens")
    for i, run in enumerate(runs):
        missing = [name for name in ("sequence", "token_ids", "start") if not hasattr(run, name)]
        if missing:
            raise InputError(
                field=f"runs[{i}]",
                expected="a Run with sequence, token_ids and start",
                actual=f"{type(run).__name__} without {', '.join(missing)}",
                hint="build runs with reference.engine.Run",
            )


def checked_tokens(token_ids: Any, vocab_size: int, field: str) -> tuple[int, ...]:
    """The ids as a tuple, at least one, each an integer, 0 <= id < vocab_size. Raises InputError."""
    if isinstance(token_ids, str) or not isinstance(token_ids, Sequence):
        raise InputError(
            field=field,
            expected="a sequence of integers",
            actual=type(token_ids).__name__,
            hint="pass a tuple or a list of token ids",
        )
    ids = tuple(token_ids)
    if not ids:
        raise InputError(field=field, expected="at least one token", actual=0, hint="leave the run out")
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InputError(
                field=f"{field}[{i}]",
                expected=f"an integer, 0 <= id < {vocab_size}",
                actual=token,
                hint="ids are those of the model's tokenizer",
            )
    return ids


def image_flags(
    token_ids: Sequence[int], mask: Sequence[Any] | None, image_token_id: int, field: str
) -> tuple[bool, ...]:
    """Which tokens stand for an image patch: the mask, or without one those with the image token's id.

    Raises InputError for a mask of another length.
    """
    if mask is None:
        return tuple(token == image_token_id for token in token_ids)
    if len(mask) != len(token_ids):
        raise InputError(
            field=field,
            expected=f"{len(token_ids)} values, one a token",
            actual=len(mask),
            hint="mark every token of the run, or pass None",
        )
    return tuple(bool(m) for m in mask)


def check_capacity(capacity: Any, limit: int, hint: str) -> None:
    """A capacity is a number of tokens in 1..limit. Raises CapacityError."""
    if type(capacity) is not int or not 0 < capacity <= limit:
        raise CapacityError(
            field="capacity", expected=f"1 <= capacity <= {limit} tokens", actual=capacity, hint=hint
        )
