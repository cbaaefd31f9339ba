"""Each kind of step with real processes, HAProxy, an API server over TLS, and systemd."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forewarn.agent import settings
from forewarn.agent.rules import Rule
from forewarn.agent.steps import KINDS, make_step
from forewarn.agent.steps.base import StepContext, StepFailed, WorkflowPhase
from forewarn.client import Event
from tests.e2e.api_server import ApiServer, Pod, certify, serving
from tests.e2e.balancer import balancing
from tests.unit.agent.steps.build import Server, context_until, script

EVENT = Event(
    id="E1",
    type="Reboot",
    status="Scheduled",
    source="Platform",
    resources=("web-0",),
    duration_seconds=9,
)


def run(
    kind: str, spec: object, phase: str = "prepare", *, seconds: float = 20, event: Event = EVENT
) -> float:
    """Run the step, and return how long it took."""
    begun = time.monotonic()
    make_step(kind, spec, kind).run(
        StepContext(event, WorkflowPhase(phase), "web-0", begun + seconds)
    )
    return time.monotonic() - begun


def test_every_kind_of_step_is_tested_here_or_under_systemd() -> None:
    here = Path(__file__)
    steps, units = here.read_text(), here.with_name("test_units.py").read_text()
    untested = [kind for kind in KINDS if f'run("{kind}"' not in steps]

    assert [kind for kind in untested if f"{{{kind} = " not in units] == []


def test_run_terminates_a_command_with_all_its_children(tmp_path: Path) -> None:
    """However deeply they are nested, and even if they ignore SIGTERM."""
    deep = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    leaf = (
        deep
        + f"open({str(tmp_path / 'leaf')!r}, 'w').write(str(__import__('os').getpid()));"
        + "time.sleep(600)"
    )
    tree = deep + f"subprocess.Popen([sys.executable, '-c', {leaf!r}]); time.sleep(600)"
    step = make_step("run", {"command": [sys.executable, "-c", tree], "grace_seconds": 0.5}, "W")
    with pytest.raises(StepFailed, match="at its time limit"):
        step.run(context_until(tmp_path / "leaf"))

    leaf_stat = Path(f"/proc/{(tmp_path / 'leaf').read_text()}/stat")
    until = time.monotonic() + 10
    while is_running(leaf_stat):  # the kernel may need a little time
        assert time.monotonic() < until, "the leaf still runs"
        time.sleep(0.05)


def is_running(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_run_returns_when_the_command_ends() -> None:
    assert 0.5 <= run("run", {"command": "sleep 0.5", "shell": True}) < 10


@pytest.mark.system
def test_haproxy_drains_a_server_and_awaits_its_last_session(tmp_path: Path) -> None:
    """New sessions go elsewhere, the existing one finishes, and recover brings the server back."""
    with balancing(tmp_path) as balancer:
        first, second = balancer.session(), balancer.session()
        closer = threading.Timer(1, first.close)
        closer.start()
        spec = {"socket": balancer.path, "servers": ["web/{resource}"]}
        took = run("haproxy", spec)

        assert balancer.state("web-0") == "DRAIN"
        assert took >= 0.9
        with balancer.session() as third:
            run("haproxy", spec)
            third.sendall(b"y")
            assert third.recv(1) == b"y"
        run(
            "haproxy",
            {"socket": f"127.0.0.1:{balancer.admin}", "servers": ["web/web-0"]},
            "recover",
        )

        assert balancer.state("web-0") == "no check"
        closer.join()
        second.close()


@pytest.mark.system
def test_haproxy_reports_remaining_sessions_and_rejections(
    tmp_path: Path,
) -> None:
    with balancing(tmp_path) as balancer, balancer.session(), balancer.session():
        with pytest.raises(StepFailed, match=r"timed out: .*sessions remain: {'web/web-0': 1}"):
            run("haproxy", {"socket": balancer.path, "servers": ["web/web-0"]}, seconds=2)
        with pytest.raises(
            StepFailed, match="HAProxy cannot set web/web-9 to drain: No such server"
        ):
            run("haproxy", {"socket": balancer.path, "servers": ["web/web-9"]})
        with pytest.raises(
            StepFailed, match=r"HAProxy cannot set nil/web-0 to drain: No such (backend|server)"
        ):
            run("haproxy", {"socket": balancer.path, "servers": ["nil/web-0"]})
        with pytest.raises(
            StepFailed,
            match=r"HAProxy cannot set web/web-0 to drain: (Permission denied|Unknown command)",
        ):
            run("haproxy", {"socket": str(tmp_path / "user.sock"), "servers": ["web/web-0"]})


def kubernetes(api: ApiServer, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "node": "n1",
        "server": api.url,
        "token_file": str(folder / "token"),
        "ca_file": str(folder / "ca.crt"),
        **more,
    }


@pytest.mark.system
def test_kubernetes_cordons_evicts_and_uncordons(tmp_path: Path) -> None:
    """Two pods with a budget of one leave one after the other; pods of the node itself stay."""
    pods = (
        Pod("a", budget="web"),
        Pod("b", budget="web"),
        Pod("daemon", owner="DaemonSet"),
        Pod("static", is_mirror=True),
        Pod("done", phase="Succeeded"),
        Pod("elsewhere", node="n2"),
    )
    with serving(tmp_path, *pods, budgets={"web": 1}) as api:
        api.conflicts_left = 1
        run("kubernetes", kubernetes(api, tmp_path))

        assert api.node["spec"] == {"unschedulable": True}
        assert api.node["metadata"]["annotations"] == {"forewarn/cordoned-for": "E1"}
        assert [(name, status) for name, status, _ in api.evictions if status == 201] == [
            ("a", 201),
            ("b", 201),
        ]
        assert ("b", 429) in [(name, status) for name, status, _ in api.evictions]
        assert all(pod.gone_at is None for pod in pods[2:])
        run("kubernetes", kubernetes(api, tmp_path), "recover")

        assert (api.node["spec"], api.node["metadata"]["annotations"]) == ({}, {})


@pytest.mark.system
def test_kubernetes_example_of_the_page_uncordons_the_node(tmp_path: Path) -> None:
    """Its recover step must find the node that its prepare step cordoned."""
    with serving(tmp_path, Pod("a")) as api:
        rule = example(
            "kubernetes",
            ('"web-0"', '"n1"'),
            ("https://10.0.0.1:6443", api.url),
            ("/etc/forewarn", str(tmp_path)),
        )
        run_phase(rule, WorkflowPhase.PREPARE)

        assert api.node["spec"] == {"unschedulable": True}
        run_phase(rule, WorkflowPhase.RECOVER)

        assert (api.node["spec"], api.node["metadata"]["annotations"]) == ({}, {})


def test_file_example_of_the_page_restores_the_files(tmp_path: Path) -> None:
    ready, draining = tmp_path / "ready", tmp_path / "nginx-draining"
    ready.write_text("ok")
    rule = example("file", ("/var/www/health", str(tmp_path)), ("/run/", f"{tmp_path}/"))
    run_phase(rule, WorkflowPhase.PREPARE)

    assert (ready.exists(), draining.read_text()) == (False, "maintenance\n")
    run_phase(rule, WorkflowPhase.RECOVER)

    assert (ready.read_text(), draining.exists()) == ("ok", False)


def example(kind: str, *replaced: tuple[str, str]) -> Rule:
    """The rule with the example of this kind in docs/steps.md, for this machine."""
    page = (Path(__file__).parents[2] / "docs" / "steps.md").read_text()
    text = page.split(f"\n## {kind}\n")[1].split("```toml\n")[1].split("```")[0]
    for written, here in replaced:
        text = text.replace(written, here)
    (rule,) = settings.parse(f'[[rule]]\nname = "r"\n{text}', "docs/steps.md").rules
    return rule


def run_phase(rule: Rule, phase: WorkflowPhase) -> None:
    for planned in rule.steps(phase):
        planned.step.run(StepContext(EVENT, phase, "web-0", time.monotonic() + 20))


@pytest.mark.system
def test_kubernetes_limits_the_grace_to_the_time_left(tmp_path: Path) -> None:
    """A pod that needs less gets no more."""
    with serving(
        tmp_path,
        Pod("slow", grace_seconds=300, ends_after_seconds=300),
        Pod("quick", grace_seconds=2),
    ) as api:
        run("kubernetes", kubernetes(api, tmp_path), seconds=6)
        graces = {name: grace for name, _, grace in api.evictions}

    assert graces["quick"] == 2
    assert 1 <= graces["slow"] <= 4


@pytest.mark.system
def test_kubernetes_reports_pods_that_do_not_end(tmp_path: Path) -> None:
    """A lost kubelet does not end them, whatever the grace."""
    with serving(tmp_path, Pod("stuck", gone_at=float("inf"))) as api:
        with pytest.raises(
            StepFailed, match=r"timed out: .*still on the node: default/stuck \(terminating\)"
        ):
            run("kubernetes", kubernetes(api, tmp_path), seconds=2)

        assert api.evictions == []


@pytest.mark.system
def test_kubernetes_reports_pods_held_back_by_a_budget(tmp_path: Path) -> None:
    """And never forces them: that is an operator's decision."""
    with serving(tmp_path, Pod("a", budget="none"), budgets={"none": 0}) as api:
        with pytest.raises(
            StepFailed,
            match=r"^timed out: .*default/a \(held back: status 429: Cannot evict pod .* budget",
        ):
            run("kubernetes", kubernetes(api, tmp_path), seconds=3)

        assert api.pods["a"].gone_at is None
        assert len(api.evictions) >= 2


@pytest.mark.system
def test_kubernetes_keeps_an_operators_cordon(tmp_path: Path) -> None:
    """Only what the agent did is undone."""
    with serving(tmp_path) as api:
        api.node["spec"] = {"unschedulable": True}
        run("kubernetes", kubernetes(api, tmp_path))
        run("kubernetes", kubernetes(api, tmp_path), "recover")

        assert (api.node["spec"], api.node["metadata"].get("annotations")) == (
            {"unschedulable": True},
            None,
        )


@pytest.mark.system
def test_kubernetes_keeps_a_cordon_until_the_last_event_ends(
    tmp_path: Path,
) -> None:
    """One event's recovery must not fill the node again for the other's impact."""
    other = Event(id="e2", type="Redeploy", status="Scheduled", resources=("web-0",))
    with serving(tmp_path) as api:
        arguments = ("kubernetes", kubernetes(api, tmp_path))
        both = [
            threading.Thread(target=run, args=arguments, kwargs={"event": event})
            for event in (EVENT, other)
        ]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        run("kubernetes", kubernetes(api, tmp_path), "recover")

        assert api.node["metadata"]["annotations"] == {"forewarn/cordoned-for": "E2"}
        assert api.node["spec"] == {"unschedulable": True}
        run("kubernetes", kubernetes(api, tmp_path), "recover", event=other)

        assert api.node["spec"] == {}


@pytest.mark.system
def test_kubernetes_verifies_the_server_with_its_ca_file(tmp_path: Path) -> None:
    """The token goes to no other server. The server rejects a wrong token."""
    (tmp_path / "other").mkdir()
    certify(tmp_path / "other")
    with serving(tmp_path) as api:
        with pytest.raises(StepFailed, match=r"timed out: .*certificate verify failed"):
            run(
                "kubernetes",
                kubernetes(api, tmp_path, ca_file=str(tmp_path / "other" / "ca.crt")),
                seconds=2,
            )
        (tmp_path / "token").write_text("stolen")
        with pytest.raises(StepFailed, match="status 401: Unauthorized"):
            run("kubernetes", kubernetes(api, tmp_path))


@pytest.mark.system
def test_http_calls_verified_https_and_plain_http(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        spec = {
            "url": f"{api.url}/api/v1/nodes/n1",
            "headers": {"Authorization": "Bearer let-me-in"},
        }
        run("http", {**spec, "ca_file": str(tmp_path / "ca.crt")})
        with pytest.raises(StepFailed, match=r"timed out: .*certificate verify failed"):
            run("http", spec, seconds=2)
    with Server(503, 202).running() as server:
        run("http", {"url": server.url, "shape": "cloudevents", "expect": [202]})

    assert [json.loads(body)["id"] for _, _, _, body in server.requests] == ["E1/prepare/web-0"] * 2


def test_systemd_uses_the_systemctl_on_the_path(tmp_path: Path) -> None:
    script(tmp_path / "systemctl", f'echo "$1 $3" >> {tmp_path}/calls')
    code = (
        "from tests.unit.agent.steps.build import context;"
        "from forewarn.agent.steps import make_step;"
        "step = make_step('systemd', ['a', 'b'], 'W');"
        "[step.run(context(phase)) for phase in ('prepare', 'recover')]"
    )
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=Path(__file__).parents[2], check=True
    )

    assert (tmp_path / "calls").read_text() == "stop a\nstop b\nstart b\nstart a\n"


def test_signal_checkpoints_and_ends_a_process(tmp_path: Path) -> None:
    """The first documented use: checkpoint and restore."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text("old")
    program = (
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.5)\n"
        f"    open({str(checkpoint)!r} + '.new', 'w').write('new')\n"
        f"    os.replace({str(checkpoint)!r} + '.new', {str(checkpoint)!r})\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        (tmp_path / "pid").write_text(str(worker.pid))
        took = run(
            "signal",
            {"send": "USR1", "pid_file": str(tmp_path / "pid"), "until_file": str(checkpoint)},
        )

        assert (checkpoint.read_text(), took >= 0.5) == ("new", True)
        run("signal", {"send": "TERM", "pid_file": str(tmp_path / "pid"), "until_exit": True})
        assert worker.wait(5) == -15


def test_file_is_never_seen_half_written(tmp_path: Path) -> None:
    """A probe reads it all the time."""
    path = tmp_path / "ready"
    path.write_text("healthy" * 1000)
    seen: set[int] = set()
    is_over = threading.Event()

    def probe() -> None:
        while not is_over.wait(0.0005):  # ends with the test
            try:
                seen.add(len(path.read_text()))
            except FileNotFoundError:
                seen.add(-1)

    prober = threading.Thread(target=probe)
    prober.start()
    for _ in range(50):
        run("file", str(path))
        run("file", str(path), "recover")
        time.sleep(0.002)
    is_over.set()
    prober.join()

    assert seen <= {-1, 7000}
    assert path.read_text() == "healthy" * 1000


def test_log_and_hooks_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "prepare.d").mkdir()
    script(
        tmp_path / "prepare.d" / "10-note",
        f'echo "$EVENT_TYPE $EVENT_RESOURCES" > {tmp_path}/noted',
    )
    with caplog.at_level(logging.INFO):
        run("log", "{event_type} is coming")
    run("hooks", str(tmp_path))

    assert caplog.messages == ["Reboot is coming"]
    assert (tmp_path / "noted").read_text() == "Reboot web-0\n"
