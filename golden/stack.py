"""Stack and block cases: every recorded tensor against the reference on the recorded inputs of its layer.

Decisions (selection, candidate blocks, experts) are judged first.  Where one differs and is a tie, the
reference runs again with the recorded decisions forced, so that what follows from them is compared as sharply
as the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from golden import limits, measure
from golden.cases import Case
from golden.choices import judge_candidates, judge_experts, judge_selection, selections
from golden.limits import Limit
from golden.measure import Label, Measure
from golden.replay import Replay, release_model, replay
from golden.stored import stored_measures
from reference.compressor import visible_rows
from reference.config import LayerRole

# tensor -> limit for (bf16, fp8/fp4) weights, in the order of the dataflow
VALUES: dict[str, tuple[Limit, Limit]] = {
    "engram_gate": (limits.FP32,) * 2,
    "engram_out": (limits.ROUNDED,) * 2,
    "attn_pre": (limits.FP32,) * 2,
    "attn_in": (limits.ROUNDED,) * 2,
    "q": limits.ATTENTION,
    "latent": (limits.ROUNDED,) * 2,
    "index_q": (limits.INDEX_QUERY,) * 2,
    "index_w": (limits.ROUNDED,) * 2,
    "sparse_o": limits.ATTENTION,
    "attn_out": limits.ATTENTION,
    "mid_stream": limits.STREAM,
    "ffn_in": limits.STREAM,
    "moe_w": (limits.FP32,) * 2,
    "ffn_out": limits.EXPERTS,
    "stream": limits.STREAM,
    "pre_mix": (limits.FP32,) * 2,
}
FINAL = ("final_collapsed", "final_normed")


@dataclass(frozen=True)
class Decisions:
    """The recorded decisions of one variant by tap name [B, P + T, ...], and the tokens of each layer's
    window."""

    forced: Mapping[str, Tensor]
    windows: Mapping[int, Tensor]


def verify_stack(case: Case, variant: str) -> tuple[list[Measure], Replay]:
    """Every comparison of one decode variant, and what the reference computed."""
    model = release_model(case, variant)
    recorded = recorded_decisions(case, variant)
    run = replay(case, model, variant)
    measures = list(decision_measures(case, variant, run, recorded))
    if any(m.tied or m.wrong for m in measures):
        run = replay(case, model, variant, forced=recorded.forced)
    start = first_row(case, variant)
    measures += list(place_measures(case, variant, run, recorded))
    measures += list(value_measures(case, variant, run, start))
    measures += list(model_measures(case, variant, run, start))
    measures += list(stored_measures(case, variant, run))
    return measures, run


def first_row(case: Case, variant: str) -> int:
    """decfix and block cases are compared from the first token; dec shares its prefill with decfix."""
    return case.prompt if variant == "dec" and case.block_layer is None else 0


def recorded_decisions(case: Case, variant: str) -> Decisions:
    forced, windows = {}, {}
    for role in case.config.layers():
        name = f"L{role.index}"
        windows[role.index], chosen = selections(case, variant, role.index)
        if role.ratio > 0:
            forced[f"{name}.selection"] = chosen
        for tensor in ("candidates", "moe_idx"):
            rows = case.rows(variant, f"{name}.{tensor}", fill=False)
            if rows is not None:
                forced[f"{name}.{tensor}"] = rows
    return Decisions(forced, windows)


def decision_measures(case: Case, variant: str, run: Replay, recorded: Decisions) -> Iterator[Measure]:
    start = first_row(case, variant)
    positions = torch.arange(case.length)
    for role in case.config.layers():
        name = f"L{role.index}"
        visible = visible_rows(positions, role.ratio) if role.ratio else positions
        scores = _scores(case, variant, role)
        judged: dict[str, tuple[Tensor, Tensor]] = {}
        if role.is_candidate_source and scores is not None:
            ours, theirs = run.taps[f"{name}.candidates"], recorded.forced[f"{name}.candidates"]
            size = case.config.candidate_block_size
            judged["candidates"] = judge_candidates(theirs, ours, scores, visible, size)
        if role.is_index_source and scores is not None:
            masked = case.rows(variant, f"{name}.index_score_masked", fill=-torch.inf)
            ours, theirs = run.taps[f"{name}.selection"], recorded.forced[f"{name}.selection"]
            judged["selection"] = judge_selection(theirs, ours, scores if masked is None else masked)
        margin = case.rows(variant, f"{name}.route_margin")
        ours, theirs = run.taps[f"{name}.moe_idx"], recorded.forced[f"{name}.moe_idx"]
        judged["moe_idx"] = judge_experts(
            theirs, ours, run.taps[f"{name}.route_margin"] if margin is None else margin
        )
        for tensor, (wrong, tied) in judged.items():
            label = Label(case.name, variant, role.index, tensor)
            yield _from_row(measure.decisions(label, wrong[:, start:], tied[:, start:]), start)


def place_measures(case: Case, variant: str, run: Replay, recorded: Decisions) -> Iterator[Measure]:
    """Which window tokens and (in layers that reuse one) which selected rows each query reads, and the n-gram
    rows."""
    start, window = first_row(case, variant), case.config.sliding_window
    for role in case.config.layers():
        ours = run.taps[f"L{role.index}.topk_idxs"]
        wrong = (ours[..., :window] != recorded.windows[role.index]).any(-1)
        if role.kind == "reuse":
            selected = torch.where(ours[..., window:] >= 0, ours[..., window:] - window, -1)
            wrong |= (selected != recorded.forced[f"L{role.index}.selection"]).any(-1)
        label = Label(case.name, variant, role.index, "topk_idxs")
        yield _from_row(measure.decisions(label, wrong[:, start:], torch.zeros_like(wrong)[:, start:]), start)
    hashes = case.rows(variant, "engram_hash")
    if hashes is not None:
        wrong = (hashes != run.taps["engram_hash"]).flatten(2).any(-1)[:, start:]
        label = Label(case.name, variant, None, "engram_hash")
        yield _from_row(measure.decisions(label, wrong, torch.zeros_like(wrong)), start)


def value_measures(case: Case, variant: str, run: Replay, start: int) -> Iterator[Measure]:
    for role in case.config.layers():
        for tensor, pair in VALUES.items():
            expected = (
                _latent(case, variant, role)
                if tensor == "latent"
                else case.rows(variant, f"L{role.index}.{tensor}")
            )
            if expected is None or f"L{role.index}.{tensor}" not in run.taps:
                continue
            actual = run.taps[f"L{role.index}.{tensor}"]
            begin = start
            if tensor == "latent":  # one row a finished group; the tap has it at the completing token
                done = visible_rows(torch.arange(case.length), role.ratio)
                actual, begin = actual[:, (done * role.ratio) == torch.arange(1, case.length + 1)], 0
            if tensor == "moe_w":  # by expert, so that two equal scores in another order are the same weights
                expected, actual = (
                    _by_expert(w, ids)
                    for w, ids in (
                        (expected, case.rows(variant, f"L{role.index}.moe_idx")),
                        (actual, run.taps[f"L{role.index}.moe_idx"]),
                    )
                )
            label = Label(case.name, variant, role.index, tensor)
            limit = pair[int(case.quantised)]
            yield _from_row(measure.value(label, expected[:, begin:], actual[:, begin:], limit), begin)
        scores = _scores(case, variant, role)
        if scores is not None:
            for tensor in ("index_score", "index_score_masked"):
                expected = case.rows(variant, f"L{role.index}.{tensor}", fill=-torch.inf)
                if expected is None:
                    continue
                actual = run.taps[f"L{role.index}.{tensor}"].nan_to_num(-torch.inf, neginf=-torch.inf)
                expected = expected.float().nan_to_num(
                    -torch.inf, neginf=-torch.inf
                )  # NaN: a row that is not there yet
                label = Label(case.name, variant, role.index, tensor)
                yield _from_row(
                    measure.value(label, expected[:, start:], actual[:, start:], limits.SCORE), start
                )


def model_measures(case: Case, variant: str, run: Replay, start: int) -> Iterator[Measure]:
    """What stands behind the last layer, from the recorded stream."""
    for tensor in (*FINAL, "main_hidden"):
        expected = case.rows(variant, tensor)
        if expected is not None:
            label = Label(case.name, variant, None, tensor)
            yield _from_row(
                measure.value(label, expected[:, start:], run.taps[tensor][:, start:], limits.ROUNDED), start
            )
    after, ids = case.decoded(variant, "logits"), case.decoded(variant, "output_ids")
    if after is not None and ids is not None:
        expected = torch.cat((case.tensors["pre.logits_all"], after), dim=1)
        actual = run.taps["logits"]
        label = Label(case.name, variant, None, "logits")
        yield _from_row(measure.value(label, expected[:, start:], actual[:, start:], limits.FP32), start)
        last = case.prompt - 1
        chosen = torch.cat((case.tensors["pre.output_ids"].unsqueeze(1), ids), dim=1)
        wrong = actual[:, last:].argmax(-1) != chosen
        begin = start if start else last
        wrong = wrong[:, begin - last :]
        label = Label(case.name, variant, None, "output_ids")
        yield _from_row(measure.decisions(label, wrong, torch.zeros_like(wrong)), begin)


def _scores(case: Case, variant: str, role: LayerRole) -> Tensor | None:
    return case.rows(variant, f"L{role.index}.index_score", fill=-torch.inf) if role.is_index_source else None


def _latent(case: Case, variant: str, role: LayerRole) -> Tensor | None:
    """[B, groups, C]: prefill's rows, then those of the decode steps that finished a group."""
    before, after = (
        case.tensors.get(f"pre.L{role.index}.latent"),
        case.decoded(variant, f"L{role.index}.latent"),
    )
    return None if before is None or after is None else torch.cat((before, after), dim=1)


def _by_expert(weights: Tensor, experts: Tensor | None) -> Tensor:
    assert experts is not None
    return weights.gather(-1, experts.argsort(dim=-1))


def _from_row(m: Measure, start: int) -> Measure:
    """The same measure with its place counted from the sequence's first token."""
    return m.shifted(start)
