"""What this process takes from its environment below the command line: where models are kept, what its children get.

The only such place, because `LLM("demo")` has no command line that could tell it.
"""

import os
from pathlib import Path


def default_models_dir() -> Path:
    """Return where converted models are kept: $XDG_CACHE_HOME/pdserve/models, by default under ~/.cache."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return root / "pdserve" / "models"


def child_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with `changes`, for a child."""
    return {**os.environ, **changes}
