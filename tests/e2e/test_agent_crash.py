"""A real agent against a real server, killed at every line of its journal, and started again."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import mortal_agent
from tests.e2e.service import Service, running

STEPS = ["prepare-0", "prepare-1", "start-0", "recover-0", "recover-1"]
LINES_MAX = 30
LINES_MIN = 20
"""Less than this many lines for one event would mean that the test does not see them all."""
LIFE_SECONDS_MAX = 90
AT_ONCE = 4
HAS_STARTED = re.compile(rb'"what":"ended".*"phase":"start"')


def fleet() -> str:
    """A VM for each line, each in a scope of its own."""
    vms = [
        f"{{name: vm-{number}, address: 127.0.1.{number + 1}, host: host-a}}"
        for number in range(LINES_MAX)
    ]
    return "scopes:\n" + "\n".join(
        f"  - {{name: scope-{number}, kind: vm, vms: [{vm}]}}" for number, vm in enumerate(vms)
    )


class Machine:
    """A VM with an agent.

    Its steps note themselves in a file, which survives whatever happens to the agent.
    """

    def __init__(self, folder: Path, service: Service, number: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.service = service
        self.name = f"vm-{number}"
        steps = {
            phase: [name for name in STEPS if name.startswith(phase)]
            for phase in ("prepare", "start", "recover")
        }
        shown = "\n".join(
            f"{phase} = [{', '.join(self._step(name) for name in names)}]"
            for phase, names in steps.items()
        )
        rule = f'[[rule]]\nname = "all"\napprove = "when-prepared"\n{shown}\n'
        top = f"endpoint = '{service.metadata}/as/{self.name}'\njournal = '{folder}/journal'\n"
        (folder / "agent.toml").write_text(top + rule)
        for name in ("ran", "journal"):
            (folder / name).touch()
        service.poll(vm=self.name)
        status, answer = service.ask("POST", f"/vms/{self.name}/restart")
        assert status == 202, answer
        self.event_id = answer["event"]["id"]
        self.approvals: list[str] = []

    def _step(self, name: str) -> str:
        return f"{{run = ['sh', '-c', 'echo {name} >> {self.folder}/ran']}}"

    def live(self, moment: str = "after", line: int = 0) -> tuple[int, int]:
        """One life of the agent: its exit code, and how many lines it wrote if it ended by itself."""
        command = [
            sys.executable,
            mortal_agent.__file__,
            str(self.folder / "agent.toml"),
            moment,
            str(line),
        ]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        deadline = time.monotonic() + LIFE_SECONDS_MAX
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as life:
            try:
                while life.poll() is None:
                    assert time.monotonic() < deadline, "the agent does not end"
                    self._complete()
                    time.sleep(0.05)
            finally:
                life.kill()
            assert life.stdout is not None
            written = life.stdout.read()
        return life.returncode, int(written or 0)

    def _complete(self) -> None:
        """The impact is over, as an operator says it, once the agent has done what is to be done at
        the start.
        """
        if self.approvals or not HAS_STARTED.search((self.folder / "journal").read_bytes()):
            return
        self.approvals = self.service.ask("GET", f"/events/{self.event_id}")[1]["approvals"]
        status, answer = self.service.ask("POST", f"/events/{self.event_id}/complete")
        assert status == 200, answer

    def ran(self) -> list[str]:
        return (self.folder / "ran").read_text().split()


@pytest.mark.parametrize("moment", ["after", "before"])
def test_an_agent_killed_at_any_line_of_its_journal_goes_on_where_it_was(
    tmp_path: Path, moment: str
) -> None:
    """Every step is done, in order; none that the journal knows as done is run twice; the approval
    is sent.

    Killed after a line, each step has run once. Killed before it, the one step whose end that line
    was to tell is in doubt, and is run again: at most one.
    """
    with running(tmp_path, "--store", "memory", fleet=fleet()) as service:
        unharmed = Machine(tmp_path / "machine-0", service, 0)
        code, lines = unharmed.live()
        assert code == 0
        assert LINES_MIN <= lines < LINES_MAX
        assert unharmed.ran() == STEPS

        def lose_a_life(line: int) -> list[str]:
            machine = Machine(tmp_path / f"machine-{line}", service, line)
            assert machine.live(moment, line)[0] == mortal_agent.KILLED
            assert machine.live()[0] == 0
            assert machine.approvals == [machine.name]
            return machine.ran()

        with ThreadPoolExecutor(AT_ONCE) as pool:
            stories = list(pool.map(lose_a_life, range(1, lines + 1)))

    twice = [[name for name in STEPS if story.count(name) == 2] for story in stories]
    assert [sorted(set(story), key=STEPS.index) for story in stories] == [STEPS] * lines
    assert [sorted(story, key=STEPS.index) for story in stories] == stories, "in order"
    in_doubt = [] if moment == "after" else [[name] for name in STEPS]
    assert [names for names in twice if names] == in_doubt
