"""Fixtures for all tests: the demo model, tiny seeded checkpoints of the shapes that break people, and a real
Redis on a private Unix socket, which a test may pause, kill and start again.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import zmq.asyncio
from hypothesis import HealthCheck, settings

from pdserve.cli.embedded_redis import find_redis_server, temp_dir_for_sockets
from pdserve.cli.errors import CliError
from pdserve.control.redis_connection import RedisConnection, connect
from pdserve.engine.model_source import resolve_model

# Idle threads of a pool must not spin: on few cores they starve whoever has work. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What the tests serve is on this machine, and clients that heed a proxy of yours must not ask it for that.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, (os.environ.get(_name), "127.0.0.1", "localhost")))
for _name in ("all_proxy", "ALL_PROXY"):
    os.environ.pop(_name, None)  # beside a SOCKS proxy openai's client is not even made

# The same code gets the same verdict, on a busy machine too; HYPOTHESIS_PROFILE=explore looks at other examples.
settings.register_profile("repeat", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("repeat"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))

TinyModel = Callable[..., Path]


def pytest_configure(config: pytest.Config) -> None:
    """Run Triton's kernels in its interpreter and show no GPU to anyone, unless the tests marked `gpu` are asked for.

    What an engine on its default device computes, and processes that tests start, would be on a GPU where there is one,
    and interpreted there. TRITON_INTERPRET is read when triton is loaded, which other libraries may do.
    """
    wants_gpu = config.getoption("markexpr") == "gpu"
    if os.environ.setdefault("TRITON_INTERPRET", "0" if wants_gpu else "1") == "1":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Set apart what imports made, over half a million objects: a full collection of it would hold up whatever test is
    running by a second, which those that have to do with leases would take for a dead peer.
    """
    gc.collect()
    gc.freeze()


_SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """Return the directory of the demo model, fetched now if `make test` has not done it."""
    return resolve_model(None, progress=lambda line: None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Return a function that saves a random checkpoint with a tokenizer and gives its directory.

    Equal arguments share one directory: nobody may write into it.
    """
    made: dict[str, Path] = {}

    def make(model_type: str = "llama", seed: int = 0, **overrides: Any) -> Path:
        key = repr((model_type, seed, sorted(overrides.items(), key=lambda item: item[0])))
        if key not in made:
            folder = tmp_path_factory.mktemp(model_type)
            _save_checkpoint(folder, model_type, seed, {**_SHAPE, **overrides})
            made[key] = folder  # not before it is whole: a test may run out of time on the way
        return made[key]

    return make


def _save_checkpoint(folder: Path, model_type: str, seed: int, shape: dict[str, Any]) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
        elif (parameter == 1).all():  # norms: a weight of 1 would hide that it is forgotten
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.save_pretrained(folder)
    words = {f"w{token_id}": token_id for token_id in range(shape["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(folder / "tokenizer.json"))


def _find_redis_server() -> str:
    try:
        return str(find_redis_server())
    except CliError as error:
        pytest.skip(str(error))


class RedisServer:
    """One redis-server process; `kill` loses everything it held."""

    def __init__(self, folder: Path) -> None:
        self.socket_path = folder / "redis.sock"
        self.url = f"unix://{quote(str(self.socket_path))}"
        self._log = folder / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.socket_path.unlink(missing_ok=True)
        command = [_find_redis_server(), "--port", "0", "--unixsocket", str(self.socket_path), "--save", ""]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.socket_path.parent
            )

    async def wait_ready(self) -> None:
        async with asyncio.timeout(50):
            while not self._answers():
                assert self._process is not None and self._process.poll() is None, self._log.read_text()
                await asyncio.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=30)
            self._process = None

    def pause(self) -> None:
        """Stop it as a machine that swaps does: it accepts, but does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.settimeout(1)
            probe.connect(str(self.socket_path))
            probe.sendall(b"PING\r\n")
            return probe.recv(64).startswith(b"+PONG")
        return False


@pytest.fixture(scope="session")
def redis_server_binary() -> str:
    return _find_redis_server()


@pytest.fixture(scope="session")
def redis_folder() -> Iterator[Path]:
    # Not tmp_path: a Unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pdserve-", dir=temp_dir_for_sockets()) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def shared_redis(redis_folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(redis_folder)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def redis(shared_redis: RedisServer) -> AsyncIterator[RedisConnection]:
    await shared_redis.wait_ready()
    connection = connect(shared_redis.url, timeout_s=30.0)  # a busy machine's; tests of the bound make their own
    await connection.call("FLUSHALL")
    yield connection
    await connection.close()


@pytest.fixture
async def own_redis() -> AsyncIterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="pdserve-", dir=temp_dir_for_sockets()) as folder:
        server = RedisServer(Path(folder))
        server.start()
        await server.wait_ready()
        yield server
        server.kill()


@pytest.fixture
def sigint_is_heard() -> Iterator[None]:
    """Have Python's own handler, also where the tests run in the background of a shell, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)
