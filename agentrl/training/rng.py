"""The states of the three random generators of a process, as JSON."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """Return the states of python, numpy (the legacy global one) and torch (CPU)."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [
            kind,
            _pack(np.asarray(keys, dtype="<u4").tobytes()),
            position,
            has_gauss,
            cached,
        ],
        "torch": _pack(torch.get_rng_state().numpy().tobytes()),
    }


def restore(states: dict[str, Any]) -> None:
    """Set what `capture` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.frombuffer(_unpack(keys), "<u4"), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(list(_unpack(states["torch"])), dtype=torch.uint8))


def _pack(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unpack(text: str) -> bytes:
    return base64.b64decode(text)
