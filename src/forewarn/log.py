"""Log lines: a fixed text with facts beside it, for a person or for a program. One per change of the world, none per poll."""

import json
import logging
import sys
from datetime import UTC, datetime

from forewarn.config import LogFormat, LogLevel


def set_up_log(format_: LogFormat, level: LogLevel) -> None:
    """Write our log to standard error from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HumanLines() if format_ is LogFormat.HUMAN else JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("forewarn").setLevel(level.upper())


class HumanLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = "  ".join(f"{name}={value}" for name, value in facts_of(record).items())
        line = f"{stamp(record)}  {record.levelname.lower():7}  {record.getMessage()}"
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return f"{line}  {facts}".rstrip() + trace


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"at": stamp(record), "level": record.levelname.lower(), "text": record.getMessage(), **facts_of(record)}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def facts_of(record: logging.LogRecord) -> dict[str, object]:
    return getattr(record, "facts", {})


def stamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
