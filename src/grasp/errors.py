"""One tree of errors. A message is one line: where, what was found, what was expected, what to do next."""


class GraspError(Exception):
    """A mistake in the input that the user can mend; the command line prints it and exits with 2."""


class SettingsError(GraspError):
    """A settings file or a flag does not hold what it must."""


class ShapeError(GraspError):
    """Arrays that belong together have different shapes; the message carries both."""


class CorpusError(GraspError):
    """The corpus cannot be read, or holds nothing that can be used."""


class TargetError(GraspError):
    """A target is unknown, empty, or malformed."""


class SubsetError(GraspError):
    """A subset, a family or a label expression does not fit the corpus."""


class ModelError(GraspError):
    """The reference model cannot be used, or computed something that is not a number."""


class ArtifactError(GraspError):
    """An artifact is missing, unfinished, damaged, locked, or of another format."""


class ProtocolError(GraspError):
    """A protocol is malformed, or does not fit the artifact it is applied to."""


class ProtocolLeakError(ProtocolError):
    """Held-out results were handed to something that selects."""


class EngineError(GraspError):
    """The cluster cannot be reached, has no room, or its workers keep dying."""


class MissingExtraError(GraspError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class EnvironmentDataError(GraspError):
    """An environment, its utilities or a table of predictions is incomplete, damaged, or belongs to something else."""
