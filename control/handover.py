"""What the prefill node tells the decode node with DONE, beside the blocks: how the sequence goes on."""

from dataclasses import dataclass

import msgpack  # type: ignore[import-untyped]  # ships no types

from pdserve.control.errors import MalformedMessage
from pdserve.engine.sampling_params import MAX_BRANCHES

HANDOVER_VERSION = 2


@dataclass(frozen=True, slots=True)
class Handover:
    """Of each branch the tokens that the prefill node sampled after those whose blocks it ships: one at present.

    A branch without a token has ended there.
    """

    sampled_token_ids: tuple[tuple[int, ...], ...]

    def encode(self) -> bytes:
        """Return the wire form: a msgpack array [version, [[token id, ...], ...]]."""
        encoded: bytes = msgpack.packb([HANDOVER_VERSION, list(map(list, self.sampled_token_ids))])
        return encoded

    @classmethod
    def decode(cls, data: bytes) -> "Handover":
        """Read what `encode` wrote.

        Raises:
            MalformedMessage: it is not a handover of this version.
        """
        try:
            value = msgpack.unpackb(data, max_array_len=MAX_BRANCHES, max_ext_len=0)
        except Exception as error:  # msgpack raises several unrelated types for bad bytes
            raise MalformedMessage("handover", f"is not msgpack ({error})") from error
        match value:
            case [2, [*branches]] if branches and all(map(_is_token_ids, branches)):
                return cls(tuple(map(tuple, branches)))
        raise MalformedMessage("handover", "must be [2, [[token id, ...], ...]]")


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token_id) is int and token_id >= 0 for token_id in value)
