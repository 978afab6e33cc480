"""One line of a diagnosis."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `grasp diagnose`: what was measured, whether it is healthy, and what to change."""

    name: str
    measured: str  # in words
    healthy: str  # what a healthy value is
    verdict: str  # healthy, look, or not measured
    advice: str  # what to change, or why nothing was measured
    numbers: dict[str, float]  # the first one is what the verdict is about, where it is about one


def check(name: str, measured: str, healthy: str, good: bool, advice: str, numbers: dict[str, float]) -> Check:
    """A measurement; the advice is kept where it is not good."""
    return Check(name, measured, healthy, "healthy" if good else "look", "" if good else advice, numbers)


def missing(name: str, healthy: str, why: str) -> Check:
    """A measurement that could not be taken."""
    return Check(name, "not measured", healthy, "not measured", why, {})
