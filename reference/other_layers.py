"""The contract's methods for kinds of layers that a V4.1 layer is not, with the answers of one that is not.

Recurrent layers prefill in phases and write their state when a draft is accepted; layers of other models
have their expert weights laid out anew at load time. An engine asks every layer all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from reference.errors import UnsupportedError


class OtherLayersMethods(ABC):
    """Phase 1 of a prefill is the whole of it; the rest does nothing, says no, or raises UnsupportedError."""

    @property
    def uses_ssm_pool(self) -> bool:
        """Does state live in a shared recurrent pool? No."""
        return False

    @property
    def is_ssm_layer(self) -> bool:
        """Does prefill have two phases? No."""
        return False

    # the two-phase prefill of recurrent layers: phase 1 is everything

    @abstractmethod
    def prefill(self, streams: Any, state: Any, start: int, n: int, shared: Any = None) -> Any: ...

    def prefill_phase1(self, streams: Any, state: Any, start: int, n: int, shared: Any = None) -> Any:
        """The whole prefill."""
        return self.prefill(streams, state, start, n, shared)

    def prefill_phase1_proj_batched(self, *args: Any) -> None:
        raise self._not_recurrent("prefill_phase1_proj_batched")

    def prefill_phase1_conv1d_one(self, *args: Any) -> None:  # noqa: B027 - a default on purpose
        """Nothing: this layer has no convolution state."""

    def prefill_phase1_l2_batched(self, *args: Any) -> None:
        raise self._not_recurrent("prefill_phase1_l2_batched")

    def prefill_gdn_full(self, *args: Any) -> None:  # noqa: B027 - a default on purpose
        """Nothing: phase 2 of a recurrent layer."""

    def prefill_gdn_full_batched(self, *args: Any) -> None:
        raise self._not_recurrent("prefill_gdn_full_batched")

    def prefill_gdn_full_batched_fla_varlen(self, *args: Any) -> bool:
        """False: not taken."""
        return False

    def prefill_phase3(self, *args: Any) -> None:  # noqa: B027 - a default on purpose
        """Nothing: phase 3 of a recurrent layer."""

    def prefill_inner_batched_q12(self, *args: Any) -> None:
        raise self._not_recurrent("prefill_inner_batched_q12")

    # write-on-accept of recurrent layers

    @property
    def gdn_woa_stash_seq_floats(self) -> int | None:
        """None: no write-on-accept stash."""
        return None

    def gdn_woa_bind(self, *args: Any) -> None:  # noqa: B027 - a default on purpose
        """Nothing to bind."""

    def gdn_fold_accepted(self, *args: Any) -> bool:
        """False: nothing was folded."""
        return False

    # load-time weight layouts; decode works after any of them

    def transpose_moe_for_prefill(self) -> int:
        """Bytes that a layout of the experts' weights for prefill costs: 0, there is none. So below."""
        return 0

    def transpose_moe_gate_up_for_prefill(self) -> int:
        return 0

    def set_moe_down_transpose_scratch(self, *args: Any) -> int:
        return 0

    def transpose_moe_for_prefill_unified(self) -> int:
        return 0

    def transpose_moe_for_prefill_hybrid(self) -> int:
        return 0

    def _not_recurrent(self, method: str) -> UnsupportedError:
        hint = "ask is_ssm_layer first, and call prefill"
        return UnsupportedError(
            field=method, expected="a recurrent layer", actual=type(self).__name__, hint=hint
        )
