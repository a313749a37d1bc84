"""Decoders and the loading of their weights."""
