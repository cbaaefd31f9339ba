"""A config from text, as flags give it."""

from typing import Any

from forewarn.config import Config, options


def config_of(**flags: Any) -> Config:
    """Repeatable options take a list of texts."""
    config = Config(
        **{
            each.name: each.parse(flags[each.name], each.flag)
            for each in options(Config)
            if each.name in flags
        }
    )
    config.check()
    return config
