"""A sealed blob: named tensors and text metadata as safetensors bytes, with a checksum over all of it.

The checksum is a sha256 in the header's metadata, taken with its own 64 digits set to zero, so that any
reader of safetensors can open a blob and one flipped bit anywhere is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from reference.errors import SnapshotError

_NO_SUM = "0" * 64


def seal(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Tensors and metadata -> bytes."""
    blob = _ordered(save({k: t.contiguous() for k, t in tensors.items()}, {**metadata, "checksum": _NO_SUM}))
    return _replace_checksum(blob, _NO_SUM, hashlib.sha256(blob).hexdigest())


def unseal(blob: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Bytes -> (tensors, metadata).  Raises SnapshotError if truncated, altered or no blob at all."""
    metadata = _metadata(blob)
    checksum = metadata.get("checksum", "")
    if len(checksum) != 64 or not set(checksum) <= set("0123456789abcdef"):
        raise damaged("checksum", "64 hexadecimal digits", checksum[:80])
    actual = hashlib.sha256(_replace_checksum(bytes(blob), checksum, _NO_SUM)).hexdigest()
    if actual != checksum:
        raise damaged("checksum", checksum, actual)
    try:
        return load(bytes(blob)), metadata
    except Exception as error:  # the reader of safetensors raises types of its own
        raise damaged("tensors", "readable tensors", f"{type(error).__name__}: {error}") from error


def whole_number(metadata: Mapping[str, str], field: str) -> int:
    """A count in a blob's metadata.  Raises SnapshotError when it is missing or none."""
    text = metadata.get(field, "")
    if not (text.isascii() and text.isdigit()):
        raise damaged(field, "a whole number", metadata.get(field))
    return int(text)


def damaged(field: str, expected: Any, actual: Any, hint: str | None = None) -> SnapshotError:
    """The error of a blob that can't be used."""
    return SnapshotError(
        field=f"snapshot.{field}",
        expected=expected,
        actual=actual,
        hint=hint
        or "the blob is damaged, cut off or not a snapshot: take a new one, or recompute the prefix",
    )


def _metadata(blob: bytes) -> dict[str, str]:
    if not isinstance(blob, bytes | bytearray | memoryview):
        raise damaged("blob", "bytes", type(blob).__name__)
    blob = bytes(blob)
    if len(blob) < 8 or 8 + int.from_bytes(blob[:8], "little") > len(blob):
        raise damaged("size", "a safetensors header and its tensors", f"{len(blob)} bytes")
    try:
        metadata = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]
        return {str(key): str(value) for key, value in metadata.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged("header", "JSON with the metadata of a snapshot", type(error).__name__) from error


def _ordered(blob: bytes) -> bytes:
    """The same blob with its metadata in order, so that equal content gives equal bytes."""
    end = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    return len(text).to_bytes(8, "little") + text + blob[end:]


def _replace_checksum(blob: bytes, old: str, new: str) -> bytes:
    end = 8 + int.from_bytes(blob[:8], "little")
    header = blob[8:end]
    if header.count(old.encode()) != 1:
        raise damaged("checksum", "one checksum in the header", header.count(old.encode()))
    return blob[:8] + header.replace(old.encode(), new.encode()) + blob[end:]
