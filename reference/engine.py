"""The reference as an engine: open, step, rollback, snapshot, restore, branch, close over `history.py`.

Every verb checks its arguments first and leaves all state as it was when it raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference.blob import damaged, seal, unseal, whole_number
from reference.config import V41Config
from reference.contract import Ledger
from reference.dspark import Draft, DSpark
from reference.errors import CapacityError, InputError, RollbackError, StateError
from reference.history import SequenceHistory, write_logs
from reference.input_check import check_capacity, check_model, check_step, checked_tokens, image_flags
from reference.model import LayerInputs, Model, Output
from reference.precision import Precision
from reference.weights import Weights

SNAPSHOT_FORMAT = "dsv41-history/1"
DECISIONS = ("selection", "candidates", "moe_idx")  # what a step can be told instead of deciding itself


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence.  start must equal the sequence's length.

    image_mask: which tokens stand for an image patch; None means those whose id is config.image_token_id.
    """

    sequence: Hashable
    token_ids: tuple[int, ...]
    start: int
    image_mask: tuple[bool, ...] | None = None


@dataclass
class StepResult:
    """hidden [T, D] after the final norm, logits [T, V], taps name -> [T, ...]; rows in order of the runs."""

    hidden: Tensor
    logits: Tensor
    taps: dict[str, Tensor]


class ReferenceEngine:
    """The engine protocol over the reference model.

    precision: "release" or "float64".  cache_quantizers: the window, latent and index quantisers.
    release_stale_index_k, release_underfilled_selection: reproduce two defects of the release.
    """

    name = "reference"

    def __init__(
        self,
        config: V41Config,
        weights: Weights,
        *,
        precision: str = "release",
        cache_quantizers: bool = True,
        release_stale_index_k: bool = False,
        release_underfilled_selection: bool = False,
    ) -> None:
        check_model(config, weights.config)
        self.config = config
        self.max_rollback = config.max_position_embeddings
        self.model = Model(
            weights,
            Precision(precision, cache_quantizers),
            release_stale_index_k=release_stale_index_k,
            release_underfilled_selection=release_underfilled_selection,
        )
        self._dspark = DSpark(self.model) if config.draft_layers() and self.model.has_head else None
        self._live: dict[int, SequenceHistory] = {}
        self._opened = 0

    def declines(self) -> frozenset[str]:
        """`graphs`: it records none.  `bitwise`: a product's bits may depend on how many rows it has."""
        return frozenset({"graphs", "bitwise"})

    # life cycle

    def open(self, capacity: int) -> int:
        """A new sequence of at most `capacity` tokens."""
        return self._adopt(self.model.new_history(self._checked_capacity(capacity)))

    def close(self, sequence: Hashable) -> None:
        """Forget a sequence; closing it again does nothing."""
        if type(sequence) is not int or not 0 < sequence <= self._opened:
            raise self._unknown(sequence)
        self._live.pop(sequence, None)

    def length(self, sequence: Hashable) -> int:
        """Tokens that the sequence has seen."""
        return self.history(sequence).length

    def history(self, sequence: Hashable) -> SequenceHistory:
        """Everything that a live sequence has seen.  Raises StateError after its close."""
        if type(sequence) is not int or sequence not in self._live:
            raise self._unknown(sequence)
        return self._live[sequence]

    # steps

    def step(
        self,
        runs: Sequence[Any],
        *,
        taps: Collection[str] = (),
        replay: bool = False,
        forced: Mapping[str, Tensor] | None = None,
        layer_inputs: LayerInputs | None = None,
    ) -> StepResult:
        """Append each run to its sequence.  Raises InputError, StateError, CapacityError, nothing changed.

        forced (`L{i}.selection`, `.candidates`, `.moe_idx`) and layer_inputs hold one row for each token of
        the step, as the taps do.  replay is ignored.
        """
        histories, tokens, images = self._checked_runs(runs)
        _check_given(forced or {}, layer_inputs or {}, sum(len(ids) for ids in tokens))
        outputs, begin = [], 0
        before = [(h.length, h.last_key_owner) for h in histories]
        try:
            for history, token_ids, image in zip(histories, tokens, images, strict=True):
                part = slice(begin, begin + len(token_ids))
                begin += len(token_ids)
                outputs.append(
                    self._forward(
                        history,
                        token_ids,
                        image,
                        taps,
                        {name: value[part] for name, value in (forced or {}).items()},
                        {i: (h[part], p[part]) for i, (h, p) in layer_inputs.items()}
                        if layer_inputs
                        else None,
                    )
                )
        except BaseException:
            for history, (length, owner) in zip(histories, before, strict=True):
                history.length, history.last_key_owner = length, owner
            raise
        return StepResult(
            hidden=torch.cat([o.hidden for o in outputs]),
            logits=torch.cat([o.logits for o in outputs]).to(torch.float32)
            if self.model.precision.rounds
            else torch.cat([o.logits for o in outputs]),
            taps={name: _stack_rows([o.taps[name] for o in outputs]) for name in _common_names(outputs)},
        )

    def draft(self, sequence: Hashable, token_id: int, taps: Collection[str] = ()) -> Draft:
        """DSpark's guess of the tokens after `token_id`, which was chosen after the sequence's last token."""
        history = self.history(sequence)
        if self._dspark is None or history.length == 0:
            raise StateError(
                field="draft",
                expected="a configuration with draft stages, and a sequence with at least one token",
                actual=f"{self.config.num_nextn_predict_layers} stages, length {history.length}",
                hint="prefill the sequence first",
            )
        checked_tokens((token_id,), self.config.vocab_size, "token_id")
        return self._dspark.draft(history, token_id, taps)

    def _forward(
        self,
        history: SequenceHistory,
        token_ids: Tensor,
        image: Tensor,
        taps: Collection[str],
        forced: Mapping[str, Tensor],
        layer_inputs: LayerInputs | None,
    ) -> Output:
        start = history.length
        output = self.model.forward(
            history, token_ids, image, taps=taps, forced=forced, layer_inputs=layer_inputs
        )
        if self._dspark is not None and output.main_hidden is not None:
            main_x = self._dspark.observe(history, start, output.main_hidden)
            if "dspark.main_x" in taps:
                output.taps["dspark.main_x"] = main_x
        return output

    # rewinding and copies

    def rollback(self, sequence: Hashable, length: int) -> None:
        """Drop the tokens from `length` on."""
        history = self.history(sequence)
        if type(length) is not int or not 0 <= length <= history.length:
            raise RollbackError(
                field="length",
                expected=f"0 <= length <= {history.length}",
                actual=length,
                hint="a sequence can only be rewound to a length that it has had",
            )
        history.length = length  # last_key_owner stays: every step ends with the same owner

    def snapshot(self, sequence: Hashable) -> bytes:
        """The sequence as sealed safetensors bytes."""
        history = self.history(sequence)
        tensors = {name: log.rows(0, count) for name, (log, count) in history.logs().items()}
        return seal(
            tensors,
            {
                "format": SNAPSHOT_FORMAT,
                "config": self.config.digest(),
                "precision": repr(self.model.precision),
                "length": str(history.length),
                "last_key_owner": "" if history.last_key_owner is None else str(history.last_key_owner),
            },
        )

    def restore(self, blob: bytes, capacity: int) -> int:
        """A new sequence from a snapshot.  Raises SnapshotError with nothing changed."""
        tensors, metadata = unseal(blob)
        expected = {
            "format": SNAPSHOT_FORMAT,
            "config": self.config.digest(),
            "precision": repr(self.model.precision),
        }
        for field, value in expected.items():
            if metadata.get(field) != value:
                raise damaged(
                    field, value, metadata.get(field), "restore into an engine of the same kind and model"
                )
        capacity, length = self._checked_capacity(capacity), whole_number(metadata, "length")
        if length > capacity:
            raise damaged(
                "length", f"at most the capacity asked for, {capacity}", length, "ask for more capacity"
            )
        history = self.model.new_history(capacity)
        history.length = length
        if metadata.get("last_key_owner") != "":
            owner = history.last_key_owner = whole_number(metadata, "last_key_owner")
            sources = [role.index for role in self.config.layers() if role.is_kv_source]
            if owner not in sources:
                raise damaged("last_key_owner", f"one of {sources}", owner)
        write_logs(history.logs(), tensors)
        return self._adopt(history)

    def branch(self, sequence: Hashable) -> int:
        """A second sequence with the same past and capacity."""
        return self.restore(self.snapshot(sequence), self.history(sequence).capacity)

    # books

    def ledger(self) -> Ledger:
        """What the live sequences hold; memory is taken as it is needed, so nothing is ever free."""
        by_kind: dict[str, int] = {}
        for history in self._live.values():
            for name, (log, count) in history.logs().items():
                kind = name.rpartition(".")[2]
                rows = log.rows(0, count)
                by_kind[kind] = by_kind.get(kind, 0) + rows.numel() * rows.element_size()
        return Ledger(
            bytes_by_kind=by_kind,
            allocations_by_kind={},
            sequences=len(self._live),
            graphs=0,
            free=0,
            live=len(self._live),
            shared=0,
            total=len(self._live),
        )

    def state_digest(self, sequence: Hashable) -> dict[str, str]:
        """sha256 over the rows that count, by kind of state."""
        logs = self.history(sequence).logs()
        return {
            name: hashlib.sha256(log.rows(0, count).contiguous().numpy().tobytes()).hexdigest()
            for name, (log, count) in logs.items()
        }

    # checks

    def _adopt(self, history: SequenceHistory) -> int:
        self._opened += 1
        self._live[self._opened] = history
        return self._opened

    def _unknown(self, sequence: Hashable) -> StateError:
        closed = type(sequence) is int and 0 < sequence <= self._opened
        return StateError(
            field="sequence",
            expected="a live sequence of this engine",
            actual=f"{sequence!r}, which was closed" if closed else repr(sequence),
            hint="open a sequence, or restore a snapshot into a new one",
        )

    def _checked_capacity(self, capacity: int) -> int:
        hint = "the configuration's max_position_embeddings is the largest position count"
        check_capacity(capacity, self.config.max_position_embeddings, hint)
        return capacity

    def _checked_runs(self, runs: Sequence[Any]) -> tuple[list[SequenceHistory], list[Tensor], list[Tensor]]:
        check_step(runs)
        histories: list[SequenceHistory] = []
        tokens, images = [], []
        for i, run in enumerate(runs):
            history = self.history(run.sequence)
            if any(history is other for other in histories):
                raise InputError(
                    field=f"runs[{i}].sequence",
                    expected="each sequence once in a step",
                    actual=run.sequence,
                    hint="put consecutive tokens of a sequence into one run",
                )
            ids, image = self._checked_run(run, history, f"runs[{i}]")
            histories.append(history)
            tokens.append(torch.tensor(ids, dtype=torch.int64))
            images.append(torch.tensor(image, dtype=torch.bool))
        return histories, tokens, images

    def _checked_run(
        self, run: Any, history: SequenceHistory, field: str
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        if type(run.start) is not int or run.start != history.length:
            raise StateError(
                field=f"{field}.start",
                expected=f"the sequence's length, {history.length}",
                actual=run.start,
                hint="roll back first, or step the tokens in between",
            )
        ids = checked_tokens(run.token_ids, self.config.vocab_size, f"{field}.token_ids")
        mask = getattr(run, "image_mask", None)
        image = image_flags(ids, mask, self.config.image_token_id, f"{field}.image_mask")
        if run.start + len(ids) > history.capacity:
            raise CapacityError(
                field=field,
                expected=f"an end of at most the sequence's capacity, {history.capacity}",
                actual=run.start + len(ids),
                hint="open the sequence with a larger capacity, or restore a snapshot into one",
            )
        return ids, image


def _check_given(forced: Mapping[str, Tensor], layer_inputs: LayerInputs, rows: int) -> None:
    """Raises InputError for a decision that nobody takes, and for given values of another number of rows."""
    for name in forced:
        if name.rpartition(".")[2] not in DECISIONS:
            words = f"a tap named one of {', '.join(DECISIONS)}"
            raise InputError(field="forced", expected=words, actual=name, hint="only decisions can be forced")
    given = [(f"forced[{name!r}]", value) for name, value in forced.items()]
    given += [(f"layer_inputs[{i}]", value) for i, pair in layer_inputs.items() for value in pair]
    for field, value in given:
        if len(value) != rows:
            raise InputError(
                field=field,
                expected=f"{rows} rows, one a token of the step",
                actual=f"{len(value)} rows",
                hint="give a row for each token, run after run",
            )


def _common_names(outputs: Sequence[Output]) -> list[str]:
    return [name for name in outputs[0].taps if all(name in o.taps for o in outputs)]


def _stack_rows(parts: list[Tensor]) -> Tensor:
    """Rows of several runs one below the other; columns that only some contexts have are NaN, -1 or False."""
    if len({p.shape[1:] for p in parts}) == 1:
        return torch.cat(parts)
    width = max(p.shape[1] for p in parts)
    fill = torch.nan if parts[0].is_floating_point() else False if parts[0].dtype == torch.bool else -1
    return torch.cat([torch.nn.functional.pad(p, (0, width - p.shape[1]), value=fill) for p in parts])
