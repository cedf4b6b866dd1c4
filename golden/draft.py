"""The DSpark stages of a golden case, on recorded inputs: the backbone's main_hidden rows, the accepted tokens, and the
stream that each stage recorded.

Draft rows stand at positions p + 1 .. p + block of a step at position p, so tensors are [B, T, block, ...].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from golden import limits, measure
from golden.cases import Case
from golden.choices import judge_experts
from golden.limits import Limit
from golden.measure import Label, Measure
from golden.replay import release_model
from golden.stored import window_measures
from golden.units import window_positions
from reference.attention import window_tokens
from reference.dspark import DSpark
from reference.history import SequenceHistory

STAGE_VALUES: dict[str, tuple[Limit, Limit]] = {
    "attn_pre": (limits.FP32,) * 2,
    "attn_in": (limits.ROUNDED,) * 2,
    "attn_out": limits.ATTENTION,
    "ffn_in": limits.STREAM,
    "ffn_out": limits.EXPERTS,
    "moe_w": (limits.FP32,) * 2,
    "stream": limits.STREAM,
    "pre_mix": (limits.FP32,) * 2,
}
HEAD = ("base_logits", "logits", "confidence")


def verify_draft(case: Case, variant: str) -> list[Measure]:
    """Every recorded tensor of the draft stages and their head; nothing for a case without them."""
    if case.stored(variant, "dspark.logits") is None:
        return []
    dspark = DSpark(release_model(case, variant))
    hidden = case.rows(variant, "main_hidden")
    assert hidden is not None
    histories, main_x = [], []
    for b in range(case.batch):
        history = dspark.model.new_history(case.length)
        main_x.append(dspark.observe(history, 0, hidden[b].to(dspark.precision.dtype)))
        history.length = case.length
        histories.append(history)
    taps = drafted(case, variant, dspark, histories, forced=False)
    decided = list(_experts(case, variant, dspark, taps))
    if any(m.tied or m.wrong for m in decided):
        taps = drafted(case, variant, dspark, histories, forced=True)
    measures = [*decided, *_observed(case, variant, dspark, histories, torch.stack(main_x))]
    return [*measures, *_values(case, variant, dspark, taps), *_head(case, variant, taps)]


def drafted(
    case: Case, variant: str, dspark: DSpark, histories: list[SequenceHistory], *, forced: bool
) -> Mapping[str, Tensor]:
    """Every step's draft on the recorded inputs of its stages: taps [B, T, block, ...], dspark.* [B, T, ...]."""
    stages = [stage.index for stage in dspark.stages]
    names = [f"L{stage}.{tap}" for stage in stages for tap in (*STAGE_VALUES, "moe_idx", "route_margin")]
    accepted = _decoded(case, variant, "dspark.output_ids")
    inputs = {
        stage + 1: tuple(_decoded(case, variant, f"L{stage}.{x}") for x in ("stream", "pre_mix"))
        for stage in stages
    }
    chosen = {f"L{stage}.moe_idx": _decoded(case, variant, f"L{stage}.moe_idx") for stage in stages}
    sequences = []
    for b, history in enumerate(histories):
        steps = []
        for t in range(case.steps):
            history.length = case.prompt + t + 1  # the history of this step: rows behind it do not count
            draft = dspark.draft(
                history,
                int(accepted[b, t, 0]),
                names,
                forced={name: ids[b, t] for name, ids in chosen.items()} if forced else None,
                layer_inputs={stage: (h[b, t], mix[b, t]) for stage, (h, mix) in inputs.items()},
            )
            head = {f"dspark.{x}": getattr(draft, x) for x in HEAD} | {"dspark.output_ids": draft.token_ids}
            steps.append({**draft.taps, **head})
        history.length = case.length
        sequences.append({name: torch.stack([step[name] for step in steps]) for name in steps[0]})
    return {name: torch.stack([s[name] for s in sequences]) for name in sequences[0]}


def _decoded(case: Case, variant: str, name: str) -> Tensor:
    held = case.decoded(variant, name)
    assert held is not None, name
    return held


def _experts(case: Case, variant: str, dspark: DSpark, taps: Mapping[str, Tensor]) -> Iterator[Measure]:
    for stage in dspark.stages:
        name = f"L{stage.index}.moe_idx"
        margin = case.decoded(variant, f"L{stage.index}.route_margin")
        margin = taps[f"L{stage.index}.route_margin"] if margin is None else margin
        wrong, tied = judge_experts(_decoded(case, variant, name), taps[name], margin)
        label = Label(case.name, variant, stage.index, "moe_idx")
        yield measure.decisions(label, wrong.any(-1), tied.any(-1)).shifted(case.prompt)


def _observed(
    case: Case, variant: str, dspark: DSpark, histories: list[SequenceHistory], main_x: Tensor
) -> Iterator[Measure]:
    expected = case.rows(variant, "dspark.main_x")
    assert expected is not None
    yield measure.value(Label(case.name, variant, None, "dspark.main_x"), expected, main_x, limits.ROUNDED)
    for stage in dspark.stages:
        rows = torch.stack([h.layers[stage.index].window.rows(0, case.length) for h in histories])
        yield from window_measures(case, variant, stage.index, rows)


def _values(case: Case, variant: str, dspark: DSpark, taps: Mapping[str, Tensor]) -> Iterator[Measure]:
    window, block = case.config.sliding_window, case.config.dspark_block_size
    for stage in dspark.stages:
        for tensor, pair in STAGE_VALUES.items():
            expected = case.decoded(variant, f"L{stage.index}.{tensor}")
            if expected is None:
                continue
            actual, limit = taps[f"L{stage.index}.{tensor}"], pair[int(case.quantised)]
            if tensor == "moe_w":
                order = (_decoded(case, variant, f"L{stage.index}.moe_idx"), taps[f"L{stage.index}.moe_idx"])
                expected, actual = (
                    w.gather(-1, ids.argsort(-1)) for w, ids in zip((expected, actual), order, strict=True)
                )
            label = Label(case.name, variant, stage.index, tensor)
            m = measure.value(label, expected.flatten(1, 2), actual.flatten(1, 2), limit)
            yield m.of_block(block).shifted(case.prompt)
        places = _decoded(case, variant, f"L{stage.index}.topk_idxs").long()
        wrong = torch.zeros(places.shape[:2], dtype=torch.bool)
        for t in range(case.steps):
            newest = torch.tensor([case.prompt + t])
            for b in range(case.batch):
                for row in places[b, t]:
                    # in the draft call the ring stands in slot order and the block's rows follow it
                    ring = row[(row >= 0) & (row < window)].unsqueeze(0)
                    seen = torch.equal(window_positions(ring, newest, window), window_tokens(newest, window))
                    whole = torch.equal(row[-block:], torch.arange(len(row) - block, len(row)))
                    wrong[b, t] |= not (seen and whole)
        label = Label(case.name, variant, stage.index, "topk_idxs")
        yield measure.decisions(label, wrong, torch.zeros_like(wrong)).shifted(case.prompt)


def _head(case: Case, variant: str, taps: Mapping[str, Tensor]) -> Iterator[Measure]:
    for tensor in HEAD:
        label = Label(case.name, variant, None, f"dspark.{tensor}")
        expected = _decoded(case, variant, f"dspark.{tensor}")
        yield measure.value(label, expected, taps[f"dspark.{tensor}"], limits.FP32).shifted(case.prompt)
    label = Label(case.name, variant, None, "dspark.output_ids")
    wrong = (_decoded(case, variant, "dspark.output_ids") != taps["dspark.output_ids"]).any(-1)
    yield measure.decisions(label, wrong, torch.zeros_like(wrong)).shifted(case.prompt)
