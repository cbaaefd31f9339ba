"""The kinds of steps, one file each.

A kind is loaded when a rule names it: TLS costs memory that most agents can spare.
"""

import difflib
from importlib import import_module

from forewarn.agent.step import Step
from forewarn.errors import Invalid

KINDS = (
    "run",
    "systemd",
    "http",
    "haproxy",
    "file",
    "kubernetes",
    "signal",
    "log",
    "wall",
    "hooks",
)


def make(kind: str, spec: object, where: str) -> Step:
    """The step that `kind = spec` asks for.

    A wrong spec is refused here, so that a wrong file is refused when it is loaded.
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(kind[:60], KINDS, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(KINDS)}"
        raise Invalid(f"{where}: unknown kind of step {kind[:60]!r}; {hint}", field=where)
    step: Step = import_module(f"{__name__}.{kind}").make(spec, where)
    return step
