"""One forward of one run of tokens: what the layers share lives here, and dies with the step.

Published latent rows and index keys are named by their owner, so a consumer reads the owner's history and
sees rows written in this very step.  Selection and candidate rows are values for this run's queries only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from reference.history import SequenceHistory
from reference.precision import Precision
from reference.taps import Taps


@dataclass
class Step:
    """positions int64 [T]; image bool [T]; engram_rows: layer -> table rows [T, columns].

    key_owner: the layer whose index keys were published last; selection int64 [T, topk] and candidates bool
    [T, S] of the latest source.  forced: decisions to take instead of the computed ones, by tap name.
    """

    history: SequenceHistory
    start: int
    end: int
    positions: Tensor
    image: Tensor
    precision: Precision
    taps: Taps
    forced: Mapping[str, Tensor]
    stale_index_k: bool = False
    underfilled_selection: bool = False
    engram_rows: dict[int, Tensor] = field(default_factory=dict)
    key_owner: int | None = None
    selection: Tensor | None = None
    candidates: Tensor | None = None

    def decide(self, name: str, computed: Tensor) -> Tensor:
        """The forced value of a decision, or the computed one."""
        return self.forced.get(name, computed)
