"""HTTPS: a certificate that is read again when its files change, for the connections that come after."""

import asyncio
import hashlib
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pdserve.gateway.errors import InvalidCertificate

logger = logging.getLogger(__name__)

_LOOK_S = 2.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate chain and its private key, both PEM."""

    certificate: Path
    key: Path

    def stamp(self) -> tuple[bytes, ...]:
        """Return what changes when what is in a file does, which its times need not: they go by the kernel's ticks.

        Raises:
            InvalidCertificate: a file cannot be read.
        """
        try:
            return tuple(hashlib.sha256(path.read_bytes()).digest() for path in (self.certificate, self.key))
        except OSError as error:
            raise InvalidCertificate(self.certificate, str(error)) from None


class TlsCertificate:
    """Owns the context of the listening socket."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = files.stamp()  # before they are loaded: what is renewed in between is seen at the next look
        self.context = _context(files)

    def reload_if_changed(self) -> bool:
        """Take new files if they are whole and fit together, else stay with the old; whether they were taken."""
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return False
            _context(self._files)  # a half-written pair must not reach the context in use
            self.context.load_cert_chain(self._files.certificate, self._files.key)
        except (OSError, InvalidCertificate) as error:
            logger.warning("the certificate in use stays: %s", error)
            return False
        self._stamp = stamp
        logger.info("a new certificate is in use")
        return True

    async def keep_fresh(self) -> NoReturn:
        """Look at the files every other second until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.reload_if_changed()


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise InvalidCertificate(files.certificate, str(error)) from None
    return context


def _no_password() -> str:
    """A key with a password must be an error and not a prompt."""
    return ""
