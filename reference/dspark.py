"""DSpark: draft stages that guess the next tokens from the backbone's streams (numeric contract, section 13).

main_x = main_norm(main_proj(main_hidden))            one row for each accepted token
each stage keeps window rows made from main_x, so accepted tokens need no draft forward of their own
draft inputs = [accepted token, noise token, ...]     `dspark_block_size` of them, at positions p+1, p+2, ...
every draft row sees the window rows of p-W+1..p and all draft rows of its block: not causal inside the block
x = collapse(h, pre_mix);  base = fp32(norm(x)) head^T
logits[i] = base[i] + markov_head(markov_embed(token_i));  token_(i+1) = argmax(logits[i])
confidence[i] = fp32 proj(concat(x_i, markov_embed(token_i)))
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.attention import Attention, output, query, window_row
from reference.errors import UnsupportedError
from reference.history import SequenceHistory
from reference.hyper_connections import collapse
from reference.layer import block
from reference.linear import linear
from reference.model import LayerInputs, Model
from reference.norm import rms_norm
from reference.parameters import layer_parameters
from reference.sparse_attention import sparse_attention
from reference.step import Step
from reference.taps import Taps


@dataclass(frozen=True)
class Draft:
    """token_ids int64 [block + 1], accepted first; base_logits, logits [block, V]; confidence [block]."""

    token_ids: Tensor
    base_logits: Tensor
    logits: Tensor
    confidence: Tensor
    taps: dict[str, Tensor]


class DSpark:
    """The draft stages over a backbone's model and histories."""

    def __init__(self, model: Model) -> None:
        self.model, self.config, self.precision = model, model.config, model.precision
        roles = self.config.draft_layers()
        if not roles or not model.has_head:
            raise UnsupportedError(
                field="num_nextn_predict_layers",
                expected="a configuration with draft stages, their target layers and a head",
                actual=self.config.num_nextn_predict_layers,
                hint="use a preset or checkpoint with DSpark layers",
            )
        weights, last = model.weights, roles[-1].prefix
        self.stages = tuple(layer_parameters(weights, role, self.precision) for role in roles)
        self.main_proj = weights.linear(f"{roles[0].prefix}.main_proj")
        self.main_norm = weights[f"{roles[0].prefix}.main_norm.weight"].to(self.precision.dtype)
        self.norm = weights[f"{last}.norm.weight"].to(self.precision.dtype)
        self.markov_embed = weights[f"{last}.markov_head.embed.weight"]
        self.markov_head = weights[f"{last}.markov_head.head.weight"]
        self.confidence_proj = weights[f"{last}.confidence_head.proj.weight"]

    def observe(self, history: SequenceHistory, start: int, main_hidden: Tensor) -> Tensor:
        """Write every stage's window rows for accepted tokens from `start` on; main_hidden [T, targets * D].

        Returns main_x [T, D]."""
        main_x = linear(main_hidden, self.main_proj, self.precision)
        main_x = rms_norm(main_x, self.main_norm, self.config.rms_norm_eps, self.precision)
        positions = torch.arange(start, start + len(main_x))
        for stage in self.stages:
            row = window_row(main_x, positions, stage.attn, self.precision)
            history.layers[stage.index].window.write(start, row)
        return main_x

    def draft(
        self,
        history: SequenceHistory,
        token_id: int,
        taps: Collection[str] = (),
        *,
        forced: Mapping[str, Tensor] | None = None,
        layer_inputs: LayerInputs | None = None,
    ) -> Draft:
        """Guess what follows `token_id`, the token chosen after the history's last one.  Changes nothing.

        forced and layer_inputs as in Model.forward, by the stages' layer numbers."""
        size, end = self.config.dspark_block_size, history.length
        inputs = torch.tensor([token_id] + [self.config.dspark_noise_token_id] * (size - 1))
        step = Step(
            history=history,
            start=end,
            end=end + size,
            positions=torch.arange(end, end + size),
            image=torch.zeros(size, dtype=torch.bool),
            precision=self.precision,
            taps=Taps(taps),
            forced=forced or {},
        )
        h, pre_mix = self.model.embed(inputs)
        for stage in self.stages:
            if layer_inputs is not None and stage.index in layer_inputs:
                h, pre_mix = (given.to(self.precision.dtype) for given in layer_inputs[stage.index])
            h, pre_mix = block(h, pre_mix, stage, step, attend=draft_attention)
        end_inputs = self.stages[-1].index + 1
        if layer_inputs is not None and end_inputs in layer_inputs:
            h, pre_mix = (given.to(self.precision.dtype) for given in layer_inputs[end_inputs])
        return self._head(collapse(h, pre_mix, self.precision), token_id, step.taps)

    def _head(self, x: Tensor, token_id: int, taps: Taps) -> Draft:
        hidden = rms_norm(x, self.norm, self.config.rms_norm_eps, self.precision)
        base = self.precision.matmul(hidden, self.model.head)
        tokens, logits, confidence = [token_id], [], []
        for i in range(len(x)):
            markov = self.markov_embed[tokens[-1]].to(self.precision.dtype)
            logits.append(base[i] + self.precision.matmul(markov, self.markov_head))
            confidence.append(
                self.precision.matmul(torch.cat((x[i], markov)), self.confidence_proj).squeeze()
            )
            tokens.append(int(logits[-1].argmax()))
        return Draft(torch.tensor(tokens), base, torch.stack(logits), torch.stack(confidence), taps.values)


def draft_attention(x: Tensor, w: Attention, step: Step) -> Tensor:
    """x [block, D] -> [block, D]: the window rows before the block, then all of the block's own."""
    _, q = query(x, step.positions, w, step.precision)
    row = window_row(x, step.positions, w, step.precision)
    window = step.history.layers[w.role.index].window.rows(max(0, step.start - w.window), step.start)
    rows = torch.cat((window, row)).expand(len(x), -1, -1)
    present = torch.ones(rows.shape[:2], dtype=torch.bool)
    o = sparse_attention(q, rows, present, w.attn_sink, step.precision)
    step.taps(f"L{w.role.index}.draft_row", row)
    return output(o, step.positions, w, step.precision)
