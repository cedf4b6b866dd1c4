"""Random operation sequences: whatever the order of the verbs, equal tokens answer equal bits and every book
balances.
"""

from __future__ import annotations

from harness.check import Check
from harness.machine import CHECK_NAME, paths_of, search_operations

CHECK = Check(
    CHECK_NAME,
    "after any sequence of operations every row is that of a fresh pass over the same tokens, state and books included",
    search_operations,
    required_paths=paths_of,
    detectors=("RB", "SN", "GR", "BI", "CH", "LK", "AW", "REF", "CRASH"),
)
