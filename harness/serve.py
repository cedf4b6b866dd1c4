"""The other end of the pipe: any Python engine of the protocol behind standard input and output.

`serve("optimized", ...)` answers the frames of harness/PROTOCOL.md; it is what `dsv41 serve ENGINE` runs, and a pattern
for a server in another language. Nothing may write to the output beside the frames.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from harness import wire
from harness.engine import Engine, Run, load_engine
from reference.config import V41Config
from reference.errors import ConfigError, DSV41Error
from reference.weights import DictWeights, tensor_specs

Answer = tuple[dict[str, Any], dict[str, Tensor]]


class Server:
    """One engine, built when the weights have come."""

    def __init__(self, engine: str) -> None:
        self.name = engine
        self.engine: Engine | None = None
        self.config: V41Config | None = None
        self.options: dict[str, Any] = {}
        self.handles: dict[int, Any] = {}

    def answer(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        """Header fields and tensors of the answer to one request."""
        verb = header.get("verb")
        method = getattr(self, f"on_{verb}", None)
        if method is None:
            raise ConfigError(field="verb", expected="a verb of harness/PROTOCOL.md", actual=verb)
        return method(header, tensors)

    def on_hello(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        if header.get("protocol") != wire.PROTOCOL:
            raise ConfigError(field="protocol", expected=wire.PROTOCOL, actual=header.get("protocol"))
        self.config, self.options = V41Config.from_json(header["config"]), dict(header["options"])
        return {"protocol": wire.PROTOCOL, "weights": "storage", "options": sorted(self.options)}, {}

    def on_weights(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        if self.config is None:
            raise ConfigError(field="verb", expected="hello first", actual="weights")
        specs = tensor_specs(self.config)
        named = {
            name: value.view(specs[name].dtype)
            if name in specs and specs[name].dtype == torch.float8_e8m0fnu
            else value
            for name, value in tensors.items()
        }
        weights = DictWeights(self.config, named, named.pop("token_map"))
        engine = self.engine = load_engine(self.name, self.config, weights, **self.options)
        about = {
            "name": engine.name,
            "max_rollback": engine.max_rollback,
            "declines": sorted(engine.declines()),
        }
        return about, {}

    def on_open(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        return self._adopt(self._built().open(header["capacity"]))

    def on_length(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        return {"length": self._built().length(self._handle(header["sequence"]))}, {}

    def on_step(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        runs = [
            Run(
                self._handle(run["sequence"]),
                tuple(run["token_ids"]),
                run["start"],
                None if run["image_mask"] is None else tuple(run["image_mask"]),
            )
            for run in header["runs"]
        ]
        result = self._built().step(runs, taps=tuple(header["taps"]), replay=header["replay"])
        taps = {f"tap:{name}": value for name, value in result.taps.items()}
        return {}, {"hidden": result.hidden.cpu(), "logits": result.logits.cpu(), **taps}

    def on_rollback(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        self._built().rollback(self._handle(header["sequence"]), header["length"])
        return {}, {}

    def on_snapshot(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        blob = self._built().snapshot(self._handle(header["sequence"]))
        return {}, {"blob": torch.frombuffer(bytearray(blob), dtype=torch.uint8)}

    def on_restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        return self._adopt(self._built().restore(tensors["blob"].numpy().tobytes(), header["capacity"]))

    def on_branch(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        return self._adopt(self._built().branch(self._handle(header["source"])))

    def on_close(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        self._built().close(self._handle(header["sequence"]))
        return {}, {}

    def on_ledger(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        ledger = dataclasses.asdict(self._built().ledger())
        return {"ledger": {k: dict(v) if isinstance(v, Mapping) else v for k, v in ledger.items()}}, {}

    def on_state_digest(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        return {"digest": self._built().state_digest(self._handle(header["sequence"]))}, {}

    def on_bye(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        return {}, {}

    def _built(self) -> Engine:
        if self.engine is None:
            raise ConfigError(field="verb", expected="hello and weights first", actual="no engine yet")
        return self.engine

    def _adopt(self, handle: Any) -> Answer:
        """Sequences travel as numbers; the engine's own handles stay here, those of closed ones too."""
        number = len(self.handles) + 1
        self.handles[number] = handle
        return {"sequence": number}, {}

    def _handle(self, number: Any) -> Any:
        return self.handles.get(number, number)  # an unknown one is the engine's to refuse


def serve(engine: str, source: BinaryIO, sink: BinaryIO) -> None:
    """Answer frames until `bye` or the end of the input."""
    server = Server(engine)
    while True:
        prefix = source.read(wire.PREFIX.size)
        if len(prefix) < wire.PREFIX.size:
            return
        length = wire.frame_length(prefix)
        assert length is not None
        header, tensors = wire.decode(prefix + source.read(length - len(prefix)))
        try:
            fields, result = server.answer(header, tensors)
            frame = wire.encode({"id": header.get("id"), "ok": True, **fields}, result)
        except DSV41Error as error:
            said = {"field": error.field, "expected": str(error.expected), "actual": str(error.actual)}
            report = {"type": type(error).__name__, "message": None if error.field else str(error), **said}
            frame = wire.encode(
                {"id": header.get("id"), "ok": False, "error": {**report, "hint": error.hint}}
            )
        sink.write(frame)
        sink.flush()
        if header.get("verb") == "bye":
            return
