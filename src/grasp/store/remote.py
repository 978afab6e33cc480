"""Read and publish complete stores at local paths and fsspec URLs: `s3://bucket/art`, `gs://...`, `memory://...`.

A file at a URL is downloaded to a local cache when it is first used, and verified by its checksum; from then on it is
used like a file of a local store. Stores are written on the local disk and published when they are complete. The signed
record is uploaded last, so that readers of the URL see a complete store or none. Start with `open_store`.
"""

import hashlib
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import xxhash

from grasp.errors import ArtifactError, GraspError, MissingExtraError
from grasp.extras import install_hint
from grasp.files import (
    FileEntry,
    atomic_path,
    checksum,
    discard,
    fault,
    kind_of,
    mismatch,
    write_atomically,
)
from grasp.store.directory import Files
from grasp.store.locks import locked
from grasp.store.records import R, Signed

CACHE_VARIABLE = "GRASP_CACHE"
LOCAL = ("file", "local")
IN_PROCESS = ("memory",)  # protocols whose files exist in this process only
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl")  # have buckets but no directories
LOCK = ".lock"  # suffix of the lock file of a directory
_URL = re.compile(r"([a-z][a-z0-9+]*):/+(.*)")
_READ_BYTES = 1 << 20


def remote_url(path: Path | str) -> str | None:
    """Return the URL that `path` denotes, or None for a local path.

    `Path("s3://bucket/art")` drops a slash, which is restored.
    """
    match = _URL.fullmatch(str(path))
    if match is None or match[1] in LOCAL or match[1] not in fsspec.available_protocols() or Path(path).exists():
        return None
    return f"{match[1]}://{match[2].rstrip('/')}"


def local_path(path: Path | str) -> Path:
    """Return the local path of a `file:///...` URL, and any other path unchanged."""
    match = _URL.fullmatch(str(path))
    return Path("/" + match[2]) if match is not None and match[1] in LOCAL and not Path(path).exists() else Path(path)


class RemoteFiles(Files):
    """Files of a store at a URL, which are downloaded to a local cache on first use."""

    def __init__(self, url: str, filesystem: Any, root: str, *files: Any) -> None:
        super().__init__(*files)
        self.location = url
        self._filesystem, self._root = filesystem, root  # path of the store within the filesystem

    def _handle_missing(self, name: str, problem: str) -> None:
        """Download the file."""
        path, expected = self.root / name, self.entries[name]
        with locked(self.root.with_suffix(LOCK), wait=True):
            if fault(self.root, name, expected) is None:
                return  # downloaded by another process meanwhile
            for directory in reversed(path.relative_to(self.root).parents):
                if kind_of(self.root / directory) not in ("directory", "nothing"):
                    discard(self.root / directory)  # never write through a symbolic link
            path.parent.mkdir(parents=True, exist_ok=True)
            discard(path)
            with atomic_path(path) as temporary:
                with remote_errors(f"{self.location}/{name}"):
                    self._filesystem.get_file(f"{self._root}/{name}", str(temporary))
                if damage := fault(temporary.parent, temporary.name, expected):
                    raise self._error_type(
                        f"{self.location}/{name}: {damage}; list all broken files with `grasp verify "
                        f"{shlex.quote(self.location)}`"
                    )

    def fault(self, name: str) -> str | None:
        """Return what is wrong with a file at the URL or with its cached copy, in words; None: both are intact."""
        digest, size, expected = xxhash.xxh3_128(), 0, self.entries[name]
        try:
            with (
                remote_errors(f"{self.location}/{name}"),
                self._filesystem.open(f"{self._root}/{name}", "rb") as handle,
            ):
                while size <= expected.bytes and (data := handle.read(_READ_BYTES)):
                    digest.update(data)
                    size += len(data)
        except ArtifactError as err:
            return "missing" if isinstance(err.__cause__, FileNotFoundError) else str(err)
        if problem := mismatch(FileEntry(bytes=size, checksum=digest.hexdigest()), expected):
            return problem
        cached_fault = kind_of(self.root / name) != "nothing" and fault(self.root, name, expected)
        return f"{cached_fault} (cached copy in {self.root}; downloaded again on next use)" if cached_fault else None


def open_store(path_or_url: Path | str, signed: Signed[R], recovery_hint: str = "") -> tuple[R, Files]:
    """Open a complete store, and return its signed record and its files.

    Args:
        path_or_url: directory or URL.
        signed: kind of the signed record of the store.
        recovery_hint: what the user should do if a file is damaged. Default: that of `signed`.
    Raises:
        GraspError: there is no complete store, its record is damaged, or the URL cannot be reached.
        MissingExtraError: a package for the protocol of the URL is not installed.
    """
    if (url := remote_url(path_or_url)) is None:
        path = local_path(path_or_url)
        record = signed.read(path)
        return record, Files(path, signed.files(record), recovery_hint or signed.recovery_hint, signed.error_type)
    filesystem, root = _connect(url)
    with remote_errors(url):
        try:
            data: bytes = filesystem.cat_file(f"{root}/{signed.name}")
        except FileNotFoundError as err:
            raise signed.error_type(f"{url}: {signed.missing_message.format(location=shlex.quote(url))}") from err
    record = signed.parse(f"{url}/{signed.name}", data)
    cache = cache_directory("fetched", f"{url} {checksum(data)}")
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache.with_suffix(LOCK), wait=True):
        write_atomically(cache / signed.name, data)
    files = cache, signed.files(record), recovery_hint or signed.recovery_hint, signed.error_type
    return record, RemoteFiles(url, filesystem, root, *files)


def staging_directory(url: str) -> Path:
    """Return the local directory in which the store of a URL is built; it depends on the URL only."""
    return cache_directory("building", url)


def cache_directory(kind: str, name: str) -> Path:
    """Return a directory below $GRASP_CACHE or ~/.cache/grasp."""
    base = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "grasp"
    return Path(base) / kind / hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


def is_published(url: str, signed: Signed[Any]) -> bool:
    """Return whether there is a complete store at the URL."""
    filesystem, root = _connect(url)
    with remote_errors(url):
        return bool(filesystem.exists(f"{root}/{signed.name}"))


def publish(local: Path, url: str, signed: Signed[Any]) -> None:
    """Upload a complete store to a URL, its signed record last. An interrupted upload can be resumed by the same call.

    Args:
        local: directory of the store.
        url: URL to publish it at.
        signed: kind of the signed record of the store.
    Raises:
        ArtifactError: there is another store at the URL, or the URL cannot be reached or written to.
    """
    record, data = signed.read(local), (local / signed.name).read_bytes()
    entries = signed.files(record)
    filesystem, root = _connect(url)
    with remote_errors(url):
        if filesystem.exists(f"{root}/{signed.name}"):
            if filesystem.cat_file(f"{root}/{signed.name}") == data:
                return
            raise ArtifactError(f"{url}: another store exists here; delete it or choose another URL")
    journal = local / f"published-{hashlib.blake2b(url.encode(), digest_size=8).hexdigest()}"
    copied = set(journal.read_text(encoding="utf-8").splitlines()) if journal.exists() else set()
    sizes = _sizes(filesystem, root, url)
    with journal.open("a", encoding="utf-8") as journal_file:
        for name, entry in entries.items():
            line = f"{entry.checksum} {name}"
            if line not in copied or sizes.get(name) != entry.bytes:
                with remote_errors(f"{url}/{name}"):
                    # In object stores, makedirs would create a bucket if the name is misspelt.
                    if url.partition(":")[0] not in OBJECT_STORES:
                        filesystem.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
                    filesystem.put_file(str(local / name), f"{root}/{name}")
                journal_file.write(line + "\n")
                journal_file.flush()
    sizes = _sizes(filesystem, root, url)
    if not_uploaded := [name for name, entry in entries.items() if sizes.get(name) != entry.bytes]:
        raise ArtifactError(
            f"{url}: {len(not_uploaded)} of {len(entries)} files were not uploaded, e.g. {not_uploaded[0]}; run again "
            "with --resume"
        )
    with remote_errors(f"{url}/{signed.name}"):
        filesystem.pipe_file(f"{root}/{signed.name}", data)


def _sizes(filesystem: Any, root: str, url: str) -> dict[str, int]:
    """Return the size of every file below `root` by relative name; empty if `root` does not exist."""
    with remote_errors(url):
        filesystem.invalidate_cache()
        try:
            files = filesystem.find(root, detail=True)
        except FileNotFoundError:
            return {}
    return {str(path)[len(root) :].lstrip("/"): int(info["size"]) for path, info in files.items()}


def _connect(url: str) -> tuple[Any, str]:
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except ImportError as err:
        protocol = url.partition(":")[0]
        extra = install_hint("s3") if protocol in ("s3", "s3a") else f"{err}"
        raise MissingExtraError(f"{url}: needs an fsspec filesystem for {protocol!r}: {extra}") from err
    return filesystem, root.rstrip("/")


def _error_types() -> tuple[type[Exception], ...]:
    """Return OSError, and other errors of object stores and of HTTP if their library is imported."""
    names = {"aiohttp": "ClientError", "azure.core.exceptions": "AzureError", "botocore.exceptions": "BotoCoreError"}
    names |= {"gcsfs.retry": "HttpError", "google.auth.exceptions": "GoogleAuthError"}
    return OSError, *(getattr(sys.modules[module], name) for module, name in names.items() if module in sys.modules)


@contextmanager
def remote_errors(location: str, error_type: type[GraspError] = ArtifactError) -> Iterator[None]:
    """Convert errors of a remote filesystem to one line; an OSError of a local path is not changed.

    Args:
        location: URL that is read or written, or a local path.
        error_type: type of the error.
    Raises:
        GraspError: the URL cannot be reached; of type `error_type`.
    """
    try:
        yield
    except _error_types() as err:
        if isinstance(err, OSError) and "://" not in location:
            raise
        reason = " ".join(str(err).split()) or type(err).__name__
        public = " (FSSPEC_S3_ANON=true for a public bucket)" * location.startswith(("s3://", "s3a://"))
        raise error_type(
            f"{location}: cannot be reached: {reason}; check URL, credentials{public} and network"
        ) from err
