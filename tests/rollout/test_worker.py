import asyncio
import contextlib
import dataclasses
import os
import time

import pytest
from rollout_toys import ToyAgent, ToyEvents, ToyProvider, shop, task

from agentrl.config import RunConfig
from agentrl.errors import RecordError, TooManyInfraFailures, WaitTimeout
from agentrl.events import GroupEvent, NoEvents
from agentrl.handoff.socket_receiver import SocketReceiver
from agentrl.handoff.socket_sender import SocketSender
from agentrl.handoff.spool import SpoolWriter, delete, list_spool, read_group
from agentrl.handoff.trajectory import Group
from agentrl.rollout.draws import DrawSet, shard
from agentrl.rollout.sender import open_sender
from agentrl.rollout.view import EnginesFile, TrainerView
from agentrl.rollout.worker import Worker
from agentrl.weights.version import Announced, announce


class Trainer:
    """Consumes from the spool and announces, as the real one does."""

    def __init__(self, run_dir, attempt=1):
        self.run_dir, self.attempt = run_dir, attempt
        self.consumed = DrawSet()
        (run_dir / "weights" / "v000000").mkdir(parents=True, exist_ok=True)
        self.announce()

    def announce(self, *, done=False):
        announce(
            self.run_dir / "weights",
            Announced(
                version=0,
                step=0,
                folder=self.run_dir / "weights" / "v000000",
                run="demo",
                attempt=self.attempt,
                checksum="",
                files={},
                consumed=self.consumed.to_ranges(),
                done=done,
            ),
        )

    def consume(self, count):
        for draw, path in list(list_spool(self.run_dir / "spool").items())[:count]:
            self.consumed.add(draw)
            delete(path)
        self.announce()


def config(**changes):
    made = RunConfig()
    made.training.groups_per_step = 2
    made.rollout.attempts_per_task = 2
    for name, value in changes.items():
        setattr(made.rollout, name, value)
    return made


@pytest.fixture(params=["files", "socket"])
def handoff(request):
    return request.param


def worker_of(run_dir, made, sender, stop=lambda: False):
    return Worker(
        shop=made,
        tasks=[task(number) for number in range(10)],
        draws=shard(node=0, nodes=1, worker=0, workers=1),
        spool=run_dir / "spool",
        sender=sender,
        view=TrainerView(run_dir / "weights", attempt=1),
        stop=stop,
    )


def receiver_of(run_dir):
    return SocketReceiver(
        spool=run_dir / "spool",
        attempt_dir=run_dir / "attempts" / "0001",
        run=run_dir.name,
        attempt=1,
        consumed=(),
        events=NoEvents(),
    )


@pytest.fixture
def work(handoff, tmp_path):
    """Runs a worker of node 0 by either transport; the trainer's end of it is open meanwhile."""

    async def run(settings=None, stop=lambda: False, **parts):
        settings = dataclasses.replace(settings or config(), handoff=handoff)
        made = shop(settings, **parts)
        async with open_sender(settings, tmp_path, node=0, attempt=1, events=made.events) as sender:
            return await worker_of(tmp_path, made, sender, stop).run()

    with receiver_of(tmp_path) if handoff == "socket" else contextlib.nullcontext():
        yield run


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the condition is a file of another process
            await asyncio.sleep(0.005)


def test_a_worker_goes_as_far_ahead_as_allowed_and_ends_when_the_trainer_is_done(tmp_path, work):
    trainer = Trainer(tmp_path)
    spool = tmp_path / "spool"

    async def run():
        running = asyncio.create_task(work())
        await until(lambda: len(list_spool(spool)) == 4)
        await asyncio.sleep(0.2)  # it would go on, if it were to
        assert list(list_spool(spool)) == [0, 1, 2, 3]
        trainer.consume(2)
        await until(lambda: list(list_spool(spool)) == [2, 3, 4, 5])
        trainer.announce(done=True)
        return await running

    assert asyncio.run(run()) == 0
    assert read_group(list_spool(spool)[2]).trajectories[0].cause == "submitted"


def test_a_group_is_told_for_good_before_the_trainer_can_find_it(tmp_path, work):
    trainer = Trainer(tmp_path)
    spool, safe = tmp_path / "spool", set()

    class Teller(ToyEvents):
        def sync(self):
            safe.update({one.draw for one in self.of(GroupEvent)} - set(list_spool(spool)))

    async def run():
        running = asyncio.create_task(work(events=Teller()))
        await until(lambda: len(list_spool(spool)) == 4)
        trainer.announce(done=True)
        return await running

    assert asyncio.run(run()) == 0
    assert safe == {0, 1, 2, 3}


def test_a_resumed_worker_makes_exactly_the_missing_draws(tmp_path, work):
    trainer = Trainer(tmp_path)
    trainer.consumed = DrawSet([1, 4])
    trainer.announce()
    for node, draw in ((0, 0), (7, 2)):
        made = Group(draw=draw, task_id="t", trajectories=(), dropped="made before")
        SpoolWriter(tmp_path / "spool", node).write(made)
    agent = ToyAgent()

    async def run():
        running = asyncio.create_task(work(agent=agent))
        await until(lambda: len(list_spool(tmp_path / "spool")) == 4)
        trainer.announce(done=True)
        return await running

    assert asyncio.run(run()) == 0
    assert {name.split("/")[0] for name in agent.seen} == {"3", "5"}
    assert list(list_spool(tmp_path / "spool")) == [0, 2, 3, 5]


def test_a_stop_cancels_what_runs_and_closes_its_sandboxes(tmp_path, work):
    Trainer(tmp_path)
    agent, provider, asked = ToyAgent(hold=8), ToyProvider(), []

    async def run():
        running = asyncio.create_task(
            work(stop=lambda: bool(asked), agent=agent, provider=provider)
        )
        await asyncio.wait_for(agent.held.wait(), 20)
        asked.append(True)
        return await running

    assert asyncio.run(run()) == 75
    assert (provider.open, provider.started) == (0, 8)
    assert list_spool(tmp_path / "spool") == {}


def test_no_more_trajectories_are_in_flight_than_asked(tmp_path, work):
    trainer = Trainer(tmp_path)
    provider = ToyProvider()

    async def run():
        running = asyncio.create_task(work(config(concurrency=3), provider=provider))
        await until(lambda: len(list_spool(tmp_path / "spool")) == 4)
        trainer.announce(done=True)
        return await running

    assert asyncio.run(run()) == 0
    assert provider.most <= 3


def test_too_many_failures_of_ours_end_the_worker_with_the_table(tmp_path, work):
    trainer = Trainer(tmp_path)
    settings = config(infra_window=10)
    with pytest.raises(TooManyInfraFailures, match=r"sandbox_start +10 +100%  .*no room"):
        asyncio.run(work(settings=settings, provider=ToyProvider(fails=1.0)))
    assert trainer.consumed.count == 0


def test_a_worker_starts_no_draw_while_its_groups_wait_for_the_trainer(tmp_path):
    trainer, made = Trainer(tmp_path), shop(config())
    end = SocketSender(
        attempt_dir=tmp_path / "attempts" / "0001",
        run=tmp_path.name,
        attempt=1,
        node=0,
        events=NoEvents(),
        limit_s=60.0,
        flush_s=0.0,
        high_water=3,
    )

    async def run():
        async with end:
            running = asyncio.create_task(worker_of(tmp_path, made, end).run())
            await until(lambda: end.waiting == [0, 1, 2, 3])
            trainer.consumed = DrawSet(range(4))  # so that staleness would allow more
            trainer.announce()
            await asyncio.sleep(0.5)  # it would go on, if it were to
            assert end.waiting == [0, 1, 2, 3]
            with receiver_of(tmp_path):
                await until(lambda: list(list_spool(tmp_path / "spool")) == list(range(8)))
                trainer.announce(done=True)
                return await running

    assert asyncio.run(run()) == 0


@pytest.mark.parametrize("handoff", ["files"])
def test_a_spool_that_cannot_be_written_ends_the_worker(tmp_path, work):
    Trainer(tmp_path)

    async def agent(**parts):
        folder = tmp_path / "spool" / "0"
        if folder.is_dir():  # a file in the folder's place fails even for root
            folder.rmdir()
            folder.write_text("")
        return await ToyAgent()(**parts)

    with pytest.raises(OSError, match="spool"):
        asyncio.run(work(agent=agent))


def test_a_trainer_that_never_shows_up_is_named(tmp_path, work):
    settings = config()
    settings.training.wait_timeout_s = 0.05
    with pytest.raises(WaitTimeout, match="the trainer of this launch attempt is missing"):
        asyncio.run(work(settings=settings))


def test_a_jump_of_the_hosts_clock_ends_no_wait(tmp_path, work, monkeypatch):
    settings = config()
    settings.training.wait_timeout_s = 60.0

    async def run():
        running = asyncio.create_task(work(settings=settings))
        await asyncio.sleep(0)  # it has begun to wait
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 86_400)
        trainer = Trainer(tmp_path)
        await until(lambda: len(list_spool(tmp_path / "spool")) == 4)
        trainer.announce(done=True)
        return await running

    assert asyncio.run(run()) == 0


def test_an_earlier_attempts_announcement_starts_nothing(tmp_path):
    Trainer(tmp_path, attempt=0)
    view = TrainerView(tmp_path / "weights", attempt=1)
    assert view.refresh() is None
    assert not view.done
    assert view.consumed.count == 0


def test_an_announcement_is_looked_for_less_often_the_longer_there_was_none(tmp_path):
    trainer = Trainer(tmp_path)
    times = [0.0]
    view = TrainerView(tmp_path / "weights", attempt=1, clock=lambda: times[0])
    first = view.refresh()
    for passed in (50.0, 51.2):  # looked for; 1 s later, a fiftieth of the 50, again
        times[0] = passed
        assert view.refresh() is first
    trainer.announce(done=True)
    times[0] = 52.0
    assert not view.refresh().done
    times[0] = 52.3
    assert view.refresh().done
    trainer.announce(done=False)
    times[0] = 52.5
    assert not view.refresh().done


def test_a_broken_announcement_is_borne_for_a_while_only(tmp_path):
    Trainer(tmp_path)
    times = [0.0]
    view = TrainerView(tmp_path / "weights", attempt=1, clock=lambda: times[0])
    good = view.refresh()
    (tmp_path / "weights" / "LATEST.json").write_text("{")
    times[0] = 20.0
    assert view.refresh() is good
    times[0] = 60.0
    with pytest.raises(RecordError, match="not an announcement"):
        view.refresh()


def test_engines_are_read_again_only_once_published(tmp_path):
    file = EnginesFile(tmp_path, 0)
    assert file.urls() == []
    file.publish(["http://127.0.0.1:1"], "1-3-abc")
    assert EnginesFile(tmp_path, 0).urls() == file.urls() == ["http://127.0.0.1:1"]
    assert file.weights() == "1-3-abc"
    file.publish([], "1-4-def")
    assert (file.urls(), file.weights()) == ([], "1-4-def")
    assert os.listdir(tmp_path) == ["engines-0.json"]
