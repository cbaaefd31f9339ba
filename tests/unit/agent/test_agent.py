"""The agent as a whole, against an endpoint that plays its scenes."""

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from forewarn.agent.agent import WORKERS_MAX, Agent
from forewarn.agent.journal import Journal, JournalLost
from forewarn.agent.progress import EntryKind
from forewarn.agent.rules import ApproveWhen, Rule
from forewarn.agent.settings import AgentSettings
from forewarn.agent.status import to_json
from forewarn.agent.steps.base import StepContext
from forewarn.client import Document, EndpointError, InvalidDocument
from tests.unit.agent.agent_world import (
    TIMEOUT_SECONDS,
    Scene,
    ScriptedClient,
    World,
    agent_of,
    no_new_threads,
    reboot,
    shows,
    started,
    until,
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.journal.close()
    until(
        lambda: (
            not [
                thread
                for thread in threading.enumerate()
                if thread.name.startswith(("forewarn-event", "forewarn-approve"))
            ]
        )
    )()


def wrote(world: World, kind: str, key: str = "E1") -> Scene:
    return until(
        lambda: key in world.journal.progress and kind in world.journal.progress[key].marks
    )


def ran(world: World, *names: str) -> Scene:
    return until(lambda: world.ran == list(names))


def settled(world: World, phase: str, key: str = "E1") -> Scene:
    return until(
        lambda: key in world.journal.progress and phase in world.journal.progress[key].ended
    )


def run(agent: Agent) -> Agent:
    agent.run(NoWait())
    return agent


class NoWait(threading.Event):
    """Never waits, so that a pause before a retry takes no time."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_event_is_prepared_approved_started_and_recovered(world: World) -> None:
    """The whole cycle, over four documents."""
    scenes = (
        shows(1),
        shows(2, reboot()),
        wrote(world, EntryKind.APPROVED),
        shows(3, started(reboot())),
        settled(world, "start"),
        shows(4),
        settled(world, "recover"),
    )
    client = ScriptedClient(world.time, *scenes)
    agent = run(agent_of(world, client, world.rule()))

    assert world.ran == ["prepare", "start", "recover"]
    assert client.approvals == ["E1"]
    assert agent.status().workflows == ()


def test_event_of_another_vm_is_left_alone(world: World) -> None:
    """All VMs of a scope read the same document."""
    client = ScriptedClient(world.time, shows(1, reboot(resources=("web-1",))))
    agent = run(agent_of(world, client, world.rule()))

    assert world.ran == []
    assert agent.status().counters['forewarn_agent_events_total{matched="no"}'] == 1


def test_failed_approval_is_retried_until_it_is_accepted(world: World) -> None:
    def is_approved() -> bool:
        world.time.advance(0.1)
        return EntryKind.APPROVED in world.journal.progress["E1"].marks

    client = ScriptedClient(
        world.time, shows(1, reboot()), settled(world, "prepare"), until(is_approved), refusals=2
    )
    agent = run(agent_of(world, client, world.rule()))

    assert client.approvals == ["E1"]
    assert agent.status().counters['forewarn_agent_approvals_total{result="failed"}'] == 2


def test_held_event_is_never_approved(world: World) -> None:
    """Whatever `approve` says."""
    client = ScriptedClient(world.time, shows(1, reboot()), settled(world, "prepare"))
    run(agent_of(world, client, world.rule(approve=ApproveWhen.AT_ONCE, hold=True)))

    assert client.approvals == []


def test_at_once_does_not_wait_for_the_steps(world: World) -> None:
    """The approval is sent while prepare is running."""
    client = ScriptedClient(world.time, shows(1, reboot()), settled(world, "prepare"))
    prepare = world.step("slow", lambda context: assert_(client.has_approved.wait(TIMEOUT_SECONDS)))
    run(agent_of(world, client, world.rule(approve=ApproveWhen.AT_ONCE, prepare=(prepare,))))

    assert client.approvals == ["E1"]
    assert EntryKind.APPROVED in world.journal.progress["E1"].marks


def assert_(is_true: bool) -> None:
    assert is_true


@pytest.mark.parametrize(
    ("resources", "approvals"), [(("web-0", "web-1"), ["E1"]), (("web-1", "web-0"), [])]
)
def test_only_the_leader_approves(
    world: World, resources: tuple[str, ...], approvals: list[str]
) -> None:
    """One approval covers all VMs: the others must not approve before it is prepared."""
    rule = world.rule(approve=ApproveWhen.WHEN_PREPARED_AND_LEADER)
    event = reboot(resources=resources)
    other = reboot("E2")
    scenes = (
        shows(1, event),
        settled(world, "prepare"),
        shows(2, event, other),
        wrote(world, EntryKind.APPROVED, "E2"),
    )
    client = ScriptedClient(world.time, *scenes)
    run(agent_of(world, client, rule))

    assert [key for key in client.approvals if key == "E1"] == approvals


def test_approval_waits_for_a_quiet_scope(world: World) -> None:
    """One VM at a time: web-1 is Started, so web-0 waits until it is over."""
    rule, other = (
        world.rule(approve=ApproveWhen.WHEN_PREPARED_AND_QUIET),
        started(reboot("E2", resources=("web-1",))),
    )
    client = ScriptedClient(world.time)
    client.scenes = (
        shows(1, reboot(), other),
        settled(world, "prepare"),
        lambda: assert_(not client.approvals),
        shows(2, reboot()),
        wrote(world, EntryKind.APPROVED),
    )
    run(agent_of(world, client, rule))

    assert client.approvals == ["E1"]


def test_invalid_document_triggers_no_approval(world: World) -> None:
    """Whether the scope is quiet is unknown then."""
    rule = world.rule(approve=ApproveWhen.WHEN_PREPARED_AND_QUIET)
    held = threading.Event()
    prepare = world.step("prepare", lambda context: assert_(held.wait(TIMEOUT_SECONDS)))
    client = ScriptedClient(world.time)
    client.scenes = (
        shows(1, reboot()),
        InvalidDocument("kind is this"),
        held.set,
        settled(world, "prepare"),
        lambda: assert_(not client.has_approved.wait(0.05)),
        shows(2, reboot()),
        wrote(world, EntryKind.APPROVED),
    )
    agent = run(agent_of(world, client, replace(rule, prepare=(prepare,))))

    assert client.approvals == ["E1"]
    assert agent.status().counters["forewarn_agent_endpoint_problems_total"] == 1


def test_restarted_agent_sends_a_pending_approval_again(world: World) -> None:
    """Prepared and approving, not approved: prepare does not run again."""
    workflow = world.workflow(world.rule(), reboot())
    workflow.run()
    world.journal.write("E1", EntryKind.APPROVING)
    world.restart()

    client = ScriptedClient(world.time, shows(7, reboot()), wrote(world, EntryKind.APPROVED))
    run(agent_of(world, client, world.rule()))

    assert world.ran == ["prepare"]
    assert client.approvals == ["E1"]


def test_restarted_agent_recovers_once(world: World) -> None:
    """The event is over when the agent is back. The process after that does nothing."""
    world.workflow(world.rule(), reboot()).run()
    for _ in range(2):
        world.restart()
        run(
            agent_of(
                world,
                ScriptedClient(world.time, *[shows(9)] * 3, settled(world, "recover")),
                world.rule(),
            )
        )

    assert world.ran == ["prepare", "recover"]


def test_restarted_agent_does_nothing_before_a_document_comes(world: World) -> None:
    """An endpoint that is down says nothing about the event."""
    world.workflow(world.rule(), reboot()).run()
    world.restart()
    client = ScriptedClient(world.time, EndpointError("away"), EndpointError("away"))
    agent = run(agent_of(world, client, world.rule()))

    assert world.ran == ["prepare"]
    assert client.approvals == []
    status = agent.status()
    assert (status.problems, status.last_problem, status.last_contact) == (2, "away", None)


def test_finished_event_shown_again_is_ignored(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A lagging server after a failover, read by a restarted agent."""
    scenes = (shows(1, reboot()), settled(world, "prepare"), shows(2), settled(world, "recover"))
    run(agent_of(world, ScriptedClient(world.time, *scenes), world.rule()))
    world.restart()
    client = ScriptedClient(world.time)
    client.scenes = (shows(1, reboot()), lambda: assert_(not client.has_approved.wait(0.05)))
    run(agent_of(world, client, world.rule(name="new", approve=ApproveWhen.AT_ONCE)))

    assert world.ran == ["prepare", "recover"]
    assert "no longer exists" not in caplog.text


def test_event_whose_rule_was_removed_is_held(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """And that is logged."""
    world.workflow(world.rule(), reboot()).run()
    world.restart()
    client = ScriptedClient(world.time)
    client.scenes = (shows(1, reboot()), lambda: assert_(not client.has_approved.wait(0.05)))
    run(agent_of(world, client, Rule("another", approve=ApproveWhen.AT_ONCE)))

    assert client.approvals == []
    assert "the rule of an event no longer exists" in caplog.text


def test_new_rules_apply_to_new_events(world: World) -> None:
    """Current events are finished by the rule that they began with."""
    client = ScriptedClient(world.time)
    agent = agent_of(world, client, world.rule(recover=(world.step("old recover"),)))
    new = Rule("new", prepare=(world.step("new prepare"),), recover=(world.step("new recover"),))
    client.scenes = (
        shows(1, reboot()),
        wrote(world, EntryKind.APPROVED),
        lambda: agent.reload(AgentSettings(rules=(new,))),
        shows(2, reboot(), reboot("E2")),
        settled(world, "prepare", "E2"),
        shows(3),
        settled(world, "recover"),
        settled(world, "recover", "E2"),
    )
    run(agent)

    assert world.ran[:2] == ["prepare", "new prepare"]
    assert sorted(world.ran[2:]) == ["new recover", "old recover"]
    assert to_json(agent.status())["rules"] == ["new"]


def test_reload_logs_settings_that_need_a_restart(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Rules change immediately; the path of the journal does not."""
    agent = agent_of(world, ScriptedClient(world.time))
    agent.reload(AgentSettings(journal=Path("/elsewhere"), wait_seconds=7))

    facts = [
        getattr(record, "facts", {})
        for record in caplog.records
        if "need a restart" in record.message
    ]
    assert facts == [{"settings": "journal, wait_seconds"}]


def test_dry_run_logs_and_does_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """To try a file on a real machine."""
    client = ScriptedClient(world.time, shows(1, reboot()), shows(2, started(reboot())), shows(3))
    with caplog.at_level(logging.INFO, "forewarn"):
        run(agent_of(world, client, world.rule(), is_dry_run=True))

    facts = [
        getattr(record, "facts", {}) for record in caplog.records if "dry run" in record.message
    ]
    assert facts[0]["steps"] == "prepare: prepare; start: start; recover: recover"
    assert (world.ran, client.approvals, world.journal.progress) == ([], [], {})


def test_full_disk_delays_everything_and_loses_nothing(world: World) -> None:
    """The agent acts only on what is on disk, and does not forget the event."""
    fulls = [
        EntryKind.SEEN,
        EntryKind.BEGUN,
        EntryKind.STEP_DONE,
        EntryKind.APPROVING,
        EntryKind.APPROVED,
    ]

    class Filling(Journal):
        def write(self, key: str, kind: EntryKind, **facts: object) -> None:
            if kind in fulls:
                fulls.remove(kind)
                raise JournalLost(f"full at {kind}")
            super().write(key, kind, **facts)

    world.use_journal(Filling)
    client = ScriptedClient(world.time, shows(1, reboot()), wrote(world, EntryKind.APPROVED))
    agent = run(agent_of(world, client, world.rule()))

    assert world.ran == ["prepare"]
    assert client.approvals == ["E1", "E1"], (
        "sent, not written down, and sent again: that is approving once"
    )
    assert agent.status().counters["forewarn_agent_journal_problems_total"] == 5


def test_stopping_the_agent_leaves_the_event_for_the_next_start(world: World) -> None:
    """SIGTERM is also what the machine's own shutdown sends."""
    prepare = world.step("slow", lambda context: assert_(context.stop.wait(TIMEOUT_SECONDS)))
    client = ScriptedClient(world.time, shows(1, reboot()), ran(world, "slow"))
    agent = run(agent_of(world, client, world.rule(prepare=(prepare,))))

    assert agent.status().workflows[0].is_prepared is False
    assert client.approvals == []


def test_most_urgent_events_get_the_next_free_worker(world: World) -> None:
    """With more events than threads, the rest wait in the order of NotBefore."""
    held = [reboot(f"HELD-{number}") for number in range(WORKERS_MAX)]
    late, soon = reboot("LATE", lead_seconds=800), reboot("SOON", lead_seconds=100)
    free_one, free_all, begun = threading.Event(), threading.Event(), threading.Semaphore(0)
    order: list[str] = []

    def note(context: StepContext) -> None:
        order.append(context.event.id)
        if context.event.id.startswith("HELD"):
            begun.release()
            assert (free_one if context.event.id == "HELD-0" else free_all).wait(TIMEOUT_SECONDS)

    scenes = (
        shows(1, *held),
        lambda: assert_(all(begun.acquire(timeout=TIMEOUT_SECONDS) for _ in held)),
        shows(2, *held, late, soon),
        free_one.set,
        settled(world, "prepare", "LATE"),
        free_all.set,
    )
    run(
        agent_of(
            world,
            ScriptedClient(world.time, *scenes),
            Rule("all", prepare=(world.step("p", note),)),
        )
    )

    assert order[WORKERS_MAX:] == ["SOON", "LATE"]


def test_event_without_a_thread_is_retried_with_the_next_document(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The machine was short of memory for a while."""
    client = ScriptedClient(world.time)
    shortage = ExitStack()
    client.scenes = (
        lambda: shortage.enter_context(no_new_threads()),
        shows(1, reboot()),
        shortage.close,
        shows(1, reboot()),
        wrote(world, EntryKind.APPROVED),
    )
    with shortage:
        run(agent_of(world, client, world.rule()))

    assert world.ran == ["prepare"]
    assert [getattr(record, "facts", {}) for record in caplog.records] == [
        {"problem": "can't start new thread"}
    ]


def test_once_waits_until_there_is_a_thread(world: World) -> None:
    """There is no second document."""

    class Recovering(NoWait):
        def wait(self, timeout: float | None = None) -> bool:
            shortage.close()
            return super().wait(timeout)

    class Short(ScriptedClient):
        def document(self) -> Document:
            shortage.enter_context(no_new_threads())
            return super().document()

    client = Short(world.time, shows(1, reboot()))
    agent = agent_of(world, client, world.rule(approve=ApproveWhen.NEVER), is_once=True)
    with ExitStack() as shortage:
        agent.run(Recovering())

    assert world.ran == ["prepare"]


def test_name_is_requested_until_it_comes(world: World) -> None:
    """An endpoint that starts after the VM is not unusual."""

    class Shy(ScriptedClient):
        def name(self) -> str:
            if not self.refusals:
                return "web-0"
            self.refusals -= 1
            problem = EndpointError("not yet")
            raise problem

    client = Shy(world.time, shows(1, reboot()), settled(world, "prepare"), refusals=1)
    agent = run(agent_of(world, client, world.rule()))

    assert agent.status().name == "web-0"
    assert world.ran == ["prepare"]


def test_status_shows_current_events(world: World) -> None:
    client = ScriptedClient(world.time)
    agent = agent_of(world, client, world.rule(), endpoint="http://127.0.0.1:1")
    shown = []
    client.scenes = (
        shows(1, reboot()),
        wrote(world, EntryKind.APPROVED),
        lambda: shown.append(agent.status()),
    )
    run(agent)

    status = shown[0]
    assert (status.name, status.settings.endpoint) == ("web-0", "http://127.0.0.1:1")
    assert [rule.name for rule in status.settings.rules] == ["all"]
    assert status.last_contact == world.time.now
    assert [(one.event.id, one.is_approved, one.seconds_left) for one in status.workflows] == [
        ("E1", True, 900)
    ]


def test_clock_jumps_end_no_event(world: World) -> None:
    """NTP sets the time of day by hours, between two documents."""

    def jump(hours: int) -> Scene:
        def move() -> None:
            world.time.now += timedelta(hours=hours)

        return move

    scenes = (
        shows(1, reboot()),
        wrote(world, EntryKind.APPROVED),
        jump(+5),
        shows(1, reboot()),
        jump(-9),
        shows(2, started(reboot())),
        settled(world, "start"),
    )
    run(agent_of(world, ScriptedClient(world.time, *scenes), world.rule()))

    assert world.ran == ["prepare", "start"]


def test_unknown_status_is_left_alone_until_it_is_known(
    world: World,
) -> None:
    """Completed may mean that the event is over."""
    client = ScriptedClient(world.time)
    client.scenes = (
        shows(1, reboot(status="Completed")),
        lambda: assert_(not client.has_approved.wait(0.05) and world.ran == []),
        shows(2, reboot()),
        wrote(world, EntryKind.APPROVED),
    )
    run(agent_of(world, client, world.rule()))

    assert world.ran == ["prepare"]


def test_empty_first_document_after_a_restart_ends_no_event(
    world: World,
) -> None:
    """The event was there all along."""
    world.workflow(world.rule(), reboot()).run()
    world.restart()
    client = ScriptedClient(
        world.time, shows(0), shows(2, reboot()), wrote(world, EntryKind.APPROVED)
    )
    run(agent_of(world, client, world.rule()))

    assert world.ran == ["prepare"]


def test_recover_waits_for_other_events_of_this_vm(world: World) -> None:
    """It would restore what the other event has taken out of service."""
    scenes = (
        shows(1, reboot("E1"), reboot("E2")),
        settled(world, "prepare", "E1"),
        settled(world, "prepare", "E2"),
        shows(2, reboot("E2")),
        wrote(world, EntryKind.FINISHED, "E1"),
        lambda: assert_("recover" not in world.ran),
        shows(3, started(reboot("E2"))),
        settled(world, "start", "E2"),
        lambda: assert_("recover" not in world.ran),
        shows(4),
        settled(world, "recover", "E1"),
        settled(world, "recover", "E2"),
    )
    run(agent_of(world, ScriptedClient(world.time, *scenes), world.rule(approve=ApproveWhen.NEVER)))

    assert world.ran == ["prepare", "prepare", "start", "recover", "recover"]


def test_reloaded_rule_can_hold_a_current_event(world: World) -> None:
    """The file is edited while the event is being prepared."""
    client = ScriptedClient(world.time)
    go_on = threading.Event()
    rule = world.rule(
        prepare=(world.step("slow", lambda context: assert_(go_on.wait(TIMEOUT_SECONDS))),)
    )
    agent = agent_of(world, client, rule)
    client.scenes = (
        shows(1, reboot()),
        ran(world, "slow"),
        lambda: agent.reload(AgentSettings(rules=(replace(rule, hold=True),))),
        go_on.set,
        settled(world, "prepare"),
        lambda: assert_(not client.has_approved.wait(0.05)),
    )
    run(agent)

    assert client.approvals == []
