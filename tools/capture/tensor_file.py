"""Reads and writes safetensors files, byte for byte the same for the same contents.

Layout (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length,
a JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes, row-major.
"""

import json
import struct

import numpy as np

_DTYPES = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT_BYTES = 64  # of the first tensor; a cache line


def read(path):
    """Returns ({name: array}, {metadata key: string})."""
    with open(path, "rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
        data = file.read()
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}, not one of {list(_DTYPES)}")
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[begin:end], _DTYPES[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return tensors, metadata


def write(path, tensors, metadata):
    """Writes {name: array}; returns the file's size in bytes.

    Wide dtypes come first, otherwise in the order given, so that each tensor is aligned to its dtype.
    """
    header = {"__metadata__": {key: str(value) for key, value in metadata.items()}}
    blobs = []
    offset = 0
    for name, array in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        array = np.ascontiguousarray(array)
        if array.dtype not in _NAMES:
            raise ValueError(f"{name} has dtype {array.dtype}, not one of {list(_DTYPES)}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{name} holds a value that is not finite in {array.dtype}")
        blobs.append(array.tobytes())
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(blobs[-1])],
        }
        offset += len(blobs[-1])
    text = json.dumps(header, ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        file.writelines(blobs)
    return 8 + len(text) + offset
