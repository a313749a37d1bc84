"""HTTPS with a certificate that is renewed while the gateway runs."""

import asyncio
import os
import ssl
from pathlib import Path

import aiohttp
import pytest
import trustme

from pdserve.gateway.errors import InvalidCertificate
from pdserve.gateway.tls import TlsCertificate, TlsFiles


def issue(folder: Path, name: str) -> tuple[TlsFiles, ssl.SSLContext, bytes]:
    """Write a certificate for `name` and return its files, a client that trusts its issuer, and its serial bytes."""
    authority = trustme.CA()
    certificate = authority.issue_cert(name)
    files = TlsFiles(folder / "cert.pem", folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(files.certificate)
    certificate.private_key_pem.write_to_path(files.key)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return files, client, ssl.PEM_cert_to_DER_cert(certificate.cert_chain_pems[0].bytes().decode())


async def shown_by(url: str) -> bytes:
    host, port = url.removeprefix("https://").split(":")
    context = ssl._create_unverified_context()
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return shown


class Handshake:
    """A client of which the bytes of a handshake are in hand."""

    def __init__(self, context: ssl.SSLContext, host: str, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]):
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._reader, self.writer = streams

    @classmethod
    async def with_first_words(cls, host: str, port: int, context: ssl.SSLContext, words: bytes) -> "Handshake":
        """Shake hands and send `words` in one piece with the last of that."""
        client = cls(context, host, await asyncio.open_connection(host, port))
        while True:
            try:
                client._session.do_handshake()
                break
            except ssl.SSLWantReadError:
                client.writer.write(client._outgoing.read())
                client._incoming.write(await client._reader.read(65_536))
        client.write(words)
        return client

    def write(self, words: bytes) -> None:
        self._session.write(words)
        self.writer.write(self._outgoing.read())

    async def read_until(self, end: bytes) -> bytes:
        """Return what comes up to `end`, or up to the end of the connection."""
        received = b""
        while not received.endswith(end):
            try:
                received += self._session.read(65_536)
            except ssl.SSLWantReadError:
                if not (more := await self._reader.read(65_536)):
                    break
                self._incoming.write(more)
        return received


async def test_clients_are_served_by_https_and_a_renewed_certificate_is_taken(start_gateway, tmp_path):
    files, client, first = issue(tmp_path, "127.0.0.1")
    gateway = await start_gateway(tls=files)
    assert gateway.url.startswith("https://") and await shown_by(gateway.url) == first

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client)) as session,
        session.get(gateway.url + "/health") as response,
    ):
        assert response.status == 200

    _, _, second = issue(tmp_path, "127.0.0.1")
    async with asyncio.timeout(30):
        while await shown_by(gateway.url) != second:
            pass


async def test_a_request_that_comes_together_with_the_end_of_the_handshake_is_waited_for_no_longer(
    start_gateway, tmp_path
):
    files, client, _ = issue(tmp_path, "127.0.0.1")
    gateway = await start_gateway(tls=files, read_timeout_s=2.0)
    host, port = gateway.url.removeprefix("https://").split(":")
    async with asyncio.timeout(30):
        first = await Handshake.with_first_words(host, int(port), client, b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
        answered = await first.read_until(b"}")

        silent, silent_writer = await asyncio.open_connection(host, int(port), ssl=client)
        assert await silent.read() == b""  # the deadline of the head is over, that of the earlier connection too
        first.write(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
        again = await first.read_until(b"}")
        for writer in (silent_writer, first.writer):
            writer.close()

    assert answered.startswith(b"HTTP/1.1 200") and again.startswith(b"HTTP/1.1 200")


def test_a_renewal_while_the_files_are_first_read_is_seen_at_the_next_look(tmp_path, monkeypatch):
    files, _, _ = issue(tmp_path, "127.0.0.1")
    load = ssl.SSLContext.load_cert_chain

    def load_and_renew(context, *given, **named):
        load(context, *given, **named)
        monkeypatch.undo()
        issue(tmp_path, "127.0.0.1")

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_and_renew)
    certificate = TlsCertificate(files)

    assert certificate.reload_if_changed() is True


def test_a_renewal_that_the_times_of_the_files_do_not_show_is_seen(tmp_path):
    files, _, _ = issue(tmp_path, "127.0.0.1")
    before = [path.stat().st_mtime_ns for path in (files.certificate, files.key)]
    certificate = TlsCertificate(files)

    issue(tmp_path, "127.0.0.1")
    for path, at in zip((files.certificate, files.key), before, strict=True):
        os.utime(path, ns=(at, at))

    assert certificate.reload_if_changed() is True


def test_a_broken_renewal_leaves_the_old_one_in_use(tmp_path):
    files, _, _ = issue(tmp_path, "127.0.0.1")
    certificate = TlsCertificate(files)

    files.key.write_text("half a key")
    assert certificate.reload_if_changed() is False
    files.key.unlink()
    assert certificate.reload_if_changed() is False

    issue(tmp_path, "127.0.0.1")
    assert certificate.reload_if_changed() is True
    assert certificate.reload_if_changed() is False


def test_files_that_do_not_fit_together_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, _, _ = issue(tmp_path / "a", "127.0.0.1")
    other, _, _ = issue(tmp_path / "b", "127.0.0.1")

    for files in (TlsFiles(one.certificate, other.key), TlsFiles(tmp_path / "none", one.key)):
        with pytest.raises(InvalidCertificate):
            TlsCertificate(files)
