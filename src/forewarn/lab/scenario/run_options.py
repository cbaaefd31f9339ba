"""What a run of a scenario may override, and what follows from that and from its file."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from forewarn.duration import format_duration, parse_duration
from forewarn.errors import NotFound
from forewarn.lab.scenario.schema import Scenario, list_vms


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Overrides of the scenario file. External VMs are played by software at their listeners."""

    seed: int | None = None
    rate: float | None = None
    external: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    is_at_azure: bool = False
    first_poll_seconds_max: float | None = None
    to_the_end: bool = False


def choose_external(scenario: Scenario, options: RunOptions) -> tuple[str, ...]:
    """Return the external VMs: those of the options, or else those without a model guest.

    With a command there is at least one.
    """
    vms = list_vms(scenario.fleets[0])
    for vm in options.external:
        if vm not in vms:
            raise NotFound(
                f"there is no VM {vm!r} in {scenario.file.name}; expected one of {', '.join(vms)}",
                vm=vm,
            )
    if options.external:
        return options.external
    free = tuple(vm for vm in vms if vm not in scenario.guests)
    return free or (vms[:1] if options.command else ())


def choose_rate(scenario: Scenario, options: RunOptions, external: Sequence[str]) -> float | None:
    """Return the rate on the real clock; None for a virtual clock."""
    if options.rate is not None:
        return options.rate
    if scenario.file.clock.rate is not None:
        return float(scenario.file.clock.rate)
    return 1.0 if external else None


def describe_plan(until: str, rate: float | None, now: datetime) -> str:
    """Return what a run will take, on one line."""
    if rate is None:
        return f"{until} in virtual time"
    took = parse_duration(until) / rate
    real = "" if rate == 1 else f": at most {format_duration(took)}"
    return f"{until} at rate {rate:g}{real}, ends about {(now + took).astimezone():%H:%M}"
