"""HTTPS with a certificate that is renewed while the gateway runs."""

import asyncio
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
