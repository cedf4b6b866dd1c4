"""Frames of the remote protocol: a fixed prefix, a JSON header, a safetensors payload. See
harness/PROTOCOL.md.

    4 bytes  b"DSV1"          8 bytes  payload length, little-endian, 0 = no payload
    4 bytes  header length    header   UTF-8 JSON object          payload  safetensors
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

PROTOCOL = 1
MAGIC = b"DSV1"
PREFIX = struct.Struct("<4sIQ")
MAX_HEADER = 64 * 2**20
MAX_PAYLOAD = 64 * 2**30


class FrameError(ValueError):
    """Bytes that are no frame of this protocol."""


def encode(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    payload = save({name: value.contiguous() for name, value in tensors.items()}) if tensors else b""
    return PREFIX.pack(MAGIC, len(text), len(payload)) + text + payload


def frame_length(head: bytes) -> int | None:
    """Whole length of the frame that begins with these bytes; None while the prefix is incomplete.

    Raises FrameError as soon as the bytes can't be a frame.
    """
    if not MAGIC.startswith(head[: len(MAGIC)]):
        raise FrameError(f"expected a frame that begins with {MAGIC!r}, got {head[:40]!r}")
    if len(head) < PREFIX.size:
        return None
    _, header, payload = PREFIX.unpack(head[: PREFIX.size])
    if header > MAX_HEADER or payload > MAX_PAYLOAD:
        raise FrameError(f"a header of {header} bytes and a payload of {payload} bytes are beyond the limits")
    return PREFIX.size + header + payload


def decode(frame: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a whole frame. Raises FrameError on anything else."""
    _, length, payload = PREFIX.unpack(frame[: PREFIX.size])
    body = frame[PREFIX.size : PREFIX.size + length]
    try:
        header = json.loads(body)
    except ValueError as error:
        raise FrameError(f"the header is no JSON: {error}; {body[:80]!r}") from error
    if not isinstance(header, dict):
        raise FrameError(f"the header is no JSON object: {body[:80]!r}")
    try:
        tensors = load(frame[PREFIX.size + length :]) if payload else {}
    except SafetensorError as error:
        raise FrameError(f"the payload is no safetensors: {error}") from error
    return header, tensors
