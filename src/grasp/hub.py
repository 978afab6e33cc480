"""Decide whether a name may be a repository on a model hub, and whether the hub can be reached.

The hub is contacted at most once per process, since libraries would retry every request. Start with `refusal`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from grasp.text import did_you_mean, plain

SECONDS = 5.0  # timeout of the request that tests whether the hub answers


def is_path(name: str) -> bool:
    """Return whether a missing name is a path: it is spelled like one, or its first part is a directory."""
    first, slash, _ = name.partition("/")
    return (
        name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name or bool(slash and Path(first).is_dir())
    )


def suggest_path(name: str) -> str:
    """Return ` (did you mean 'ckpt'?)` if a file with the same suffix has a similar name; else an empty text."""
    path = Path(name)
    try:
        candidates = [entry for entry in path.parent.iterdir() if entry.suffix == path.suffix]
    except OSError:
        return ""
    return did_you_mean(path.stem, (entry.stem for entry in candidates)).replace("'?", f"{path.suffix}'?")


_only_here: ContextVar[str | None] = ContextVar("grasp_only_here", default=None)


@contextmanager
def only_here(remedy: str) -> Iterator[None]:
    """Forbid downloads while the block runs, since the name comes from an artifact; cached files may be used."""
    token = _only_here.set(f"names from an artifact are never downloaded; {remedy}")
    try:
        yield
    finally:
        _only_here.reset(token)


def refusal() -> str | None:
    """Return why the hub must not be contacted, or cannot be reached; None: it may be contacted."""
    return _only_here.get() or unreachable()


def fetched_before(name: str) -> str | None:
    """Return the cache directory of a repository; None: it was never downloaded."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - most commands need no hub

    cached = (try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer_config.json"))
    return next((str(Path(path).parent) for path in cached if isinstance(path, str)), None)


@cache
def unreachable() -> str | None:
    """Return why the hub cannot be reached, None: it answers, or is switched off."""
    from huggingface_hub import constants  # noqa: PLC0415 - most commands need no hub

    if constants.HF_HUB_OFFLINE:
        return None  # the libraries use their cache
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS).close()
    except HTTPError:
        return None  # an HTTP error is an answer, too
    except (OSError, HTTPException) as err:
        why = getattr(err, "reason", err)
        return f"{constants.ENDPOINT} does not answer ({plain(why, 80)}); HF_HUB_OFFLINE=1 uses cached files only"
    return None
