"""`pdserve bench`: what it prints, writes and refuses."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from pdserve.cli.commands import run
from pdserve.cli.errors import CliError, SettingError

_NUM_ASKED = web.AppKey("num_asked", list[int])


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "other"}]})


async def _complete(request: web.Request) -> web.StreamResponse:
    """A server of another make: no token ids in its events, usage in a last one; key `secret`."""
    body = await request.json()
    if body["model"] == "odd":
        return web.Response(text='data: {"choices": [1]}\n\n', content_type="text/event-stream")
    if body["model"] == "slow":
        request.app[_NUM_ASKED][0] += 1
        if request.app[_NUM_ASKED][0] > 4:  # somebody presses Ctrl-C while the fifth request is open
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        body["model"] = "other"
    elif request.headers.get("Authorization") != "Bearer secret" or body["model"] != "other":
        raise web.HTTPUnauthorized
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for index in range(body["max_tokens"]):
        event = {"choices": [{"text": f"word{index} "}]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    usage = {"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}}
    await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
    return response


@pytest.fixture
def other_server() -> Iterator[str]:
    """A server of another make, in a thread of its own; its URL."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app[_NUM_ASKED] = [0]
    app.add_routes([web.get("/v1/models", _models), web.post("/v1/completions", _complete)])
    runner = web.AppRunner(app, handler_cancellation=True)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(runner.cleanup())
    loop.close()


def test_the_result_of_any_server_is_printed_and_written(
    other_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    options = ["--num-requests", "4", "--concurrency", "2", "--prompt-tokens", "5", "--output-tokens", "6"]

    code = run(["bench", f"{other_server}/v1", *options, "--json", str(path)], {"PDSERVE_BENCH_API_KEY": "secret"})

    assert code == 0
    result = json.loads(path.read_text())
    assert (result["num_requests"], result["output_tokens"], result["prompt_tokens"]) == (4, 24, 20)
    assert result["itl_ms"]["p50"] <= result["itl_ms"]["p99"] <= result["itl_ms"]["max"]
    assert (result["model"], result["options"]["concurrency"]) == ("other", 2)
    shown = capsys.readouterr().out
    assert "requests      4, failed 0" in shown and "TTFT" in shown


@pytest.mark.usefixtures("sigint_is_heard")
def test_ctrl_c_leaves_the_result_of_what_had_ended(
    other_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    options = ["--num-requests", "9", "--warmup", "2", "--output-tokens", "6", "--json", str(path)]

    code = run(["bench", other_server, "--model", "slow", *options], {})

    assert code == 130
    result = json.loads(path.read_text())
    assert (result["num_requests"], result["num_failed"], result["output_tokens"]) == (2, 0, 12)
    assert result["is_interrupted"] and result["options"]["num_requests"] == 9
    shown = capsys.readouterr()
    assert "2 of 9 requests had ended" in shown.err and "requests      2, failed 0" in shown.out


@pytest.mark.usefixtures("sigint_is_heard")
def test_ctrl_c_before_any_request_has_ended_leaves_no_result(other_server: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = ["--warmup", "4", "--num-requests", "4", "--output-tokens", "6", "--json", str(path)]

    with pytest.raises(KeyboardInterrupt):
        run(["bench", other_server, "--model", "slow", *options], {})

    assert not path.exists()


def test_a_warm_up_that_fails_ends_the_run(other_server: str) -> None:
    with pytest.raises(CliError, match="warm-up failed: 401"):
        run(["bench", other_server], {})


def test_failed_requests_make_the_exit_code(other_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", other_server, "--warmup", "0", "--num-requests", "2", "--json", "-"], {}) == 1
    assert json.loads(capsys.readouterr().out)["num_failed"] == 2


def test_events_of_another_form_are_failures(other_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "odd", "--warmup", "0", "--num-requests", "1", "--json", "-"]

    assert run(["bench", other_server, *options], {}) == 1
    assert "an event is of another form" in json.loads(capsys.readouterr().out)["errors"][0]


def test_a_result_that_cannot_be_written_is_still_printed(
    other_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--num-requests", "2", "--output-tokens", "3", "--json", "/dev/full"]

    with pytest.raises(CliError, match="/dev/full"):
        run(["bench", other_server, *options], {"PDSERVE_BENCH_API_KEY": "secret"})

    assert "requests      2, failed 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["http://h", "--json", "/no/such/folder/result.json"], "--json: there is no directory"),
        (["http://h", "--json", "/"], "--json: '/' is a directory"),
        (["http://h", "--prompt-tokens", "5", "--shared-prefix", "6"], "--shared-prefix is more than"),
        (["http://h", "--arrivals", "constant"], "--arrivals has no effect without --rate"),
        (["http://h", "--rate", "1", "--concurrency", "2"], "--concurrency has no effect with --rate"),
        (["http://h", "--trace", "t.csv", "--output-tokens", "2"], "--output-tokens has no effect with --trace"),
        (["localhost:80"], "URL"),
        (["http://h", "--concurrency", "0"], "--concurrency"),
        (["http://h", "--rate", "fast"], "--rate"),
        (["http://h", "--arrivals", "sometimes"], "--arrivals"),
        (["http://h", "--trace", "t.csv", "--rate", "1"], "--trace"),
        (["http://h", "--trace", "no-such-file.csv"], "no-such-file"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        run(["bench", *options], {})
