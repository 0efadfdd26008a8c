"""Times `agentrl report` on a made run of about 1 GB, and reading its events against named readers.

    python -m benchmarks.report_speed RUN --peers VENV/bin/python --out benchmarks/results/…

RUN is what benchmarks.make_run writes. VENV has duckdb, polars and msgspec. Every reader brings the
fields that figures use of every line into memory, from the same files in the same process run by
run, in turn; the best of --rounds counts, its median and spread stand beside it. Ours also sorts,
looks for repeats and clock skew. A report is made anew each round, and once more from its cache.
Seconds mean something on a machine that does nothing else; CPU seconds are told beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
FIELDS = {
    "kind": "VARCHAR", "start": "DOUBLE", "end": "DOUBLE", "trajectory": "VARCHAR",
    "engine": "VARCHAR", "turn": "BIGINT", "prompt_tokens": "BIGINT", "new_tokens": "BIGINT",
    "cached_tokens": "BIGINT", "finish": "VARCHAR", "exit_code": "BIGINT", "draw": "BIGINT",
    "task": "VARCHAR", "attempt": "BIGINT", "cause": "VARCHAR", "reward": "DOUBLE",
    "turns": "BIGINT", "tokens": "BIGINT", "sampled_tokens": "BIGINT", "backend": "VARCHAR",
    "queued_s": "DOUBLE", "state": "VARCHAR", "running": "BIGINT", "waiting": "BIGINT",
    "generated_tokens": "BIGINT", "busy_s": "DOUBLE", "version": "BIGINT", "phase": "VARCHAR",
    "step": "BIGINT", "wait_s": "DOUBLE", "update_s": "DOUBLE", "publish_s": "DOUBLE",
}  # fmt: skip
TARGETS = {"report_s": 20.0, "memory_gb": 1.0, "again_s": 3.0, "reading_ratio": 0.8}


def read_ours(files: Sequence[Path]) -> int:
    from analysis.store import event_files, open_store

    folder = files[0].parent
    return len(open_store(folder, event_files(folder), None))


def read_msgspec(files: Sequence[Path]) -> int:
    import msgspec

    from agentrl import events

    decoder = msgspec.json.Decoder(events.AnyEvent)
    found: list[Any] = []
    for path in files:
        with path.open("rb") as file:
            found += map(decoder.decode, file)
    return len(found)


def read_polars(files: Sequence[Path]) -> int:
    import polars

    types = {"VARCHAR": polars.String, "DOUBLE": polars.Float64, "BIGINT": polars.Int64}
    schema = {name: types[kind] for name, kind in FIELDS.items()}
    return sum(len(polars.scan_ndjson(path, schema=schema).collect()) for path in files)


def read_duckdb(files: Sequence[Path]) -> int:
    import duckdb

    names = [str(path) for path in files]
    table = duckdb.read_json(names, columns=FIELDS, format="newline_delimited").arrow()
    return len(table.read_all() if hasattr(table, "read_all") else table)


READERS: dict[str, Callable[[Sequence[Path]], int]] = {
    "ours": read_ours,
    "msgspec raw": read_msgspec,
    "polars": read_polars,
    "duckdb": read_duckdb,
}


def time_reader(name: str, python: str, files: Sequence[Path]) -> dict[str, Any]:
    """Run one reader in a fresh process; return its seconds, without imports, and its rows."""
    code = (
        "import sys, time, json; from pathlib import Path;"
        "from benchmarks.report_speed import READERS, cpu_s, warm;"
        "name, files = sys.argv[1], [Path(f) for f in sys.argv[2:]];"
        "warm(name); begin, cpu = time.perf_counter(), cpu_s(); rows = READERS[name](files);"
        "print(json.dumps({'seconds': time.perf_counter() - begin, 'cpu_s': cpu_s() - cpu,"
        "'rows': rows}))"
    )
    done = subprocess.run(
        [python, "-c", code, name, *map(str, files)],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name} exited {done.returncode}: {done.stderr.strip()[-500:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))  # duckdb draws a bar before


def cpu_s() -> float:
    """Return the CPU time of this process and of those that it waited for, seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def warm(name: str) -> None:
    """Import what a reader needs, so that no reader's imports are timed."""
    modules = {
        "ours": "analysis.store",
        "msgspec raw": "agentrl.events",
        "polars": "polars",
        "duckdb": "duckdb",
    }
    __import__(modules[name])


def time_report(run: Path) -> dict[str, float]:
    """Run `agentrl report` once; return its seconds and the peak memory of all its processes."""
    import psutil

    begin, cpu = time.perf_counter(), cpu_s()
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.report", str(run)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    watched, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        peak = max(peak, _memory([watched, *_children(watched)]))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"the report exited {process.returncode}")
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_s": cpu_s() - cpu,
        "memory_gb": peak / 1e9,
    }


def _children(process: Any) -> list[Any]:
    import psutil

    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _memory(processes: Sequence[Any]) -> int:
    import psutil

    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def versions(peers: str) -> dict[str, str]:
    """Return the version of each reader, and the commit of this code."""
    code = (
        "import duckdb, polars, msgspec, json;"
        "print(json.dumps({m.__name__: m.__version__ for m in (duckdb, polars, msgspec)}))"
    )
    told = subprocess.run([peers, "-c", code], capture_output=True, text=True, check=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return {**json.loads(told.stdout), "commit": commit.stdout.strip()}


def measure(run: Path, peers: str, rounds: int) -> dict[str, Any]:
    files = sorted((run / "events").glob("*.jsonl"))
    pythons = {name: sys.executable if name == "ours" else peers for name in READERS}
    readings: dict[str, list[dict[str, Any]]] = {name: [] for name in READERS}
    for _ in range(rounds):
        for name in READERS:
            readings[name].append(time_reader(name, pythons[name], files))
    best = {name: min(each["seconds"] for each in some) for name, some in readings.items()}
    fastest = min(seconds for name, seconds in best.items() if name != "ours")
    firsts, agains = [], []
    for _ in range(rounds):
        shutil.rmtree(run / "report", ignore_errors=True)
        firsts.append(time_report(run))
        agains.append(time_report(run))
    return {
        "benchmark": "report_speed",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.report_speed RUN --peers PYTHON --rounds {rounds}",
        "versions": versions(peers),
        "bytes": sum(path.stat().st_size for path in files),
        "rows": {name: some[0]["rows"] for name, some in readings.items()},
        "reading_s": {name: spread(some, "seconds") for name, some in readings.items()},
        "reading_cpu_s": {name: spread(some, "cpu_s") for name, some in readings.items()},
        "reading_ratio": fastest / best["ours"],
        "load_average": os.getloadavg()[0],
        "report_s": spread(firsts, "seconds"),
        "report_cpu_s": spread(firsts, "cpu_s"),
        "memory_gb": max(each["memory_gb"] for each in [*firsts, *agains]),
        "again_s": spread(agains, "seconds"),
        "again_cpu_s": spread(agains, "cpu_s"),
        "targets": TARGETS,
        "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
    }


def spread(rounds: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """Return least, median and most of one number over the rounds."""
    values = [round(each[name], 3) for each in rounds]
    return {"least": min(values), "median": median(values), "most": max(values)}


def main(argv: Sequence[str]) -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("run", type=Path)
    arguments.add_argument("--peers", required=True, help="python that has duckdb and polars")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args(argv)
    found = measure(given.run, given.peers, given.rounds)
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if given.out:
        given.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
