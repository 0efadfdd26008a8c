"""One pull an image for all nodes; refusals are waited out, and a dead maker is in no one's way."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.errors import SandboxStartError
from agentrl.sandbox.layers import restore, save
from agentrl.sandbox.pull import claim_path, ensure, made_path, unfinished_path
from agentrl.sandbox.single import SingleFlight

REFERENCE = "docker://swebench/sweb.eval:latest"


@pytest.fixture
def folder(odd_path: Path) -> Path:
    return odd_path / "images"


def registry(folder: Path, *answers: str) -> list[str]:
    """Return a program that does `answers` in turn, the last one ever after, and counts."""
    cases = "".join(f"{n + 1}) {answer};;\n" for n, answer in enumerate(answers[:-1]))
    program = folder.parent / "apptainer build"
    calls = folder.parent / "calls"
    program.write_text(
        f'#!/bin/sh\necho x >> "{calls}"\ncase $(wc -l < "{calls}") in\n{cases}*) {answers[-1]};;'
        "\nesac\n"
    )
    program.chmod(0o755)
    return [str(program)]


def calls(folder: Path) -> int:
    return len((folder.parent / "calls").read_text().splitlines())


GOOD = 'sleep 0.2; echo "$2" > "$1"'
REFUSED = "echo 'FATAL: toomanyrequests: You have reached your pull rate limit'; exit 255"


def test_many_who_want_an_image_at_once_pull_it_once(folder: Path) -> None:
    program = registry(folder, GOOD)
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(ensure, REFERENCE, folder, program=program, timeout_s=60) for _ in range(8)
        ]
        assert {one.result() for one in asked} == {made_path(folder, REFERENCE)}
    assert calls(folder) == 1
    assert made_path(folder, REFERENCE).read_text() == f"{REFERENCE}\n"
    assert [path.name for path in folder.iterdir()] == [made_path(folder, REFERENCE).name]


def test_a_refusal_for_now_is_waited_out(folder: Path) -> None:
    ensure(REFERENCE, folder, program=registry(folder, REFUSED, REFUSED, GOOD), timeout_s=60)
    assert calls(folder) == 3


def test_any_other_failure_is_told_in_its_own_words_and_leaves_nothing(folder: Path) -> None:
    program = registry(folder, "echo 'manifest unknown'; exit 255")
    with pytest.raises(SandboxStartError, match="exited 255: manifest unknown"):
        ensure(REFERENCE, folder, program=program, timeout_s=60)
    assert list(folder.iterdir()) == []


def test_a_claim_that_nobody_touches_any_more_is_no_hindrance(folder: Path) -> None:
    folder.mkdir()
    claim = claim_path(made_path(folder, REFERENCE))
    claim.touch()
    os.utime(claim, (1, 1))
    unfinished_path(made_path(folder, REFERENCE)).write_text("half of it")
    ensure(REFERENCE, folder, program=registry(folder, GOOD), timeout_s=60)
    assert calls(folder) == 1
    assert [path.name for path in folder.iterdir()] == [made_path(folder, REFERENCE).name]


def test_a_living_claim_is_waited_for_until_the_deadline(folder: Path) -> None:
    folder.mkdir()
    claim_path(made_path(folder, REFERENCE)).touch()
    with pytest.raises(SandboxStartError, match="within 1 s; is a node stuck"):
        ensure(REFERENCE, folder, program=["false"], timeout_s=1)


def test_references_that_look_alike_have_files_of_their_own(folder: Path) -> None:
    names = ("docker://a/b:c", "docker://a_b:c", "docker://a/b_c", "docker://a/b.c")
    assert len({made_path(folder, name) for name in names}) == 4


def test_what_takes_long_to_make_holds_up_nothing_else() -> None:
    gate = threading.Event()

    async def main() -> str:
        flight: SingleFlight[bool] = SingleFlight()
        slow = [asyncio.ensure_future(flight.get(str(n), gate.wait)) for n in range(40)]
        await asyncio.sleep(0)
        started = await asyncio.wait_for(asyncio.to_thread(lambda: "started"), 30)
        gate.set()
        await asyncio.gather(*slow)
        return started

    assert asyncio.run(main()) == "started"


def test_one_process_makes_a_thing_once_and_tries_again_after_a_failure() -> None:
    tries: list[int] = []
    gate = threading.Event()

    def make() -> int:
        tries.append(1)
        gate.wait(30)
        if len(tries) == 1:
            raise OSError("the first fails")
        return 7

    async def main() -> None:
        flight: SingleFlight[int] = SingleFlight()
        first = [asyncio.ensure_future(flight.get("a", make)) for _ in range(3)]
        await asyncio.sleep(0)
        gate.set()
        assert len(await asyncio.gather(*first, return_exceptions=True)) == 3
        assert flight.made("a") is None
        assert (await flight.get("a", make), flight.made("a")) == (7, 7)

    asyncio.run(main())
    assert len(tries) == 2


@pytest.mark.parametrize("how", ["overlay", "copy"])
def test_what_a_sandbox_wrote_comes_back_from_what_was_saved(how: str, tmp_path: Path) -> None:
    scratch, image = tmp_path / "scratch", tmp_path / "image"
    (image / "testbed").mkdir(parents=True)
    for name in ("layer/upper/usr", "testbed/upper"):
        (scratch / name).mkdir(parents=True)
    (scratch / "layer/upper/usr/new").write_text("new\n")
    (scratch / "layer/upper/usr/new").chmod(0o6755)
    (scratch / "testbed/upper/a.txt").symlink_to("b.txt")
    save(scratch, image, tmp_path / "saved", environment="/env.sif", how=how)
    assert (tmp_path / "saved").stat().st_mode & 0o077 == 0  # a setuid program is in it
    fresh = tmp_path / "fresh"
    for name in ("layer", "testbed/upper"):
        (fresh / name).mkdir(parents=True)
    restore(tmp_path / "saved", fresh)
    assert (fresh / "layer/upper/usr/new").read_text() == "new\n"
    laid = {"overlay": fresh / "testbed/upper", "copy": tmp_path / "saved/testbed"}[how]
    assert os.readlink(laid / "a.txt") == "b.txt"
    assert (tmp_path / "saved/environment").read_text() == "/env.sif\n"
