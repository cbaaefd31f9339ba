"""TLS for the control listener. Certificate and key may be replaced while it runs.

A new handshake uses the newest valid pair. An invalid pair is logged, and the old one stays in use.
"""

import asyncio
import ssl
from pathlib import Path

from forewarn.errors import Invalid
from forewarn.log import log

POLL_SECONDS = 2.0

Stamp = tuple[tuple[int, ...], ...]


class Certificate:
    """A pair of files. The listener uses `context`, which passes handshakes to the newest pair."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Invalid if the pair cannot be used, with the file and the reason."""
        self._files = (certificate, key)
        self._stamp = _stamp(self._files)
        self._newest = self.context = _load(*self._files)
        self.context.sni_callback = self._use_newest

    async def follow(self) -> None:
        """Check the files every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self.reload)

    def reload(self) -> bool:
        """Load the pair if it has changed; whether a new one is in use."""
        stamp = _stamp(self._files)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self._newest = _load(*self._files)
        except Invalid as error:
            log.warning(
                "new certificate rejected, the old one stays in use",
                file=self._files[0],
                problem=error.message,
            )
            return False
        log.info("certificate renewed", file=self._files[0])
        return True

    def _use_newest(
        self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        """Called at every handshake, with and without SNI."""
        connection.context = self._newest


def _load(certificate: Path, key: Path) -> ssl.SSLContext:
    for file, kind in ((certificate, "certificate"), (key, "key")):
        try:
            file.read_bytes()
        except OSError as error:
            raise Invalid(
                f"the {kind} file {file} cannot be read: {error.strerror or error}", file=str(file)
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise Invalid(
            f"the certificate file {certificate} and the key file {key} {_explain(error)}",
            file=str(certificate),
        ) from error
    return context


def _explain(error: Exception) -> str:
    reason = getattr(error, "reason", None) or ""
    if reason == "KEY_VALUES_MISMATCH":
        return "do not belong together; expected the two files of one pair"
    if isinstance(error, ValueError) and not reason:
        return "cannot be used: the key is encrypted; expected a key without a password"
    text = reason.lower().replace("_", " ") or error
    return f"cannot be used: {text}; expected two PEM files"


def _no_password() -> bytes:
    """Called for an encrypted key. OpenSSL would prompt on the terminal instead."""
    raise ValueError


def _stamp(files: tuple[Path, ...]) -> Stamp:
    """Changes when a file is written, replaced or its mode is changed; empty for a missing file."""
    stamps: list[tuple[int, ...]] = []
    for file in files:
        try:
            stat = file.stat()
            stamps.append((stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino))
        except OSError:
            stamps.append(())
    return tuple(stamps)
