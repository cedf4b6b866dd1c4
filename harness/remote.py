"""An engine in another process, in any language, over its standard input and output. The frames:
harness/wire.py.

Nothing that the process does may hang or crash the harness. Both pipes are served from one loop with a
deadline, so a process that doesn't read can't block us either; a crash, a hang, a late answer, half a frame
and nonsense each raise EngineFault, end the process, and become a finding.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import shlex
import subprocess
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

import reference.errors
from harness import wire
from harness.engine import CAPABILITIES, Run, StepResult
from harness.guard import EngineFault
from reference.contract import Ledger
from reference.errors import ConfigError, DSV41Error
from reference.parameters import engram_table
from reference.weights import tensor_specs

CHUNK = 1 << 16
FORMS = ("storage", "dense")  # of weights on the wire
STDERR_KEPT = 4000  # characters of the process's last words in a finding


class Connection:
    """One child process and the exchange of frames with it."""

    def __init__(self, command: Sequence[str]) -> None:
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            raise EngineFault(
                "PROTO", f"the engine can't be started: {error}", field="command", actual=command
            ) from error
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin, self.stdout, self.stderr = (
            pipe.fileno() for pipe in (self.process.stdin, self.process.stdout, self.process.stderr)
        )
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe, False)
        self.words = b""

    def exchange(self, request: bytes, what: str, seconds: float) -> bytes:
        """Send one frame, receive one. Raises EngineFault; the process has ended then."""
        began = time.monotonic()
        deadline, patience = began + seconds, began + 2 * seconds  # late answers are told from hangs
        out, answer = memoryview(request), bytearray()
        with selectors.DefaultSelector() as ready:
            ready.register(self.stdin, selectors.EVENT_WRITE)
            ready.register(self.stdout, selectors.EVENT_READ)
            ready.register(self.stderr, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                if now >= patience:
                    state = f"half an answer ({len(answer)} bytes)" if answer else "no answer"
                    raise self.end(
                        f"hang: {state} to {what}", f"within {seconds:g} s", f"none after {now - began:.2f} s"
                    )
                for key, _ in ready.select(patience - now):
                    if key.fd == self.stdin:
                        out = self._send(out, ready)
                    elif key.fd == self.stderr:
                        self._listen(ready)
                    elif self._receive(answer, what):
                        late = time.monotonic()
                        if late > deadline:
                            raise self.end(
                                f"late answer to {what}",
                                f"within {seconds:g} s",
                                f"after {late - began:.2f} s",
                            )
                        return bytes(answer)

    def _send(self, out: memoryview, ready: selectors.BaseSelector) -> memoryview:
        try:
            out = out[os.write(self.stdin, out[:CHUNK]) :]
        except BlockingIOError:
            return out
        except BrokenPipeError:
            out = out[:0]  # the process is gone or has closed its input: reading will tell
        if not out:
            ready.unregister(self.stdin)
        return out

    def _listen(self, ready: selectors.BaseSelector) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.stderr, CHUNK)
            if not data:
                ready.unregister(self.stderr)
            self.words = (self.words + data)[-STDERR_KEPT:]

    def _receive(self, answer: bytearray, what: str) -> bool:
        """Take what is there; True when the frame is whole."""
        try:
            data = os.read(self.stdout, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            try:
                status: int | None = self.process.wait(1)
            except subprocess.TimeoutExpired:
                status = None
            kind = "half message" if answer else "crash"
            told = "its output closed" if status is None else f"the process ended with status {status}"
            raise self.end(
                f"{kind}: no answer to {what}", "a whole frame", f"{told} after {len(answer)} bytes"
            )
        answer += data
        try:
            length = wire.frame_length(bytes(answer[: wire.PREFIX.size]))
        except wire.FrameError as error:
            raise self.end(
                f"nonsense in answer to {what}", f"a frame of protocol {wire.PROTOCOL}", error
            ) from error
        if length is not None and len(answer) > length:
            raise self.end(f"nonsense after the answer to {what}", f"{length} bytes", f"{len(answer)} bytes")
        return length == len(answer)

    def end(self, message: str, expected: Any, actual: Any) -> EngineFault:
        """End the process; the fault to raise."""
        self.kill()
        words = self.words.decode(errors="replace").strip()
        hint = f"its last words on stderr: {words[-600:]}" if words else "it wrote nothing to stderr"
        return EngineFault(
            "PROTO", message, field="remote engine", expected=expected, actual=str(actual), hint=hint
        )

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with contextlib.suppress(OSError, ValueError, BlockingIOError):
            self.words = (self.words + os.read(self.stderr, CHUNK))[-STDERR_KEPT:]
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class RemoteEngine:
    """The verbs of the protocol, asked of another process. seconds: limit of one verb; start_seconds: of
    the start.
    """

    def __init__(
        self,
        config: Any,
        weights: Any,
        *,
        command: Sequence[str],
        seconds: float = 60.0,
        start_seconds: float = 120.0,
        **options: Any,
    ) -> None:
        self.config, self.seconds, self.start_seconds = config, seconds, start_seconds
        self._ids = itertools.count(1)
        self._dead: EngineFault | None = None
        self._connection = Connection(command)
        hello = {
            "protocol": wire.PROTOCOL,
            "config": config.to_dict(),
            "digest": config.digest(),
            "options": options,
        }
        answer, _ = self._ask("hello", hello, seconds=start_seconds)
        if answer.get("protocol") != wire.PROTOCOL:
            raise self._fail(
                "the engine speaks another protocol", f"version {wire.PROTOCOL}", answer.get("protocol")
            )
        unknown = sorted(set(options) - set(answer.get("options", ())))
        if unknown:
            self.shutdown()
            raise ConfigError(
                field="options",
                expected=f"of {answer.get('options', [])}, as the engine's answer to hello says",
                actual=unknown,
                hint="leave them out, or let the engine list the options that it understands",
            )
        wanted = answer.get("weights", "none")
        if wanted in FORMS:
            tensors = weight_tensors(config, weights, wanted)
            answer |= self._ask("weights", {"form": wanted}, tensors, seconds=start_seconds)[0]
        elif wanted != "none":
            raise self._fail("weights in no known form asked for", f"none, {', '.join(FORMS)}", wanted)
        self._accept(answer)
        self.name = f"remote {answer['name']}"
        self.max_rollback = int(answer["max_rollback"])
        self._declines = frozenset(answer["declines"])

    def _accept(self, answer: Mapping[str, Any]) -> None:
        """Refuse a missing field, an unknown capability."""
        missing = [key for key in ("name", "max_rollback", "declines") if key not in answer]
        if missing:
            raise self._fail("the engine doesn't say what it is", ", ".join(missing), sorted(answer))
        unknown = set(answer["declines"]) - CAPABILITIES.keys()
        if unknown:
            raise self._fail(
                "the engine declines what nobody asks", f"of {', '.join(CAPABILITIES)}", sorted(unknown)
            )

    def _fail(self, message: str, expected: Any, actual: Any) -> EngineFault:
        self._dead = self._connection.end(message, expected, actual)
        return self._dead

    def _ask(
        self,
        verb: str,
        fields: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        seconds: float | None = None,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if self._dead is not None:
            raise self._dead
        number = next(self._ids)
        frame = wire.encode({"id": number, "verb": verb, **fields}, tensors)
        try:
            answer, result = wire.decode(self._connection.exchange(frame, verb, seconds or self.seconds))
        except wire.FrameError as error:
            raise self._fail(f"nonsense in answer to {verb}", "a frame of the protocol", error) from error
        except EngineFault as error:
            self._dead = error
            raise
        if answer.get("id") != number:
            raise self._fail(f"the answer to {verb} belongs to another request", number, answer.get("id"))
        if answer.get("ok") is not True:
            raise self._error(verb, answer.get("error"))
        return answer, result

    def _error(self, verb: str, error: Any) -> DSV41Error:
        """The typed error that the process reports; anything else is a fault."""
        known = isinstance(error, Mapping) and isinstance(error.get("type"), str)
        kind = getattr(reference.errors, error["type"], None) if known else None
        if isinstance(kind, type) and issubclass(kind, DSV41Error):
            said = {key: error.get(key) for key in ("field", "expected", "actual", "hint")}
            return kind(error.get("message"), **said)
        return self._fail(
            f"an error without a known type from {verb}", "a class name of reference/errors.py", error
        )

    def _value(self, verb: str, key: str, kind: type | tuple[type, ...], **fields: Any) -> Any:
        answer, _ = self._ask(verb, fields)
        if not isinstance(answer.get(key), kind):
            raise self._fail(f"the answer to {verb} lacks {key!r}", kind, answer.get(key))
        return answer[key]

    def declines(self) -> frozenset[str]:
        return self._declines

    def open(self, capacity: int) -> Hashable:
        return self._value("open", "sequence", (int, str), capacity=capacity)

    def length(self, sequence: Hashable) -> int:
        return self._value("length", "length", int, sequence=sequence)

    def step(self, runs: Sequence[Run], *, taps: Iterable[str] = (), replay: bool = False) -> StepResult:
        rows = [
            {
                "sequence": run.sequence,
                "token_ids": list(run.token_ids),
                "start": run.start,
                "image_mask": None if run.image_mask is None else list(run.image_mask),
            }
            for run in runs
        ]
        _, tensors = self._ask("step", {"runs": rows, "taps": list(taps), "replay": replay})
        missing = {"hidden", "logits"} - set(tensors)
        if missing:
            raise self._fail("the answer to step is incomplete", "tensors hidden, logits", sorted(tensors))
        named = {
            name.removeprefix("tap:"): value for name, value in tensors.items() if name.startswith("tap:")
        }
        return StepResult(tensors["hidden"], tensors["logits"], named)

    def rollback(self, sequence: Hashable, length: int) -> None:
        self._ask("rollback", {"sequence": sequence, "length": length})

    def snapshot(self, sequence: Hashable) -> bytes:
        _, tensors = self._ask("snapshot", {"sequence": sequence})
        blob = tensors.get("blob")
        if blob is None or blob.dtype != torch.uint8:
            raise self._fail(
                "the answer to snapshot lacks the blob", "tensor blob uint8 [bytes]", sorted(tensors)
            )
        return blob.numpy().tobytes()

    def restore(self, blob: bytes, capacity: int) -> Hashable:
        tensor = torch.frombuffer(bytearray(blob) or bytearray(1), dtype=torch.uint8)[: len(blob)]
        answer, _ = self._ask("restore", {"capacity": capacity}, {"blob": tensor})
        return answer["sequence"]

    def branch(self, sequence: Hashable) -> Hashable:
        return self._value("branch", "sequence", (int, str), source=sequence)

    def close(self, sequence: Hashable) -> None:
        self._ask("close", {"sequence": sequence})

    def ledger(self) -> Ledger:
        answer = self._value("ledger", "ledger", dict)
        known = {field.name for field in fields(Ledger)}
        return Ledger(**{name: value for name, value in answer.items() if name in known})

    def state_digest(self, sequence: Hashable) -> dict[str, str]:
        return self._value("state_digest", "digest", dict, sequence=sequence)

    def shutdown(self) -> None:
        """Tell the process to end, and end it."""
        if self._dead is None:
            with contextlib.suppress(DSV41Error):
                self._ask("bye", {}, seconds=2.0)
            self._dead = EngineFault("PROTO", "the remote engine was shut down")
        self._connection.kill()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._connection.kill()


def weight_tensors(config: Any, weights: Any, form: str) -> dict[str, Tensor]:
    """All weights by name: `storage` as in the checkpoint, `dense` dequantised to float32; and token_map int64 [V]."""
    specs = tensor_specs(config)
    tensors = {"token_map": weights.token_map.to(torch.int64)}
    for name in specs:
        if form == "storage":
            value = weights[name]
            # e8m0 travels as its exponent bytes: not every safetensors reader knows the type
            tensors[name] = value.view(torch.uint8) if value.dtype == torch.float8_e8m0fnu else value
        elif not name.endswith(".scale"):
            tensors[name] = dense(weights, name, f"{name.removesuffix('.weight')}.scale" in specs)
    return tensors


def dense(weights: Any, name: str, scaled: bool) -> Tensor:
    """One weight as float32; the n-gram table has a scale for each row, every other matrix as its Linear says."""
    if not scaled:
        return weights[name].to(torch.float32)
    prefix = name.removesuffix(".weight")
    if not prefix.endswith("engram.embed"):
        return weights.linear(prefix).dequantized(torch.float32)
    table = engram_table(weights, prefix.removesuffix(".embed"))
    return table.lookup(torch.arange(table.size).unsqueeze(-1), torch.float32)


def remote_factory(command: str) -> Callable[..., RemoteEngine]:
    """A factory `(config, weights, **options)` that starts the command, split as a shell would."""

    def build(config: Any, weights: Any, **options: Any) -> RemoteEngine:
        return RemoteEngine(config, weights, command=shlex.split(command), **options)

    return build
