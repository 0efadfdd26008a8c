"""Images read without Apptainer: whole or not, for this machine or not, and their labels."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sif_toys import write_sif

from agentrl.errors import ImageError
from containers import sif


def test_a_whole_image_tells_its_machine_its_labels_and_its_definition(odd_path: Path) -> None:
    found = sif.read(write_sif(odd_path / "a.sif"))
    assert (found.architecture, found.gpu, found.definition) == ("x86_64", "rocm", "Bootstrap: x\n")
    assert found.size == (odd_path / "a.sif").stat().st_size


def test_every_truncation_is_seen(tmp_path: Path) -> None:
    whole = write_sif(tmp_path / "a.sif").read_bytes()
    for length in range(0, len(whole), 97):
        (tmp_path / "b.sif").write_bytes(whole[:length])
        with pytest.raises(ImageError, match=r"not a SIF|truncated|ends within|without a file sys"):
            sif.read(tmp_path / "b.sif")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 5000), bytes_=st.binary(min_size=1, max_size=16))
def test_whatever_is_damaged_the_image_is_read_or_refused(
    tmp_path: Path, place: int, bytes_: bytes
) -> None:
    data = bytearray(write_sif(tmp_path / "a.sif").read_bytes())
    at = place % len(data)
    data[at : at + len(bytes_)] = bytes_
    (tmp_path / "b.sif").write_bytes(data)
    with suppress(ImageError):  # anything else fails
        assert sif.read(tmp_path / "b.sif").size == len(data)


@pytest.mark.parametrize("labels", ["[1]", '{"data": []}', '{"data": {"attributes": 1}}', "{"])
def test_labels_of_another_shape_are_refused(tmp_path: Path, labels: str) -> None:
    path = write_sif(tmp_path / "a.sif")
    data = path.read_bytes()
    begin = data.index(b'{"data"')
    end = data.index(b"hsqs")
    path.write_bytes(data[:begin] + labels.encode().ljust(end - begin) + data[end:])
    with pytest.raises(ImageError, match="labels are not readable"):
        sif.read(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file: run it as another user")
def test_an_image_that_is_not_ours_to_read_is_told_so(tmp_path: Path) -> None:
    path = write_sif(tmp_path / "a.sif")
    path.chmod(0)
    with pytest.raises(ImageError, match="Permission denied; is it yours"):
        sif.read(path)


def test_another_machines_image_is_refused_with_both_names(tmp_path: Path) -> None:
    found = sif.read(write_sif(tmp_path / "a.sif", architecture=b"04"))
    with pytest.raises(ImageError, match="for aarch64, and this machine is x86_64"):
        sif.refuse_foreign(found, "x86_64")
    sif.refuse_foreign(found, "aarch64")


def test_what_is_no_image_is_told_from_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "page.sif").write_text("<html>403 Forbidden</html>" * 10)
    with pytest.raises(ImageError, match="begins with b'<html>403"):
        sif.read(tmp_path / "page.sif")
    with pytest.raises(ImageError, match="no such file"):
        sif.read(tmp_path / "none.sif")
    with pytest.raises(ImageError, match="a folder; pack it"):
        sif.read(tmp_path)


def test_an_image_without_a_file_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="without a file system"):
        sif.read(write_sif(tmp_path / "a.sif", kind=sif.LABELS))


def test_the_digest_is_sha256_and_tells_how_far_it_is(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 10)
    heard: list[int] = []
    found = sif.digest(tmp_path / "f", heard.append)
    assert found == f"sha256:{hashlib.sha256(b'x' * 10).hexdigest()}"
    assert heard == [10]
