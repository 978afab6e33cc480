"""Field names in the files of other tools: which are used, which change nothing, which are unknown.

A reader of a foreign file passes its two lists to `unknown_names`, and reports what is returned as "not used: ...".
"""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

from grasp.errors import SettingsError

MIN_SIMILARITY = 0.8  # of an unknown name to a used one, in `difflib`: from there on it is a typing error


def unknown_names(
    names: Iterable[str],
    used: Collection[str],
    neutral: Collection[str],
    location: str,
    *,
    mistaken: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the names that are neither used nor known to change nothing, in their order.

    Args:
        names: the fields of a file that have a value.
        used: names that the reader interprets or refuses.
        neutral: names that change neither the training nor the data.
        location: beginning of error messages, e.g. the path of the file.
        mistaken: right name by a wrong one that is too different for `difflib`.

    Raises:
        SettingsError: an unknown name resembles a used one.
    """
    unknown = [name for name in names if name not in used and name not in neutral]
    for name in unknown:
        right = (mistaken or {}).get(name)
        if close := [right] if right else get_close_matches(name, used, 1, MIN_SIMILARITY):
            raise SettingsError(f"{location}: unknown field {name}; did you mean {close[0]}?")
    return unknown
