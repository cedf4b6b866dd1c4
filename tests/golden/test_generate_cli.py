"""`dsv41 golden generate | diff | list | export`, and the numpy example of the page for implementers elsewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

import golden
from golden.generate import REFERENCE, read_cases
from golden.manage import listing
from golden.manage_cli import register
from reference.config import V41Config
from reference.engine import ReferenceEngine, Run
from reference.weights import DictWeights

GOLDEN = Path(golden.__file__).parent
app = typer.Typer()
register(app)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_diff_of_an_unchanged_case():
    result = run("diff", "toy_slice")
    assert result.exit_code == 0 and "nothing moved" in result.output


def test_an_unknown_case_names_the_known_ones():
    result = run("diff", "toy_slcie")
    assert result.exit_code == 2 and "toy_slice" in result.output


def test_generate_refuses_without_a_reason(tmp_path):
    entry = next(e for e in json.loads((REFERENCE / "cases.json").read_text()) if e["name"] == "toy_slice")
    (tmp_path / "cases.json").write_text(json.dumps([entry]))
    assert "new" in run("generate", "--folder", tmp_path).output
    (tmp_path / "cases.json").write_text(json.dumps([entry | {"seed": 99}]))
    refused = run("generate", "--folder", tmp_path)
    assert refused.exit_code == 1 and "--reason" in refused.output and "in.token_ids" in refused.output
    assert run("generate", "--folder", tmp_path, "--reason", "another seed").exit_code == 0
    assert run("diff", "--folder", tmp_path).exit_code == 0


def test_list_flags_goldens_that_no_test_uses(tmp_path):
    assert [row.name for row in listing() if not row.tests] == []
    (tmp_path / "test_x.py").write_text('GOLDEN_FAMILY = "official"\nNAME = "toy_deep"\n')
    unused = {row.name for row in listing(tests=tmp_path) if not row.tests}
    assert unused == set(read_cases()) - {"toy_deep"}
    assert run("list").exit_code == 0
    rows = json.loads(run("list", "--json").output)
    assert all(row["why"] and row["bytes"] for row in rows if row["family"] == "reference")


def test_exported_weights_give_the_recorded_numbers(tmp_path):
    """What somebody elsewhere does: read checkpoint and configuration, run, compare with the file."""
    assert run("export", "toy_slice", "--out", tmp_path).exit_code == 0
    config = V41Config.from_json(tmp_path / "config.json")
    tensors = load_file(tmp_path / "model.safetensors")
    engine = ReferenceEngine(config, DictWeights(config, tensors, tensors.pop("token_map")))
    stored = load_file(REFERENCE / "toy_slice.safetensors")
    sequence = engine.open(64)
    ids = tuple(stored["in.token_ids"].tolist())[:9]
    result = engine.step([Run(sequence, ids, 0)], taps=["L3.stream"])
    assert (result.taps["L3.stream"] == stored["out.L3.stream"][:9]).all()


def example():
    return re.search(
        r"```python\n(.*?)```", (GOLDEN / "USING.md").read_text(encoding="utf-8"), re.DOTALL
    ).group(1)


@pytest.mark.parametrize("name", ["toy_deep", "toy_decode", "toy_chunks"])
def test_numpy_example_of_the_page(tmp_path, name):
    script = tmp_path / "example.py"
    script.write_text(example(), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-I", script, REFERENCE / f"{name}.safetensors"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rf"{name}: \d+ selections as recorded", done.stdout)


def test_numpy_example_is_short_and_can_fail(tmp_path):
    text = example()
    assert len([line for line in text.splitlines() if line.strip()]) <= 30
    assert "torch" not in text and "safetensors import" not in text
    script = tmp_path / "example.py"
    script.write_text(text.replace('kind="stable")[:k]', 'kind="stable")[1 : k + 1]'), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, REFERENCE / "toy_deep.safetensors"], capture_output=True, timeout=60
    )
    assert done.returncode == 1
