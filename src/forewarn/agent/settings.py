"""The agent's configuration file: TOML, read once into values. No other file is opened, but who may
write the file and the hooks that it names is checked.
"""

import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from forewarn.agent.config_reader import Key, checked, is_text, number, read, reject, tables
from forewarn.agent.ownership import check_ownership
from forewarn.agent.rules import PlannedStep, Rule
from forewarn.agent.steps import make_step
from forewarn.agent.steps.base import RunsFiles, WorkflowPhase
from forewarn.client.backoff import PERIOD_SECONDS
from forewarn.client.http1 import Endpoint
from forewarn.client.protocol import API_VERSION, DEFAULT_ENDPOINT, TIMEOUT_SECONDS
from forewarn.errors import Invalid

BYTES_MAX = 1024 * 1024
RULES_MAX = 256
SLACK_SECONDS = 30.0
RULE_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*rule[ \t]*\]\]", re.MULTILINE)


def _is_endpoint(value: object) -> bool:
    """Or "", which is discovered."""
    with suppress(Invalid):
        return value == "" or (isinstance(value, str) and bool(Endpoint.parse(value)))
    return False


def _is_address(value: object) -> bool:
    """Or "", which opens no port."""
    host, _, port = str(value).rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < 65536
    return value == "" or (is_text(value) and bool(host) and is_port)


ENDPOINT_FORM = f"the URL of an endpoint (such as {DEFAULT_ENDPOINT})"
LISTEN_FORM = "an address and a port, such as 127.0.0.1:9480"


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """`endpoint` "" is discovered, `name` "" comes from the endpoint, `listen` "" opens no port.

    `hooks` is a directory of executables that run at the end of each phase of every rule.
    """

    endpoint: Annotated[str, checked(ENDPOINT_FORM, _is_endpoint)] = ""
    name: str = ""
    journal: Path = Path("/var/lib/forewarn-agent/journal")
    socket: Path | None = None
    listen: Annotated[str, checked(LISTEN_FORM, _is_address)] = ""
    hooks: Path | None = None
    poll_seconds: Annotated[float, number(PERIOD_SECONDS, 60)] = PERIOD_SECONDS
    wait_seconds: Annotated[float, number(0, 300)] = 30
    api_version: str = API_VERSION
    rules: Annotated[tuple[Rule, ...], Key("rule"), tables(partial(read, Rule), RULES_MAX)] = ()

    @property
    def quiet_seconds_max(self) -> float:
        """How long a healthy agent may be without a response from its endpoint."""
        return self.wait_seconds + self.poll_seconds + TIMEOUT_SECONDS + SLACK_SECONDS


def load(path: Path) -> AgentSettings:
    """The settings in a file. Raises Invalid if it cannot be read or is wrong, or if others may
    write it or its hooks.
    """
    check_ownership(path)
    try:
        with path.open("rb") as file:
            content = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}", file=str(path)) from error
    if len(content) > BYTES_MAX:
        raise Invalid(f"{path}: expected at most {BYTES_MAX} bytes", file=str(path))
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise Invalid(f"{path}: expected UTF-8: {error}", file=str(path)) from error
    settings = parse(text, str(path))
    for each in _files_to_run(settings.rules):
        check_ownership(each, is_run=True)
    return settings


def parse(text: str, source: str) -> AgentSettings:
    """The settings in a text. Error messages begin with `source`."""
    table = _parse_toml(text, source)
    try:
        settings = read(AgentSettings, table, "")
        _check_unique_names(settings.rules)
        return _add_hooks(settings)
    except Invalid as error:
        line = _line_of_rule(str(error.facts["field"]), text, table)
        where = f"{source}:{line}" if line else source
        raise Invalid(f"{where}: {error.message}", file=source, **error.facts) from error
    except (ValueError, OverflowError, RecursionError) as error:
        message = f"{source}: expected smaller numbers and less nesting: {error!r:.200}"
        raise Invalid(message, file=source) from error


def _parse_toml(text: str, source: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        message = f"{source}:{line}: expected TOML: {error}"
        raise Invalid(message, file=source, line=line) from error


def _line_of_rule(field: str, text: str, table: dict[str, Any]) -> int | None:
    """The line of the `[[rule]]` that a field path such as `rule[2].approve` is in.

    Computed for an error only. None where the count of headers shows that the text writes its
    rules in another way.
    """
    found = re.match(r"rule\[(\d+)\]", field)
    if not found:
        return None
    starts = [match.start() for match in RULE_HEADER.finditer(text)]
    if len(starts) != len(table["rule"]):
        return None
    return text.count("\n", 0, starts[int(found[1])]) + 1


def _check_unique_names(rules: tuple[Rule, ...]) -> None:
    """The journal identifies a rule by its name."""
    names = [rule.name for rule in rules]
    for index, name in enumerate(names):
        if name in names[:index]:
            reject(f"rule[{index}].name", name, "a unique name")


def _files_to_run(rules: tuple[Rule, ...]) -> list[Path]:
    planned = (one for rule in rules for phase in WorkflowPhase for one in rule.steps(phase))
    steps = dict.fromkeys(one.step for one in planned if isinstance(one.step, RunsFiles))
    return [file for step in steps for file in step.files()]


def _add_hooks(settings: AgentSettings) -> AgentSettings:
    if settings.hooks is None:
        return settings
    hooks = PlannedStep(make_step("hooks", str(settings.hooks), "hooks"))

    def extend(rule: Rule) -> Rule:
        steps: dict[str, Any] = {phase: (*rule.steps(phase), hooks) for phase in WorkflowPhase}
        return replace(rule, **steps)

    return replace(settings, rules=tuple(map(extend, settings.rules)))
