"""Scoring rules from plain settings, as from a file, with or without interactions."""

from grasp.artifact.reader import ArtifactReader
from grasp.paper.candidates import Candidate, ComponentSettings
from grasp.paper.protocol import InteractionProtocol
from grasp.predict.scoring_rule import ScoringProtocol, parse_protocol


def rule(**settings) -> ScoringProtocol:
    return parse_protocol(settings, "protocol")


def candidate_of(protocol: ScoringProtocol, source: ArtifactReader) -> Candidate:
    """Convert a protocol, resolved for an artifact, into a candidate."""
    resolved = protocol.resolved_for(source)
    assert isinstance(resolved.match, dict)
    match = tuple(resolved.match.items())
    if not isinstance(resolved, InteractionProtocol):
        return Candidate(ComponentSettings("retained", "mean", "mean_relevance", resolved.negative), match, ())
    settings = ComponentSettings(resolved.side, resolved.weighting, resolved.standardize.task, resolved.negative)
    return Candidate(settings, match, tuple(resolved.components.items()))
