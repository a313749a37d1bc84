"""How a model writes function calls into its answer: what every syntax has to say."""

from typing import Protocol

from pdserve.gateway.call_text import CallText, Reading


class ToolSyntax(Protocol):
    """Where blocks of calls begin. `markers` begin one everywhere, `bare` only where nothing was said before.

    `separators` may stand between bare blocks, beside white space.
    """

    markers: tuple[str, ...]
    bare: str
    separators: str

    def read(self, text: CallText, marker: str) -> Reading[None]:
        """Tell the calls of the block that `text` begins with, `marker` first, and go behind its end.

        Raises:
            MalformedCall: it is none, or not from here on.
        """
