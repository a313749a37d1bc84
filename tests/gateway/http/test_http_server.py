"""What is answered to bytes that are no request of ours: always the envelope."""

import asyncio
import json

import pytest


async def _exchange(url: str, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send `sent`, read until the server closes; return status, headers and body."""
    host, port = url.removeprefix("http://").split(":")
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        received = await reader.read()
        writer.close()
    head, _, body = received.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status_line.split()[1]), headers, body


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid_http"),
        (b"NONSENSE\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", 400, "invalid_http"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 9000 + b"\r\n\r\n", 431, "header_too_large"),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431, "header_too_large"),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: a miracle\r\nConnection: close\r\n\r\n",
            417,
            "expectation_failed",
        ),
    ],
)
async def test_bytes_that_are_no_request_get_the_envelope(gateway, sent, status, code) -> None:
    answered, headers, body = await _exchange(gateway.url, sent)

    assert answered == status
    assert headers["content-type"] == "application/json; charset=utf-8"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (code, "invalid_request_error")


async def test_a_client_that_waits_to_be_told_to_go_on_is_told(gateway) -> None:
    body = json.dumps({"model": "org/demo", "prompt": "x"}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        "Expect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    host, port = gateway.url.removeprefix("http://").split(":")
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode())
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        writer.write(body)
        await reader.readline()

        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
