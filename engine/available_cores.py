"""How many cores this process may use: those that it may run on, and no more than its container's share of their time.

Threads beyond that share do not compute sooner: the system stops them all until the next period.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def num_available_cores() -> int:
    """Return at least 1; a fraction of a core counts as one."""
    num_cores = len(os.sched_getaffinity(0))
    share = cpu_share(_MEMBERSHIP, _CGROUPS)
    return num_cores if share is None else max(1, min(num_cores, math.ceil(share)))


def cpu_share(membership: Path, cgroups: Path) -> float | None:
    """Return how many cores' time the control groups of this process allow, the strictest; None if any.

    `membership` is as /proc/self/cgroup, `cgroups` where the file systems of both versions of groups are mounted.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    shares = [share for line in lines for folder in _folders(line, cgroups) if (share := _share(folder)) is not None]
    return min(shares, default=None)


def _folders(line: str, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of a group and of those around it. In a container the path may be the host's, and only the
    mounted root be there.
    """
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if controllers and "cpu" not in controllers.split(","):
        return
    inside = PurePosixPath(path.lstrip("/"))
    for root in (cgroups / controllers, cgroups / "cpu") if controllers else (cgroups,):
        yield from (root / each for each in (inside, *inside.parents))


def _share(folder: Path) -> float | None:
    """Return the limit of one group: `cpu.max` of version 2, two files of version 1."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period")
            )
        share = int(quota) / int(period)
    except (OSError, ValueError):  # not there, or "max"
        return None
    return share if share > 0 else None
