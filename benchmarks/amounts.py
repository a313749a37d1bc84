"""How many, how much, how long: types for argparse, which refuse what no measurement has before anything runs."""

import argparse
import math
from collections.abc import Callable


def above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return the type of finite numbers above 0, read by `kind`: int or float."""

    def positive(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    positive.__name__ = kind.__name__  # argparse names it for what is no number at all
    return positive
