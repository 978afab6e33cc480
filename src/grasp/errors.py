"""The exceptions of GRASP. A message is one line: location, actual value, expected value, what to do next."""

from collections.abc import Iterator
from contextlib import contextmanager


class GraspError(Exception):
    """Base class of errors that the user can fix; the command line prints the message and exits with code 2."""


class SettingsError(GraspError):
    """A setting, an option or an argument is missing or invalid."""


class ShapeError(GraspError):
    """Arrays have incompatible shapes; the message has both."""


class CorpusError(GraspError):
    """The corpus cannot be read, or has no usable rows."""


class TargetError(GraspError):
    """A target is unknown, empty, or malformed."""


class SubsetError(GraspError):
    """A subset, a family or a label expression does not fit the corpus."""


class ModelError(GraspError):
    """The reference model cannot be used, or computed NaN or infinity."""


class ArtifactError(GraspError):
    """An artifact is missing, unfinished, damaged, locked, or of another format."""


class ProtocolError(GraspError):
    """A protocol is malformed, or does not fit the artifact it is applied to."""


class ProtocolLeakError(ProtocolError):
    """Held-out results were passed to a selection."""


class EngineError(GraspError):
    """The cluster cannot be reached, has no free resources, or its workers keep dying."""


class MissingExtraError(GraspError):
    """An optional dependency is not installed; the message names the extra that contains it."""


class RunsError(GraspError):
    """Runs, their utilities or a table of predictions are incomplete, damaged, or do not match the artifact."""


@contextmanager
def at(place: str, error_type: type[GraspError] | None = None) -> Iterator[None]:
    """Put a place before the message of an error that the block raises: `PLACE: MESSAGE`.

    Args:
        place: what the error is about, such as file and line of a record, or a setting.
        error_type: type of the new error in the place of a `CorpusError`. Default: the same.
    """
    try:
        yield
    except GraspError as err:
        message = f"{place}: {err}"
        if error_type is not None and isinstance(err, CorpusError):
            raise error_type(message) from err
        err.args = (message,)
        raise
