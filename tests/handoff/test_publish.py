import json
import os
import resource
import subprocess
import sys

import pytest

from agentrl.handoff.publish import publish_bytes, publish_json


def test_a_published_file_has_its_bytes_and_leaves_no_other(tmp_path):
    publish_bytes(tmp_path / "deep er" / "it's.bin", b"abc")
    publish_bytes(tmp_path / "deep er" / "it's.bin", b"newer")
    assert (tmp_path / "deep er" / "it's.bin").read_bytes() == b"newer"
    assert os.listdir(tmp_path / "deep er") == ["it's.bin"]


def test_json_refuses_what_other_readers_cannot_read(tmp_path):
    publish_json(tmp_path / "a.json", {"x": [1, 2]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [1, 2]}
    with pytest.raises(ValueError, match="JSON compliant"):
        publish_json(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [1, 2]}


def test_a_full_disk_changes_nothing_and_leaves_no_temporary_file(tmp_path):
    target = tmp_path / "a.bin"
    publish_bytes(target, b"old")
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from agentrl.handoff.publish import publish_bytes\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "publish_bytes(Path(sys.argv[1]), b'x' * 100_000)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, target], check=False, capture_output=True, text=True
    )
    assert "File too large" in done.stderr
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5000
