"""What the fields of a message may be: each check returns the value, or raises ValueError."""

from collections.abc import Callable

Check = Callable[[object], object]


def text(max_length: int, min_length: int = 0) -> Check:
    """Text of so many bytes in UTF-8."""

    def check(value: object) -> object:
        if not isinstance(value, str) or not min_length <= len(value.encode("utf-8")) <= max_length:
            raise ValueError(f"must be text of {min_length}..{max_length} bytes")
        return value

    return check


def clip(value: str, max_length: int) -> str:
    """Return the beginning of a text that has at most so many bytes in UTF-8."""
    return value.encode("utf-8", "replace")[:max_length].decode("utf-8", "ignore")


def one_of(*names: str) -> Check:
    """One of these names."""

    def check(value: object) -> object:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return value

    return check


def natural(maximum: int) -> Check:
    """A whole number in [0, maximum]."""

    def check(value: object) -> object:
        if type(value) is not int or not 0 <= value <= maximum:
            raise ValueError(f"must be a whole number in [0, {maximum}]")
        return value

    return check


def naturals(maximum: int, max_items: int) -> Check:
    """A list of at most so many whole numbers in [0, maximum]; it becomes a tuple. There is one for each block."""

    def check(value: object) -> object:
        if not isinstance(value, list | tuple) or len(value) > max_items:
            raise ValueError(f"must be a list of at most {max_items}")
        if value and not (set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= maximum):
            raise ValueError(f"must be whole numbers in [0, {maximum}]")
        return tuple(value)

    return check


def blob(max_length: int, min_length: int = 0) -> Check:
    """So many bytes."""

    def check(value: object) -> object:
        if not isinstance(value, bytes) or not min_length <= len(value) <= max_length:
            raise ValueError(f"must be {min_length}..{max_length} bytes")
        return value

    return check


def flag(value: object) -> object:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def many(check_item: Check, max_items: int) -> Check:
    """A list of at most so many of what `check_item` takes; it becomes a tuple."""

    def check(value: object) -> object:
        if not isinstance(value, list | tuple) or len(value) > max_items:
            raise ValueError(f"must be a list of at most {max_items}")
        return tuple([check_item(item) for item in value])

    return check
