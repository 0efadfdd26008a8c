"""`agentrl watch RUN`: a run's standing, live, until it ends; Ctrl-C ends only the watching.

The numbers are those of `agentrl report`, by its reader and its definitions: of the whole run, and
of its last ten minutes (`--since`). Slurm is asked once in every --every-s; the run's own files are
read twice a second, less often where counting takes long. Without a terminal a line is printed
whenever something changed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from analysis.live import LiveRun
from analysis.table import whole_percent
from launch.command import guard, parser, say
from launch.run_dir import RunDir
from launch.status import Place, ended, place_of
from slurm import ledger
from slurm.exit_record import DONE, FAILED

FILES_EVERY_S = 0.5
RECENT_S = 600.0
COLOURS = {"RUNNING": "green", "PENDING": "yellow", "COMPLETING": "yellow", "COMPLETED": "green"}
ENGINE_COLOURS = {"ready": "green", "failed": "red", "stopped": "dim"}
ATTEMPTS_SHOWN = 4
ENGINES_SHOWN = 8
BAR_WIDTH = 30


def main(argv: Sequence[str]) -> int:
    """Show the run until nothing of it lives."""
    arguments = parser("watch", __doc__)
    arguments.add_argument("run", metavar="RUN", help="run directory, such as runs/demo")
    arguments.add_argument("--every-s", type=float, default=5.0, help="between questions to Slurm")
    given = arguments.parse_args(argv)
    follow(View(RunDir.open(given.run), every_s=given.every_s))
    return DONE


def until_end(run: RunDir) -> int:
    """Show the run until it ends; return its exit code, or 0 if only the watching was ended."""
    view = View(run)
    if not follow(view):
        return DONE
    last = view.lines[-1] if view.lines else None
    return last.code if last and last.action in ("done", "stop") else FAILED


def follow(view: View) -> bool:
    """Show it until its end; return False after Ctrl-C."""
    try:
        if sys.stdout.isatty():
            watch_live(view)
        else:
            watch_lines(view)
    except KeyboardInterrupt:
        say(f"{view.run.name} goes on; `agentrl stop {view.run.path}` ends it")
        return False
    return True


def watch_live(view: View) -> None:
    with Live(view.screen(), auto_refresh=False, console=Console()) as live:
        while view.look():
            live.update(view.screen(), refresh=True)
            time.sleep(FILES_EVERY_S)
        live.update(view.screen(), refresh=True)


def watch_lines(view: View) -> None:
    told = ""
    while True:
        is_living = view.look()
        if view.line() != told:
            told = view.line()
            say(told)
        if not is_living:
            return
        time.sleep(FILES_EVERY_S)


class View:
    """What is known of a run, kept up to date by `look`."""

    def __init__(self, run: RunDir, *, every_s: float = 5.0) -> None:
        self.run = run
        self.steps = run.config().training.steps
        self.place = Place()
        self.lines: list[ledger.LedgerLine] = []
        self._live = LiveRun(run.path, run.config())
        self._is_new = False
        self._every_s = every_s
        self._ask_at = 0.0
        self._live.read()
        self._count()

    def look(self) -> bool:
        """Read what is new; return whether the run lives, or may live."""
        if time.monotonic() >= self._ask_at:
            self.place = place_of(self.run)
            self._ask_at = time.monotonic() + self._every_s
        self._is_new |= self._live.read()
        if self._is_new and (time.monotonic() >= self._count_at or not self.place.state):
            self._count()
        self.lines = ledger.read(self.run.path)
        return bool(self.place.state)

    def _count(self) -> None:
        """Count anew, and not again before ten times as long as it took."""
        from analysis.standing import standing  # a second, which `train` has no need of

        begin, run = time.monotonic(), self._live.run()
        self.standing = standing(run)
        self.recent = standing(run.within(time.time() - RECENT_S, inf))
        self._is_new = False
        self._count_at = time.monotonic() + 10 * (time.monotonic() - begin)

    @property
    def state(self) -> str:
        return self.place.state or ended(self.run.attempts(), self.lines)

    def line(self) -> str:
        """Return it in one line, without what changes all the time."""
        parts = [f"{self.run.name}: {self.state}"]
        parts += [
            f"{role} {text.partition(',')[0]}" for role, text in self.place.components.items()
        ]
        engines = sum(state == "ready" for _, state in self.standing.engines)
        parts += [f"step {self.standing.step}/{self.steps}", f"{engines} engines ready"]
        parts += [f"checkpoint {self.run.checkpoint_step()}", f"{self.standing.faults} faults"]
        return " · ".join(parts)

    def screen(self) -> Panel:
        """Return it as a panel as wide as the terminal is now."""
        head = f"{self.state}   job {self.place.job}" if self.place.job else self.state
        body = Group(self._components(), self._numbers(), self._engines(), self._attempts())
        return Panel(body, title=f"run {self.run.path}", title_align="left", subtitle=head)

    def _components(self) -> Table:
        rows = _rows()
        for role, text in self.place.components.items():
            word = text.split()[0].rstrip(",")
            rows.add_row(role, Text(text, style=COLOURS.get(word, "red")))
        return rows

    def _numbers(self) -> Table:
        rows, standing = _rows(), self.standing
        bar = ProgressBar(total=self.steps, completed=standing.step, width=BAR_WIDTH)
        count = Table.grid(padding=(0, 1))
        count.add_row(bar, f"{standing.step}/{self.steps}")
        rows.add_row("step", count)
        rows.add_row("version", str(standing.version) if standing.version >= 0 else "none yet")
        rows.add_row("checkpoint", f"step {self.run.checkpoint_step()}")
        many = f"{standing.trajectories:,} in all, {standing.lost:,} lost"
        rows.add_row("trajectories", many)
        for name, found, text in self._rates():
            if found == found:
                rows.add_row(name, text)
        last = f", the last: {standing.last_fault}" if standing.last_fault else ""
        style = "red" if standing.faults else ""
        rows.add_row("engine faults", Text(f"{standing.faults}{last}", style=style))
        return rows

    def _rates(self) -> Iterator[tuple[str, float, str]]:
        """Yield name, number and words; what is not known is NaN."""
        whole, recent = self.standing, self.recent

        def both(words: Callable[[float], str], of: str) -> tuple[float, str]:
            first, second = float(getattr(whole, of)), float(getattr(recent, of))
            lately = f" ({words(second)} in the last {RECENT_S / 60:.0f} min)"
            return first, words(first) + (lately if second == second else "")

        yield "reward", whole.reward, f"{whole.reward:.3f}, mean of the last steps"
        yield "rate", *both(lambda value: f"{value:,.0f} an hour", "per_hour")
        yield "under way", *both(lambda value: f"{value:,.1f}", "concurrent")
        yield "sampled", *both(lambda value: f"{value:,.0f} tokens/s", "tokens_per_s")
        yield "trainer idle", *both(whole_percent, "trainer_idle")
        yield "engines idle", *both(whole_percent, "engines_idle")

    def _engines(self) -> Table:
        rows = _rows()
        engines = self.standing.engines
        for name, state in engines[:ENGINES_SHOWN]:
            rows.add_row(name, Text(state, style=ENGINE_COLOURS.get(state, "yellow")))
        if len(engines) > ENGINES_SHOWN:
            rows.add_row("", f"and {len(engines) - ENGINES_SHOWN} more")
        return rows

    def _attempts(self) -> Table:
        rows = _rows()
        for one in self.lines[-ATTEMPTS_SHOWN:]:
            text = f"steps {one.step_begin} to {one.step_end}, {one.action}: {one.ended}"
            rows.add_row(f"attempt {one.attempt}", Text(text, overflow="ellipsis", no_wrap=True))
        return rows


def _rows() -> Table:
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(width=14, no_wrap=True)
    rows.add_column(ratio=1)
    return rows


if __name__ == "__main__":
    sys.exit(guard(main))
