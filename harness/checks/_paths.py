"""Which paths a list of operations takes, from the operations and the config alone, never from the engine's word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.checks._lengths import ratios
from harness.operations import Book, Operation


class Paths:
    """Which paths a list of operations takes, from the operations alone."""

    def __init__(self, config: Any, max_rollback: int) -> None:
        self.config, self.book, self.counts = config, Book(max_rollback), dict[str, int]()
        self.last_start: dict[str, int] = {}

    def took(self, path: str, when: Any = True) -> None:
        if when:
            self.counts[path] = self.counts.get(path, 0) + 1

    def follow(self, operation: Operation) -> None:
        """Count what an operation does, then let it happen in the book."""
        if operation.expect is not None:
            self.took(f"{operation.expect} raised")
            return
        op, name = operation.op, operation.sequence or ""
        if op == "step":
            self._step(operation)
        elif op == "rollback":
            length, old = operation.length or 0, len(self.book.live[name].tokens)
            self.took("rolled back", length < old)
            self.took("nothing accepted", length == self.last_start.get(name))
            self.took("some accepted", self.last_start.get(name, length) < length < old)
            self.took("rolled back over the window's edge", old > self.config.sliding_window and length < old)
            self.took(
                "rolled back into a group", any(length % r for r in ratios(self.config)) and length < old
            )
        elif op in ("snapshot", "restore", "branch", "close", "churn"):
            self.took(op)
            self.took("snapshot of an open group", op == "snapshot" and self._open_group(name))
        elif op == "open":
            self.took("opened after a close", bool(self.book.closed))
        self.book.apply(operation)

    def _open_group(self, name: str) -> bool:
        return any(len(self.book.live[name].tokens) % r for r in ratios(self.config))

    def _step(self, operation: Operation) -> None:
        runs = [(name, len(self.book.live[name].tokens), len(tokens)) for name, tokens in operation.runs]
        self.took("several sequences", len(runs) > 1)
        self.took("ragged", len({n for _, _, n in runs}) > 1)
        self.took("replay", operation.replay)
        self.took("sequences at different lengths", len({start for _, start, _ in runs}) > 1)
        for name, start, n in runs:
            self._run(start, n)
            self.last_start[name] = start

    def _run(self, start: int, n: int) -> None:
        config, end = self.config, start + n
        self.took("prefill", start == 0 and n > 1)
        self.took("chunk", start > 0 and n > 1)
        self.took("decode", start > 0 and n == 1)
        self.took("one-token prompt", start == 0 and n == 1)
        self.took("window wrapped", end > config.sliding_window)
        self.took("run longer than the window", n > config.sliding_window)
        self.took("top-k cut", any(end // r > config.index_topk for r in ratios(config)))
        self.took(
            "fewer rows than top-k", any(0 < (start + 1) // r < config.index_topk for r in ratios(config))
        )
        self.took("nothing visible", any((start + 1) // r == 0 for r in ratios(config)))
        for r in ratios(config):
            if r > 1:
                self.took("group closed by one row", n == 1 and end % r == 0)
                self.took("group closed across steps", start % r != 0 and start // r < end // r)
                self.took("group left open", end % r != 0)
        for role in config.layers():
            if role.is_candidate_source:
                blocks = -(-(end // role.ratio) // config.candidate_block_size)
                self.took("candidates cut", blocks > config.candidate_topk_blocks)


def reachable(config: Any, *paths: str) -> list[str]:
    """Those of the paths that the config's layers have at all."""
    groups = any(r > 1 for r in ratios(config))
    absent = set()
    if not ratios(config):
        absent |= {"top-k cut", "fewer rows than top-k"}
    if not groups:
        absent |= {"nothing visible", "group closed by one row", "group closed across steps", "group left open",
                   "rolled back into a group", "snapshot of an open group"}  # fmt: skip
    if not any(role.is_candidate_source for role in config.layers()):
        absent.add("candidates cut")
    return [path for path in paths if path not in absent]


def requires(*paths: str) -> Callable[[Any], list[str]]:
    """For `Check.required_paths`."""
    return lambda config: reachable(config, *paths)
