"""Model folders, Hugging Face's to Megatron's and back, on files alone: no GPU, no Megatron.

A Megatron folder has `layout.json`, config.json and the other side files, and for each pipeline
stage `dense-ppPP-tpTT/` and, with experts, `experts-ppPP-epEE/`: a rank loads one of each. In each,
safetensors files of about a bucket; never more than the open buckets is in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from agentrl.errors import ConfigError, PublishError
from agentrl.handoff.publish import fsync_folder, publish_json
from agentrl.hf_shape import Layout, ModelShape, read_config, read_shape
from agentrl.training.hf_map import fuse, join, split, unfuse
from agentrl.training.hf_tables import Place, places
from agentrl.training.model_folder import copy_side_files
from agentrl.training.weight_files import INDEX, WeightFiles, check_weights

LAYOUT = "layout.json"
BUCKET_MB = 512


class Buckets:
    """Writes tensors to files of about a bucket, `00001.safetensors` …, each fsynced."""

    def __init__(self, folder: Path, limit_mb: int) -> None:
        self.folder, self.limit = folder, limit_mb * 2**20
        self.index: dict[str, str] = {}
        self._held: dict[str, Tensor] = {}
        self._size = self._files = 0
        folder.mkdir(parents=True)

    def put(self, name: str, tensor: Tensor) -> None:
        self._held[name] = tensor.contiguous()
        self._size += tensor.nbytes
        if self._size >= self.limit:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        self._files += 1
        path = self.folder / f"{self._files:05d}.safetensors"
        save_file(self._held, path, metadata={"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self.index |= dict.fromkeys(self._held, path.name)
        self._held, self._size = {}, 0
        fsync_folder(self.folder)


def to_megatron(source: Path, out: Path, layout: Layout, *, bucket_mb: int = BUCKET_MB) -> int:
    """Write the Hugging Face folder `source` as a Megatron one at `out`; return its tensors.

    Raises ConfigError: config and weights disagree, a tensor is left over, or `layout` can't be.
    """
    shape, files = read_shape(read_config(source)), WeightFiles(source)
    layout.check(shape)
    check_weights(files, shape)
    with _Building(out) as building:
        parts: dict[str, Buckets] = {}
        count = 0
        for place in places(shape, layout):
            whole = fuse(place, [files.get(name) for name in place.hf], shape)
            for folder, tensor in _owners(place, whole, layout):
                if folder not in parts:
                    parts[folder] = Buckets(building / folder, bucket_mb)
                parts[folder].put(place.name, tensor)
                count += 1
        for part in parts.values():
            part.flush()
        copy_side_files(source, building)
        publish_json(building / LAYOUT, asdict(layout))
    return count


def to_hf(
    source: Path, out: Path, *, bucket_mb: int = BUCKET_MB, fuses_experts: bool = False
) -> int:
    """Write the Megatron folder `source` as a Hugging Face one at `out`; return its tensors."""
    shape, layout = read_shape(read_config(source)), read_layout(source)
    files: dict[str, WeightFiles] = {}
    with _Building(out) as building:
        bucket = Buckets(building / "parts", bucket_mb)
        tensors = _hf_tensors(source, files, shape, layout)
        for name, tensor in fused_experts(tensors, shape) if fuses_experts else tensors:
            bucket.put(name, tensor)
        bucket.flush()
        _name_parts(building, bucket)
        copy_side_files(source, building)
        (building / LAYOUT).unlink()
    return len(bucket.index)


def read_layout(folder: Path) -> Layout:
    try:
        return Layout(**json.loads((folder / LAYOUT).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{folder / LAYOUT}: not readable ({error}); give a folder that `agentrl convert` wrote"
        ) from error


def fused_experts(
    tensors: Iterable[tuple[str, Tensor]], shape: ModelShape
) -> Iterator[tuple[str, Tensor]]:
    """Stack each layer's experts as transformers 5 holds them: gate_up_proj, down_proj."""
    held: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in tensors:
        stem, _, rest = name.partition(".mlp.experts.")
        if not rest:
            yield name, tensor
            continue
        expert, kind, _ = rest.split(".")
        group = held[f"{stem}.mlp.experts.{kind}"]
        group[int(expert)] = tensor
        if kind == "down_proj" and len(group) == shape.experts:
            parts = {
                kind: held.pop(f"{stem}.mlp.experts.{kind}")
                for kind in ("gate_proj", "up_proj", "down_proj")
            }
            rows = range(shape.experts)
            pairs = [torch.cat([parts["gate_proj"][i], parts["up_proj"][i]]) for i in rows]
            yield f"{stem}.mlp.experts.gate_up_proj", torch.stack(pairs)
            yield (
                f"{stem}.mlp.experts.down_proj",
                torch.stack([parts["down_proj"][i] for i in rows]),
            )


def single_experts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Undo `fused_experts`: the names that Hub files and engines have."""
    for name, tensor in tensors:
        stem, _, kind = name.partition(".mlp.experts.")
        if kind == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                yield f"{stem}.mlp.experts.{expert}.gate_proj.weight", gate
                yield f"{stem}.mlp.experts.{expert}.up_proj.weight", up
        elif kind == "down_proj":
            for expert, down in enumerate(tensor):
                yield f"{stem}.mlp.experts.{expert}.down_proj.weight", down
        else:
            yield name, tensor


def _owners(place: Place, whole: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    for stage in place.stages:
        for rank, part in enumerate(split(place, whole, layout.tp)):
            yield _folder(place, stage, rank), part
        if not place.rule.is_expert and place.rule.cut == "copy":
            for rank in range(1, layout.tp):
                yield _folder(place, stage, rank), whole


def _folder(place: Place, stage: int, rank: int) -> str:
    if place.rule.is_expert:
        return f"experts-pp{stage:02d}-ep{place.ep_rank:02d}"
    return f"dense-pp{stage:02d}-tp{rank:02d}"


def _hf_tensors(
    source: Path, files: dict[str, WeightFiles], shape: ModelShape, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    seen: set[str] = set()
    for place in places(shape, layout):
        if seen.issuperset(place.hf):
            continue  # a tied embedding's copy on the last stage
        seen.update(place.hf)
        ranks = range(1 if place.rule.is_expert or place.rule.cut == "copy" else layout.tp)
        parts = []
        for rank in ranks:
            folder = _folder(place, place.stages[0], rank)
            if folder not in files:
                files[folder] = WeightFiles(source / folder)
            parts.append(files[folder].get(place.name))
        tensors = unfuse(place, join(place, parts, shape), shape)
        fuse(place, tensors, shape)  # a part of another size is found here, and named
        yield from zip(place.hf, tensors, strict=True)


def _name_parts(building: Path, bucket: Buckets) -> None:
    paths = sorted((building / "parts").iterdir())
    names = {
        path.name: f"model-{number:05d}-of-{len(paths):05d}.safetensors"
        for number, path in enumerate(paths, 1)
    }
    if len(paths) == 1:
        names = {paths[0].name: "model.safetensors"}
    for path in paths:
        os.rename(path, building / names[path.name])
    (building / "parts").rmdir()
    if len(paths) > 1:
        index = {name: names[file] for name, file in bucket.index.items()}
        size = sum((building / name).stat().st_size for name in names.values())
        publish_json(building / INDEX, {"metadata": {"total_size": size}, "weight_map": index})


class _Building:
    """A folder that comes to be whole at `out`, or not at all."""

    def __init__(self, out: Path) -> None:
        self.out, self.temporary = out, out.with_name(f".{out.name}.tmp")

    def __enter__(self) -> Path:
        if self.out.exists():
            raise ConfigError(f"{self.out} is there already; name another folder, or remove it")
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        return self.temporary

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: object
    ) -> None:
        if kind is not None:
            shutil.rmtree(self.temporary)
            if isinstance(error, SafetensorError | OSError):
                raise PublishError(
                    f"writing {self.out}: {error}; nothing is left of it. Free space there, or "
                    "name another folder"
                ) from error
            return
        fsync_folder(self.temporary)
        os.rename(self.temporary, self.out)
        fsync_folder(self.out.parent)
