"""`forewarn agent`: hands over to the agent's own command line. Needs no extra."""

import typer

PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def agent(context: typer.Context) -> None:
    """The agent inside a VM: run, status, check. See `forewarn agent --help`."""
    from forewarn.agent.__main__ import main  # only this command needs it

    raise typer.Exit(main(context.args, program="forewarn agent"))
