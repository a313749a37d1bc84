"""What a browser needs to call the API from a page of another origin."""

import pytest

from pdserve.gateway.api_keys import KeyLimits, KeyRing, keys_of

PAGE = "https://page.example"
CHAT_PATH = "/v1/chat/completions"
CHAT = {"model": "org/demo", "messages": [{"role": "user", "content": "x"}]}
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize(("origins", "shown"), [((PAGE,), PAGE), (("*",), "*")])
async def test_a_preflight_needs_no_key_and_every_reply_may_be_read(start_gateway, origins, shown) -> None:
    """C165."""
    gateway = await start_gateway(cors_allow_origins=origins, api_keys=KeyRing(keys_of(("secret",), KeyLimits())))
    url, authorized = gateway.url + CHAT_PATH, {"Origin": PAGE, "Authorization": "Bearer secret"}

    async with gateway.session.options(url, headers=PREFLIGHT) as reply:
        assert reply.status == 204
        assert reply.headers["Access-Control-Allow-Origin"] == shown
        assert reply.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in reply.headers["Access-Control-Allow-Methods"]
    for headers, body, status in (
        ({"Origin": PAGE}, CHAT, 401),
        (authorized, {}, 400),
        (authorized, CHAT, 200),
        (authorized, {**CHAT, "stream": True}, 200),
    ):
        async with gateway.session.post(url, json=body, headers=headers) as reply:
            assert reply.status == status
            assert reply.headers["Access-Control-Allow-Origin"] == shown
            assert reply.headers["Vary"] == "Origin"
            assert "X-Request-Id" in reply.headers["Access-Control-Expose-Headers"]


@pytest.mark.parametrize("origins", [(), ("https://other.example",)])
async def test_other_origins_are_told_nothing(start_gateway, origins) -> None:
    gateway = await start_gateway(cors_allow_origins=origins)

    async with gateway.session.options(gateway.url + CHAT_PATH, headers=PREFLIGHT) as reply:
        assert reply.status == 405
        assert "Access-Control-Allow-Origin" not in reply.headers
    async with gateway.session.post(gateway.url + CHAT_PATH, json=CHAT, headers={"Origin": PAGE}) as reply:
        assert reply.status == 200
        assert "Access-Control-Allow-Origin" not in reply.headers
