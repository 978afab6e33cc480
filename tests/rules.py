"""Scoring rules from plain settings, as from a file, with or without interactions."""

from grasp.predict.scoring_rule import ScoringProtocol, parse_protocol


def rule(**settings) -> ScoringProtocol:
    return parse_protocol(settings, "protocol")
