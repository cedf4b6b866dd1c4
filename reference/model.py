"""The model around the layers: embedding, the stack, the last collapse, the head.

    h = embed[id] in every stream, pre_mix = one-hot on the first stream
    for each layer: h = engram(h); h, pre_mix = block(h, pre_mix)
    logits = fp32(norm(collapse(h, pre_mix))) head^T
    main_hidden = concat over the draft's target layers of bf16(mean over streams of the h that enters it)

Sequences never meet: a forward is one run of consecutive tokens of one sequence, from any start and of any
length. Prefill, a chunk, a decode step and a verify step are this same function.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.config import V41Config
from reference.engram import DEAD, hash_constants, ngram_rows, ngram_tokens
from reference.history import SequenceHistory
from reference.hyper_connections import collapse
from reference.layer import block, recall
from reference.norm import rms_norm
from reference.parameters import layer_parameters
from reference.precision import RELEASE, Precision
from reference.step import Step
from reference.taps import Taps
from reference.weights import Weights

LayerInputs = Mapping[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Output:
    """hidden [T, D] after the final norm, logits [T, V], main_hidden [T, targets * D] or None, taps."""

    hidden: Tensor
    logits: Tensor
    main_hidden: Tensor | None
    taps: dict[str, Tensor]


class Model:
    """The reference stack.  Its only state is the caller's SequenceHistory.

    release_stale_index_k: an owner publishes its index keys only in a call that writes one.
    release_underfilled_selection: keep reachable rows outside the candidate blocks when too few are inside.
    """

    def __init__(
        self,
        weights: Weights,
        precision: Precision = RELEASE,
        *,
        release_stale_index_k: bool = False,
        release_underfilled_selection: bool = False,
    ) -> None:
        self.config: V41Config = weights.config
        self.weights, self.precision = weights, precision
        self.stale_index_k, self.underfilled_selection = release_stale_index_k, release_underfilled_selection
        self.layers = tuple(layer_parameters(weights, role, precision) for role in self.config.layers())
        # a slice or a single block may come without the model around it
        self.has_head = all(name in weights for name in ("embed.weight", "norm.weight", "head.weight"))
        if self.has_head:
            self.norm = weights["norm.weight"].to(precision.dtype)
            self.head = weights["head.weight"].to(torch.float64)

    def new_history(self, capacity: int) -> SequenceHistory:
        return SequenceHistory(self.config, capacity, self.precision.dtype)

    def forward(
        self,
        history: SequenceHistory,
        token_ids: Tensor,
        image: Tensor,
        *,
        taps: Collection[str] = (),
        forced: Mapping[str, Tensor] | None = None,
        layer_inputs: LayerInputs | None = None,
    ) -> Output:
        """Appends token_ids int64 [T] (image bool [T]) to the history and returns a row for each.

        forced: decisions to use instead of the computed ones (`L{i}.selection`, `.candidates`, `.moe_idx`).
        layer_inputs: (h [T, N, D], pre_mix [T, N]) that replace what enters a layer; `num_hidden_layers`
        stands for the last collapse.
        """
        step = self._begin(history, token_ids, image, Taps(taps), forced or {})
        h, pre_mix = self._embed(token_ids, layer_inputs)
        main = []
        for w in self.layers:
            if layer_inputs is not None and w.index in layer_inputs:
                h, pre_mix = (given.to(self.precision.dtype) for given in layer_inputs[w.index])
            h = recall(h, w, step)
            if w.index in self.config.dspark_target_layer_ids:
                main.append(self.precision.bf16(h.mean(1)))
            h, pre_mix = block(h, pre_mix, w, step)
        if layer_inputs is not None and self.config.num_hidden_layers in layer_inputs:
            h, pre_mix = (
                given.to(self.precision.dtype) for given in layer_inputs[self.config.num_hidden_layers]
            )
        hidden, logits = self._finish(h, pre_mix, step)
        history.last_key_owner = step.key_owner
        history.length = step.end  # only now do the rows written above count
        main_hidden = torch.cat(main, dim=-1) if main else None
        if main_hidden is not None:
            step.taps("main_hidden", main_hidden)
        return Output(hidden, logits, main_hidden, step.taps.values)

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """token_ids [T] -> (the streams [T, N, D], pre_mix [T, N] one-hot on the first stream)."""
        rows = self.weights.rows("embed.weight", token_ids).to(self.precision.dtype)
        pre_mix = rows.new_zeros((len(rows), self.config.hc_mult))
        pre_mix[:, 0] = 1
        return rows.unsqueeze(1).repeat(1, self.config.hc_mult, 1), pre_mix

    def _embed(self, token_ids: Tensor, layer_inputs: LayerInputs | None) -> tuple[Tensor, Tensor]:
        if layer_inputs is not None and self.layers[0].index in layer_inputs:
            return layer_inputs[self.layers[0].index]
        return self.embed(token_ids)

    def _begin(
        self,
        history: SequenceHistory,
        token_ids: Tensor,
        image: Tensor,
        taps: Taps,
        forced: Mapping[str, Tensor],
    ) -> Step:
        config, start, end = self.config, history.length, history.length + len(token_ids)
        history.token_ids.write(start, token_ids)
        step = Step(
            history=history,
            start=start,
            end=end,
            positions=torch.arange(start, end),
            image=image,
            precision=self.precision,
            taps=taps,
            forced=forced,
            stale_index_k=self.stale_index_k,
            underfilled_selection=self.underfilled_selection,
            key_owner=history.last_key_owner if self.stale_index_k else None,
        )
        if config.hashes_ngrams:
            compressed_ids = torch.where(image, DEAD, self.weights.token_map[token_ids])
            history.compressed_ids.write(start, compressed_ids)
            pad = int(self.weights.token_map[config.engram_pad_token_id])
            compressed = history.compressed_ids.rows(0, end)
            tokens = ngram_tokens(compressed, start, config.engram_max_ngram_size, pad)
            constants = hash_constants(config)
            for place, layer in enumerate(config.engram_layer_ids):
                table = (constants.multipliers[place], constants.primes[place], constants.offsets[place])
                step.engram_rows[layer] = ngram_rows(tokens, *table)
            taps("engram_hash", lambda: torch.stack(list(step.engram_rows.values()), dim=1))
        return step

    def _finish(self, h: Tensor, pre_mix: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        collapsed = collapse(h, pre_mix, self.precision)
        step.taps("final_collapsed", collapsed)
        if not self.has_head:
            return collapsed, collapsed.new_empty((len(collapsed), 0))
        hidden = rms_norm(collapsed, self.norm, self.config.rms_norm_eps, self.precision)
        logits = self.precision.matmul(hidden, self.head)
        step.taps("final_normed", hidden)
        step.taps("logits", logits)
        return hidden, logits
