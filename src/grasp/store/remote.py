"""Reading a complete store, here or behind an fsspec URL: `s3://bucket/art`, `gs://...`, `memory://...`.

Of a URL whole files are fetched, each when it is first needed, into a cache on this machine, and compared with their
checksums: from there on they are mapped into memory and queried like those of a local store. Writing happens on the
local disk, and what is complete is published: every file, the signed record last, so that who reads the URL sees a
whole store or none.
"""

import hashlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import xxhash

from grasp.errors import ArtifactError, MissingExtraError
from grasp.extras import install_hint
from grasp.files import (
    FileEntry,
    checksum,
    discard,
    fault,
    kind_of,
    mismatch,
    write_whole,
    written_aside,
)
from grasp.store.directory import Files
from grasp.store.locks import locked
from grasp.store.records import R, Signed

CACHE_VARIABLE = "GRASP_CACHE"
LOCAL = ("file", "local")
IN_PROCESS = ("memory",)  # what lies there ends with the process
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl")  # they have buckets and no directories
LOCK = ".lock"  # beside the directory that it is for
_URL = re.compile(r"([a-z][a-z0-9+]*):/+(.*)")
_READ_BYTES = 1 << 20


def remote_url(path: Path | str) -> str | None:
    """The URL that `path` means, or None where it is a path on this machine.

    `Path("s3://bucket/art")` has lost a slash on its way; it is put back.
    """
    found = _URL.fullmatch(str(path))
    if found is None or found[1] in LOCAL or found[1] not in fsspec.available_protocols() or Path(path).exists():
        return None
    return f"{found[1]}://{found[2].rstrip('/')}"


def local_path(path: Path | str) -> Path:
    """The path on this machine that a `file:///...` URL means; any other path as it is."""
    found = _URL.fullmatch(str(path))
    return Path("/" + found[2]) if found is not None and found[1] in LOCAL and not Path(path).exists() else Path(path)


class RemoteFiles(Files):
    """The files of a store behind a URL; those that are asked for are fetched, and kept in a directory of ours."""

    def __init__(self, url: str, filesystem: Any, place: str, *files: Any) -> None:
        super().__init__(*files)
        self.where = url
        self._filesystem, self._place = filesystem, place  # the path of the store within the filesystem

    def _not_here(self, name: str, what: str) -> None:
        """It is fetched."""
        path, expected = self.root / name, self.entries[name]
        with locked(self.root.with_suffix(LOCK), wait=True):
            if fault(self.root, name, expected) is None:
                return  # another process has fetched it meanwhile
            for directory in reversed(path.relative_to(self.root).parents):
                if kind_of(self.root / directory) not in ("directory", "nothing"):
                    discard(self.root / directory)  # a link that somebody put there: nothing is written behind it
            path.parent.mkdir(parents=True, exist_ok=True)
            discard(path)
            with written_aside(path) as part:
                with _reached(f"{self.where}/{name}"):
                    self._filesystem.get_file(f"{self._place}/{name}", str(part))
                if wrong := fault(part.parent, part.name, expected):
                    raise self._error_type(
                        f"{self.where}/{name}: {wrong}; `grasp verify {shlex.quote(self.where)}` names everything that "
                        "is broken"
                    )

    def fault(self, name: str) -> str | None:
        """What is wrong with a file where it lies, read as a stream; None: nothing."""
        digest, size, expected = xxhash.xxh3_128(), 0, self.entries[name]
        try:
            with _reached(f"{self.where}/{name}"), self._filesystem.open(f"{self._place}/{name}", "rb") as handle:
                while size <= expected.bytes and (data := handle.read(_READ_BYTES)):
                    digest.update(data)
                    size += len(data)
        except ArtifactError as err:
            return "missing" if isinstance(err.__cause__, FileNotFoundError) else str(err)
        if what := mismatch(FileEntry(bytes=size, checksum=digest.hexdigest()), expected):
            return what
        kept = kind_of(self.root / name) != "nothing" and fault(self.root, name, expected)
        return f"{kept} (the copy of it in {self.root}; it is fetched again when it is needed)" if kept else None


def open_store(place: Path | str, signed: Signed[R], recovery_hint: str = "") -> tuple[R, Files]:
    """The signed record of a complete store, and its files: a directory, or a URL.

    Args:
        recovery_hint: what to do if a file is damaged; empty: that of `signed`.
    Raises:
        GraspError: no complete store there, damaged, or the place cannot be reached.
        MissingExtraError: what speaks this protocol is not installed.
    """
    if (url := remote_url(place)) is None:
        path = local_path(place)
        record = signed.read(path)
        return record, Files(path, signed.files(record), recovery_hint or signed.recovery_hint, signed.error_type)
    filesystem, root = _connect(url)
    with _reached(url):
        try:
            data: bytes = filesystem.cat_file(f"{root}/{signed.name}")
        except FileNotFoundError as err:
            raise signed.error_type(f"{url}: {signed.none.format(place=shlex.quote(url))}") from err
    record = signed.parse(f"{url}/{signed.name}", data)
    cache = cache_directory("fetched", f"{url} {checksum(data)}")
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache.with_suffix(LOCK), wait=True):
        write_whole(cache / signed.name, data)
    files = cache, signed.files(record), recovery_hint or signed.recovery_hint, signed.error_type
    return record, RemoteFiles(url, filesystem, root, *files)


def staging_directory(url: str) -> Path:
    """Where the store of a URL is made; the same for every build that goes there from this machine."""
    return cache_directory("building", url)


def cache_directory(kind: str, name: str) -> Path:
    """A directory of our own under $GRASP_CACHE, or the user's cache."""
    base = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "grasp"
    return Path(base) / kind / hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


def is_published(url: str, signed: Signed[Any]) -> bool:
    """Whether a complete store lies at the URL."""
    filesystem, root = _connect(url)
    with _reached(url):
        return bool(filesystem.exists(f"{root}/{signed.name}"))


def publish(local: Path, url: str, signed: Signed[Any]) -> None:
    """Copy a complete store to a URL, its signed record last. Cut off, the same call goes on with what is missing.

    Raises:
        ArtifactError: something else lies there; the place cannot be reached or written to.
    """
    record, data = signed.read(local), (local / signed.name).read_bytes()
    entries = signed.files(record)
    filesystem, root = _connect(url)
    with _reached(url):
        if filesystem.exists(f"{root}/{signed.name}"):
            if filesystem.cat_file(f"{root}/{signed.name}") == data:
                return
            raise ArtifactError(f"{url}: another one lies here; delete it, or choose another URL")
    journal = local / f"published-{hashlib.blake2b(url.encode(), digest_size=8).hexdigest()}"
    noted = set(journal.read_text(encoding="utf-8").splitlines()) if journal.exists() else set()
    there = _sizes(filesystem, root, url)
    with journal.open("a", encoding="utf-8") as note:
        for name, entry in entries.items():
            line = f"{entry.checksum} {name}"
            if line not in noted or there.get(name) != entry.bytes:
                with _reached(f"{url}/{name}"):
                    if url.partition(":")[0] not in OBJECT_STORES:  # there it would make a bucket of a misspelt name
                        filesystem.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
                    filesystem.put_file(str(local / name), f"{root}/{name}")
                note.write(line + "\n")
                note.flush()
    there = _sizes(filesystem, root, url)
    if lost := [name for name, entry in entries.items() if there.get(name) != entry.bytes]:
        raise ArtifactError(
            f"{url}: {len(lost)} of {len(entries)} files did not arrive, e.g. {lost[0]}; run again with "
            "--resume to send them"
        )
    with _reached(f"{url}/{signed.name}"):
        filesystem.pipe_file(f"{root}/{signed.name}", data)


def _sizes(filesystem: Any, root: str, url: str) -> dict[str, int]:
    """Bytes of every file below `root`, by its name there; nothing where there is no such place yet."""
    with _reached(url):
        filesystem.invalidate_cache()
        try:
            found = filesystem.find(root, detail=True)
        except FileNotFoundError:
            return {}
    return {str(path)[len(root) :].lstrip("/"): int(known["size"]) for path, known in found.items()}


def discard_staging(url: str) -> None:
    """Remove what a published store was made from."""
    shutil.rmtree(staging_directory(url), ignore_errors=True)


def _connect(url: str) -> tuple[Any, str]:
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except ImportError as err:
        protocol = url.partition(":")[0]
        extra = install_hint("s3") if protocol in ("s3", "s3a") else f"{err}"
        raise MissingExtraError(f"{url}: needs an fsspec filesystem for {protocol!r}: {extra}") from err
    return filesystem, root.rstrip("/")


@contextmanager
def _reached(where: str) -> Iterator[None]:
    """Turn what a filesystem says into one line; libraries of object stores and of HTTP have errors of their own."""
    trees = (("botocore.exceptions", "BotoCoreError"), ("aiohttp", "ClientError"))
    own = [getattr(sys.modules[library], name) for library, name in trees if library in sys.modules]
    try:
        yield
    except (OSError, *own) as err:
        what = " ".join(str(err).split()) or type(err).__name__
        raise ArtifactError(f"{where}: cannot be reached: {what}; check URL, credentials and network") from err
