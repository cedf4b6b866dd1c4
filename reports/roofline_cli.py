"""`dsv41 roofline`: the table and the JSON of reports/roofline.py."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from reference.config import load_config
from reference.errors import ConfigError
from reports.roofline import GPUS, Gpu, Step, layer_costs, stack_costs, summarise


def pick_gpu(name: str, bandwidth: float | None, tflops: float | None) -> Gpu:
    """A card of the table, its rates replaced where given (TB/s and TFLOP/s). Raises ConfigError for a
    name unknown.
    """
    if name not in GPUS:
        raise ConfigError(
            field="gpu",
            expected=f"one of {', '.join(GPUS)}",
            actual=name,
            hint="name a known card and replace its rates by --bandwidth and --tflops",
        )
    gpu = GPUS[name]
    if bandwidth or tflops:
        gpu = replace(
            gpu,
            bytes_per_s=(bandwidth or gpu.bytes_per_s / 1e12) * 1e12,
            flops_per_s=(tflops or gpu.flops_per_s / 1e12) * 1e12,
            source="given on the command line",
        )
    return gpu


def roofline_data(config_name: str, layers: list[int], step: Step, gpu: Gpu, nodes: int) -> dict[str, Any]:
    """Everything that the command prints, as JSON-ready data."""
    config = load_config(config_name)
    for index in layers:
        config.layer(index)  # ConfigError for a layer that isn't there
    parts = stack_costs(config, step)
    if layers:  # a choice of rows, not a slice: a reuse layer may be asked for without its source
        parts = {f"L{index}": layer_costs(config, config.layer(index), step) for index in layers}
    out: dict[str, Any] = {"config": config_name, "gpu": asdict(gpu), "step": asdict(step), "layers": {}}
    for name, components in parts.items():
        summary = summarise(components, gpu, nodes if name.startswith("L") else 1)
        if name.startswith("L"):
            role = config.layer(int(name[1:]))
            summary["kind"] = role.kind + (" + engram" if role.has_engram else "")
            summary["ratio"] = role.ratio
        out["layers"][name] = summary
    total = summarise(
        [c for components in parts.values() for c in components],
        gpu,
        nodes * sum(name[0] == "L" for name in parts) + 2,
    )
    total.pop("components")
    out["total"] = total
    return out


def roofline(
    config: Annotated[str, typer.Option(help="preset (flash, toy) or a config.json")] = "flash",
    layer: Annotated[list[int] | None, typer.Option(help="only these layers (repeat the option)")] = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="new tokens a sequence: 1 = decode")] = 1,
    context: Annotated[int, typer.Option(min=1, help="tokens held after the step")] = 4096,
    gpu: Annotated[str, typer.Option(help=f"one of {', '.join(GPUS)}")] = "h200",
    bandwidth: Annotated[float | None, typer.Option(help="TB/s in place of the card's")] = None,
    tflops: Annotated[float | None, typer.Option(help="bf16 TFLOP/s in place of the card's")] = None,
    experts: Annotated[float | None, typer.Option(help="measured distinct experts a layer")] = None,
    nodes: Annotated[int, typer.Option(min=0, help="graph nodes a layer, for the launch floor")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output")] = False,
) -> None:
    """Bytes, FLOPs and floors of each layer, by component."""
    if tokens > context:
        raise typer.BadParameter(f"--tokens {tokens} can't exceed --context {context}, which counts them")
    try:
        card = pick_gpu(gpu, bandwidth, tflops)
        data = roofline_data(config, layer or [], Step(batch, tokens, context, experts), card, nodes)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        typer.echo(json.dumps(data, indent=1))
        return
    print_tables(data)


def print_tables(data: dict[str, Any], console: Console | None = None) -> None:
    """One line a layer, then the components of each kind of layer that occurs."""
    console = console or Console()
    step, gpu = data["step"], data["gpu"]
    title = (
        f"{data['config']} on {gpu['name']} "
        f"({gpu['bytes_per_s'] / 1e12:.3g} TB/s, {gpu['flops_per_s'] / 1e12:.4g} TFLOP/s, "
        f"{gpu['source']}): batch {step['batch']}, {step['tokens']} new, context {step['context']}"
    )
    table = Table(title=title)
    for head in (
        "layer",
        "kind",
        "MB",
        "GFLOP",
        "bytes us",
        "compute us",
        "launch us",
        "floor us",
    ):
        table.add_column(head, justify="left" if head in ("layer", "kind") else "right")
    for name, row in [*data["layers"].items(), ("total", data["total"])]:
        table.add_row(
            name,
            row.get("kind", ""),
            *_numbers(row),
            f"{row['launch_floor_us']:.1f}",
            f"{row['floor_us']:.1f}",
        )
    console.print(table)
    seen = set()
    for name, row in data["layers"].items():
        shape = (row.get("kind"), row.get("ratio"))
        if not name.startswith("L") or shape in seen:
            continue
        seen.add(shape)
        parts = Table(title=f"{name}: {row['kind']}, ratio {row['ratio']}")
        for head in (
            "component",
            "MB",
            "GFLOP",
            "bytes us",
            "compute us",
            "floor us",
            "share",
            "bound",
        ):
            words = head in ("component", "bound")
            parts.add_column(head, justify="left" if words else "right", no_wrap=words)
        for part in row["components"]:
            parts.add_row(
                part["name"],
                *_numbers(part),
                f"{part['floor_us']:.2f}",
                f"{part['share']:.1%}",
                part["bound"],
            )
        console.print(parts)


def _numbers(row: dict[str, Any]) -> tuple[str, ...]:
    floors = (f"{row['bytes_floor_us']:.2f}", f"{row['compute_floor_us']:.2f}")
    return (f"{row['bytes'] / 1e6:.2f}", f"{row['flops'] / 1e9:.2f}", *floors)
