"""What an agent does to its own sandbox decides nothing, whatever kind of sandbox it has."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from agentrl.errors import GradingError
from agentrl.sandbox.base import Sandbox
from agentrl.tasks.grade import grade
from agentrl.tasks.task import Task, Verdict

CHECK = """\
import mod
print("t::kept PASSED")
print("t::fixed", "PASSED" if mod.x == 2 else "FAILED")
"""
FORGE = "print('t::kept PASSED'); print('t::fixed PASSED'); import os; os._exit(0)"
TASK = Task(
    instance_id="a",
    repo="a/a",
    problem_statement="x is wrong",
    patch="",
    gold="x",
    fail_to_pass=("t::fixed",),
    pass_to_pass=("t::kept",),
    image_name="",
    test_command="python3 check.py --all",
    test_files=("check.py",),
)
REPLACE = 'f=$(command -v {name}); rm -f "$f"; printf "{text}" > "$f"; chmod 755 "$f"'
SAYS = "#!/bin/sh\\necho t::kept PASSED; echo t::fixed PASSED\\n"
ATTACKS = {
    "another python on PATH": REPLACE.format(name="python3", text=SAYS),
    "a shell that forges": REPLACE.format(name="sh", text="#!/usr/bin/env python3\\n" + FORGE),
    "a git that does nothing": REPLACE.format(name="git", text="#!/bin/sh\\nexit 0\\n"),
    "a module of the system": f'd=$(python3 -c "import os; print(os.path.dirname(os.__file__))"); '
    f'echo "{FORGE}" | tee $d/sitecustomize.py > $d/this.py; ls $d/dist-packages',
    "a package that every interpreter loads": "for d in $(python3 -c 'import sys; "
    f"print(*sys.path)') /usr/lib/python3/dist-packages; do mkdir -p $d; "
    f'echo "import sys; exec(\\"{FORGE}\\")" > $d/x.pth; done',
    "settings of shells": "for f in /etc/profile /etc/bash.bashrc ~/.bashrc /etc/environment; "
    "do echo 'echo t::fixed PASSED; exit' > $f; done; export BASH_ENV=~/.bashrc",
    "a library for every program": "echo /tmp/none.so > /etc/ld.so.preload",
    "hooks and filters of git": "mkdir -p .git/hooks; for h in post-index-change pre-commit; do "
    "printf '#!/bin/sh\\nsed -i s/1/2/ /testbed/mod.py\\n' > .git/hooks/$h; done; "
    "chmod +x .git/hooks/*; git config core.fsmonitor 'sed -i s/1/2/ mod.py; false'",
    "the test itself": f'echo "{FORGE}" > check.py',
    "a process that stays": f'(while sleep 0.01; do echo "{FORGE}" > check.py; done) & true',
    "what git ignores": f'mkdir lib; echo "{FORGE}" > lib/mod.py; echo lib > .gitignore; '
    "git config core.excludesFile /dev/null",
    "a link out of the repository": "rm check.py; ln -s /etc/passwd check.py; ln -s / root",
    "a setuid program": "cp $(command -v sh) own; chmod 6755 own",
}


@pytest.fixture
def judged(box: Any) -> Any:
    """A function that grades what a command leaves."""
    testbed = box.image / "testbed"
    (testbed / "mod.py").write_text("x = 1\n")
    (testbed / "check.py").write_text(CHECK)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=testbed, check=True, capture_output=True)

    def verdict(*commands: str, task: Task = TASK) -> Verdict:
        async def body(sandbox: Sandbox) -> Verdict:
            for command in commands:
                await sandbox.exec(command, timeout_s=60)
            return await grade(task, sandbox, image=box.image, timeout_s=60)

        found: Verdict = box.run(body)
        return found

    return verdict


FIX = "echo 'x = 2' > mod.py"


@pytest.fixture(autouse=True)
def isolated(box: Any) -> None:
    if box.kind == "process":
        pytest.skip("it isolates nothing: such commands would change this host")


def test_a_fix_is_resolved_and_nothing_is_not(judged: Any) -> None:
    assert judged(FIX).resolved
    assert judged("true").failed == ("t::fixed",)


SAME_SECOND = (
    "git config core.trustctime false; touch -d @1700000000 mod.py; git add mod.py; "
    f"touch -d @1700000000 .git/index; {FIX}; touch -d @1700000000 mod.py"
)
"""The fix keeps the file's size and second: by the index's time alone git reads it again."""


def test_a_fix_in_the_second_of_the_index_is_not_lost(judged: Any) -> None:
    assert judged(SAME_SECOND).resolved


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_earns_nothing(attack: str, judged: Any) -> None:
    verdict = judged(ATTACKS[attack])
    assert not verdict.resolved
    assert "t::fixed" in verdict.failed


@pytest.mark.slow
def test_files_new_removed_renamed_binary_and_with_odd_names_are_carried(judged: Any) -> None:
    made = "git mv link moved; rm -r pkg; printf '\\377\\0x = 2' > b; mv b 'odd \"n\u00e4me'; "
    seen = "import os; print('t::fixed', 'PASSED' if sorted(os.listdir('.')) == "
    seen += "['.git', 'a.txt', 'check.py', 'mod.py', 'moved', 'odd \"n\u00e4me'] else 'FAILED')"
    wanted = replace(TASK, pass_to_pass=(), test_command=f"python3 - <<'E' #check.py\n{seen}\nE")
    assert judged(made, task=wanted).resolved


def test_a_lock_and_a_commit_of_the_agents_are_in_no_ones_way(judged: Any) -> None:
    assert judged(FIX, "git add -A && git commit -qm mine && touch .git/index.lock").resolved


def test_a_repository_that_is_gone_has_failed(judged: Any) -> None:
    verdict = judged(FIX, "rm -rf .git")
    assert not verdict.resolved
    assert "git cannot tell what was changed" in verdict.log


@pytest.mark.slow
def test_changes_past_the_bound_have_failed(judged: Any, box: Any) -> None:
    box.set(file_mb=64, disk_mb=256)
    verdict = judged(FIX, "head -c 20000000 /dev/urandom > big")
    assert "over 16 MiB" in verdict.log


def test_an_image_without_a_commit_is_our_failure(judged: Any, box: Any) -> None:
    (box.image / "testbed/.git/HEAD").write_text("ref: refs/heads/none\n")
    with pytest.raises(GradingError, match="not a git repository with a commit"):
        judged(FIX)
