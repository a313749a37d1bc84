"""What a body is declared to be: media types, content codings, and how large it may grow."""

import asyncio
import gzip
import json
import zlib

import pytest

from pdserve.gateway.content_coding import BodyTooLarge, decoded

PATH = "/v1/completions"
BODY = json.dumps({"model": "org/demo", "prompt": "Grüße"}).encode()


def _bare(content: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(content) + stream.flush()


async def _send(gateway, content: bytes, **headers: str) -> tuple[int, dict, dict]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with gateway.session.post(
        gateway.url + PATH, data=content, headers=named, skip_auto_headers=["Content-Type"]
    ) as response:
        assert response.headers["X-Request-Id"]
        return response.status, await response.json(), dict(response.headers)


@pytest.mark.parametrize(
    ("coding", "content"),
    [
        ("gzip", gzip.compress(BODY)),
        ("x-gzip", gzip.compress(BODY)),
        ("GZIP", gzip.compress(BODY)),
        ("gzip", gzip.compress(BODY[:7]) + gzip.compress(b"") + gzip.compress(BODY[7:])),
        ("deflate", zlib.compress(BODY)),
        ("deflate", _bare(BODY)),
        ("identity", BODY),
        ("", BODY),
    ],
)
async def test_a_body_may_come_compressed(gateway, coding, content):
    status, _, _ = await _send(gateway, content, Content_Encoding=coding)

    assert status == 200
    assert gateway.source.started[0].request.prompt_token_ids == tuple(gateway.tokenizer.encode("Grüße"))


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "nonsense"])
async def test_another_coding_is_415_and_the_ones_that_are_taken_are_named(gateway, coding):
    status, reply, headers = await _send(gateway, BODY, Content_Encoding=coding)

    assert (status, reply["error"]["code"]) == (415, "unsupported_encoding")
    assert headers["Accept-Encoding"] == "gzip, deflate"
    assert gateway.source.started == []


@pytest.mark.parametrize(
    ("coding", "content"),
    [
        ("gzip", BODY),
        ("gzip", b""),
        ("gzip", gzip.compress(BODY)[:-4]),
        ("gzip", gzip.compress(BODY) + b"more"),
        ("gzip", gzip.compress(BODY) + gzip.compress(b"")[:-1]),
        ("gzip", gzip.compress(BODY)[:-8] + bytes(8)),
        ("deflate", b""),
        ("deflate", zlib.compress(BODY)[:-1]),
        ("deflate", zlib.compress(BODY) + zlib.compress(b"")),
        ("deflate", b"\x00not deflated"),
    ],
)
async def test_a_body_that_is_not_encoded_as_declared_is_400(gateway, coding, content):
    status, reply, _ = await _send(gateway, content, Content_Encoding=coding)

    assert (status, reply["error"]["code"]) == (400, "invalid_encoding")
    assert gateway.source.started == []


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_small_body_that_stands_for_a_huge_one_is_refused_at_the_limit(start_gateway, coding):
    gateway = await start_gateway(max_body_bytes=4096)
    pack = gzip.compress if coding == "gzip" else zlib.compress
    fits = {"model": "org/demo", "prompt": "Hi", "user": "x" * 4000}
    fits["user"] = "x" * (4000 - len(json.dumps(fits)) + 4096)

    assert (await _send(gateway, pack(json.dumps(fits).encode()), Content_Encoding=coding))[0] == 200
    status, reply, _ = await _send(gateway, pack(bytes(3_000_000)), Content_Encoding=coding)

    assert (status, reply["error"]["code"]) == (413, "body_too_large")


async def test_many_small_members_are_one_body_that_has_the_limit():
    """More members than a piece of what is read has, and ends of members and of pieces in all places."""
    members = [gzip.compress(b"%d," % number) for number in range(2000)]
    body = b"".join(b"%d," % number for number in range(2000))

    assert await decoded(b"".join(members), "gzip", len(body)) == body
    with pytest.raises(BodyTooLarge):
        await decoded(b"".join(members), "gzip", len(body) - 1)


async def test_the_event_loop_goes_on_while_a_body_is_decoded():
    bomb = gzip.compress(bytes(2**27), 1)

    decoding = asyncio.ensure_future(decoded(bomb, "gzip", 2**27))
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert not decoding.done()
    assert len(await decoding) == 2**27


@pytest.mark.parametrize(
    "media_type",
    [
        "text/plain",
        "text/html",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/xml",
        "application/msgpack",
        "image/png",
    ],
)
async def test_a_body_that_is_said_to_be_no_json_is_415(gateway, media_type):
    status, reply, _ = await _send(gateway, BODY, Content_Type=media_type)

    assert (status, reply["error"]["code"]) == (415, "unsupported_media_type")
    assert gateway.source.started == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content_Type": "application/json"},
        {"Content_Type": "application/octet-stream"},
        {"Content_Type": "application/vnd.api+json; charset=utf-8"},
    ],
)
async def test_json_is_taken_and_so_is_what_is_not_declared(gateway, headers):
    assert (await _send(gateway, BODY, **headers))[0] == 200
