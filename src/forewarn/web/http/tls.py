"""TLS for the control listener: certificate and key from two files that may be replaced while it
runs.

A new handshake gets the newest pair that fits together. A pair that does not is told in the log,
and the old one goes on.
"""

import asyncio
import logging
import ssl
from pathlib import Path

from forewarn.errors import Invalid

log = logging.getLogger("forewarn")

LOOK_SECONDS = 2.0
HANDSHAKE_SECONDS_MAX = 3.0
GOODBYE_SECONDS_MAX = 1.0
"""How long the other side of an ending connection is waited for: one that is idle says nothing."""

Stamp = tuple[tuple[int, ...], ...]


class Certificate:
    """A pair of files.

    `context` is what the listener is given; it hands every handshake over to the newest pair.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """Invalid if the pair cannot be used, with the file and what is wrong with it."""
        self._files = (certificate, key)
        self._stamp = _stamp(self._files)
        self._newest = self.context = _load(*self._files)
        self.context.sni_callback = self._hand_over

    async def follow(self) -> None:
        """Look at the files every few seconds, until cancelled."""
        while True:  # ends when cancelled
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.look)

    def look(self) -> bool:
        """Take a new pair if there is one; whether there was."""
        stamp = _stamp(self._files)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        facts = {"file": str(self._files[0])}
        try:
            self._newest = _load(*self._files)
        except Invalid as problem:
            log.warning(
                "new certificate refused, the old one goes on",
                extra={"facts": {**facts, "problem": problem.message}},
            )
            return False
        log.info("certificate renewed", extra={"facts": facts})
        return True

    def _hand_over(
        self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        """Called at every handshake, whether the client names a server or not."""
        connection.context = self._newest


def _load(certificate: Path, key: Path) -> ssl.SSLContext:
    for file, what in ((certificate, "certificate"), (key, "key")):
        try:
            file.read_bytes()
        except OSError as error:
            raise Invalid(
                f"the {what} file {file} cannot be read: {error.strerror or error}", file=str(file)
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise Invalid(
            f"the certificate file {certificate} and the key file {key} {_why(error)}",
            file=str(certificate),
        ) from error
    return context


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None) or ""
    if reason == "KEY_VALUES_MISMATCH":
        return "do not fit: the key is another certificate's; expected the two of one pair"
    if isinstance(error, ValueError) and not reason:
        return "cannot be used: the key is encrypted; expected one without a password"
    return f"cannot be used: {reason.lower().replace('_', ' ') or error}; expected two files in PEM form"


def _no_password() -> bytes:
    """Asked for where a key is encrypted.

    OpenSSL would ask on the terminal, and nobody is there.
    """
    raise ValueError


def _stamp(files: tuple[Path, ...]) -> Stamp:
    """What changes when a file is written, replaced or given to others to read; nothing for one
    that is not there just now.
    """
    found: list[tuple[int, ...]] = []
    for file in files:
        try:
            one = file.stat()
            found.append((one.st_mtime_ns, one.st_ctime_ns, one.st_size, one.st_ino))
        except OSError:
            found.append(())
    return tuple(found)
