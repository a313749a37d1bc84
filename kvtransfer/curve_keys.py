"""Who may talk on the KV plane: CURVE key pairs and the public keys that are trusted. Keys are Z85 text of 40
characters; where they are kept is the caller's business."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A node's own key pair and the public keys of its peers. With no peers named all nodes share this one pair."""

    public_key: str
    secret_key: str = field(repr=False)
    peer_keys: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, key in (("public_key", self.public_key), ("secret_key", self.secret_key)):
            _check_key(name, key)
        for key in self.peer_keys:
            _check_key("a key of peer_keys", key)
        if zmq.curve_public(self.secret_key.encode()).decode() != self.public_key:
            raise ValueError("public_key does not belong to secret_key")

    @classmethod
    def from_secret(cls, secret_key: str, peer_keys: Iterable[str] = ()) -> "CurveKeys":
        """Derive the public key from the secret one.

        Raises:
            ValueError: a key is not Z85 text of 40 characters.
        """
        _check_key("secret_key", secret_key)
        return cls(zmq.curve_public(secret_key.encode()).decode(), secret_key, frozenset(peer_keys))

    @classmethod
    def load(cls, secret_file: Path, trust_file: Path | None = None) -> "CurveKeys":
        """Read a secret key from one file and the peers' public keys, one a line, from another; `#` begins a comment.

        Raises:
            ValueError: a file has something else; the message names it.
            OSError: a file cannot be read.
        """
        secrets = _lines(secret_file)
        if len(secrets) != 1:
            raise ValueError(f"{secret_file} must hold one secret key, it has {len(secrets)} lines")
        try:
            return cls.from_secret(secrets[0], _lines(trust_file) if trust_file is not None else ())
        except ValueError as error:
            raise ValueError(f"{secret_file}, {trust_file}: {error}") from error

    def trusts(self, public_key: str) -> bool:
        """Whether a peer of this key may talk to this node."""
        return public_key in self.peer_keys if self.peer_keys else public_key == self.public_key


def generate_keys() -> CurveKeys:
    """Make a new key pair; as it stands it is one for all nodes to share."""
    public_key, secret_key = zmq.curve_keypair()
    return CurveKeys(public_key.decode(), secret_key.decode())


def _check_key(name: str, key: str) -> None:
    try:
        is_key = len(z85.decode(key)) == _KEY_BYTES
    except (ValueError, KeyError, AttributeError, TypeError):
        is_key = False
    if not is_key:  # the key itself stays out of the message
        raise ValueError(f"{name} is not Z85 text of 40 characters")


def _lines(file: Path) -> list[str]:
    # Z85 has `#` among its digits: a comment is a line of its own, or stands after white space.
    lines = (line.strip() for line in file.read_text("utf-8").splitlines())
    return [line.split()[0] for line in lines if line and not line.startswith("# ")]
