"""`agentrl report`: what it prints and opens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # a report is drawn


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "it's a run"
    (folder / "events").mkdir(parents=True)
    return folder


def report(run: Path, *options: str, browser: Path | None = None) -> str:
    given = {**os.environ, "BROWSER": str(browser)} if browser else None
    command = [sys.executable, "-m", "launch.report", str(run), *options]
    done = subprocess.run(
        command, env=given, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_is_opened_in_the_browser_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" >"{seen}"\n')
    browser.chmod(0o755)
    page = Path(report(run, "--open", browser=browser).strip())
    assert page == run / "report" / "index.html"
    assert seen.read_text() == page.resolve().as_uri()


def test_a_second_call_prints_the_same_numbers_without_drawing_again(run: Path) -> None:
    first = report(run, "--json")
    page = run / "report" / "index.html"
    drawn = page.stat().st_mtime_ns
    assert json.loads(report(run, "--json")) == json.loads(first)
    assert page.stat().st_mtime_ns == drawn
