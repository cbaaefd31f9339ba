"""No test contacts Azure's address outside a network of its own: on a cloud machine it answers.

Python reports each connection before it is made. Not those of uvloop, which libuv makes.
"""

import sys

AZURE = "169.254.169.254"


def refuse_azure(event: str, arguments: tuple[object, ...]) -> None:
    if event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1][0] == AZURE:
        raise AssertionError(f"a test would have contacted {AZURE}")


sys.addaudithook(refuse_azure)
