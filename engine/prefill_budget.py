"""How many prompt tokens a step may have beside running streams, learned from how long steps take. Pure: no clock."""

_AIM = 0.9  # of the target: the rest is for noise and for what lies between two steps
_MAX_GROWTH = 1.5  # from one step to the next
_MIN_TOKENS = 16  # however long streams alone take
_SMOOTHING = 0.2  # weight of the newest step in the time that streams alone take


class PrefillBudget:
    """A feedback controller for the time of a step: every running stream gets its next token at the end of one.

    Two things are measured: what recent steps without prompt tokens took (`alone`), and what each prompt token of the
    last step with some added to that. The budget is (aim - alone) / (time of a prompt token): exact when the time grows
    linearly, and corrected at each step when it does not. It begins small and grows at most by half from a step to
    the next, and only while it is what limits the step. Where streams alone take longer than the target, prompts
    still get `min_tokens` a step.
    """

    def __init__(self, target_s: float | None, max_tokens: int, min_tokens: int = _MIN_TOKENS) -> None:
        self._aim_s = None if target_s is None else _AIM * target_s
        self._max_tokens = max_tokens
        self._min_tokens = min(min_tokens, max_tokens)
        self._most = float(self._min_tokens)  # what the last steps have shown to be safe, and half as much again
        self._alone_s = 0.0
        self._token_s = 0.0

    @property
    def has_target(self) -> bool:
        """Whether steps have a time to keep to; else nothing is learned from them."""
        return self._aim_s is not None

    def tokens(self, num_streams: int) -> int:
        """Return the most prompt tokens for a step in which `num_streams` get a token; no limit beside none."""
        if self._aim_s is None or num_streams == 0:
            return self._max_tokens
        room_s = self._aim_s - self._alone_s
        wanted = min(self._most, room_s / self._token_s) if self._token_s > 0 else self._most
        return int(min(max(wanted, self._min_tokens), self._max_tokens))

    def observe(self, num_prompt_tokens: int, num_streams: int, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        if self._aim_s is None or num_streams == 0:
            return
        if num_prompt_tokens == 0:
            weight = _SMOOTHING if self._alone_s else 1.0
            self._alone_s += weight * (seconds - self._alone_s)
            return
        is_limited = num_prompt_tokens >= self.tokens(num_streams)
        if not is_limited and seconds <= self._aim_s:
            return  # the end of a prompt: nothing is known of a longer step
        alone_s = min(self._alone_s, 0.9 * seconds)  # an old measurement never explains the whole step
        self._token_s = (seconds - alone_s) / num_prompt_tokens
        self._most = max(self._min_tokens, _MAX_GROWTH * num_prompt_tokens)
