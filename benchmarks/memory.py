"""Peak memory of the process that asks."""

import resource
from pathlib import Path


def peak_bytes() -> int:
    """Of this process since its program began (ru_maxrss would count the parent's at the fork), or of a child."""
    status = Path("/proc/self/status")
    if not status.exists():
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        resident = int(line.split()[1]) * 1024
    return max(resident, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
