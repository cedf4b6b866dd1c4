"""The one declaration of per-sequence state, from the configuration.

Allocation, release, ledger, poison, snapshot, rollback and the capability answers are derived from this
table, and nothing else is mutable between steps.

    name       owner         addressing  rows       a row in form "packed"                   in form "release"
    window     every layer   ring        W + R      fp8 codes, e8m0 scales [C + C/32]        bf16 [C]
    pending    kv src r > 1  ring        r - 1 + R  fp32 [2, C]: kv and score                the same
    latent     kv source     append      S // r     fp4 codes, e4m3 scales [C/2 + C/16]      bf16 [C]
    index_key  kv source     append      S // r     fp4 codes, e8m0 scales [Ci/2 + Ci/32]    bf16 [Ci]
    ngram      the model     ring        n - 1 + R  int32                                    int64, all S tokens
    length     the model     scalar      1          int64                                    the same
    floor      the model     scalar      1          int64, lowest length to rewind to        -

S = the sequence's capacity in tokens, R = spare ring rows, r = the layer's compress ratio, n = the largest
n-gram, C = head_dim, Ci = index_head_dim. "packed" is the serving format, "release" what the release's own
code keeps, which has r pending rows instead of r - 1, at ratio 1 too.

ring: a token's row is its position mod rows. append: row j is the group of tokens j*r .. j*r + r - 1.
history: by position. Rewinding lowers `length`: appended rows and histories stand; a ring must still hold
what the dropped tokens pushed out, so it can be rewound by its R spare rows and no further.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from reference.config import LayerRole, V41Config
from reference.errors import InputError
from reference.input_check import check_capacity

FORMS = ("packed", "release")


@dataclass(frozen=True)
class StateKind:
    """One kind of state of one sequence.

    layer: the owner, None for the model's own.  rows, row_shape, dtype: its tensor is [rows, *row_shape].
    addressing: ring | append | history | scalar.  ratio: tokens a row stands for.
    rewindable: tokens by which the length may be lowered without losing a needed row; None = any number.
    snapshot: part of a snapshot.  formula: `rows` in the letters above.
    """

    name: str
    layer: int | None
    rows: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    addressing: str
    rewindable: int | None
    snapshot: bool
    formula: str
    ratio: int = 1

    @property
    def row_bytes(self) -> int:
        return prod(self.row_shape) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    def row_of(self, position: int) -> int:
        """The row that holds the token at `position`."""
        if self.addressing == "ring":
            return position % self.rows
        return position // self.ratio if self.addressing in ("append", "history") else 0


def state_table(
    config: V41Config, *, capacity: int, form: str = "packed", ring_spare: int = 0, drafts: bool = False
) -> list[StateKind]:
    """Every kind of state of a sequence of `capacity` tokens, layer by layer, then the model's own.

    form: "packed" or "release".  ring_spare: R.  drafts: the windows of the draft stages too.
    Raises CapacityError, or InputError for a form or a number of spare rows that doesn't exist.
    """
    _check(config, capacity, form, ring_spare)
    roles = (*config.layers(), *(config.draft_layers() if drafts else ()))
    table = [kind for role in roles for kind in _layer_kinds(config, role, capacity, form, ring_spare)]
    return [*table, *_model_kinds(config, capacity, form, ring_spare)]


def layer_state(
    config: V41Config, layer: int, *, capacity: int, form: str = "packed", ring_spare: int = 0
) -> list[StateKind]:
    """The kinds that one layer owns."""
    _check(config, capacity, form, ring_spare)
    return list(_layer_kinds(config, config.layer(layer), capacity, form, ring_spare))


def state_bytes(
    config: V41Config, *, capacity: int, form: str = "packed", ring_spare: int = 0, drafts: bool = False
) -> int:
    """Bytes of the layers' state of one sequence; the model's own few (n-gram ids, length) are not in it."""
    table = state_table(config, capacity=capacity, form=form, ring_spare=ring_spare, drafts=drafts)
    return sum(kind.bytes for kind in table if kind.layer is not None)


def max_rollback(table: list[StateKind]) -> int | None:
    """Tokens by which a sequence with this state can be rewound; None = any number."""
    return min((kind.rewindable for kind in table if kind.rewindable is not None), default=None)


def _check(config: V41Config, capacity: int, form: str, ring_spare: int) -> None:
    hint = "the configuration's max_position_embeddings bounds a sequence"
    check_capacity(capacity, config.max_position_embeddings, hint)
    if form not in FORMS:
        raise InputError(field="form", expected=f"one of {', '.join(FORMS)}", actual=form)
    if type(ring_spare) is not int or ring_spare < 0:
        raise InputError(field="ring_spare", expected="0 or more spare rows", actual=ring_spare)


def _layer_kinds(
    config: V41Config, role: LayerRole, capacity: int, form: str, spare: int
) -> Iterator[StateKind]:
    packed, width, index_width = form == "packed", config.head_dim, config.index_head_dim
    layer, ratio, bf16, byte = role.index, role.ratio, torch.bfloat16, torch.uint8

    row, dtype = (config.window_row_bytes, byte) if packed else (width, bf16)
    rows = config.sliding_window + spare
    yield StateKind("window", layer, rows, (row,), dtype, "ring", spare, True, "W + R")
    if not role.is_kv_source:
        return
    # packed keeps the open group's earlier tokens only: the token that completes it is in the step itself
    open_rows = ratio - 1 if packed else ratio
    if open_rows > 0 and (ratio > 1 or not packed):
        formula = "r - 1 + R" if packed else "r + R"
        shape = (2, width)
        yield StateKind(
            "pending", layer, open_rows + spare, shape, torch.float32, "ring", spare, True, formula
        )
    groups = capacity // ratio
    row, dtype = (config.latent_row_bytes, byte) if packed else (width, bf16)
    yield StateKind("latent", layer, groups, (row,), dtype, "append", None, True, "S // r", ratio)
    row, dtype = (config.index_row_bytes, byte) if packed else (index_width, bf16)
    yield StateKind("index_key", layer, groups, (row,), dtype, "append", None, True, "S // r", ratio)


def _model_kinds(config: V41Config, capacity: int, form: str, spare: int) -> Iterator[StateKind]:
    if config.hashes_ngrams:
        if form == "packed":
            rows = config.engram_max_ngram_size - 1 + spare
            yield StateKind("ngram", None, rows, (), torch.int32, "ring", spare, True, "n - 1 + R")
        else:
            yield StateKind("ngram", None, capacity, (), torch.int64, "history", None, True, "S")
    yield StateKind("length", None, 1, (), torch.int64, "scalar", None, True, "1")
    if form == "packed":
        yield StateKind("floor", None, 1, (), torch.int64, "scalar", None, True, "1")
