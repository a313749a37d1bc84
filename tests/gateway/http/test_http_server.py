"""What is answered to bytes that are no request of ours: always the envelope."""

import asyncio
import contextlib
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

    assert answered == status and headers["x-request-id"]
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


@pytest.mark.parametrize("sent", [b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"])
async def test_a_head_that_does_not_come_to_its_end_is_a_408(start_gateway, sent) -> None:
    gateway = await start_gateway(read_timeout_s=1.0)

    answered, headers, body = await _exchange(gateway.url, sent)

    assert answered == 408 and headers["connection"] == "close" and headers["x-request-id"]
    assert json.loads(body)["error"]["code"] == "header_timeout"


async def test_a_head_that_comes_byte_by_byte_is_not_waited_for_longer(start_gateway) -> None:
    gateway = await start_gateway(read_timeout_s=1.0)
    host, port = gateway.url.removeprefix("http://").split(":")
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(host, int(port))
        reading = asyncio.ensure_future(reader.read())
        writer.write(b"GET /health HTTP/1.1\r\n")
        while not reading.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"A: b\r\n")
                await writer.drain()
            await asyncio.wait([reading], timeout=0.02)
        writer.close()

    assert reading.exception() is not None or reading.result().startswith(b"HTTP/1.1 408 ")


async def test_a_connection_that_says_nothing_is_closed_in_silence(start_gateway) -> None:
    gateway = await start_gateway(read_timeout_s=1.0)
    host, port = gateway.url.removeprefix("http://").split(":")
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(host, int(port))

        assert await reader.read() == b""
        writer.close()


async def test_a_connection_may_rest_between_requests_but_not_within_the_next_head(start_gateway) -> None:
    gateway = await start_gateway(read_timeout_s=2.0)
    ask = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"
    host, port = gateway.url.removeprefix("http://").split(":")
    async with asyncio.timeout(30):
        resting, resting_writer = await asyncio.open_connection(host, int(port))
        hanging, hanging_writer = await asyncio.open_connection(host, int(port))
        for reader, writer in ((resting, resting_writer), (hanging, hanging_writer)):
            writer.write(ask + b"\r\n")  # some send an empty line behind a request
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")

        hanging_writer.write(ask[:9])
        rest = await hanging.read()
        resting_writer.write(ask)

        assert rest.startswith(b"HTTP/1.1 408 ")
        assert (await resting.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        for writer in (resting_writer, hanging_writer):
            writer.close()


@pytest.mark.parametrize("head", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"])
async def test_a_body_that_does_not_come_to_its_end_is_a_408(start_gateway, head) -> None:
    gateway = await start_gateway(read_timeout_s=1.0)
    host, port = gateway.url.removeprefix("http://").split(":")
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + head)

        reply = await reader.readuntil(b"}}")
        writer.close()

    assert reply.startswith(b"HTTP/1.1 408 ") and b'"code":"body_timeout"' in reply
