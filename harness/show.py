"""`dsv41 show`: a configuration's values, layer roles, per-sequence state and tensors, as a table or as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any

import typer

from harness.terminal import console, new_table
from reference.config import V41Config, load_config
from reference.state_table import FORMS, state_table
from reference.weight_specs import TensorSpec, tensor_specs

app = typer.Typer(no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(metavar="CONFIG", help="flash, toy, flash-slice, or the path of a config.json.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table.")]


@app.callback()
def group() -> None:
    """What a configuration means: values, roles of the layers, state of a sequence, tensors.

    Example: dsv41 show layers flash
    """


@app.command()
def config(name: Name = "toy", as_json: Json = False) -> None:
    """Every value of the configuration, and the sizes that follow from it."""
    loaded = load_config(name)
    values = loaded.to_dict()
    derived = {
        key: getattr(loaded, key)
        for key in (
            "engram_columns",
            "engram_row_bytes",
            "window_row_bytes",
            "latent_row_bytes",
            "index_row_bytes",
        )
    }
    if as_json:
        print(
            json.dumps(
                {"name": name, "digest": loaded.digest(), "values": values, "derived": derived}, indent=1
            )
        )
        return
    rows = [(f.name, _short(values[f.name])) for f in fields(loaded)]
    _print(f"configuration {name}", ("field", "value"), rows)
    _print("derived", ("size", "value"), derived.items())
    console().print(f"digest {loaded.digest()}", highlight=False)


@app.command()
def layers(name: Name = "toy", as_json: Json = False) -> None:
    """The role of each layer: who owns rows and keys, who selects, who reuses what."""
    loaded = load_config(name)
    roles = [asdict(role) for role in (*loaded.layers(), *loaded.draft_layers())]
    if as_json:
        print(json.dumps(roles, indent=1))
        return
    rows = []
    for role in roles:
        pool = "builds" if role["is_candidate_source"] else "masks by" if role["uses_candidates"] else ""
        sources = [
            ("own" if role[s] == role["index"] else _or_dash(role[s])) for s in ("kv_source", "index_source")
        ]
        kind = "draft" if role["is_draft"] else role["kind"]
        engram = "yes" if role["has_engram"] else ""
        experts = f"{role['top_k']} of {role['n_experts']}"
        rows.append((role["index"], kind, role["ratio"], *sources, pool, engram, experts, role["prefix"]))
    headings = (
        "layer",
        "kind",
        "ratio",
        "rows and keys of",
        "selection of",
        "candidate pool",
        "engram",
        "experts",
        "names",
    )
    _print(f"layers of {name}", headings, rows)


@app.command()
def state(
    name: Name = "toy",
    capacity: Annotated[
        int, typer.Option("--capacity", min=1, help="Tokens that a sequence may hold.")
    ] = 1024,
    form: Annotated[
        str, typer.Option("--form", help=f"{' or '.join(FORMS)}: serving format, or the release's.")
    ] = "packed",
    spare: Annotated[
        int, typer.Option("--ring-spare", min=0, help="Spare ring rows = tokens of rollback.")
    ] = 0,
    drafts: Annotated[bool, typer.Option("--drafts", help="The draft stages' windows too.")] = False,
    as_json: Json = False,
) -> None:
    """What one sequence keeps between steps, in bytes, for a capacity in tokens."""
    loaded = load_config(name)
    table = state_table(loaded, capacity=capacity, form=form, ring_spare=spare, drafts=drafts)
    total = sum(kind.bytes for kind in table)
    if as_json:
        kinds = [
            asdict(k) | {"dtype": _dtype(k.dtype), "row_bytes": k.row_bytes, "bytes": k.bytes} for k in table
        ]
        print(
            json.dumps({"capacity": capacity, "form": form, "total_bytes": total, "kinds": kinds}, indent=1)
        )
        return
    rows = [
        (
            k.name,
            "model" if k.layer is None else k.layer,
            k.addressing,
            f"{k.rows:,} = {k.formula}",
            f"{_dtype(k.dtype)} {list(k.row_shape)}",
            "any" if k.rewindable is None else k.rewindable,
            f"{k.bytes:,}",
        )
        for k in table
    ]
    headings = ("kind", "layer", "addressing", "rows", "a row", "rewinds by", "bytes")
    _print(f"state of one sequence of {capacity:,} tokens, {name}, {form}", headings, rows)
    console().print(f"total {total:,} bytes, {total / capacity:,.1f} a token of capacity", highlight=False)


@app.command()
def weights(
    name: Name = "toy",
    layer: Annotated[list[int] | None, typer.Option("--layer", help="Only these layers; repeatable.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every tensor alone, not layers and experts together.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Names, shapes, storage formats and bytes of the tensors, under the release's names."""
    loaded = load_config(name)
    specs = tensor_specs(loaded, layer or None).values()
    rows = [_tensor(spec, spec.name, 1) for spec in specs] if every else _grouped(loaded, specs)
    total, count = sum(spec.nbytes for spec in specs), len(specs)
    if as_json:
        print(json.dumps({"tensors": count, "total_bytes": total, "rows": rows}, indent=1))
        return
    table = [(r["name"], r["count"], _dtype_name(r["dtype"]), r["shape"], f"{r['bytes']:,}") for r in rows]
    _print(f"tensors of {name}", ("name", "tensors", "format", "shape", "bytes"), table)
    console().print(f"{count:,} tensors, {total:,} bytes", highlight=False)


def _grouped(config: V41Config, specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    """Tensors that differ in layer or expert number alone, as one row each."""
    groups: dict[tuple[str, tuple[int, ...], Any], list[TensorSpec]] = {}
    for spec in specs:
        pattern = re.sub(
            r"experts\.\d+\.", "experts.*.", re.sub(r"^(layers|mtp)\.\d+\.", r"\1.*.", spec.name)
        )
        groups.setdefault((pattern, spec.shape, spec.dtype), []).append(spec)
    rows = []
    for (pattern, _, _), members in groups.items():
        numbers = sorted({int(n) for s in members for n in re.findall(r"^(?:layers|mtp)\.(\d+)\.", s.name)})
        row = _tensor(
            members[0],
            pattern.replace(".*.", f".{_ranges(numbers)}.", 1) if numbers else pattern,
            len(members),
        )
        rows.append(row)
    return rows


def _tensor(spec: TensorSpec, name: str, count: int) -> dict[str, Any]:
    return {
        "name": name,
        "count": count,
        "dtype": _dtype(spec.dtype),
        "shape": list(spec.shape),
        "bytes": count * spec.nbytes,
        "optional": spec.optional,
    }


def _ranges(numbers: Sequence[int]) -> str:
    """[2, 3, 4, 7] -> {2-4,7}; a single number stands alone."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"


def _print(title: str, headings: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    table = new_table(title)
    numeric = {"bytes", "tensors", "layer", "ratio", "rewinds by"}
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console().print(table)


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _short(value: Any) -> str:
    """Lists with long runs of one value in short: 0 x2, 2 x18."""
    if not isinstance(value, list):
        return str(value)
    runs: list[tuple[Any, int]] = []
    for item in value:
        if runs and runs[-1][0] == item:
            runs[-1] = (item, runs[-1][1] + 1)
        else:
            runs.append((item, 1))
    if len(runs) * 2 > len(value):
        return ", ".join(map(str, value)) or "none"
    return ", ".join(f"{item} x{count}" if count > 1 else str(item) for item, count in runs)


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_name(name: str) -> str:
    return {"float8_e4m3fn": "fp8 e4m3", "float8_e8m0fnu": "e8m0", "uint8": "uint8 (fp4 x2)"}.get(name, name)
