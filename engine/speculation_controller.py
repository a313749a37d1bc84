"""Whether and how far to speculate, decided from what was measured. Pure: times come in as arguments.

Two questions. For a sequence: how many drafts, from how many of its last ones were accepted. For a batch size: does a
token cost less with drafts or without, from running means of both, the loser being tried again ever more rarely.
"""

from dataclasses import dataclass

_WARM_UP_STEPS = 4  # measured steps before a mean is believed
_PROBE_STEPS = 2
_FIRST_PROBE_INTERVAL = 32  # steps; doubles each time the loser loses again
_LONGEST_PROBE_INTERVAL = 2048
_WEIGHT = 0.2  # of the newest measurement in a running mean
_FIRST_PAUSE = 4
_LONGEST_PAUSE = 64


class DraftLength:
    """How many drafts one sequence gets: twice as many after full acceptance, half after none, then pauses."""

    __slots__ = ("_length", "_most", "_num_to_skip", "_pause")

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = most
        self._pause = _FIRST_PAUSE
        self._num_to_skip = 0

    def next(self) -> int:
        """Return the limit of the next step; 0 while pausing."""
        if self._num_to_skip > 0:
            self._num_to_skip -= 1
            return 0
        return self._length

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a verified step that had drafts."""
        if num_accepted == num_drafted:
            self._length = min(self._most, 2 * max(self._length, 1))
        else:
            self._length = max(num_accepted, self._length // 2, 1)
        if num_accepted > 0:
            self._pause = _FIRST_PAUSE
        elif num_drafted == 1:  # at its shortest and still wrong
            self._num_to_skip = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)


@dataclass(frozen=True, slots=True)
class StepCost:
    """One decode step as measured: sequences in it, tokens it emitted, seconds with drafting and verification."""

    num_sequences: int
    num_emitted: int
    seconds: float


class SpeculationController:
    """Speculates for a batch size while that is the cheaper way to a token there."""

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}

    def should_speculate(self, num_sequences: int) -> bool:
        """Whether a step with so many decoding sequences should have drafts."""
        return self._choice(num_sequences).wants_drafts()

    def record(self, cost: StepCost, *, had_drafts: bool) -> None:
        """Learn from a step."""
        if cost.num_emitted > 0:
            self._choice(cost.num_sequences).record(cost.seconds / cost.num_emitted, had_drafts)

    def _choice(self, num_sequences: int) -> "_Choice":
        return self._choices.setdefault(num_sequences.bit_length(), _Choice())


class _Choice:
    """The measured cost of a token with and without drafts, and when the dearer way is tried again."""

    __slots__ = ("_costs", "_interval", "_num_measured", "_num_probes_left", "_num_since_probe")

    def __init__(self) -> None:
        self._costs = {True: 0.0, False: 0.0}
        self._num_measured = {True: 0, False: 0}
        self._interval = _FIRST_PROBE_INTERVAL
        self._num_since_probe = 0
        self._num_probes_left = 0

    def wants_drafts(self) -> bool:
        for way in (True, False):
            if self._num_measured[way] < _WARM_UP_STEPS:
                return way
        return self._better if self._num_probes_left == 0 else not self._better

    def record(self, seconds_per_token: float, had_drafts: bool) -> None:
        better_before = self._better
        num_measured = self._num_measured[had_drafts]
        # The first measurements weigh alike: a slow first step must not decide.
        weight = max(_WEIGHT, 1 / (num_measured + 1))
        self._costs[had_drafts] += weight * (seconds_per_token - self._costs[had_drafts])
        self._num_measured[had_drafts] = num_measured + 1
        if min(self._num_measured.values()) < _WARM_UP_STEPS:
            return
        if self._better != better_before:
            self._interval, self._num_since_probe, self._num_probes_left = _FIRST_PROBE_INTERVAL, 0, 0
        elif self._num_probes_left > 0:
            self._count_probe(had_drafts)
        else:
            self._num_since_probe += 1
            if self._num_since_probe >= self._interval:
                self._num_probes_left = _PROBE_STEPS

    def _count_probe(self, had_drafts: bool) -> None:
        if had_drafts != self._better:
            self._num_probes_left -= 1
            if self._num_probes_left == 0:
                self._num_since_probe = 0
                self._interval = min(2 * self._interval, _LONGEST_PROBE_INTERVAL)

    @property
    def _better(self) -> bool:
        """Whether drafts make a token cheaper, as far as is known."""
        return self._costs[True] <= self._costs[False]
