"""A real agent as a process that dies at the nth entry of its journal: `mortal_agent.py CONFIG
before|after N`.

It exits with 0 when nothing is left to do for its event.
"""

import os
import sys
import threading
from pathlib import Path

from forewarn.agent.agent import Agent
from forewarn.agent.journal import Journal
from forewarn.agent.settings import load
from forewarn.client import Client

KILLED = 137
RUN_SECONDS_MAX = 60


class MortalJournal(Journal):
    """Exits right before the nth entry is written, or right after it is on disk.

    No handler runs, no file is closed.
    """

    when = ""
    entries_left = 0

    def _append(self, line: bytes) -> None:
        self.entries_left -= 1
        if self.entries_left == 0 and self.when == "before":
            os._exit(KILLED)
        super()._append(line)
        if self.entries_left == 0:
            os._exit(KILLED)


def main(file: str, when: str, entries: str) -> int:
    settings = load(Path(file))
    journal = MortalJournal(settings.journal)
    journal.when, journal.entries_left = when, int(entries)
    client = Client(settings.endpoint)
    stop = threading.Event()
    running = threading.Thread(target=Agent(settings, client, journal).run, args=(stop,))
    running.start()
    pause = threading.Event()
    for _ in range(RUN_SECONDS_MAX * 50):
        if journal.progress and all(progress.is_done for progress in journal.progress.values()):
            break
        pause.wait(0.02)
    stop.set()
    client.close()
    running.join()
    is_done = all(progress.is_done for progress in journal.progress.values())
    entries_written = int(entries) - journal.entries_left
    journal.close()
    print(entries_written)
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
