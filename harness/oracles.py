"""What must hold after any list of operations, cheapest first; asked while a search runs and when a finding runs again.

- an operation succeeds, or raises the error that it must, and leaves every length as it should be;
- equal tokens, equal bits: every answered row is remembered under the tokens that led to it;
- at the end each live sequence answers two more tokens, and its tokens are replayed on a fresh sequence in one pass:
  every row on that path, and the digest of every kind of state, must be the same;
- everything closed, the ledger is back where it began;
- the reference, once a token sequence and within a share of the time: `against_reference` over the replay's taps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from harness import operations as ops
from harness.compare import same_bits
from harness.engine import Engine
from harness.lockstep import Divergence, wanted_taps
from harness.observed import Observed, from_rows, observe
from harness.operations import Interpreter, Operation, Row

REFERENCE_SHARE = 0.2  # of the time


@dataclass
class Failure(Exception):
    """What an oracle saw. `operations`: everything since the engine was built."""

    detector: str
    message: str
    where: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


@dataclass
class Known:
    """What the rows of this engine must be, by tokens; and the token sequences already held against the
    reference.
    """

    rows: dict[tuple[int, ...], Row] = field(default_factory=dict)
    referenced: set[tuple[int, ...]] = field(default_factory=set)
    reference_seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)


class Searcher:
    """One engine under search: runs operations, asks the oracles. Raises Failure."""

    def __init__(
        self, engine: Engine, known: Known, judge: Callable[[Observed], Divergence | None] | None = None
    ) -> None:
        self.engine, self.known, self.judge = engine, known, judge
        self.declines = engine.declines()
        self.bitwise = "bitwise" not in self.declines
        self.wanted = wanted_taps(engine.config) if "taps" not in self.declines else []
        self.interpreter = Interpreter(engine, taps=() if self.bitwise else self.wanted)
        self.operations: list[Operation] = []
        self.seen = 0
        self.example = 0  # where the current example began
        self.before_finish: int | None = None  # where the end of an example began, while it runs
        self.baseline = self._books()

    @property
    def book(self) -> ops.Book:
        return self.interpreter.trace.book

    def run(self, operation: Operation) -> None:
        self.operations.append(operation)
        if not self.interpreter.run(operation):
            surprise = self.interpreter.trace.surprises[-1]
            detector = getattr(surprise.error, "detector", "CRASH" if surprise.error else "AW")
            message = f"{operation.op}: expected {surprise.expected}, got {surprise.actual}"
            raise Failure(detector, message, {"sequence": operation.sequence})
        for row in self.interpreter.trace.rows[self.seen :]:
            self._same_bits(row)
        self.seen = len(self.interpreter.trace.rows)

    def _same_bits(self, row: Row) -> None:
        """Equal tokens, equal bits; without that promise the latest row counts, and the reference judges
        it.
        """
        if not self.bitwise:
            self.known.rows[row.prefix] = row
            return
        first = self.known.rows.setdefault(row.prefix, row)
        if first is row:
            return
        for name, expected, actual in (
            ("hidden", first.hidden, row.hidden),
            ("logits", first.logits, row.logits),
        ):
            found = same_bits(expected.unsqueeze(0), actual.unsqueeze(0))
            if found is not None:
                raise Failure(
                    classify(self.operations),
                    f"the same tokens gave another {name}: {found.kind}",
                    {"sequence": row.sequence, "position": row.position, "tap": name, "expected": found.expected,
                     "actual": found.actual},
                )  # fmt: skip

    def finish(self, texts: list[tuple[int, ...]]) -> None:
        """End of an example: probe and replay every live sequence, close it, and look at the books."""
        self.before_finish = len(self.operations)
        for name in list(self.book.live):
            held = self.book.live[name]
            room = min(2, held.capacity - len(held.tokens))
            if room:
                at = len(held.tokens)
                self.run(ops.step((name, texts[0][at : at + room])))
            if held.tokens:
                self._replay(name, held.tokens)
                self._ask_reference(held.tokens)
            self.run(ops.close(name))
        for blob in list(self.book.blobs):
            self.run(Operation("forget", target=blob))
        self.before_finish = None
        books = self._books()
        if books != self.baseline:
            changed = {k: (v, books.get(k)) for k, v in self.baseline.items() if v != books.get(k)}
            raise Failure(
                "LK",
                f"everything closed, yet the ledger differs: {changed}",
                {"expected": self.baseline, "actual": books},
            )

    def _replay(self, name: str, tokens: tuple[int, ...]) -> None:
        """The tokens on a fresh sequence in one pass: rows, and the state that is left."""
        if not self.bitwise:
            return
        sequence = f"{name}'{len(self.operations)}"
        self.run(ops.open_(sequence, len(tokens)))
        self.run(ops.step((sequence, tokens)))
        if "state_digest" not in self.declines:
            handles = self.interpreter.handles
            ours, fresh = (self.engine.state_digest(handles[n]) for n in (name, sequence))
            wrong = sorted(kind for kind in fresh if ours.get(kind) != fresh[kind])
            if wrong:
                where = {"sequence": name, "position": len(tokens) - 1, "tap": wrong[0], "expected": fresh[wrong[0]],
                         "actual": ours.get(wrong[0])}  # fmt: skip
                raise Failure(
                    classify(self.operations),
                    f"state differs from a fresh sequence's: {', '.join(wrong)}",
                    where,
                )
        self.run(ops.close(sequence))

    def _ask_reference(self, tokens: tuple[int, ...]) -> None:
        """Hold one pass over the tokens against the reference; without equal bits, the rows as they were
        answered.
        """
        known = self.known
        covered = self.bitwise and any(tokens == other[: len(tokens)] for other in known.referenced)
        if (
            self.judge is None
            or covered
            or known.reference_seconds > REFERENCE_SHARE * (time.monotonic() - known.began) + 1.0
        ):
            return
        began = time.monotonic()
        if self.bitwise:
            observed = observe(self.engine, tokens, taps=self.wanted)
        else:
            observed = from_rows([known.rows[tokens[: end + 1]] for end in range(len(tokens))])
        divergence = self.judge(observed)
        known.referenced.add(tokens)
        known.reference_seconds += time.monotonic() - began
        if divergence is not None:
            raise Failure("REF", divergence.message, divergence.where())

    def _books(self) -> dict[str, Any]:
        """What must be back when every sequence is closed."""
        if "ledger" in self.declines:
            return {}
        ledger = self.engine.ledger()
        return {name: getattr(ledger, name, None) for name in ("sequences", "live", "free", "shared")}


def classify(operations: Iterable[Operation]) -> str:
    """The detector that a list of operations speaks for: the most particular thing in it."""
    kinds = [operation.op for operation in operations]
    several = any(len(operation.runs) > 1 for operation in operations)
    for op, detector in (("rollback", "RB"), ("restore", "SN"), ("branch", "SN")):
        if op in kinds:
            return detector
    if any(operation.replay for operation in operations):
        return "GR"
    return "BI" if several or kinds.count("open") > 2 else "CH"
