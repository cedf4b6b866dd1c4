"""A finding: what a check saw, and everything needed to see it again.

A finding is a repro, not a sentence: engine and options, config, weights' seed, the operation list (shrunk
where a search found it), and the place: sequence, position, layer, tap, with both values and the limit.
`dsv41 replay FILE` runs it again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

FORMAT = 1
DETECTORS: dict[str, str] = {
    "DP": "decode = prefill",
    "CH": "any split into chunks",
    "BI": "batch company, order and padding",
    "PG": "physical slot or page",
    "GR": "graph replay = eager",
    "PAD": "padding rows write nothing",
    "SN": "snapshot round trip",
    "RB": "rollback = never drafted",
    "LK": "conservation and leaks",
    "CAN": "a row's owner, generation, position and writer",
    "REF": "derived limit against the reference in float64",
    "TK": "top-k and other decisions, ties understood",
    "NF": "non-finite values",
    "AW": "address width and capacity edges",
    "DET": "the same run twice",
    "CRASH": "an error that the contract does not allow",
    "PROTO": "the engine protocol: shape, dtype, count, time, life of the process",
    "PATH": "a path that the check must take was not taken",
}


@dataclass
class Finding:
    """One disagreement. Every field but `check`, `detector` and `message` may be None where it has no
    meaning.
    """

    check: str
    detector: str
    message: str
    engine: str = "?"
    engine_options: dict[str, Any] = field(default_factory=dict)
    config: Any = None  # preset name or the whole config as a dict
    seed: int = 0
    operations: list[dict[str, Any]] = field(default_factory=list)
    sequence: str | None = None
    position: int | None = None
    layer: int | None = None
    tap: str | None = None
    expected: Any = None
    actual: Any = None
    limit: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **{key: jsonable(value) for key, value in asdict(self).items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """Raises ValueError when the file is of another format or lacks a field."""
        if data.get("format") != FORMAT:
            raise ValueError(f"finding file of format {data.get('format')!r}, this version reads {FORMAT}")
        known = {f.name for f in fields(cls)}
        missing = {"check", "detector", "message"} - set(data)
        if missing:
            raise ValueError(f"finding file without {', '.join(sorted(missing))}")
        return cls(**{key: value for key, value in data.items() if key in known})

    @property
    def file_name(self) -> str:
        digest = hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.check}-{digest}.json".replace("/", "_").replace(" ", "_")

    def write(self, folder: str | Path) -> Path:
        """Write the finding as JSON, whole or not at all; returns its path."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file_name
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".finding-", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.to_dict(), file, indent=1)
                file.write("\n")
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return path

    @classmethod
    def read(cls, path: str | Path) -> Finding:
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    @property
    def where(self) -> str:
        """Sequence, position, layer and tap in words; empty when none is known."""
        parts = [
            ("sequence", self.sequence),
            ("position", self.position),
            ("layer", self.layer),
            ("tap", self.tap),
        ]
        return ", ".join(f"{name} {value}" for name, value in parts if value is not None)

    def text(self, path: str | Path | None = None) -> str:
        """The finding for a reader, ending with the command that runs it again."""
        lines = [f"[{self.check} / {self.detector}: {DETECTORS.get(self.detector, '?')}] {self.message}"]
        if self.where:
            lines.append(f"  at        {self.where}")
        if self.expected is not None or self.actual is not None:
            lines.append(f"  expected  {short(self.expected)}")
            lines.append(f"  actual    {short(self.actual)}")
        if self.limit is not None:
            lines.append(f"  limit     {self.limit:.4g}")
        lines.extend(f"  {key:<9} {short(value)}" for key, value in self.details.items())
        if self.operations:
            lines.append(f"  after     {len(self.operations)} operations: {operations_text(self.operations)}")
        lines.append(f"  engine    {self.engine} {self.engine_options or ''}".rstrip())
        config = self.config if isinstance(self.config, str) else "in the file"
        lines.append(f"  config    {config}, seed {self.seed}")
        lines.append(f"  again     dsv41 replay {path if path is not None else self.file_name}")
        return "\n".join(lines)


def operations_text(operations: list[dict[str, Any]]) -> str:
    parts = []
    for op in operations:
        arguments = " ".join(f"{key}={short(value, 24)}" for key, value in op.items() if key != "op")
        parts.append(f"{op.get('op', '?')} {arguments}".strip())
    return "; ".join(parts)


def short(value: Any, width: int = 200) -> str:
    text = str(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def jsonable(value: Any) -> Any:
    """Plain JSON of a value; non-finite numbers become strings, tensors and other objects become lists or
    text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [jsonable(item) for item in items]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    return str(value)
