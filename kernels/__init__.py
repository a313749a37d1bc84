"""Operations on tensors: paged attention, KV store, norms, rope, sampling. Nothing here knows requests."""
