import pytest
import zmq.asyncio

from pdserve.kvtransfer import SenderConfig
from pdserve.kvtransfer.sockets import open_dealer

SYSTEMS_CHOICE = -1


@pytest.mark.parametrize(
    ("endpoint", "is_bounded"),
    [
        ("tcp://127.0.0.1:5000", True),
        ("tcp://[::1]:5000", True),
        ("tcp://10.0.0.1:5000", False),  # a long way needs what the system measures it to need
        ("ipc://@kv", False),
    ],
)
def test_only_loopback_tcp_has_a_bounded_send_buffer(endpoint, is_bounded):
    with zmq.asyncio.Context() as context, open_dealer(context, endpoint, SenderConfig(), None) as socket:
        size_bytes = socket.getsockopt(zmq.SNDBUF)

    assert (size_bytes != SYSTEMS_CHOICE) == is_bounded
    assert size_bytes < 1024 * 1024
