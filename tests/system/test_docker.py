"""The Compose file as a user runs it: built, healthy, serving; and serving again after a node was killed.

Needs a Docker engine with Compose that the `docker` command reaches (DOCKER_HOST and the like are respected).
"""

import json
import os
import secrets
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import APIError, OpenAI

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

COMPOSE_FILE = Path(__file__).parents[2] / "docker" / "compose.yaml"
MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

Compose = Callable[..., str]


@pytest.fixture(scope="module")
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def compose(port: int) -> Iterator[Compose]:
    """Run `docker compose` on a project of its own, which is gone with its volumes at the end."""
    project = f"pdserve-test-{secrets.token_hex(4)}"
    environment = {**os.environ, "PDSERVE_PORT": str(port), "PDSERVE_NUM_THREADS": "2"}

    def run(*arguments: str, timeout_s: float = 120.0) -> str:
        command = ["docker", "compose", "-p", project, "-f", str(COMPOSE_FILE), *arguments]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
        )
        assert result.returncode == 0, f"{' '.join(command)}:\n{result.stdout}\n{result.stderr}"
        return result.stdout

    try:
        run("ps", timeout_s=20.0)
    except (AssertionError, FileNotFoundError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no Docker engine with Compose answers: {error}")
    try:
        run("up", "--detach", "--build", "--wait", "--scale", "prefill=2", timeout_s=1500.0)
        yield run
    finally:
        run("down", "--volumes", "--timeout", "5")


@pytest.fixture(scope="module")
def client(compose: Compose, port: int) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60.0, max_retries=0) as client:
        yield client


def stream_answer(client: OpenAI, max_tokens: int = 16) -> Iterator[str]:
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=max_tokens, temperature=0, stream=True
    )
    with stream:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


def test_stream_through_prefill_and_decode_containers(client: OpenAI) -> None:
    assert "Paris" in "".join(stream_answer(client))


def test_every_container_is_healthy_and_without_rights(compose: Compose) -> None:
    services = compose("ps", "--format", "{{.Service}} {{.Health}}").split("\n")

    assert sorted(line for line in services if line) == [
        "decode healthy",
        "gateway healthy",
        "prefill healthy",
        "prefill healthy",
        "redis healthy",
    ]
    for service in ("gateway", "prefill", "decode"):
        assert compose("exec", "-T", service, "id", "-u").strip() == "10001"


def test_all_travels_under_a_key_that_gateway_and_nodes_can_only_read(
    compose: Compose, client: OpenAI, port: int
) -> None:
    key = "/home/pdserve/keys/transfer.key"

    assert compose("exec", "-T", "decode", "stat", "-c", "%a %u", key).strip() == "600 10001"
    assert "refused" in compose("exec", "-T", "decode", "bash", "-c", f"echo x 2>&1 >>{key} || echo refused")
    assert "neither authenticated nor encrypted" not in compose("logs", "decode")
    assert "refused" in compose("exec", "-T", "gateway", "bash", "-c", f"echo x 2>&1 >>{key} || echo refused")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/admin/status", timeout=10) as reply:
        before = json.loads(reply.read())["routes"]["disaggregated"]
    assert "Paris" in "".join(stream_answer(client))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/admin/status", timeout=10) as reply:
        assert json.loads(reply.read())["routes"]["disaggregated"] == before + 1


def test_doctor_proves_every_node_and_link_encrypted_and_finds_strangers_refused(
    compose: Compose, client: OpenAI
) -> None:
    found = json.loads(compose("exec", "-T", "gateway", "pdserve", "doctor", "--json"))

    assert (found["ok"], found["problems"]) == (True, [])
    assert sorted(node["role"] for node in found["nodes"]) == ["decode", "prefill", "prefill"]
    assert all(node["is_encrypted"] for node in found["nodes"])
    assert len(found["links"]) == 2 and all(link["is_encrypted"] for link in found["links"])
    assert all(link["mb_per_s"] > 0 and link["round_trip_ms"] > 0 for link in found["links"])
    script = "unset PDSERVE_TRANSFER_KEY_FILE; pdserve doctor 2>&1 || echo refused"
    assert "perhaps the keys of both ends differ" in compose("exec", "-T", "gateway", "bash", "-c", script)


def test_gateway_image_has_no_torch(compose: Compose) -> None:
    find = "import importlib.util as u; print(u.find_spec('torch'))"

    assert compose("exec", "-T", "gateway", "/opt/pdserve/bin/python", "-c", find).strip() == "None"


def test_service_recovers_from_a_killed_decode_node(compose: Compose, client: OpenAI) -> None:
    answer = stream_answer(client, max_tokens=512)
    next(answer)

    compose("exec", "-T", "decode", "bash", "-c", "kill -KILL -1")

    try:
        rest = "".join(answer)  # migrated to the node that came back
        assert rest
    except APIError as error:  # or one terminal error, in time
        assert error.message
    deadline = time.monotonic() + 120
    while True:
        try:
            assert "Paris" in "".join(stream_answer(client))
            break
        except APIError:
            assert time.monotonic() < deadline, "the service did not recover"
            time.sleep(1.0)  # a client's own pause between tries


def test_scaling_up_adds_nodes_and_replaces_none(compose: Compose, client: OpenAI) -> None:
    before = set(compose("ps", "--quiet").split())

    compose("up", "--detach", "--wait", "--scale", "prefill=2", "--scale", "decode=2", timeout_s=300.0)

    assert before < set(compose("ps", "--quiet").split())
    assert compose("ps", "--quiet", "decode").count("\n") == 2
    assert "Paris" in "".join(stream_answer(client))
