"""From logits to token ids in one launch, as kernels/sampling.py: edits, temperature, top-k, top-p, min-p, Gumbel-max.

    token = argmax over kept ids of logit / temperature - log E(seed, position, id)

What the request does to logits (kernels/logit_edits.py) is written to the row itself first. E is the exponential noise
that the sampler draws: Philox 4x64-10 (Salmon et al. 2011), keyed by the seed and counted by
the position, computed here for each id by itself. Scores are float64, so the choice is the sampler's unless two differ
in the last bits. Ties at the border of top-k or top-p are all kept.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-any-return,attr-defined"

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.logit_edits import LogitEdits
from pdserve.kernels.sampling import SEED_MASK, RowAnswer, RowRequest

_TILE = 1024  # at most
_NOT_FINITE = -2  # instead of a token; -1: nothing is allowed


@dataclass(frozen=True, slots=True)
class EditedRows:
    """What is done to each row before: entries [starts[row], starts[row + 1]) are the row's edits."""

    starts: Tensor  # [num_rows + 1] int32
    token_ids: Tensor  # [num_edits] int32
    biases: Tensor  # [num_edits] float32
    counts: Tensor  # [num_edits] int32, in the output; -1 where not even in the prompt
    penalties: Tensor  # [num_rows, 3] float32: repetition, presence, frequency
    masks: Tensor  # [num_masks, ceil(vocab_size / 32)] int32, a bit for each id that is allowed
    mask_of: Tensor  # [num_rows] int32, the row's mask; -1: none

    @classmethod
    def of(cls, edits: Sequence[LogitEdits | None], vocab_size: int, device: torch.device) -> "EditedRows":
        """Lay the edits of rows out."""
        each = [one or LogitEdits() for one in edits]
        entries = [_entries(one) for one in each]
        starts = [0, *accumulate(map(len, entries))]
        flat = [entry for own in entries for entry in own]
        masked = [index for index, one in enumerate(each) if one.allowed_ids is not None]
        num_words = -(-vocab_size // 32)
        masks = torch.zeros((len(masked), 32 * num_words), dtype=torch.bool)
        mask_of = torch.full((len(each),), -1, dtype=torch.int32)
        for place, index in enumerate(masked):
            ids = torch.tensor(each[index].allowed_ids or (), dtype=torch.int64)
            masks[place, ids[ids < vocab_size]] = True
            mask_of[index] = place
        powers = torch.tensor([1 << bit for bit in range(31)] + [-(1 << 31)], dtype=torch.int32)
        words = torch.where(masks.view(len(masked), num_words, 32), powers, 0).sum(-1, dtype=torch.int32)
        return cls(
            torch.tensor(starts, dtype=torch.int32).to(device),
            torch.tensor([token_id for token_id, _, _ in flat], dtype=torch.int32).to(device),
            torch.tensor([bias for _, bias, _ in flat], dtype=torch.float32).to(device),
            torch.tensor([count for _, _, count in flat], dtype=torch.int32).to(device),
            torch.tensor([(one.repetition, one.presence, one.frequency) for one in each]).to(device),
            words.to(device),
            mask_of.to(device),
        )


def _entries(edits: LogitEdits) -> list[tuple[int, float, int]]:
    """Return (id, bias, count) of each id that is biased or seen; -1 counts those that are not seen."""
    assert edits.banned is None
    biases = dict(edits.biases)
    seen = () if edits.seen is None else zip(edits.seen.token_ids, edits.seen.counts, strict=True)
    entries = [(token_id, biases.pop(token_id, 0.0), count) for token_id, count in seen]
    return entries + [(token_id, bias, -1) for token_id, bias in biases.items()]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What each row asks for."""

    shares: Tensor  # [num_rows, 3] float64: temperature, 0: the likeliest; top_p; min_p
    numbers: Tensor  # [num_rows, 3] int64: top_k, 0: off; the seed's 64 bits; position of the output token
    edits: EditedRows | None

    @classmethod
    def of(cls, requests: Sequence[RowRequest], vocab_size: int, device: torch.device) -> "SampledRows":
        """Lay requests of tokens out; of logprobs and bans the kernel knows nothing."""
        assert all(each.num_top is None and each.token_id is None for each in requests)
        shares = [(each.temperature, each.top_p, each.min_p) for each in requests]
        numbers = [(each.top_k, each.seed & SEED_MASK, each.position) for each in requests]
        has_edits = any(each.edits is not None for each in requests)
        return cls(
            torch.tensor(shares, dtype=torch.float64).to(device),
            torch.tensor(numbers, dtype=torch.uint64).view(torch.int64).to(device),
            EditedRows.of([each.edits for each in requests], vocab_size, device) if has_edits else None,
        )

    def sample(self, logits: Tensor) -> Tensor:  # [num_rows, vocab_size] float32 -> [num_rows] int64
        """Choose a token for each row, or say why there is none. Rows with edits are changed."""
        num_rows, vocab_size = logits.shape
        if logits.dtype is not torch.float32 or logits.stride(1) != 1:
            raise ValueError(f"logits are rows of float32, got {logits.dtype} with strides {logits.stride()}")
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        if num_rows:
            sample_row[(num_rows,)](
                logits, self.shares, self.numbers, token_ids, *_edit_arguments(self.edits, logits), logits.stride(0),
                vocab_size, HAS_EDITS=self.edits is not None,
                TILE=min(_TILE, max(64, triton.next_power_of_2(vocab_size))), num_warps=8,
            )  # fmt: skip
        return token_ids


def sample_rows(logits: Tensor, requests: Sequence[RowRequest]) -> list[RowAnswer]:
    """Answer requests of tokens as kernels.sampling.sample_rows does; rows with edits are changed."""
    rows = SampledRows.of(requests, logits.shape[1], logits.device)
    return [
        RowAnswer(token_id) if token_id >= 0 else RowAnswer(None, is_finite=token_id != _NOT_FINITE)
        for token_id in rows.sample(logits).tolist()
    ]


def _edit_arguments(edits: EditedRows | None, logits: Tensor) -> tuple[Tensor | int, ...]:
    if edits is None:
        return (logits,) * 7 + (0,)
    columns = (edits.starts, edits.token_ids, edits.biases, edits.counts, edits.penalties, edits.masks, edits.mask_of)
    return (*columns, edits.masks.shape[1])


@triton.jit
def edit(
    row, index, starts, edit_ids, biases, counts, penalties, masks, mask_of, num_words, vocab_size, TILE: tl.constexpr
):
    """Write the edited logits of one row in their place."""
    repetition = tl.load(penalties + 3 * index)
    presence = tl.load(penalties + 3 * index + 1)
    frequency = tl.load(penalties + 3 * index + 2)
    end = tl.load(starts + index + 1)
    for start in range(tl.load(starts + index), end, TILE):
        at = start + tl.arange(0, TILE)
        ids = tl.load(edit_ids + at, mask=at < end, other=0)
        inside = (at < end) & (ids < vocab_size)
        own = tl.load(row + ids, mask=inside, other=0.0) + tl.load(biases + at, mask=inside, other=0.0)
        count = tl.load(counts + at, mask=inside, other=-1)
        penalized = tl.where(own > 0, tl.div_rn(own, repetition), own * repetition)
        own = tl.where(count >= 0, penalized, own)
        own = tl.where(count > 0, own - (presence + frequency * count.to(tl.float32)), own)
        tl.store(row + ids, own, mask=inside)
    mask = tl.load(mask_of + index)
    if mask >= 0:
        tl.debug_barrier()  # an id that is edited and forbidden is written twice, by two threads: this one is the last
        for start in range(0, vocab_size, TILE):
            ids = start + tl.arange(0, TILE)
            inside = ids < vocab_size
            words = tl.load(masks + mask * num_words + ids // 32, mask=inside, other=0)
            forbidden = tl.full([TILE], float("-inf"), tl.float32)
            tl.store(row + ids, forbidden, mask=inside & (((words >> (ids % 32)) & 1) == 0))
    tl.debug_barrier()  # what one thread wrote others read


@triton.jit
def ordered_keys(row, ids, vocab_size):
    """Logits and integers of the same order; ids beyond the vocabulary are -inf."""
    logits = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
    bits = logits.to(tl.int32, bitcast=True)
    return logits, bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def count_not_finite(row, vocab_size, TILE: tl.constexpr):
    """How many logits are infinite or not a number."""
    count = 0
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        own, _ = ordered_keys(row, ids, vocab_size)
        is_other = (own != own) | (tl.abs(own) == float("inf"))
        count += tl.sum((is_other & (ids < vocab_size)).to(tl.int32), 0)
    return count


@triton.jit
def count_from(row, vocab_size, border, TILE: tl.constexpr):
    """How many ids have keys >= border."""
    count = 0
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        _, keys = ordered_keys(row, ids, vocab_size)
        count += tl.sum(((keys >= border) & (ids < vocab_size)).to(tl.int32), 0)
    return count


@triton.jit
def mass_above(row, vocab_size, border, least, highest, temperature, TILE: tl.constexpr):
    """The weight of ids with keys > border and keys >= least."""
    mass = tl.zeros([1], tl.float64)
    for start in range(0, vocab_size, TILE):
        logits, keys = ordered_keys(row, start + tl.arange(0, TILE), vocab_size)
        weights = tl.exp(logits.to(tl.float64) / temperature - highest)
        mass += tl.sum(tl.where((keys > border) & (keys >= least), weights, 0.0), 0)
    return mass


@triton.jit
def exponential_noise(seed, position, ids, TILE: tl.constexpr):
    """One draw of the unit exponential distribution for each id: float64 [TILE]."""
    zeros = tl.zeros([TILE], tl.uint64)
    key_0, key_1 = zeros + seed.to(tl.uint64, bitcast=True), zeros
    c0 = (ids // 4 + 1).to(tl.uint64)  # four words a count, which begins at one
    c1, c2, c3 = zeros + position.to(tl.uint64, bitcast=True), zeros, zeros
    multiplier_0 = tl.full([TILE], 0xD2E7470EE14C6C93, tl.uint64)
    multiplier_1 = tl.full([TILE], 0xCA5A826395121157, tl.uint64)
    weyl_0 = tl.full([TILE], 0x9E3779B97F4A7C15, tl.uint64)
    weyl_1 = tl.full([TILE], 0xBB67AE8584CAA73B, tl.uint64)
    for _ in range(10):
        high_0, high_1 = tl.umulhi(multiplier_0, c0), tl.umulhi(multiplier_1, c2)
        low_0, low_1 = multiplier_0 * c0, multiplier_1 * c2
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0, key_1 = key_0 + weyl_0, key_1 + weyl_1
    word = ids % 4
    bits = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    uniform = (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
    return -tl.log(1.0 - uniform)  # 1 - uniform is exact


@triton.jit
def sample_row(
    logits, shares, numbers, token_ids,
    edit_starts, edit_ids, biases, counts, penalties, masks, mask_of, num_words, row_stride, vocab_size,
    HAS_EDITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row by one program; borders are found by bisection over the keys."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    if count_not_finite(row, vocab_size, TILE) > 0:
        tl.store(token_ids + index, -2)
        return
    if HAS_EDITS:
        edit(row, index, edit_starts, edit_ids, biases, counts, penalties, masks, mask_of, num_words, vocab_size, TILE)
    temperature = tl.load(shares + 3 * index)
    top_p = tl.load(shares + 3 * index + 1)
    min_p = tl.load(shares + 3 * index + 2)
    top_k = tl.load(numbers + 3 * index)
    best_logit = float("-inf")
    best_id = 0
    for start in range(0, vocab_size, TILE):
        own, _ = ordered_keys(row, start + tl.arange(0, TILE), vocab_size)
        tile_best = tl.max(own, 0)
        if tile_best > best_logit:
            best_id = start + tl.argmax(own, 0)
            best_logit = tile_best
    if tl.abs(best_logit) == float("inf"):  # nothing is allowed, or an edit overflowed
        tl.store(token_ids + index, tl.where(best_logit < 0, -1, -2).to(tl.int64))
        return
    if temperature == 0.0:
        tl.store(token_ids + index, best_id.to(tl.int64))
        return
    highest = best_logit.to(tl.float64) / temperature
    least = tl.full([], -2147483648, tl.int64)
    if (top_k > 0) & (top_k < vocab_size):
        beyond = tl.full([], 2147483648, tl.int64)  # fewer than top_k keys are as large
        for _ in range(32):
            middle = (least + beyond) >> 1
            is_enough = count_from(row, vocab_size, middle, TILE) >= top_k
            least = tl.where(is_enough, middle, least)
            beyond = tl.where(is_enough, beyond, middle)
    if top_p < 1.0:
        kept_mass = top_p * tl.sum(mass_above(row, vocab_size, least - 1, least, highest, temperature, TILE), 0)
        below = least - 1  # the mass above it is too large, or it is below all that is kept
        border = tl.full([], 2147483647, tl.int64)
        for _ in range(33):
            middle = (below + border) >> 1
            mass = tl.sum(mass_above(row, vocab_size, middle, least, highest, temperature, TILE), 0)
            border = tl.where(mass < kept_mass, middle, border)
            below = tl.where(mass < kept_mass, below, middle)
        least = tl.maximum(least, border)
    seed = tl.load(numbers + 3 * index + 1)
    position = tl.load(numbers + 3 * index + 2)
    best_score = tl.full([], float("-inf"), tl.float64)
    chosen = best_id
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        own, keys = ordered_keys(row, ids, vocab_size)
        scaled = own.to(tl.float64) / temperature - highest
        is_kept = (keys >= least) & (own > float("-inf")) & (tl.exp(scaled) >= min_p)
        scores = tl.where(is_kept, scaled - tl.log(exponential_noise(seed, position, ids, TILE)), float("-inf"))
        tile_best = tl.max(scores, 0)
        if tile_best > best_score:
            chosen = start + tl.argmax(scores, 0)
            best_score = tile_best
    tl.store(token_ids + index, chosen.to(tl.int64))
