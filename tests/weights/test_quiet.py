from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.errors import PublishError
from agentrl.weights.quiet import QUIET, is_quiet, quiet


def test_a_checkpoint_is_announced_while_it_is_written(odd_path: Path) -> None:
    assert not is_quiet(odd_path)
    with quiet(odd_path):
        assert is_quiet(odd_path)
    assert not is_quiet(odd_path)


def test_the_word_is_taken_back_when_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), quiet(tmp_path):
        raise OSError("full")
    assert not is_quiet(tmp_path)


def test_the_word_of_a_trainer_that_died_expires(tmp_path: Path) -> None:
    with quiet(tmp_path, longest_s=-1.0):
        assert (tmp_path / QUIET).is_file()
        assert not is_quiet(tmp_path)


def test_a_disk_that_refuses_the_word_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("no folder")
    with (
        pytest.raises(PublishError, match=r"CHECKPOINTING\.json.*then resume"),
        quiet(tmp_path / "weights"),
    ):
        pass


def test_a_shorter_word_meanwhile_takes_nothing_off_a_longer_one(odd_path: Path) -> None:
    with quiet(odd_path, longest_s=1800):
        longest = json.loads((odd_path / QUIET).read_bytes())["until"]
        with quiet(odd_path):
            assert json.loads((odd_path / QUIET).read_bytes())["until"] == longest
        assert json.loads((odd_path / QUIET).read_bytes())["until"] == longest
        assert is_quiet(odd_path)
    assert not is_quiet(odd_path)
