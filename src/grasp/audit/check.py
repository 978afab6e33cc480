"""One line of a diagnosis."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured, whether it is healthy, and what to change."""

    name: str
    value: str
    healthy: str  # what a healthy value is
    verdict: str  # healthy, look, or not measured
    advice: str  # what to change, or why nothing was measured
    numbers: dict[str, float]


def finding(name: str, value: str, healthy: str, good: bool, advice: str, numbers: dict[str, float]) -> Finding:
    """A measurement; the advice is kept where it is not good."""
    return Finding(name, value, healthy, "healthy" if good else "look", "" if good else advice, numbers)


def missing(name: str, healthy: str, why: str) -> Finding:
    """A measurement that could not be taken."""
    return Finding(name, "not measured", healthy, "not measured", why, {})
