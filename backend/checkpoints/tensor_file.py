"""Tensors in safetensors files: read one at a time whatever they are kept in, and those that are float32. No torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from backend.trainer.base import Array

_DTYPES = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8")}
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")


class TensorFile:
    """Raises ValueError for what is not a whole safetensors file."""

    def __init__(self, path: Path) -> None:
        try:
            # The library checks the file; what it cannot do without torch is to read bfloat16.
            with safe_open(path, framework="np") as file:
                self.names = frozenset(file.keys())
        except SafetensorError as error:
            raise ValueError(f"it is not a whole safetensors file ({error})") from None
        self._path = path
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self._header = json.loads(file.read(length))
        self._start = 8 + length

    def read(self, name: str) -> Array:
        """float32. Raises ValueError for integers and types of 8 bits or fewer."""
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        with open(self._path, "rb") as file:
            file.seek(self._start + begin)
            data = file.read(end - begin)
        return _decode(name, entry["dtype"], data).reshape(entry["shape"])


def write_float32(path: Path, tensors: Mapping[str, Array], metadata: dict[str, str]) -> None:
    """Goes to disk tensor by tensor."""
    save_file(contiguous(tensors), path, metadata=metadata)


def read_float32(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """(tensors, metadata), tensor by tensor. Raises ValueError for what is not a safetensors file of float32."""
    try:
        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"it is not a whole safetensors file ({error})") from None
    require_float32(tensors)
    return tensors, metadata


def contiguous(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """float32, as safetensors wants them."""
    return {name: np.ascontiguousarray(t, dtype=np.float32) for name, t in tensors.items()}


def require_float32(tensors: Mapping[str, Array]) -> None:
    """Raises ValueError, naming a tensor that is not."""
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32:
            raise ValueError(f"{name} is {tensor.dtype}, must be float32")


def find_base_tensor(directory: Path, name: str) -> Array | None:
    """A model's tensor from its directory in Hugging Face's format; None: it has none.

    Of an output head that is the embedding, the embedding. Names are those of the model's modules; a file may leave
    out their first part.
    """
    files = [TensorFile(path) for path in sorted(directory.glob("*.safetensors"))]
    for is_it in (_is_named(name), _is_embedding(name)):
        for file in files:
            for found in sorted(file.names):
                if is_it(found):
                    return file.read(found)
    return None


def _is_named(name: str):
    return lambda found: name == found or name.endswith(f".{found}")


def _is_embedding(name: str):
    return lambda found: name.endswith("lm_head.weight") and found.endswith(_EMBEDDINGS)


def _decode(name: str, dtype: str, data: bytes) -> Array:
    if dtype == "BF16":
        # The upper half of a float32.
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype not in _DTYPES:
        raise ValueError(f"tensor {name} is {dtype}, must be float16, bfloat16, float32 or float64")
    return np.frombuffer(data, _DTYPES[dtype]).astype(np.float32)
