"""A short name for the contents of weight tensors, without reading them all.

Two sets of tensors with different names, types or shapes never share a fingerprint; different values do only when
they differ in no byte that is sampled and the files agree in size and time of last change. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .tensor import TensorSource

SAMPLE_BYTES = 1024
SAMPLES = 8  # of each tensor, evenly spread, its first and last bytes among them
DIGEST_BYTES = 32


def hash_tensors(tensors: Mapping[str, TensorSource], paths: Iterable[Path]) -> bytes:
    """BLAKE2b-256 of names, types, shapes and samples of `tensors`, and of size and change time of the files.

    The change time makes an edited file another one, however small the edit; a file that is moved stays the same.
    What is mapped for sampling is released again.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(repr((name, tensor.type_name, tensor.shape)).encode())
        for sample in _cut_samples(tensor.data):
            digest.update(sample.tobytes())
        tensor.release()
    for path in paths:
        status = path.stat()
        digest.update(repr((status.st_size, status.st_mtime_ns)).encode())
    return digest.digest()


def _cut_samples(data: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    if data.size <= SAMPLES * SAMPLE_BYTES:
        yield data
        return
    for index in range(SAMPLES):
        start = (data.size - SAMPLE_BYTES) * index // (SAMPLES - 1)
        yield data[start : start + SAMPLE_BYTES]
