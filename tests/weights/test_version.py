from __future__ import annotations

import hashlib
import json
import os
import resource
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.errors import PublishError, RecordError
from agentrl.weights.version import (
    Announced,
    latest,
    publish_version,
    reannounce,
    tensor_checksum,
)


def publish(root: Path, version: int, *, value: float = 1.0, attempt: int = 1) -> Announced:
    model = root / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    return publish_version(
        root / "weights",
        run="r",
        attempt=attempt,
        version=version,
        step=version,
        tensors=[("w", torch.full((4, 4), value)), ("b", torch.arange(3.0))],
        model_folder=model,
        consumed=[[0, 7]],
    )


def test_a_published_version_is_read_back_whole(odd_path):
    announced = publish(odd_path, 12)
    assert latest(odd_path / "weights") == announced
    assert announced.folder.name == "v000012"
    assert sorted(os.listdir(announced.folder)) == ["config.json", "model.safetensors"]
    assert (
        tensor_checksum(load_file(announced.folder / "model.safetensors").items())
        == announced.checksum
    )


def test_there_is_no_version_before_the_first(tmp_path):
    assert latest(tmp_path / "weights") is None


def test_a_torn_announcement_is_an_error(tmp_path):
    publish(tmp_path, 0)
    (tmp_path / "weights" / "LATEST.json").write_text('{"version": 1, "st')
    with pytest.raises(RecordError, match="not an announcement"):
        latest(tmp_path / "weights")


def test_an_announcement_without_its_folder_or_of_another_size_is_an_error(tmp_path):
    announced = publish(tmp_path, 0)
    with (announced.folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(RecordError, match="bytes instead of"):
        latest(tmp_path / "weights")
    announced.folder.rename(tmp_path / "gone")
    with pytest.raises(RecordError, match="is not there"):
        latest(tmp_path / "weights")


def test_the_same_version_can_be_announced_with_more_draws_and_as_the_last(tmp_path):
    announced = publish(tmp_path, 3)
    reannounce(tmp_path / "weights", announced, consumed=[[0, 9]])
    done = reannounce(tmp_path / "weights", announced, done=True)
    assert latest(tmp_path / "weights") == done
    assert done.done
    assert done.identity == announced.identity


def test_a_version_published_again_with_other_weights_replaces_the_old_one(tmp_path):
    old = publish(tmp_path, 3)
    new = publish(tmp_path, 3, value=2.0, attempt=2)
    assert new.identity != old.identity
    assert latest(tmp_path / "weights") == new
    assert load_file(new.folder / "model.safetensors")["w"][0, 0] == 2.0
    assert sorted(os.listdir(tmp_path / "weights")) == ["LATEST.json", "v000003"]


def test_what_a_killed_trainer_left_is_removed(tmp_path):
    weights = tmp_path / "weights"
    (weights / "v000002.tmp-0001").mkdir(parents=True)
    (weights / "v000002.tmp-0001" / "model.safetensors").write_text("half")
    publish(tmp_path, 2)
    assert sorted(os.listdir(weights)) == ["LATEST.json", "v000002"]


def test_the_checksum_is_over_name_dtype_shape_and_bytes_by_sorted_name():
    digest = hashlib.sha256()
    digest.update(b"a\0torch.bfloat16\0(1,)\0" + b"\x80\x3f")  # 1.0 in bfloat16
    digest.update(b"b\0torch.float32\0(2, 1)\0" + struct.pack("<2f", 1.0, 2.0))
    tensors = [
        ("b", torch.tensor([[1.0], [2.0]])),
        ("a", torch.ones(1, dtype=torch.bfloat16)),
    ]
    assert tensor_checksum(tensors) == digest.hexdigest()


def test_the_checksum_sees_a_transposed_tensor_as_it_reads():
    square = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert tensor_checksum([("w", square.T)]) == tensor_checksum([("w", square.T.contiguous())])
    assert tensor_checksum([("w", square.T)]) != tensor_checksum([("w", square)])


@pytest.fixture
def small_files_only():
    """Any file over 200 kB fails with EFBIG while the fixture is in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files_only")
def test_a_file_too_large_for_the_filesystem_leaves_the_old_version_announced(tmp_path):
    check_that_a_large_version_is_refused(tmp_path)


def check_that_a_large_version_is_refused(root: Path) -> None:
    old = publish(root, 1)
    with pytest.raises(PublishError, match="version announced before it stays"):
        publish_version(
            root / "weights",
            run="r",
            attempt=1,
            version=2,
            step=2,
            tensors=[("w", torch.ones(500_000))],
            model_folder=root / "model",
            consumed=[],
        )
    assert latest(root / "weights") == old
    assert sorted(os.listdir(root / "weights")) == ["LATEST.json", "v000001"]


@pytest.fixture
def tiny_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_old_version_announced(tiny_disk):
    check_that_a_large_version_is_refused(tiny_disk)


def test_an_announcement_is_json_with_relative_folder(tmp_path):
    publish(tmp_path, 5)
    record = json.loads((tmp_path / "weights" / "LATEST.json").read_text())
    assert record["folder"] == "v000005"
    assert record["transport"] == "disk"
    assert record["consumed"] == [[0, 7]]
