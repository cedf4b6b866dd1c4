"""The command line: what it prints for programs, and its exit status."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from golden import cli as golden_cli
from golden.cases import OFFICIAL
from harness import cli, commands
from reference.config import V41Config

CASE, WEIGHTS = "i_ties_fp8fp4_p9.safetensors", "weights_fp8fp4.safetensors"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def run(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == status, result.output
    return result.output


def main_status(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dsv41", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def test_help_says_where_to_start() -> None:
    text = run("--help")
    assert "Start here" in text and "Exit status" in text
    for command in ("verify", "show", "golden"):
        assert command in text


def test_show_config() -> None:
    shown = json.loads(run("show", "config", "flash", "--json"))
    assert V41Config.from_json(shown["values"]) == V41Config.flash()
    assert "window_row_bytes" in run("show", "config", "toy")


def test_show_config_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(V41Config.toy().to_dict()))
    assert json.loads(run("show", "config", str(path), "--json"))["digest"] == V41Config.toy().digest()


def test_show_layers() -> None:
    roles = json.loads(run("show", "layers", "flash", "--json"))
    assert len(roles) == 43
    assert [r["index"] for r in roles if r["kind"] == "full"] == [2, 8, 14, 20]
    assert [r["index"] for r in roles if r["uses_candidates"]] == [24, 28, 32, 36]
    table = run("show", "layers", "toy")
    assert "masks by" in table and "mtp.1" in table


def test_show_state_gives_the_published_bytes() -> None:
    kinds = {}
    for capacity in (1000, 2000):
        shown = json.loads(run("show", "state", "flash", "--capacity", str(capacity), "--json"))
        kinds[capacity] = sum(k["bytes"] for k in shown["kinds"] if k["addressing"] == "append")
    assert (kinds[2000] - kinds[1000]) / 1000 == 890  # bytes a token of context


def test_show_weights() -> None:
    shown = json.loads(run("show", "weights", "flash", "--json"))
    experts = [r for r in shown["rows"] if r["name"] == "layers.{0-39}.ffn.experts.*.w1.weight"]
    assert experts[0]["count"] == 40 * 384 and experts[0]["shape"] == [2304, 2560]
    assert shown["total_bytes"] == sum(r["bytes"] for r in shown["rows"])
    one = json.loads(run("show", "weights", "toy", "--layer", "2", "--all", "--json"))
    assert all(r["name"].startswith("layers.2.") and r["count"] == 1 for r in one["rows"])
    assert one["tensors"] == len(one["rows"])


@pytest.mark.parametrize(
    "words",
    [
        ("show", "layers", "no-such-config"),
        ("show", "state", "toy", "--capacity", "100000000"),
        ("show", "state", "toy", "--form", "zip"),
        ("show", "weights", "toy", "--layer", "77"),
        ("golden", "verify", "no/such/place"),
        ("no-such-command",),
        ("verify", "--checks", "no-such-check"),
        ("verify", "--no-golden", "--engine", "no_such_module:build"),
        ("verify", "--no-golden", "--option", "no equals sign"),
        ("verify", "--no-golden", "--budget", "soon"),
        ("replay", "no-such-file.json"),
        ("compare", "no-such-file", "no-such-file"),
        ("show", "state", "--capacity", "many"),
    ],
)
def test_wrong_use_ends_with_two(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert main_status(monkeypatch, *words) == 2
    assert "error" in capsys.readouterr().err.lower()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in (CASE, WEIGHTS):
        shutil.copy(OFFICIAL / name, tmp_path / name)
    return tmp_path


def test_golden_verify_ends_with_zero_and_writes_reports(place: Path, tmp_path: Path) -> None:
    text = run("golden", "verify", str(place), "--out", str(tmp_path / "out"))
    assert "1 cases" in text and "0 outside their limits" in text and "L" in text
    report = json.loads((tmp_path / "out" / "golden-verify.json").read_text())
    assert report["ok"] and report["cases"][0]["paths"]["groups closed"] > 0
    assert (tmp_path / "out" / "golden-verify.html").exists()


def test_golden_verify_details_list_every_tensor(place: Path, tmp_path: Path) -> None:
    text = run("golden", "verify", str(place / CASE), "--details", "--out", str(tmp_path / "out"))
    assert "index_score_masked" in text and "cmp_state_score" in text


def test_golden_verify_ends_with_one_and_names_the_tensor(place: Path, tmp_path: Path) -> None:
    with safe_open(place / CASE, framework="pt") as file:
        tensors, metadata = {k: file.get_tensor(k) for k in file.keys()}, file.metadata()  # noqa: SIM118
    tensors["pre.L3.attn_out"][0, 4] *= 1.1
    save_file(tensors, place / CASE, metadata)
    text = run("golden", "verify", str(place), "--out", str(tmp_path / "out"), status=1)
    assert "FAIL i_ties_fp8fp4_p9 decfix L3.attn_out" in text and "position 4" in text
    assert not json.loads((tmp_path / "out" / "golden-verify.json").read_text())["ok"]


def test_golden_verify_of_a_cut_file_ends_with_two(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / CASE).write_bytes((OFFICIAL / CASE).read_bytes()[:5000])
    assert main_status(monkeypatch, "golden", "verify", str(place)) == 2
    assert "a whole safetensors file" in capsys.readouterr().err


def test_verify_of_one_check(tmp_path: Path) -> None:
    text = run("verify", "--engine", "reference", "--checks", "interleave", "--out", str(tmp_path))
    assert "interleave" in text and "1 passed" in text and "golden" not in text
    assert json.loads((tmp_path / "verify.json").read_text())["status"] == 0


def test_golden_cases_come_first_and_their_failure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden_cli, "verify_places", lambda places, console, details: [])
    monkeypatch.setattr(golden_cli, "report", lambda results, console, out, whole_set: False)
    monkeypatch.setattr(commands, "verify", lambda *a, **k: 0)
    run("verify", "--out", str(tmp_path), status=1)
    run("verify", "--no-golden", "--out", str(tmp_path), status=0)


def test_checks_and_engines_are_listed() -> None:
    assert "decode_prefill" in run("checks")
    assert "package.module:factory" in run("engines")


def test_compare_two_dumps(tmp_path: Path) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"L0.stream": torch.zeros(2, 3)}, a)
    save_file({"L0.stream": torch.ones(2, 3)}, b)
    assert "equal byte for byte" in run("compare", str(a), str(a))
    assert "L0.stream" in run("compare", str(a), str(b), status=1)


def test_engine_options_are_json_or_text() -> None:
    assert cli.engine_option("max_sequences=4") == ("max_sequences", 4)
    assert cli.engine_option("backend=torch") == ("backend", "torch")
    assert cli.engine_option("buckets=[1, 8]") == ("buckets", [1, 8])


def test_a_command_whose_library_is_missing_says_so(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("no chart library", name="chartlib")

    monkeypatch.setattr(cli.importlib, "import_module", broken)
    cli.mount("reports.nothing", lambda module: None, "nothing")
    try:
        assert main_status(monkeypatch, "nothing") == 2
        assert "chartlib" in capsys.readouterr().err
    finally:
        cli.app.registered_commands.pop()
