"""A real agent against a real server, killed at an entry of its journal and started again.

Every third entry is tried; with FOREWARN_CRASH_EVERY=1 in the environment, all of them.
"""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import crashing_agent
from tests.e2e.service import Service, running

STEPS = ["prepare-0", "prepare-1", "start-0", "recover-0", "recover-1"]
ENTRIES_MIN, ENTRIES_MAX = 20, 30
"""Fewer entries for one event would mean that the test misses some."""
EVERY = int(os.environ.get("FOREWARN_CRASH_EVERY", "3"))
RUN_SECONDS_MAX = 90
PARALLEL = 4
START_ENDED = re.compile(rb'"what":"ended".*"phase":"start"')


def fleet() -> str:
    """A VM for each entry, each in its own scope."""
    vms = [
        f"{{name: vm-{number}, address: 127.0.1.{number + 1}, host: host-a}}"
        for number in range(ENTRIES_MAX)
    ]
    return "scopes:\n" + "\n".join(
        f"  - {{name: scope-{number}, kind: vm, vms: [{vm}]}}" for number, vm in enumerate(vms)
    )


class Machine:
    """A VM with an agent. Its steps record their names in a file that survives the agent."""

    def __init__(self, folder: Path, service: Service, number: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.service = service
        self.name = f"vm-{number}"
        steps = "\n".join(
            f"{phase} = [{', '.join(self._step(name) for name in STEPS if phase in name)}]"
            for phase in ("prepare", "start", "recover")
        )
        rule = f'[[rule]]\nname = "all"\napprove = "when-prepared"\n{steps}\n'
        top = f"endpoint = '{service.metadata}/as/{self.name}'\njournal = '{folder}/journal'\n"
        (folder / "agent.toml").write_text(top + rule)
        for name in ("ran", "journal"):
            (folder / name).touch()
        service.poll(vm=self.name)
        status, response = service.ask("POST", f"/vms/{self.name}/restart")
        assert status == 202, response
        self.event_id = response["event"]["id"]
        self.approvals: list[str] = []

    def _step(self, name: str) -> str:
        return f"{{run = ['sh', '-c', 'echo {name} >> {self.folder}/ran']}}"

    def run_agent(self, when: str = "after", entry: int = 0) -> tuple[int, int]:
        """Returns the exit code, and how many entries it wrote if it was not killed."""
        config = str(self.folder / "agent.toml")
        command = [sys.executable, crashing_agent.__file__, config, when, str(entry)]
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
        deadline = time.monotonic() + RUN_SECONDS_MAX
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as agent:
            try:
                while agent.poll() is None:
                    assert time.monotonic() < deadline, "the agent does not end"
                    self._complete_event()
                    time.sleep(0.05)
            finally:
                agent.kill()
            assert agent.stdout is not None
            written = agent.stdout.read()
        return agent.returncode, int(written or 0)

    def _complete_event(self) -> None:
        """End the impact once the agent has run its start steps."""
        if self.approvals or not START_ENDED.search((self.folder / "journal").read_bytes()):
            return
        self.approvals = self.service.ask("GET", f"/events/{self.event_id}")[1]["approvals"]
        status, response = self.service.ask("POST", f"/events/{self.event_id}/complete")
        assert status == 200, response

    def ran(self) -> list[str]:
        return (self.folder / "ran").read_text().split()


@pytest.mark.parametrize("when", ["after", "before"])
def test_agent_killed_at_any_entry_continues_where_it_was(tmp_path: Path, when: str) -> None:
    """Every step runs, in order, and the approval is sent.

    Killed after an entry, each step has run once. Killed before the entry that records the end of a
    step, this one step is in doubt and runs again.
    """
    with running(tmp_path, "--store", "memory", fleet=fleet()) as service:
        undisturbed = Machine(tmp_path / "machine-0", service, 0)
        code, entries = undisturbed.run_agent()
        assert code == 0
        assert ENTRIES_MIN <= entries < ENTRIES_MAX
        assert undisturbed.ran() == STEPS

        def crash_at(entry: int) -> list[str]:
            machine = Machine(tmp_path / f"machine-{entry}", service, entry)
            assert machine.run_agent(when, entry)[0] == crashing_agent.KILLED
            assert machine.run_agent()[0] == 0
            assert machine.approvals == [machine.name]
            return machine.ran()

        with ThreadPoolExecutor(PARALLEL) as pool:
            runs = list(pool.map(crash_at, range(1, entries + 1, EVERY)))

    repeated = [[name for name in STEPS if run.count(name) == 2] for run in runs]
    assert [sorted(set(run), key=STEPS.index) for run in runs] == [STEPS] * len(runs)
    assert [sorted(run, key=STEPS.index) for run in runs] == runs, "in order"
    if when == "after":
        assert [names for names in repeated if names] == []
    else:
        assert all(len(names) <= 1 for names in repeated)
        assert EVERY > 1 or [names for names in repeated if names] == [[name] for name in STEPS]
