"""Protocols out of plain settings, as a file of them is read: with interactions or without."""

from grasp.predict.scoring_rule import ScoringProtocol, parse_protocol


def rule(**settings) -> ScoringProtocol:
    return parse_protocol(settings, "protocol")
