"""The files of a safetensors checkpoint, looked at without reading a tensor.

A safetensors file is 8 bytes of header length, a JSON header (name -> dtype, shape, data_offsets) and the
data. The header alone says what is in the file and how long the file must be, so a truncated one is found
before use.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from reference.errors import Problem, WeightsError

INDEX_SUFFIX = ".safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and as what. `key` is its name in the file."""

    file: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def find_files(path: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """The safetensors files at `path`, and which of them holds which key where an index says so.

    path: a safetensors file, an index JSON, or a directory that holds an index or safetensors files.
    """
    if path.is_file() and not path.name.endswith(".json"):
        return [path], None
    indices = [path] if path.is_file() else sorted(path.glob(f"*{INDEX_SUFFIX}")) if path.is_dir() else []
    if len(indices) > 1:
        words = "one index file"
        raise WeightsError(field=str(path), expected=words, actual=[index.name for index in indices])
    if indices:
        return _indexed(indices[0])
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not files:
        hint = "give a .safetensors file, its index, or the directory that holds them"
        raise WeightsError(field="path", expected="a checkpoint", actual=str(path), hint=hint)
    return files, None


def _indexed(index: Path) -> tuple[list[Path], dict[str, Path]]:
    try:
        content = json.loads(index.read_text())
        weight_map = {str(key): index.parent / str(file) for key, file in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        words = "JSON with a weight_map of tensor names to files"
        raise WeightsError(field=str(index), expected=words, actual=repr(error)) from error
    return sorted(set(weight_map.values())), weight_map


def read_header(file: Path) -> tuple[dict[str, StoredTensor], list[Problem]]:
    """The tensors of one file by key, and what is wrong with the file as a whole."""
    try:
        size = os.path.getsize(file)
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                words = f"{length + 8:,} bytes for the header"
                return {}, [
                    Problem(str(file), words, f"{size:,} bytes: truncated, or not a safetensors file")
                ]
            header = json.loads(stream.read(length))
        entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if end != size:
            kind = "truncated" if size < end else "longer than its header says"
            return {}, [Problem(str(file), f"{end:,} bytes by its header", f"{size:,} bytes: {kind}")]
        tensors, problems = {}, []
        for key, entry in entries.items():
            tensor, fault = _stored(file, key, entry)
            tensors[key] = tensor
            problems += fault
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return {}, [Problem(str(file), "a readable safetensors file", repr(error))]
    return tensors, problems


def _stored(file: Path, key: str, entry: dict[str, Any]) -> tuple[StoredTensor, list[Problem]]:
    shape = tuple(int(n) for n in entry["shape"])
    begin, end = entry["data_offsets"]
    dtype = DTYPES[entry["dtype"]]
    problems = []
    if end - begin != prod(shape) * dtype.itemsize:
        words = f"{prod(shape) * dtype.itemsize:,} bytes for {entry['dtype']} {list(shape)}"
        problems.append(Problem(f"{key} in {file.name}", words, f"{end - begin:,} bytes"))
    return StoredTensor(file, key, dtype, shape), problems
