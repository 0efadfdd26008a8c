"""What the tests themselves see of other processes."""

from __future__ import annotations

import os
import subprocess

from processes import children, is_gone, words


def test_a_child_that_nobody_has_waited_for_is_gone() -> None:
    with subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert not is_gone(process.pid)
        (child,) = children(having="read line")
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert is_gone(child)
        assert words(child) == []
        assert children(having="read line") == []
    assert is_gone(process.pid)
    assert children(process.pid) == []
