"""Paged caches and queries for kernels, for Triton's interpreter or, where it is not chosen, on a GPU.

tests/conftest.py chooses before anything imports triton, which must not be imported here.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.kernels.attention import AttentionSpan
from pdserve.kernels.kv_rows import row_elements
from pdserve.kernels.kv_store import store_kv

collect_ignore_glob = ["test_*.py"] if find_spec("triton") is None else []


def is_interpreted() -> bool:
    return os.environ["TRITON_INTERPRET"] == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the interpreter kernels need a GPU: what launches one is then a test of those marked so."""
    if is_interpreted():
        return
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sequences as (query_len, context_len); the context ends with the queries."""

    sequences: tuple[tuple[int, int], ...]
    head_dim: int = 64
    num_kv_heads: int = 2
    heads_per_kv_head: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  # as dtype


@dataclass(frozen=True)
class AttentionInputs:
    query: Tensor
    kv_blocks: Tensor
    spans: list[AttentionSpan]

    @property
    def block_tables(self) -> Tensor:
        tables = [span.block_table for span in self.spans]
        # What lies behind a table is no block: whoever reads it fails.
        return torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=2**31 - 1).to(torch.int32)

    @property
    def context_lens(self) -> Tensor:
        lens = [span.context_len for span in self.spans]
        return torch.tensor(lens, dtype=torch.int32, device=self.query.device)

    @property
    def alibi_slopes(self) -> Tensor:
        """Those of Press et al. (2022), for a power of two of heads."""
        num_heads = self.query.shape[1]
        return 2.0 ** (-8 / num_heads * torch.arange(1, num_heads + 1, device=self.query.device))


@pytest.fixture(scope="session")
def device() -> torch.device:
    if is_interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda")


@pytest.fixture
def make_inputs(device: torch.device) -> Callable[..., AttentionInputs]:
    """Build queries and one layer of a cache of several layers; slots that nobody wrote are not numbers."""

    def make(**fields: Any) -> AttentionInputs:
        shape = AttentionShape(**fields)
        generator = torch.Generator().manual_seed(sum(context_len for _, context_len in shape.sequences))
        kv_dtype = shape.kv_dtype or shape.dtype
        num_blocks = sum(-(-context_len // shape.block_size) for _, context_len in shape.sequences) + 3
        row = row_elements(shape.head_dim, kv_dtype)
        size = (num_blocks, 3, 2, shape.num_kv_heads, shape.block_size, row)
        if kv_dtype is torch.int8:
            nothing = torch.full((*size[:-1], row // 4), math.nan).view(torch.int8)
        else:
            nothing = torch.full(size, math.nan, dtype=kv_dtype)
        layer = nothing[:, 1]
        free = torch.randperm(num_blocks, generator=generator)
        spans, start = [], 0
        for query_len, context_len in shape.sequences:
            count = -(-context_len // shape.block_size)
            table, free = free[:count].clone(), free[count:]
            context = torch.randn(2, context_len, shape.num_kv_heads, shape.head_dim, generator=generator)
            positions = torch.arange(context_len)
            slots = table[positions // shape.block_size] * shape.block_size + positions % shape.block_size
            store_kv(context[0].to(shape.dtype), context[1].to(shape.dtype), layer, slots)
            spans.append(AttentionSpan(start, query_len, context_len, table.to(device)))
            start += query_len
        num_heads = shape.num_kv_heads * shape.heads_per_kv_head
        query = torch.randn(start, num_heads, shape.head_dim, generator=generator).to(shape.dtype)
        return AttentionInputs(query.to(device), nothing.to(device)[:, 1], spans)

    return make
