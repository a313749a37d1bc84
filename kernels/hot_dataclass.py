"""Values of which a step makes one for each of its sequences: frozen for the type checker alone. Torch-free.

A frozen dataclass sets each field through `object.__setattr__`, which makes it three times as slow to build, and by a
half in caches that a model has just emptied (see docs/performance.md, "How a step grows").
"""

from typing import TYPE_CHECKING

__all__ = ["hot_dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass as hot_dataclass
else:
    from dataclasses import dataclass

    def hot_dataclass(*, frozen: bool, slots: bool):
        """Return what makes a dataclass of a class: equal and hashed by its fields, and not to be changed."""
        return dataclass(slots=slots, unsafe_hash=frozen)
