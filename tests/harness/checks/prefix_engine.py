"""An engine of nothing but bookkeeping: a row is a function of the tokens before it. Fast, correct, and easy to break.

It keeps what a real one keeps (slots, capacities, generations, a ledger, graphs by bucket), so that each kind of defect
has a place. `defects` names those to build in.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harness.engine import StepResult
from reference.errors import (
    AllocationError,
    CapacityError,
    InputError,
    RollbackError,
    SnapshotError,
    StateError,
)
from reference.ledger import Ledger

BUCKETS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Handle:
    slot: int
    generation: int


@dataclass
class Held:
    tokens: list[int] = field(default_factory=list)
    capacity: int = 0
    longest: int = 0
    salt: str = ""  # what a defect has left in the state


class PrefixEngine:
    name = "prefix"
    max_rollback = 8
    page_tokens = 16

    def __init__(
        self, config: Any, weights: Any = None, *, defects: tuple[str, ...] = (), max_sequences: int = 8
    ) -> None:
        self.config, self.defects, self.max_sequences = config, frozenset(defects), max_sequences
        self.buckets = BUCKETS
        self.live: dict[Handle, Held] = {}
        self.free = list(range(max_sequences))[::-1]
        self.generations = [0] * max_sequences
        self.given: set[Handle] = set()
        self.leaked = self.steps = 0
        self.graphs: dict[int, int] = {}
        self.last_slots: list[int] = []
        self.fault_injection = None

    def has(self, defect: str) -> bool:
        return defect in self.defects

    def declines(self) -> frozenset[str]:
        return frozenset({"taps"})

    # life cycle

    def open(self, capacity: int) -> Handle:
        if isinstance(capacity, bool) or not isinstance(capacity, int):
            raise InputError(field="capacity", expected="an int", actual=capacity, hint="pass a count")
        if not 0 < capacity <= self.config.max_position_embeddings:
            raise CapacityError(field="capacity", expected="1..maximum", actual=capacity, hint="ask for less")
        if not self.free:
            raise CapacityError(field="slots", expected="a free one", actual=0, hint="close a sequence")
        slot = self.free.pop()
        if self.fault_injection is not None:
            try:
                self.fault_injection("alloc.slot")
            except AllocationError:
                if not self.has("failed open leaks"):
                    self.free.append(slot)
                raise
        self.generations[slot] += 1
        handle = Handle(slot, self.generations[slot])
        salt = "reused" if self.has("slot state not cleared") and self.generations[slot] > 1 else ""
        self.live[handle] = Held(capacity=capacity, salt=salt)
        self.given.add(handle)
        return handle

    def held(self, sequence: Any) -> Held:
        if self.has("dead handles live") and isinstance(sequence, Handle) and sequence not in self.live:
            for handle, held in self.live.items():
                if handle.slot == sequence.slot:
                    return held
        if not isinstance(sequence, Handle) or sequence not in self.live:
            raise StateError(field="sequence", expected="a live one", actual=repr(sequence), hint="open one")
        return self.live[sequence]

    def length(self, sequence: Any) -> int:
        return len(self.held(sequence).tokens)

    def close(self, sequence: Any) -> None:
        if sequence in self.live:
            del self.live[sequence]
            if self.has("close leaks"):
                self.leaked += 1
            else:
                self.free.append(sequence.slot)
        elif sequence not in self.given:
            raise StateError(
                field="sequence", expected="one of this engine", actual=repr(sequence), hint="open one"
            )

    # steps

    def step(self, runs: Any, *, taps: Any = (), replay: bool = False, **_: Any) -> StepResult:
        if not runs:
            raise InputError(field="runs", expected="one or more", actual=0, hint="pass runs")
        helds = []
        for i, run in enumerate(runs):
            held = self.held(run.sequence)
            if any(held is other for other in helds):
                raise InputError(
                    field=f"runs[{i}]", expected="a sequence once", actual="twice", hint="one run each"
                )
            helds.append(held)
            self._check(run, held)
        for run, held in zip(runs, helds, strict=True):
            room = held.capacity + self.has("one past the capacity")
            if run.start + len(run.token_ids) > room:
                raise CapacityError(
                    field="run", expected=f"an end of at most {held.capacity}", actual=run.start, hint="x"
                )
        self.steps += 1
        rows = sum(len(run.token_ids) for run in runs)
        if replay:
            self._replay(rows)
        hidden, logits = [], []
        for run, held in zip(runs, helds, strict=True):
            for k, token in enumerate(run.token_ids):
                image = run.image_mask is not None and run.image_mask[k]
                if self.has("decode forgets images") and len(run.token_ids) == 1:
                    image = False
                held.tokens.append(token + self.config.vocab_size * image)
                salt = self._salt(run, held, len(runs), k, replay)
                row = self.row(held.tokens, salt)
                hidden.append(row[: self.config.hidden_size])
                logits.append(row[self.config.hidden_size :])
            held.longest = max(held.longest, len(held.tokens))
        if self.has("nan at the first token"):
            hidden = [h * float("nan") if run.start == 0 else h for h, run in zip(hidden, runs, strict=False)]
        self.last_slots = [run.sequence.slot for run in runs]
        return StepResult(torch.stack(hidden), torch.stack(logits), {})

    def _check(self, run: Any, held: Held) -> None:
        if not run.token_ids:
            raise InputError(field="token_ids", expected="one or more", actual=0, hint="leave the run out")
        if run.start != len(held.tokens):
            raise StateError(
                field="start", expected=len(held.tokens), actual=run.start, hint="roll back first"
            )
        if any(not 0 <= t < self.config.vocab_size for t in run.token_ids):
            raise InputError(
                field="token_ids", expected="ids of the vocabulary", actual=run.token_ids, hint="check"
            )
        if run.image_mask is not None and len(run.image_mask) != len(run.token_ids):
            raise InputError(
                field="image_mask", expected="one a token", actual=len(run.image_mask), hint="mark all"
            )

    def _replay(self, rows: int) -> None:
        bucket = next(b for b in self.buckets if b >= rows)
        self.graphs.setdefault(bucket, self.steps)
        if self.has("padding in the last slot") and rows < bucket:
            for handle, held in self.live.items():
                if handle.slot == self.max_sequences - 1:
                    held.salt = "padding"

    def _salt(self, run: Any, held: Held, runs: int, k: int, replay: bool) -> str:
        position = len(held.tokens) - 1
        one = len(run.token_ids) == 1
        conditions = {
            "decode at even positions": one and run.start > 0 and position % 2 == 0,
            "chunk without its past": not one and run.start > 0 and k == 0,
            "batch of three": runs == 3,
            "last slot differs": run.sequence.slot == self.max_sequences - 1,
            "stale replay": replay and self.graphs.get(1, self.steps) < self.steps and position == 9,
            "other sequence before": self.last_slots not in ([], [run.sequence.slot])
            and runs == 1
            and position > 2,
            "counts its sequences": len(self.given) > 2 and position == 0,
            "random": self.steps % 7 == 3,
        }
        salts = [name for name, holds in conditions.items() if holds and self.has(name)]
        return f"{held.salt}{salts}{self.steps if 'random' in salts else ''}" if salts or held.salt else ""

    def row(self, tokens: list[int], salt: str) -> torch.Tensor:
        digest = hashlib.sha256(f"{tokens}{salt}".encode()).digest()
        size = self.config.hidden_size + self.config.vocab_size
        return torch.from_numpy(
            np.random.default_rng(list(digest[:8])).standard_normal(size, dtype=np.float32)
        )

    # copies

    def rollback(self, sequence: Any, length: int) -> None:
        held = self.held(sequence)
        if not max(0, held.longest - self.max_rollback) <= length <= len(held.tokens):
            raise RollbackError(
                field="length", expected="within reach", actual=length, hint="restore a snapshot"
            )
        dropped = len(held.tokens) - length
        del held.tokens[length:]
        if self.has("rollback of three or more") and dropped >= 3:
            held.salt = "drafts"

    def snapshot(self, sequence: Any) -> bytes:
        held = self.held(sequence)
        body = json.dumps({"tokens": held.tokens, "salt": held.salt})
        return f"{hashlib.sha256(body.encode()).hexdigest()}{body}".encode()

    def restore(self, blob: bytes, capacity: int) -> Handle:
        text = bytes(blob).decode("latin1")
        if hashlib.sha256(text[64:].encode("latin1")).hexdigest() != text[:64]:
            if not (self.has("damaged blobs restored") and len(text) > 64):
                raise SnapshotError(
                    field="blob", expected="a sealed one", actual="damaged", hint="take a new one"
                )
            text = text[:64] + json.dumps({"tokens": [1], "salt": ""})
        data = json.loads(text[64:])
        if len(data["tokens"]) > capacity:
            raise SnapshotError(
                field="length", expected=capacity, actual=len(data["tokens"]), hint="more capacity"
            )
        handle = self.open(capacity)
        held = self.live[handle]
        held.tokens, held.longest = list(data["tokens"]), len(data["tokens"])
        held.salt = data["salt"]
        if self.has("restore forgets the window") and len(held.tokens) > self.config.sliding_window:
            held.salt = "forgotten"
        return handle

    def branch(self, sequence: Any) -> Handle:
        held = self.held(sequence)
        child = self.open(held.capacity)
        self.live[child].tokens = held.tokens if self.has("branch shares its tail") else list(held.tokens)
        self.live[child].longest, self.live[child].salt = len(held.tokens), held.salt
        return child

    # books

    def ledger(self) -> Ledger:
        live = len(self.live)
        return Ledger(
            {"slot": 64 * live},
            {"slot": live},
            live,
            len(self.graphs),
            len(self.free),
            live,
            0,
            self.max_sequences,
        )

    def state_digest(self, sequence: Any) -> dict[str, str]:
        tokens = self.held(sequence).tokens
        seen = tokens[:-1] if self.has("digest without the last token") else tokens
        salt = self.held(sequence).longest if self.has("digest of what was dropped") else ""
        return {"tokens": hashlib.sha256(f"{seen}{salt}".encode()).hexdigest()}

    def address_layout(self, kind: str) -> tuple[int, int]:
        return 16, 64

    def address_probe(self, kind: str, unit: int, row: int) -> int:
        flat = unit * 16 + row
        return (flat + 2**31) % 2**32 - 2**31 if self.has("32-bit addresses") else flat


def build(config: Any, weights: Any = None, **options: Any) -> PrefixEngine:
    return PrefixEngine(config, weights, **options)
