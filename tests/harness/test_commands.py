"""The commands as functions: exit status, files written, findings run again, dumps compared."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from harness import commands
from harness.findings import Finding
from harness.outcome import by_root
from reference.errors import ConfigError, InputError


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=160)


STALE = {"release_stale_index_k": True}


def test_a_correct_engine_passes_and_leaves_a_page(tmp_path, console):
    assert commands.verify("optimized", checks=["interleave"], out=tmp_path, console=console) == 0
    data = json.loads((tmp_path / "verify.json").read_text())
    assert (data["status"], data["checks"][0]["check"], data["checks"][0]["status"]) == (
        0,
        "interleave",
        "passed",
    )
    page = (tmp_path / "verify.html").read_text()
    assert "interleave" in page and "0 findings" in page
    assert not any(mark in page for mark in ("<script src", "<link", "http://", "https://")), "self-contained"
    assert not (tmp_path / "findings").exists()


def test_the_release_s_stale_keys_are_exactly_one_finding_and_it_shows_again(tmp_path, console):
    names = ["decode_prefill", "reference_limits", "topk_oracle"]
    assert commands.verify("reference", options=STALE, checks=names, out=tmp_path, console=console) == 1
    files = list((tmp_path / "findings").iterdir())
    assert len(files) == 1
    finding = Finding.read(files[0])
    assert (finding.check, finding.detector) == ("decode_prefill", "DP")
    assert finding.position % 2 == 0 and (finding.layer, finding.tap) == (2, "index_score")
    assert finding.details["inputs agreed"] is True
    assert commands.replay(files[0], console=console) == 1
    assert "dsv41 replay" in console.export_text()

    finding.engine_options = {}
    repaired = finding.write(tmp_path / "repaired")
    assert commands.replay(repaired, console=console) == 0


def test_a_declined_check_is_not_passed(tmp_path, console):
    assert commands.verify("reference", checks=["graphs"], out=tmp_path, console=console) == 0
    text = console.export_text()
    assert "declined: graphs" in text and "0 passed" in text


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: commands.verify("no.such:engine"), ConfigError),
        (lambda: commands.verify("nonsense"), ConfigError),
        (lambda: commands.verify(checks=["nonsense"]), ConfigError),
        (lambda: commands.verify(config="/no/such/config.json"), ConfigError),
        (lambda: commands.verify("optimized", remote="true"), InputError),
        (lambda: commands.verify(budget="soon"), InputError),
        (lambda: commands.replay(commands.Path("/no/such/finding.json")), InputError),
        (lambda: commands.compare(commands.Path("/no/a"), commands.Path("/no/b")), InputError),
    ],
)
def test_wrong_use_is_a_typed_error(call, error):
    with pytest.raises(error):
        call()


@pytest.mark.parametrize(("text", "value"), [("60s", 60), ("2m", 120), ("0.5", 0.5), (7, 7), ("1h", 3600)])
def test_times(text, value):
    assert commands.seconds(text) == value


def test_two_dumps_first_divergence_first(tmp_path, console):
    generator = torch.Generator().manual_seed(1)
    names = ("engram_hash", "L0.q", "L0.attn_out", "L10.q", "L2.stream", "logits")
    dump = {name: torch.randn(4, 8, generator=generator) for name in names}
    save_file(dump, tmp_path / "a.safetensors")
    assert commands.compare(tmp_path / "a.safetensors", tmp_path / "a.safetensors", console=console) == 0
    changed = {name: value.clone() for name, value in dump.items() if name != "logits"}
    changed["L10.q"][1] += 1
    changed["L2.stream"][3, 5] = 9.0
    save_file(changed, tmp_path / "b.safetensors")
    assert commands.compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors", console=console) == 1
    text = console.export_text()
    assert text.index("L2.stream") < text.index("L10.q") < text.index("logits")
    assert "row 3, element" in text and "only in" in text and "L0.q" not in text


def test_lists(console):
    assert commands.checks(console=console) == 0 and commands.engines(console=console) == 0
    text = console.export_text()
    assert "decode_prefill" in text and "remote:COMMAND" in text and "bitwise, graphs" in text


def test_findings_of_one_root_are_one():
    def finding(check, layer, tap, position, count):
        operations = [{"op": "open"}] * count
        return Finding(check, "CH", "m", layer=layer, tap=tap, position=position, operations=operations)

    merged = by_root([
        finding("chunks", 2, "q", 9, 5), finding("batch", 2, "q", 7, 3), finding("batch", 3, "q", 7, 3),
        finding("leaks", None, None, None, 2),
    ])  # fmt: skip
    assert len(merged) == 3
    assert merged[0].check == "batch"
    assert merged[0].details == {"seen": 2, "by": ["batch", "chunks"], "positions": [7, 9]}
