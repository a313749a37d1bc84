"""Whether a port can be bound, asked before anything slow is started."""

import errno
import socket

from pdserve.cli.errors import SettingError


def free_port(host: str, port: int) -> int:
    """Return `port`, or a free one for 0.

    Raises:
        SettingError: it cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise SettingError(f"--host: {host!r} is not an address of this machine ({error.strerror})") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingError(
                f"--port: {port} is in use on {host}; stop what uses it, or give another (0 takes a free one)"
            ) from None
        raise SettingError(f"--host, --port: cannot bind {host}:{port} ({error.strerror})") from None
