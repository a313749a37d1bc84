"""The limits of API keys around each request: charged before work, settled after it, told in OpenAI's headers."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.control.errors import RedisUnavailable
from pdserve.control.quota_store import Quota, QuotaAnswer, QuotaLimit, QuotaStore
from pdserve.gateway.api_keys import ApiKey
from pdserve.gateway.error_responses import ErrorReply, HttpError
from pdserve.gateway.running_choices import RunningChoices

logger = logging.getLogger(__name__)

_CODES = {
    QuotaLimit.REQUESTS_PER_MINUTE: "rate_limit_exceeded",
    QuotaLimit.TOKENS_PER_MINUTE: "rate_limit_exceeded",
    QuotaLimit.MAX_CONCURRENT: "rate_limit_exceeded",
    QuotaLimit.TOKENS_PER_DAY: "insufficient_quota",
}


class ChargedRequest:
    """One request under the limits of its key; `num_tokens` becomes what it really used."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers
        self.num_tokens = 0

    @asynccontextmanager
    async def following(self, running: RunningChoices) -> AsyncIterator[None]:
        """Charge what `running` has handed out when the block ends, in whatever way."""
        try:
            yield
        finally:
            usage = running.usage()
            self.num_tokens = usage.num_prompt_tokens + usage.num_output_tokens


@asynccontextmanager
async def charged(
    store: QuotaStore, key: ApiKey | None, request_id: str, num_tokens: int
) -> AsyncIterator[ChargedRequest]:
    """Run the body under the limits of `key`, charged `num_tokens` at first and what was used at last.

    Raises:
        HttpError: a limit refuses it (429, with when to come back).
        RedisUnavailable: it cannot be charged now.
    """
    if key is None or key.limits.is_none:
        yield ChargedRequest({})
        return
    limits = key.limits
    quota = Quota(limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day, limits.max_concurrent)
    answer = await store.take(key.name, request_id, num_tokens, quota)
    if answer.refused_by is not None:
        raise _refusal(answer, quota)
    request = ChargedRequest(_headers(answer, quota))
    try:
        yield request
    finally:
        try:
            await store.settle(key.name, request_id, request.num_tokens - num_tokens, quota)
        except RedisUnavailable as error:
            logger.warning("what %s used is not settled: %s", key.name, error, extra={"request_id": request_id})


def _refusal(answer: QuotaAnswer, quota: Quota) -> HttpError:
    assert answer.refused_by is not None
    limit = getattr(quota, answer.refused_by.value)
    message = f"this API key has reached its limit {answer.refused_by} of {limit}; try again in {answer.wait_s:.1f} s"
    code = _CODES[answer.refused_by]
    return HttpError(ErrorReply(429, message, code=code, retry_after_s=answer.wait_s, headers=_headers(answer, quota)))


def _headers(answer: QuotaAnswer, quota: Quota) -> dict[str, str]:
    """OpenAI's names; those of limits that do not exist are left out."""
    shown = {
        "x-ratelimit-limit-requests": quota.requests_per_minute,
        "x-ratelimit-remaining-requests": answer.requests_left,
        "x-ratelimit-limit-tokens": quota.tokens_per_minute,
        "x-ratelimit-remaining-tokens": answer.tokens_left,
    }
    return {name: str(value) for name, value in shown.items() if value is not None}
