"""The kinds of steps. A module is imported when a rule names one of its kinds: TLS alone costs
memory that most agents do not need to spend.
"""

from importlib import import_module

from forewarn.agent.config_reader import read, reject_unknown
from forewarn.agent.steps.base import Step

KINDS = {
    "run": ("command", "RunStep"),
    "systemd": ("command", "SystemdStep"),
    "http": ("http", "HttpStep"),
    "haproxy": ("haproxy", "HaproxyStep"),
    "file": ("file", "FileStep"),
    "kubernetes": ("kubernetes", "KubernetesStep"),
    "signal": ("signal", "SignalStep"),
    "log": ("log", "LogStep"),
    "hooks": ("command", "HooksStep"),
}


def make_step(kind: str, value: object, path: str) -> Step:
    """The step that `kind = value` configures. Raises Invalid, so a wrong file is rejected when
    it is loaded, not when an event comes.
    """
    if kind not in KINDS:
        reject_unknown("kind of step", kind, KINDS, path)
    module, name = KINDS[kind]
    step: Step = read(getattr(import_module(f"{__name__}.{module}"), name), value, path)
    return step
