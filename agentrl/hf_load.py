"""How transformers reads a folder that we did not write: nothing of it is run or unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError


def load_safely(kind: Any, folder: Path, **options: Any) -> Any:
    """Return what an Auto class of transformers makes of `folder`. Raises ConfigError."""
    try:
        return kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except (ValueError, OSError, LookupError) as error:
        raise ConfigError(
            f"model folder {folder}: transformers cannot load it: {type(error).__name__}: {error}"
        ) from error


def load_weights(kind: Any, folder: Path, **options: Any) -> Any:
    """Return the model in `folder`, its weights from safetensors only. Raises ConfigError."""
    return load_safely(kind, folder, use_safetensors=True, **options)
