"""One process, one device, no network: from token ids to token ids."""
