"""The process that lands KV blocks, runs continuous batching and streams tokens."""
