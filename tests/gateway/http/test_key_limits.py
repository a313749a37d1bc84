"""Limits of API keys as clients meet them, over a real Redis."""

import asyncio
import hashlib
from pathlib import Path

import pytest

from pdserve.control.keyspace import Keyspace
from pdserve.control.quota_store import QuotaStore
from pdserve.gateway.api_keys import ApiKey, KeyLimits, KeyRing, keys_of, load_keys
from pdserve.gateway.errors import InvalidKeyFile

MODEL = "org/demo"
BODY = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 20}
ANN = {"Authorization": "Bearer ann"}


def ring(**limits: int) -> KeyRing:
    return KeyRing(keys_of(("ann", "bob"), KeyLimits(**limits)))


@pytest.fixture
def quotas(redis) -> QuotaStore:
    return QuotaStore(redis, Keyspace("test"), 60.0)


async def test_a_key_at_its_limit_is_told_when_to_come_back(start_gateway, quotas):
    gateway = await start_gateway(api_keys=ring(requests_per_minute=2, tokens_per_minute=1000), quotas=quotas)

    for left in ("1", "0"):
        status, reply, response = await gateway.post("/v1/completions", BODY, headers=ANN)
        assert status == 200 and response.headers["x-ratelimit-remaining-requests"] == left
        assert response.headers["x-ratelimit-limit-requests"] == "2"
    status, reply, response = await gateway.post("/v1/completions", BODY, headers=ANN)

    assert status == 429 and reply["error"]["type"] == "rate_limit_error"
    assert reply["error"]["code"] == "rate_limit_exceeded" and 1 <= int(response.headers["Retry-After"]) <= 30
    assert len(gateway.source.started) == 2
    assert (await gateway.post("/v1/completions", BODY, headers={"Authorization": "Bearer bob"}))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_charged_beyond_the_answer_is_given_back(start_gateway, quotas, stream):
    gateway = await start_gateway(api_keys=ring(tokens_per_day=60), quotas=quotas)
    gateway.say("one two")

    for _ in range(3):  # 24 are charged each time, and fewer than 10 of them used
        async with gateway.session.post(
            gateway.url + "/v1/completions", json={**BODY, "stream": stream}, headers=ANN
        ) as response:
            assert response.status == 200, await response.text()
            await response.read()
    status, reply, _ = await gateway.post("/v1/completions", {**BODY, "max_tokens": 100}, headers=ANN)
    assert status == 429 and reply["error"]["code"] == "insufficient_quota"


async def test_requests_at_one_time_are_limited_and_a_cancelled_one_makes_room(start_gateway, quotas):
    gateway = await start_gateway(api_keys=ring(max_concurrent=1), quotas=quotas)
    gateway.say("one two three", hold_after=1)
    gateway.script.proceed.clear()
    held = asyncio.create_task(gateway.post("/v1/completions", BODY, headers=ANN))
    async with asyncio.timeout(50):
        await gateway.source.has_started.wait()

    assert (await gateway.post("/v1/completions", BODY, headers=ANN))[0] == 429

    response_id = gateway.source.started[0].request.request_id.removesuffix("-0")
    async with gateway.session.delete(f"{gateway.url}/v1/requests/{response_id}", headers=ANN) as response:
        assert response.status == 200
    assert (await held)[0] == 499
    gateway.script.proceed.set()
    assert (await gateway.post("/v1/completions", BODY, headers=ANN))[0] == 200


async def test_admin_has_keys_of_its_own(start_gateway):
    gateway = await start_gateway(api_keys=ring(), admin_keys=KeyRing(keys_of(("root",), KeyLimits())))

    async def status(path: str, key: str) -> int:
        async with gateway.session.get(gateway.url + path, headers={"Authorization": f"Bearer {key}"}) as response:
            return response.status

    assert [await status("/admin/status", key) for key in ("root", "ann", "nobody")] == [200, 403, 401]
    assert [await status("/v1/models", key) for key in ("root", "ann", "nobody")] == [401, 200, 401]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return path


def test_a_file_of_keys_holds_digests_and_limits(tmp_path):
    digest = hashlib.sha256(b"long and random").hexdigest()
    path = write(tmp_path, f'[[keys]]\nname = "team-a"\nsha256 = "{digest}"\nrequests_per_minute = 5\n')

    keys = load_keys(path, KeyLimits(max_concurrent=3, requests_per_minute=9))

    assert keys == [ApiKey("team-a", bytes.fromhex(digest), KeyLimits(requests_per_minute=5, max_concurrent=3))]
    assert KeyRing(keys).find(b"long and random") == keys[0] and KeyRing(keys).find(b"long and randon") is None


DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no [[keys]]"),
        ("keys = 5", "no [[keys]]"),
        ("[[keys]", "not TOML"),
        (f'[[keys]]\nname = "a b"\nsha256 = "{DIGEST}"', "keys[0].name"),
        ('[[keys]]\nname = "a"\nsha256 = "abc"', "keys[0].sha256"),
        (f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"\nrpm = 4', "'rpm' is not a field"),
        (f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"\ntokens_per_day = 0', "tokens_per_day"),
        (f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"\nmax_concurrent = true', "max_concurrent"),
        (f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"\n' * 2, "same name"),
    ],
)
def test_a_wrong_file_of_keys_says_where(tmp_path, text, problem):
    with pytest.raises(InvalidKeyFile) as raised:
        load_keys(write(tmp_path, text), KeyLimits())
    assert problem in str(raised.value)
