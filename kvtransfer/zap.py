"""The authenticator of a ZeroMQ context (ZAP, RFC 27): lets in who holds a trusted CURVE key, and nobody else.

libzmq asks before a connection exists for this process: a stranger's words are never read and nothing is allocated
for them. There is one authenticator a context.
"""

import logging
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio
from zmq.utils import z85

from pdserve.kvtransfer.curve_keys import CurveKeys

logger = logging.getLogger(__name__)

ZAP_DOMAIN = "kv"
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_CURVE = b"CURVE"


class KeyAuthenticator:
    """Answers libzmq's questions about connecting peers. `run` is its whole life."""

    def __init__(self, context: zmq.asyncio.Context, keys: CurveKeys, on_refusal: Callable[[], None]) -> None:
        self._context = context
        self._keys = keys
        self._on_refusal = on_refusal
        self._socket: zmq.asyncio.Socket | None = None

    def bind(self) -> None:
        """Begin to take questions; must come before the socket that asks is bound."""
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)

    def close(self) -> None:
        """Take no more questions; `run` must have ended."""
        if self._socket is not None:
            self._socket.close()

    async def run(self) -> None:
        """Answer until cancelled."""
        assert self._socket is not None
        while True:
            question = await self._socket.recv_multipart()
            await self._socket.send_multipart(self._answer(question))

    def _answer(self, question: Sequence[bytes]) -> list[bytes]:
        request_id = question[1] if len(question) > 1 else b""
        if len(question) != 7 or question[0] != _VERSION or question[5] != _CURVE or len(question[6]) != 32:
            return self._refuse(request_id, "not a CURVE peer")
        public_key = z85.encode(question[6]).decode()
        if not self._keys.trusts(public_key):
            return self._refuse(request_id, f"{public_key} is not a trusted key")
        return [_VERSION, request_id, b"200", b"OK", public_key.encode(), b""]

    def _refuse(self, request_id: bytes, why: str) -> list[bytes]:
        logger.warning("a peer was refused: %s", why)
        self._on_refusal()
        return [_VERSION, request_id, b"400", b"not a trusted key", b"", b""]
