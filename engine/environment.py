"""What this process takes from its environment below the command line: where models are kept, what its children get.

The only such place, because `LLM("demo")` has no command line that could tell it.
"""

import os
from pathlib import Path

from pdserve.engine.errors import ModelError


def default_models_dir() -> Path:
    """Return where converted models are kept: $XDG_CACHE_HOME/pdserve/models, by default under ~/.cache.

    Raises:
        ModelError: this user has no home.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(configured):
        return Path(configured) / "pdserve" / "models"
    try:
        return Path.home() / ".cache" / "pdserve" / "models"
    except RuntimeError:
        raise ModelError(
            "this user has no home directory to keep converted models in; set XDG_CACHE_HOME to a directory "
            "that it may write to, or give the path of a Hugging Face directory"
        ) from None


def child_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with `changes`, for a child."""
    return {**os.environ, **changes}
