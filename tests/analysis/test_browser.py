"""The page in a real browser: nothing complains, every figure shows, at a desk, a phone, on paper.

Screenshots are kept in build/screenshots. Skipped where no Chromium is installed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import chromium
import pytest
from made_run import Made, make_run

from analysis.report import FIGURES, write_report

BROWSER = chromium.find()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        BROWSER is None, reason=f"none of {', '.join(chromium.NAMES)} is on PATH: install chromium"
    ),
]
KEPT = Path(__file__).parents[2] / "build" / "screenshots"
SEEN = """[...document.querySelectorAll('figure svg')].filter(svg => svg.checkVisibility()).map(
  svg => ({ id: svg.closest('figure').id, box: svg.getBoundingClientRect().toJSON(),
            marks: svg.querySelectorAll('path, use').length }))"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folders = [tmp_path_factory.mktemp("runs") / name for name in ("before", "after")]
    for i, folder in enumerate(folders):
        make_run(folder, Made(steps=30, resume_at=12), seed=i)
    return write_report(folders, is_compared=True).page


def look(report: Path, profile: Path, name: str, *, width: int, scheme: str = "light") -> Any:
    """Open the page; return what is seen, how far it overflows, and what the browser says."""

    async def run() -> Any:
        assert BROWSER
        async with chromium.page(BROWSER, profile) as tab:
            await tab.open(report, width=width, scheme=scheme)
            await tab.screenshot(KEPT / f"{name}.png")
            return await tab.ask(SEEN), await tab.ask(OVERFLOW), tab.complaints

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("desk", 1200, "light"), ("phone", 390, "light"), ("dark", 1200, "dark")],
)
def test_every_figure_shows_and_nothing_complains(
    report: Path, tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    seen, overflow, complaints = look(report, tmp_path, name, width=width, scheme=scheme)
    assert complaints == []
    assert overflow == 0
    shown = {each["id"] for each in seen if each["box"]["height"] > 60 and each["marks"] > 10}
    drawn = {figure.name for figure in FIGURES} - {"solve_groups"}
    wanted = {f"{run}-{name}" for run in ("before", "after") for name in drawn} | {
        "compare",
        "sandbox_runs",
    }
    assert wanted - shown == set()
    assert all(each["box"]["right"] <= width for each in seen)


def test_the_page_prints(report: Path, tmp_path: Path) -> None:
    async def run() -> Path:
        assert BROWSER
        async with chromium.page(BROWSER, tmp_path / "profile") as tab:
            await tab.open(report, width=1200, scheme="dark")
            await tab.pdf(KEPT / "print.pdf")
        return KEPT / "print.pdf"

    data = asyncio.run(run()).read_bytes()
    assert data.startswith(b"%PDF")
    assert 5 < data.count(b"/Type /Page\n") + data.count(b"/Type /Page ") < 80
