"""Pages of a list of items, as OpenAI's lists have them: `order`, `limit`, `after`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.engine.errors import InvalidRequest
from pdserve.gateway.other_reply_types import InputItems

MAX_ITEMS = 100
DEFAULT_ITEMS = 20
ORDERS = ("asc", "desc")
_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class ItemPage:
    """Which items of a list are wanted: `limit` of them, from the last one back unless `is_oldest_first`."""

    is_oldest_first: bool
    limit: int
    after: str | None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "ItemPage":
        """Return what `query` asks for.

        Raises:
            InvalidRequest: one of its values is wrong.
        """
        order, limit = query.get("order", "desc"), query.get("limit", str(DEFAULT_ITEMS))
        if order not in ORDERS:
            raise InvalidRequest("order", f"must be {' or '.join(ORDERS)}")
        if not _WHOLE_NUMBER.fullmatch(limit) or not 1 <= int(limit) <= MAX_ITEMS:
            raise InvalidRequest("limit", f"must be a whole number between 1 and {MAX_ITEMS}")
        return cls(order == "asc", int(limit), query.get("after"))

    def cut(self, items: Sequence[dict[str, Any]]) -> InputItems:
        """Return this page of `items`, which come oldest first.

        Raises:
            InvalidRequest: `after` is none of them.
        """
        ordered = list(items if self.is_oldest_first else reversed(items))
        if self.after is not None:
            ids = [item["id"] for item in ordered]
            if self.after not in ids:
                raise InvalidRequest("after", "must be the id of an item of this list")
            ordered = ordered[ids.index(self.after) + 1 :]
        shown = ordered[: self.limit]
        return {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(ordered) > len(shown),
        }
