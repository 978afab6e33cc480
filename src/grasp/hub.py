"""Names of repositories on a hub: may a name be one, and does the hub answer? Asked once, where libraries retry."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from grasp.text import did_you_mean, plain

SECONDS = 5.0  # that a hub has to say anything at all


def is_path(name: str) -> bool:
    """Whether a name that is not there was meant as a path: it is spelled as one, or its first part is a directory."""
    first, slash, _ = name.partition("/")
    return (
        name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name or bool(slash and Path(first).is_dir())
    )


def meant(name: str) -> str:
    """` (did you mean 'ckpt'?)`, where something of its kind is there and spelled like it."""
    path = Path(name)
    try:
        there = [entry for entry in path.parent.iterdir() if entry.suffix == path.suffix]
    except OSError:
        return ""
    return did_you_mean(path.stem, (entry.stem for entry in there)).replace("'?", f"{path.suffix}'?")


_only_here: ContextVar[str | None] = ContextVar("grasp_only_here", default=None)


@contextmanager
def only_here(remedy: str) -> Iterator[None]:
    """Ask no hub while the block runs: a name comes from an artifact, and what was fetched before has to do."""
    token = _only_here.set(f"nothing is fetched because an artifact names it; {remedy}")
    try:
        yield
    finally:
        _only_here.reset(token)


def refusal() -> str | None:
    """Why no hub is asked: it would be an artifact that decides it, or none answers. None: it may be asked."""
    return _only_here.get() or unreachable()


def fetched_before(name: str) -> str | None:
    """The directory of what was fetched of a repository before; None: nothing was."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - most commands never ask

    found = (try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer_config.json"))
    return next((str(Path(one).parent) for one in found if isinstance(one, str)), None)


@cache
def unreachable() -> str | None:
    """Why nothing can be had from a hub now: one question, for some seconds. None: it answers, or nobody may ask it."""
    from huggingface_hub import constants  # noqa: PLC0415 - most commands never ask

    if constants.HF_HUB_OFFLINE:
        return None  # the libraries look into what they have fetched before
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS).close()
    except HTTPError:
        return None  # an answer all the same
    except (OSError, HTTPException) as err:
        why = getattr(err, "reason", err)
        return f"{constants.ENDPOINT} does not answer ({plain(why, 80)}); HF_HUB_OFFLINE=1 uses what was fetched before"
    return None
