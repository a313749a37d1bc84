"""Errors of the engine.

PdserveError
├── InvalidRequest (also ValueError)   the caller's mistake; names the field
├── ModelError                         the model cannot be loaded or is not supported
├── GrammarFailed                      a grammar cannot be compiled, or an answer cannot go on in it
├── NoFreeBlocks                       the block pool cannot satisfy an allocation now
├── CorruptBlock                       a KV block on disk is not what was written there
├── EngineStopped                      the engine thread has ended
└── StepInterrupted                    a step was given up half-way because the engine is to end
"""


class PdserveError(Exception):
    """Root of every error that pdserve raises on purpose."""


class InvalidRequest(PdserveError, ValueError):
    """A request that can never be served; `field` is the name the user gave it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type["InvalidRequest"], tuple[str, str]]:
        return type(self), (self.field, self.message)


class ModelError(PdserveError):
    """The model directory cannot be served; the text says what is wrong and what to do."""


class GrammarFailed(PdserveError):
    """A grammar cannot be compiled, or an answer cannot go on in it; the text says why."""


class NoFreeBlocks(PdserveError):
    """Fewer blocks are free or evictable than were asked for."""

    def __init__(self, num_needed: int, num_available: int) -> None:
        super().__init__(f"{num_needed} blocks needed, {num_available} available")
        self.num_needed = num_needed
        self.num_available = num_available


class CorruptBlock(PdserveError):
    """A block file is damaged, of another version or model, or holds another block; the text says which."""


class EngineStopped(PdserveError):
    """The engine thread has ended; nothing more will be computed."""


class StepInterrupted(PdserveError):
    """A step was given up half-way: the engine is to end, and its blocks hold nothing that may be used."""
