"""The kinds of steps. A module is imported when a rule names one of its kinds: TLS alone costs
memory that most agents do not need to spend.
"""

from importlib import import_module

from forewarn.agent.config_reader import read, suggest
from forewarn.agent.steps.base import Step
from forewarn.errors import Invalid

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
REMOVED_KINDS = {"wall": 'use run = ["wall", "text"]'}


def make_step(kind: str, value: object, path: str) -> Step:
    """The step that `kind = value` configures. Raises Invalid, so a wrong file is rejected when
    it is loaded, not when an event comes.
    """
    if kind in REMOVED_KINDS:
        raise Invalid(f"{path}: no longer supported; {REMOVED_KINDS[kind]}", field=path)
    if kind not in KINDS:
        hint = suggest(kind, tuple(KINDS))
        raise Invalid(f"{path}: unknown kind of step; {hint}", field=path)
    module, name = KINDS[kind]
    step: Step = read(getattr(import_module(f"{__name__}.{module}"), name), value, path)
    return step
