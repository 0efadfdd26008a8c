"""Handoff against plain files: groups of 8 × 30,000 tokens, the same content, the same fsyncs.

    python -m benchmarks.handoff_speed [--rounds 30] [--folder FOLDER]

Peer: the same content (each row's int32, float32 and one-byte mask arrays and its messages) as one
plain file, not compressed, written with the same temporary name, fsync, rename and folder fsync,
and read back into the same arrays and texts. Both alternate within one process, so that they share
the disk's moods. Ratio: the plain files' median time over ours; the project asks for 0.5 or more.
CPU time is shown too: on a busy machine it moves less than what a clock on the wall shows.
`socket_write` is from the group to its acknowledgement by a receiver that has written it to the
same disk; both ends are in this process, over 127.0.0.1, so it has no network in it.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from agentrl.engine.base import VersionSpan
from agentrl.events import NoEvents
from agentrl.handoff.publish import publish_json, publish_pieces
from agentrl.handoff.socket_receiver import SocketReceiver
from agentrl.handoff.socket_sender import SocketSender
from agentrl.handoff.spool import SpoolWriter, read_group
from agentrl.handoff.trajectory import Group, Trajectory

ATTEMPTS, TOKENS = 8, 30_000
BYTES_PER_TOKEN = 4
"""Of text; what byte-pair vocabularies reach on code."""
VOCABULARY = 151_936
NAMES = ("ours_write", "ours_read", "plain_write", "plain_read", "socket_write", "socket_read")


def make_group(draw: int, rng: np.random.Generator, text: str) -> Group:
    return Group(
        draw=draw,
        task_id="benchmark",
        trajectories=tuple(make_trajectory(draw, one, rng, text) for one in range(ATTEMPTS)),
    )


def make_trajectory(draw: int, attempt: int, rng: np.random.Generator, text: str) -> Trajectory:
    """Zipf tokens; 60 alternating spans, a third of it sampled; source text as the messages."""
    sampled = np.repeat(np.tile([False, True], 30), np.tile([667, 333], 30))
    ranks = np.minimum(rng.zipf(1.2, TOKENS), VOCABULARY) - 1
    first = int(rng.integers(0, len(text) - TOKENS * BYTES_PER_TOKEN))
    content = text[first : first + TOKENS * BYTES_PER_TOKEN]
    return Trajectory(
        run="benchmark",
        draw=draw,
        task_id="benchmark",
        attempt=attempt,
        node=0,
        tokens=ranks.astype(np.int32),
        logprobs=np.where(sampled, -rng.exponential(0.4, TOKENS), 0).astype(np.float32),
        loss_mask=sampled,
        versions=tuple(
            VersionSpan(version=7, start=start, end=start + 333)
            for start in range(667, 30_000, 1000)
        ),
        reward=float(attempt % 2),
        cause="submitted",
        turns=30,
        messages=json.dumps([{"role": "user", "content": content}]),
    )


def plain_pieces(group: Group) -> list[memoryview]:
    return [
        memoryview(piece)
        for one in group.trajectories
        for piece in (
            one.tokens.tobytes(),
            one.logprobs.tobytes(),
            one.loss_mask.tobytes(),
            one.messages.encode(),
        )
    ]


def write_plain(path: Path, group: Group) -> None:
    publish_pieces(path, plain_pieces(group))


def read_plain(path: Path, text_sizes: list[int]) -> list[tuple[object, ...]]:
    """Return each row's arrays and messages; a plain file tells no sizes, so they are given."""
    data, place, rows = path.read_bytes(), 0, []
    for size in text_sizes:
        arrays = []
        for kind in (np.int32, np.float32, np.bool_):
            arrays.append(np.frombuffer(data, kind, TOKENS, place).copy())  # aligned
            place += arrays[-1].nbytes
        rows.append((*arrays, data[place : place + size].decode()))
        place += size
    return rows


def timed(work: Callable[..., object], *given: object) -> tuple[float, float]:
    """Return seconds on the wall, and of CPU."""
    begin, cpu = time.perf_counter(), time.process_time()
    work(*given)
    return time.perf_counter() - begin, time.process_time() - cpu


@contextmanager
def socket_pair(folder: Path) -> Iterator[Callable[[Group], None]]:
    """Give what sends a group by socket into `folder`/by socket and waits for its answer."""
    attempt_dir = folder / "attempts" / "0001"
    receiver = SocketReceiver(
        spool=folder / "by socket",
        attempt_dir=attempt_dir,
        run="benchmark",
        attempt=1,
        consumed=(),
        events=NoEvents(),
    )
    sender = SocketSender(
        attempt_dir=attempt_dir,
        run="benchmark",
        attempt=1,
        node=0,
        events=NoEvents(),
        limit_s=60.0,
        flush_s=0.0,
    )
    with receiver, asyncio.Runner() as runner:
        runner.run(sender.__aenter__())
        try:
            yield lambda group: runner.run(sender.write(group))
        finally:
            runner.run(sender.__aexit__(None, None, None))


def measure(folder: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    rng = np.random.default_rng(0)
    text = "".join(
        inspect.getsource(sys.modules[name]) for name in ("argparse", "inspect", "typing")
    )
    spool, plain = SpoolWriter(folder, 0), folder / "plain"
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    sizes = 0, 0
    with socket_pair(folder) as send:
        for draw in range(rounds + 2):
            group = make_group(draw, rng, text)
            path, target = spool.folder / f"{draw:08d}.parquet", plain / f"{draw}.bin"
            by_socket = folder / "by socket" / "0" / path.name
            text_sizes = [len(one.messages.encode()) for one in group.trajectories]
            turns: list[tuple[str, Callable[..., object], tuple[object, ...]]] = [
                ("ours_write", spool.write, (group,)),
                ("ours_read", read_group, (path,)),
                ("plain_write", write_plain, (target, group)),
                ("plain_read", read_plain, (target, text_sizes)),
                ("socket_write", send, (group,)),
                ("socket_read", read_group, (by_socket,)),
            ]
            first = draw % 3 * 2
            for name, work, given in turns[first:] + turns[:first]:
                times[name].append(timed(work, *given))
            sizes = path.stat().st_size, target.stat().st_size
            for one in (path, target, by_socket):
                one.unlink()
    print(f"one group: {sizes[0]:,} bytes in the spool, {sizes[1]:,} plain")
    return {name: values[2:] for name, values in times.items()}  # two rounds of warming up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        times = measure(Path(folder), options.rounds)
    result = summary(times, options.rounds, (load, os.getloadavg()[0]))
    publish_json(Path(__file__).parent / "results" / "handoff_speed.json", result)


def summary(
    times: dict[str, list[tuple[float, float]]], rounds: int, loads: tuple[float, float]
) -> dict[str, object]:
    """Print the figures, and return them."""
    wall = {name: [one[0] for one in values] for name, values in times.items()}
    median = {name: statistics.median(values) for name, values in wall.items()}
    cpu = {name: statistics.median(one[1] for one in values) for name, values in times.items()}
    for name, values in wall.items():
        low, _, high = statistics.quantiles(values, n=4)
        print(
            f"{name:12s} median {median[name] * 1e3:6.1f} ms   "
            f"quartiles {low * 1e3:.1f}–{high * 1e3:.1f}   CPU {cpu[name] * 1e3:.1f} ms"
        )
    ratio = (median["plain_write"] + median["plain_read"]) / (
        median["ours_write"] + median["ours_read"]
    )
    socket_ratio = (median["plain_write"] + median["plain_read"]) / (
        median["socket_write"] + median["socket_read"]
    )
    print(f"by socket: ratio {socket_ratio:.2f} of plain files' speed")
    command = f"python -m benchmarks.handoff_speed --rounds {rounds}"
    print(
        f"ratio {ratio:.2f} of plain files' speed (wanted: 0.5 or more); load average "
        f"{loads[0]:.1f} before, {loads[1]:.1f} after, on {os.cpu_count()} CPUs"
    )
    print(f"{command}   {versions()}")
    return {
        "benchmark": "handoff_speed",
        "command": command,
        "versions": versions(),
        "rounds": rounds,
        "seconds": {name: [round(value, 6) for value in values] for name, values in wall.items()},
        "median_s": median,
        "median_cpu_s": cpu,
        "load_average": loads,
        "cpus": os.cpu_count(),
        "ratio": ratio,
        "socket_ratio": socket_ratio,
        "wanted": 0.5,
    }


def versions() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], check=False, capture_output=True, text=True
    ).stdout.strip()
    return {
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "numpy": np.__version__,
        "commit": commit,
    }


if __name__ == "__main__":
    main()
