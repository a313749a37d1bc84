"""The `pdserve` command: flags, environment and TOML into frozen configs; starts processes."""
