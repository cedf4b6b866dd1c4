"""The reference goldens: the same bytes on every run, verified against the reference, sharp against one constant."""

import json
import shutil

import pytest
import torch

import reference.hyper_connections
from golden.compare import moved
from golden.coverage import COUNTERS, coverage
from golden.generate import REFERENCE, encode, generate, narrow, read_cases
from golden.manage import difference, make
from golden.manifest import checksum, read_manifest, sha256, weights_vector
from golden.reference_check import verify_file, verify_reference
from reference.errors import ConfigError, WeightsError

GOLDEN_FAMILY = "reference"
CASES = read_cases()
MANIFEST = read_manifest()
SMALL = "toy_slice"


@pytest.fixture
def folder(tmp_path):
    """A folder with one small case alone."""
    shutil.copy(REFERENCE / CASES[SMALL].file, tmp_path)
    entries = json.loads((REFERENCE / "cases.json").read_text())
    (tmp_path / "cases.json").write_text(json.dumps([e for e in entries if e["name"] == SMALL]))
    files = {CASES[SMALL].file: MANIFEST["files"][CASES[SMALL].file]}
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST | {"files": files}))
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_as_recorded(name):
    result = verify_file(REFERENCE, CASES[name], MANIFEST["files"].get(CASES[name].file))
    assert result.ok, result.message


def test_weights_generator_is_pinned():
    assert weights_vector() == MANIFEST["weights"]


def test_every_path_is_taken_by_some_case():
    for path in COUNTERS:
        assert any(entry["coverage"][path] for entry in MANIFEST["files"].values()), path


def test_sizes():
    sizes = [entry["bytes"] for entry in MANIFEST["files"].values()]
    assert max(sizes) < 1_000_000 and sum(sizes) < 10_000_000
    assert (
        {p.name for p in REFERENCE.glob("*.safetensors")}
        == {c.file for c in CASES.values()}
        == set(MANIFEST["files"])
    )


@pytest.mark.parametrize("name", [SMALL, "toy_deep"])
def test_same_bytes_again(name):
    threads = torch.get_num_threads()
    data, run = generate(CASES[name])
    torch.set_num_threads(1 if threads > 1 else 2)  # the caller's threads must not matter
    again = encode(CASES[name], run.tensors)
    torch.set_num_threads(threads)
    assert sha256(data) == MANIFEST["files"][CASES[name].file]["sha256"] == sha256(again)


@pytest.mark.slow
def test_all_the_same_bytes_within_a_minute():
    for name, case in CASES.items():
        assert sha256(generate(case)[0]) == MANIFEST["files"][case.file]["sha256"], name


def test_nineteen_sinkhorn_iterations_are_named(monkeypatch):
    """One constant off: the first tensor that it touches is named, with its place."""
    right = reference.hyper_connections.sinkhorn
    monkeypatch.setattr(reference.hyper_connections, "sinkhorn", lambda x, n, eps: right(x, n - 1, eps))
    result = verify_file(REFERENCE, CASES["toy_deep"], MANIFEST["files"]["toy_deep.safetensors"])
    assert not result.ok
    first = result.moved[0]
    assert first.tensor.endswith((".mid_stream", ".stream")) and first.position >= 0
    assert first.tensor in result.message
    # what stands before the mix in the dataflow has not moved
    assert not {m.tensor for m in result.moved} & {
        f"out.L{i}.{x}" for i in range(9) for x in ("attn_in", "attn_pre")
    }


def test_a_changed_file_is_refused(folder):
    path = folder / CASES[SMALL].file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "sha256" in verify_reference(folder)[0].message


def test_a_changed_configuration_is_refused(folder):
    entries = json.loads((folder / "cases.json").read_text())
    entries[0]["config"] = {"hc_sinkhorn_iters": 19}
    (folder / "cases.json").write_text(json.dumps(entries))
    assert "configuration" in verify_reference(folder)[0].message


def test_a_moved_generator_is_refused(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["weights"]["embed.weight"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "embed.weight" in verify_reference(folder)[-1].message


def test_coverage_is_asserted(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][CASES[SMALL].file]["coverage"]["ring wraps"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "ring wraps" in verify_reference(folder)[0].message


def test_strays_and_missing_files(folder):
    shutil.copy(folder / CASES[SMALL].file, folder / "stray.safetensors")
    (folder / CASES[SMALL].file).unlink()
    results = verify_reference(folder)
    assert "no file" in results[0].message and "stray" in results[-1].message


def test_moved_file_is_overwritten_with_a_reason_only(folder, monkeypatch):
    right = reference.hyper_connections.sinkhorn
    monkeypatch.setattr(reference.hyper_connections, "sinkhorn", lambda x, n, eps: right(x, 2, eps))
    before = (folder / CASES[SMALL].file).read_bytes()
    outcome = make(folder=folder)[0]
    assert outcome.status == "moved" and outcome.moved == difference(CASES[SMALL], folder)
    assert (folder / CASES[SMALL].file).read_bytes() == before
    assert make(folder=folder, reason="two iterations, for a test")[0].status == "overwritten"
    change = read_manifest(folder / "manifest.json")["files"][CASES[SMALL].file]["changes"][-1]
    assert change["reason"] == "two iterations, for a test" and change["before"] == sha256(before)
    assert change["first"] == outcome.moved[0].text()
    assert make(folder=folder)[0].status == "same" and difference(CASES[SMALL], folder) == []


def test_first_divergence_is_the_earliest_row_in_dataflow_order():
    rows = {"in.sequence": torch.tensor([0, 0, 1]), "in.position": torch.tensor([0, 1, 0])}
    old = rows | {
        "out.L0.attn_out": torch.ones(3, 2),
        "out.L0.stream": torch.ones(3, 2),
        "out.L1.stream": torch.ones(3, 2),
    }
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["out.L1.stream"][0, 1] = 2
    new["out.L0.attn_out"][1, 0] = 3
    new["out.L0.stream"][1, 0] = 3
    found = moved(old, new)
    assert [m.tensor for m in found] == ["out.L1.stream", "out.L0.attn_out", "out.L0.stream"]
    assert (found[1].sequence, found[1].position, found[1].index) == (0, 1, (0,))
    assert (found[1].expected, found[1].actual, found[1].rows) == (1.0, 3.0, 1)


def test_narrowing_loses_nothing():
    for values in (
        torch.tensor([1.0, float("nan"), -float("inf")]),
        torch.tensor([1.1]),
        torch.tensor([1.1]).double(),
    ):
        small = narrow(values)
        assert torch.equal(small.to(values.dtype).nan_to_num(7), values.nan_to_num(7))
    assert narrow(torch.tensor([1.5])).dtype == torch.bfloat16
    assert narrow(torch.tensor([300, -1])).dtype == torch.int16
    assert checksum(torch.tensor([0.1, float("nan")], dtype=torch.float64)) == "float64 2 0.1 1"


def test_bad_cases_are_refused(tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(
        json.dumps([{"name": "x", "why": "", "seed": 1, "calls": [[1]], "steps": 1, "colour": "red"}])
    )
    with pytest.raises(ConfigError, match="colour"):
        read_cases(path)
    with pytest.raises(WeightsError, match="golden generate"):
        read_manifest(tmp_path / "none.json")


def test_coverage_counts_calls_that_cut_a_group():
    _, run = generate(CASES[SMALL])
    assert coverage(CASES[SMALL], run)["groups cut by a call"] == 4  # 9, 11, 13 and 15 tokens of 9 + 6
