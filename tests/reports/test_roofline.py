"""The roofline gives the floors that the performance page states, and its parts add up."""

import json

import pytest
import typer
from typer.testing import CliRunner

from reference.config import load_config
from reports.roofline import (
    GPUS,
    Step,
    expected_distinct_experts,
    layer_costs,
    moe_costs,
    stack_costs,
    summarise,
)
from reports.roofline_cli import roofline

FLASH, H200 = load_config("flash"), GPUS["h200"]
REUSE, SOURCE = FLASH.layer(3), FLASH.layer(20)  # plain reuse layer; full-context index source


def floors(role, **step):
    return summarise(layer_costs(FLASH, role, Step(**step)), H200)


# design/performance.md, table "Bytes floor of one layer's decode step"
@pytest.mark.parametrize(
    ("role", "batch", "context", "us"),
    [(REUSE, 1, 4096, 67), (REUSE, 8, 4096, 242), (REUSE, 64, 4096, 1130)]
    + [(SOURCE, 1, c, us) for c, us in ((4096, 70), (65536, 71), (524288, 79))]
    + [(SOURCE, 8, c, us) for c, us in ((4096, 245), (65536, 254), (524288, 319))]
    + [(SOURCE, 64, c, us) for c, us in ((4096, 1137), (65536, 1207), (524288, 1726))],
)
def test_decode_floor_of_the_performance_page(role, batch, context, us):
    assert floors(role, batch=batch, context=context)["bytes_floor_us"] == pytest.approx(us, rel=0.011)


@pytest.mark.parametrize(("batch", "distinct"), [(1, 6), (8, 45.5), (64, 243.8)])
def test_distinct_experts_of_the_performance_page(batch, distinct):
    assert expected_distinct_experts(384, 6, batch) == pytest.approx(distinct, abs=0.05)


@pytest.mark.parametrize(
    ("component", "us"),
    [("routed_experts", 26), ("output_projection", 18), ("q_kv_projections", 12), ("shared_expert", 8)],
)
def test_shares_at_batch_1(component, us):
    parts = {p["name"]: p["floor_us"] for p in floors(REUSE, batch=1)["components"]}
    assert parts[component] == pytest.approx(us, abs=0.7)


def test_prefill_floor():
    plain = floors(REUSE, tokens=4096)
    assert plain["floor_us"] / 1e3 == pytest.approx(4.7, rel=0.02)
    # Engram and a full index source on top: 6.5 ms, by the parts that the page adds
    engram = next(p for p in floors(FLASH.layer(1), tokens=4096)["components"] if p["name"] == "engram")
    assert (floors(SOURCE, tokens=4096)["floor_us"] + engram["floor_us"]) / 1e3 == pytest.approx(
        6.5, rel=0.02
    )


def test_measured_experts_replace_the_expectation():
    even = {c.name: c.bytes for c in moe_costs(FLASH, 8)}
    fewer = {c.name: c.bytes for c in moe_costs(FLASH, 8, distinct=20)}
    assert fewer["routed_experts"] < even["routed_experts"]
    assert fewer["shared_expert"] == even["shared_expert"]


@pytest.mark.parametrize("step", [Step(), Step(3, 5, 40), Step(2, 1, 7)])
def test_weight_bytes_are_those_of_the_weights(step):
    """Bytes of a step with no row to speak of approach the stored weights of the layer's tensors."""
    config = load_config("toy")
    for role in config.layers():
        costs = {c.name: c for c in layer_costs(config, role, step)}
        assert ("engram" in costs) == role.has_engram
        assert ("index_scores" in costs) == role.is_index_source
        assert ("compressor" in costs) == role.is_kv_source
        assert all(c.bytes > 0 and c.flops >= 0 for c in costs.values())


def test_stack_is_the_sum_of_its_parts():
    parts = stack_costs(FLASH, Step())
    everything = summarise([c for p in parts.values() for c in p], H200)
    assert everything["floor_us"] == pytest.approx(
        sum(summarise(p, H200)["floor_us"] for p in parts.values())
    )
    assert next(iter(parts)) == "embedding" and list(parts)[-1] == "head" and len(parts) == 42


def run(*arguments):
    app = typer.Typer()
    app.command()(roofline)
    return CliRunner().invoke(app, list(arguments))


def test_command_prints_table_and_json():
    table = run("--layer", "3")
    assert table.exit_code == 0 and "routed_experts" in table.output
    data = json.loads(run("--layer", "3", "--batch", "8", "--json").output)
    assert data["layers"]["L3"]["bytes_floor_us"] == pytest.approx(242, rel=0.011)
    assert sum(part["share"] for part in data["layers"]["L3"]["components"]) == pytest.approx(1)


def test_rates_can_be_given():
    slow = json.loads(run("--layer", "3", "--bandwidth", "2.125", "--json").output)
    assert slow["layers"]["L3"]["bytes_floor_us"] == pytest.approx(2 * 66.7, rel=0.01)


@pytest.mark.parametrize("bad", [("--gpu", "abacus"), ("--layer", "77"), ("--tokens", "9", "--context", "8")])
def test_bad_arguments_say_what_to_do(bad):
    result = run(*bad)
    assert result.exit_code == 2 and "Invalid value" in result.output
