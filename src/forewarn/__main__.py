"""`python -m forewarn`: the command line."""

from forewarn.cli.main import main

main()
