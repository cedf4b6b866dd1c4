"""What an engine's sequences hold, in numbers that must add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ledger:
    """One moment's books.

    bytes_by_kind, allocations_by_kind: held by live sequences, by kind of state (units with several holders once).
    sequences: live ones.  graphs: captured and replayable.
    free, live, shared, total: units that sequences are made of (slots and pages): held by nobody, by one sequence,
    by several, and all there are.
    """

    bytes_by_kind: Mapping[str, int] = field(default_factory=dict)
    allocations_by_kind: Mapping[str, int] = field(default_factory=dict)
    sequences: int = 0
    graphs: int = 0
    free: int = 0
    live: int = 0
    shared: int = 0
    total: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_kind.values())

    @property
    def allocations(self) -> int:
        return sum(self.allocations_by_kind.values())

    @property
    def conserved(self) -> bool:
        """free + live + shared = total, nothing negative, and nothing held when nobody is there to hold it."""
        return not self.violations()

    def violations(self) -> list[str]:
        """What breaks the conservation law, in words; empty when the books balance."""
        found = []
        counts = {"sequences": self.sequences, "graphs": self.graphs}
        counts |= {"free": self.free, "live": self.live, "shared": self.shared, "total": self.total}
        counts |= {f"bytes of {kind}": n for kind, n in self.bytes_by_kind.items()}
        counts |= {f"allocations of {kind}": n for kind, n in self.allocations_by_kind.items()}
        found += [f"{name} is {n}, below 0" for name, n in counts.items() if n < 0]
        held = self.free + self.live + self.shared
        if held != self.total:
            fault = (
                f"{self.total - held} leaked" if held < self.total else f"{held - self.total} counted twice"
            )
            units = (
                f"free {self.free} + live {self.live} + shared {self.shared} = {held} units of {self.total}"
            )
            found.append(f"{units}: {fault}")
        if self.sequences == 0:
            if self.live or self.shared:
                found.append(f"no sequence is live, yet {self.live + self.shared} units are held")
            found += [
                f"no sequence is live, yet {kind} holds {n} bytes"
                for kind, n in self.bytes_by_kind.items()
                if n
            ]
            found += [
                f"no sequence is live, yet {kind} has {n} allocations"
                for kind, n in self.allocations_by_kind.items()
                if n
            ]
        return found

    def leaks(self, baseline: Ledger) -> list[str]:
        """What is held now and was not at `baseline`; empty when everything is back."""
        found = []
        for what, before, now in (
            ("bytes", baseline.bytes_by_kind, self.bytes_by_kind),
            ("allocations", baseline.allocations_by_kind, self.allocations_by_kind),
        ):
            for kind in sorted(set(before) | set(now)):
                grown = now.get(kind, 0) - before.get(kind, 0)
                if grown:
                    found.append(f"{kind}: {grown:+} {what}")
        for name in ("sequences", "graphs", "free", "live", "shared", "total"):
            grown = getattr(self, name) - getattr(baseline, name)
            if grown:
                found.append(f"{name}: {grown:+}")
        return found
