"""Protocols out of plain settings, as a file of them is read: with interactions or without."""

from grasp.predict.scoring_rule import ScoringProtocol, protocol_from


def rule(**settings) -> ScoringProtocol:
    return protocol_from(settings, "protocol")
