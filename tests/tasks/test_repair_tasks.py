"""The generator: rows that prove, splits that never overlap, repositories that git accepts."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.tasks.build import build
from agentrl.tasks.check import CHECK
from agentrl.tasks.command import try_command
from agentrl.tasks.library import all_names, library
from agentrl.tasks.mutate import PATTERNS, edits
from agentrl.tasks.repair import MODULE, Row, all_triples, is_reserved, plan
from agentrl.tasks.repository import materialise, write_repository
from agentrl.tasks.splits import SPLITS, TRAINED, partition, wanted

HELD = [split for split in SPLITS if split not in TRAINED]


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def edited(source: list[str], line: int, pattern: str, new: str) -> str:
    """Make the edit by the tokens of its class, without a regular expression."""
    kind = next(kind for kind, text in PATTERNS.items() if text == pattern)
    found = [e for e in edits("".join(source)) if (e.line, e.kind) == (line, kind)]
    text = source[line - 1]
    first = min(found, key=lambda edit: edit.column)
    done = text[: first.column] + new + text[first.column + len(first.old) :]
    return "".join([*source[: line - 1], done, *source[line:]])


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(islice(build(partition(3), "train", 1, 3), 24))


def test_the_library_is_wide() -> None:
    templates = library().values()
    assert len(templates) >= 52
    assert len({template.module for template in templates}) >= 12
    assert len({kind for _, kind in all_triples()}) >= 6
    assert all(2 <= t.render({}, dict.fromkeys(t.constants, 7)).count("\n") <= 6 for t in templates)


def test_each_edit_can_be_taken_back_by_another_of_the_family() -> None:
    for template in library().values():
        source = template.render({}, dict.fromkeys(template.constants, 12))
        for edit in edits(source):
            changed = edit.apply(source)
            back = next(e for e in edits(changed) if e == edit.reverse())
            assert back.apply(changed) == source


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_no_split_shares_what_it_must_not_with_training(seed: int) -> None:
    part = partition(seed)
    trained = set(part.triples["train"])
    assert not trained & set(part.triples["held_out"])
    assert {t[:2] for t in part.triples["held_out"]} <= {t[:2] for t in trained}
    assert not {t[:2] for t in trained} & {t[:2] for t in part.triples["unseen_sites"]}
    assert not {t[0] for t in trained} & {t[0] for t in part.triples["unseen_functions"]}
    assert not set(part.trained_names) & set(part.reserved_names)
    assert sum(map(len, part.triples.values())) == len(all_triples())
    assert all(part.triples.values())


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**9), functions=st.integers(24, 64))
def test_fewer_functions_are_spread_over_the_modules(seed: int, functions: int) -> None:
    triples = [one for some in partition(seed, functions).triples.values() for one in some]
    found = {function for function, _, _ in triples}
    counts = Counter(library()[function].module for function in found)
    assert len(found) == functions
    assert len(counts) >= 12
    assert len({kind for triple, kind in all_triples() if triple in triples}) >= 6


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**9), functions=st.integers(1, 3))
def test_plans_draw_names_and_constants_from_their_own_stock(seed: int, functions: int) -> None:
    part = partition(seed)
    for split in SPLITS:
        rng = random.Random(seed)
        for want in islice(wanted(part, split, functions, rng), 5):
            made = plan(want, rng)
            if made is None:
                continue
            stock = part.trained_names if split in TRAINED else part.reserved_names
            assert set(made.names) <= set(stock)
            if made.constants:
                assert is_reserved(want.triple[0], made.constants) == (split not in TRAINED)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_evaluation_takes_every_bug_before_any_comes_again(seed: int) -> None:
    part = partition(seed)
    bugs = part.triples["held_out"]
    drawn = islice(wanted(part, "held_out", 1, random.Random(seed)), 2 * len(bugs))
    triples = [want.triple for want in drawn]
    assert set(triples[: len(bugs)]) == set(triples[len(bugs) :]) == set(bugs)


def test_the_same_seed_gives_the_same_rows(rows: list[Row]) -> None:
    assert list(islice(build(partition(3), "train", 1, 3), 8)) == rows[:8]
    assert list(islice(build(partition(3), "train", 1, 4), 2)) != rows[:2]


def test_rows_fail_before_the_fix_and_name_it(rows: list[Row]) -> None:
    for row in rows:
        assert row.FAIL_TO_PASS
        assert "\nassert " in row.problem_statement
        assert row.fix is not None
        line, pattern, new = row.fix
        source = row.files[f"{MODULE}.py"].splitlines(keepends=True)
        assert edited(source, line, pattern, new) != "".join(source)


def test_larger_modules_hold_several_functions_and_number_the_right_lines() -> None:
    for row in islice(build(partition(3), "train", 3, 3), 4):
        source = row.files[f"{MODULE}.py"].splitlines()
        assert sum(line.startswith("def ") for line in source) == 3
        for shown in row.problem_statement.splitlines()[:-1]:
            number, _, text = shown.partition(" ")
            assert source[int(number) - 1] == text


def test_the_patch_is_the_bug_and_its_reverse_the_fix(rows: list[Row], odd_path: Path) -> None:
    write_repository(odd_path, rows[0].files)
    subprocess.run(
        ["git", "apply", "--reverse"], cwd=odd_path, input=rows[0].patch, text=True, check=True
    )
    done = subprocess.run(
        [sys.executable, "check.py"], cwd=odd_path, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"")


def test_git_takes_the_repository_as_its_own_work(rows: list[Row], odd_path: Path) -> None:
    write_repository(odd_path, rows[0].files)
    git(odd_path, "fsck", "--strict", "--full")
    assert git(odd_path, "status", "--porcelain") == ""
    assert git(odd_path, "rev-list", "--all", "--count") == "1\n"
    assert "unreachable" not in git(odd_path, "fsck", "--unreachable")


def test_checkout_restores_an_edit_of_the_same_size_made_at_once(
    rows: list[Row], tmp_path: Path
) -> None:
    write_repository(tmp_path, rows[0].files)
    file = tmp_path / f"{MODULE}.py"
    for _ in range(3):
        file.write_text(rows[0].files[file.name].replace("def ", "DEF "))
        git(tmp_path, "checkout", "-q", file.name)
        assert file.read_text() == rows[0].files[file.name]


def _materialise(image: Path, files: dict[str, str]) -> bool:
    return materialise(image, files) == image


def test_two_processes_may_make_one_image(rows: list[Row], tmp_path: Path) -> None:
    with get_context("spawn").Pool(2) as pool:
        made = pool.starmap(_materialise, [(tmp_path / "images" / "a", rows[0].files)] * 8)
    assert all(made)
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["a"]
    git(tmp_path / "images/a/testbed", "fsck", "--strict")


def test_a_right_try_hands_in_and_a_wrong_one_shows_a_short_line(
    rows: list[Row], tmp_path: Path
) -> None:
    row = next(row for row in rows if row.rivals)
    write_repository(tmp_path, row.files)
    assert row.fix is not None
    right = try_command(*row.fix).replace("python ", f"{sys.executable} ")
    done = subprocess.run(
        ["sh", "-c", right], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n", 0)
    nothing = try_command(99, "x", "y").replace("python ", f"{sys.executable} ")
    done = subprocess.run(
        ["sh", "-c", nothing], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    claim = (
        row.problem_statement.splitlines()[-1].removeprefix("assert ").replace(" # got", ", got")
    )
    assert (done.stdout, done.returncode) == (f"{claim}\n", 1)
    assert git(tmp_path, "status", "--porcelain") == ""


def test_sed_makes_the_very_edit_that_was_meant(rows: list[Row], tmp_path: Path) -> None:
    for row in rows[:6]:
        for line, pattern, new in row.rivals:
            source = row.files["f.py"].splitlines(keepends=True)
            (tmp_path / "f.py").write_text("".join(source))
            script = try_command(line, pattern, new).split("'")[1]
            subprocess.run(["sed", "-i", script, "f.py"], cwd=tmp_path, check=True)
            assert (tmp_path / "f.py").read_text() == edited(source, line, pattern, new)


def test_check_names_what_an_import_raised(rows: list[Row], tmp_path: Path) -> None:
    write_repository(tmp_path, {**rows[0].files, "f.py": "x = 1\ndef f(:\n"})
    done = subprocess.run(
        [sys.executable, "check.py"], cwd=tmp_path, capture_output=True, check=False
    )
    assert (done.stdout, done.returncode) == (b"SyntaxError line 2\n", 1)
    assert "import" in CHECK


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", *HELD])
def test_what_the_batch_found_is_what_a_real_process_finds(split: str, tmp_path: Path) -> None:
    for row in islice(build(partition(1), split, 2, 1), 8):
        folder = tmp_path / f"{row.function}-{random.random()}"
        write_repository(folder, row.files)
        done = subprocess.run(
            [sys.executable, "check.py", "-v"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        results = dict(line.split(" ") for line in done.stdout.splitlines())
        assert {n for n, result in results.items() if result == "FAILED"} == set(row.FAIL_TO_PASS)
        assert {n for n, result in results.items() if result == "PASSED"} == set(row.PASS_TO_PASS)


def test_every_name_is_two_syllables() -> None:
    assert len(all_names()) > 300
    assert all(len(name) == 4 and name.isidentifier() for name in all_names())
