"""A real agent as a process that dies at the nth line of its journal: `mortal_agent.py SETTINGS
before|after N`.

It ends by itself, with 0, when nothing is left to do about the event that it was started for.
"""

import os
import sys
import threading
from pathlib import Path

from forewarn.agent.agent import Agent
from forewarn.agent.journal import Journal
from forewarn.agent.progress import Facts, EntryKind
from forewarn.agent.settings import load
from forewarn.client import Client

KILLED = 137
LIFE_SECONDS_MAX = 60


class Mortal(Journal):
    """Dies right before the nth line is written, or right after it is on disk.

    No handler runs, no file is closed.
    """

    moment = ""
    lines_left = 0

    def _append(self, key: str, what: EntryKind, facts: Facts) -> None:
        self.lines_left -= 1
        if self.lines_left == 0 and self.moment == "before":
            os._exit(KILLED)
        super()._append(key, what, facts)
        if self.lines_left == 0:
            os._exit(KILLED)


def main(file: str, moment: str, lines: str) -> int:
    settings = load(Path(file))
    journal = Mortal.open(settings.journal)
    journal.moment, journal.lines_left = moment, int(lines)
    client = Client(settings.endpoint)
    stop = threading.Event()
    running = threading.Thread(target=Agent(settings, client, journal).run, args=(stop,))
    running.start()
    rest = threading.Event()
    for _ in range(LIFE_SECONDS_MAX * 50):
        if journal.progress and all(progress.is_done for progress in journal.progress.values()):
            break
        rest.wait(0.02)
    stop.set()
    client.close()
    running.join()
    is_done = all(progress.is_done for progress in journal.progress.values())
    lines_written = int(lines) - journal.lines_left
    journal.close()
    print(lines_written)
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
