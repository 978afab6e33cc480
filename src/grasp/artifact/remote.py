"""An artifact behind an fsspec URL: `s3://bucket/art`, `gs://...`, `memory://...`.

Reading fetches whole files, each when it is first needed, into a cache on this machine, and checks them against the
manifest: from there on they are mapped into memory and queried like those of a local artifact. A prediction that needs
two arrays fetches two arrays. Writing builds on the local disk and publishes: every file, the manifest last, so that
who reads the URL sees a whole artifact or none.
"""

import hashlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import fsspec
import xxhash

from grasp.artifact.layout import MANIFEST
from grasp.artifact.manifest import Manifest, parse_manifest
from grasp.errors import ArtifactError, MissingExtraError
from grasp.files import FileEntry, checksum_fault, discard, fault, kind_of, size_fault, write_whole, written_aside
from grasp.locks import one_at_a_time

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


@dataclass(frozen=True, slots=True)
class RemoteFiles:
    """The files of one artifact behind a URL, and the directory that keeps what was fetched of them."""

    url: str
    filesystem: Any
    root: str  # path of the artifact within the filesystem
    cache: Path
    files: Mapping[str, FileEntry]

    @classmethod
    def open(cls, url: str) -> tuple[Self, Manifest]:
        """Read the manifest.

        Raises:
            ArtifactError: no complete artifact there, damaged, or the place cannot be reached.
            MissingExtraError: what speaks this protocol is not installed.
        """
        filesystem, root = _connect(url)
        with _reached(url):
            try:
                data: bytes = filesystem.cat_file(f"{root}/{MANIFEST}")
            except FileNotFoundError as err:
                raise ArtifactError(
                    f"{url}: no complete artifact here; make one with `grasp build --out {shlex.quote(url)}`, or see "
                    "that the URL is right"
                ) from err
        manifest = parse_manifest(Path(f"{url}/{MANIFEST}"), data)
        cache = cache_directory("fetched", f"{url} {manifest.checksum}")
        cache.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(cache.with_suffix(LOCK)):
            write_whole(cache / MANIFEST, data)
        return cls(url, filesystem, root, cache, manifest.files), manifest

    def fetch(self, name: str, expected: FileEntry) -> None:
        """See that the file is on this machine, whole; what is not here yet, or was damaged here, is fetched.

        Raises:
            ArtifactError: it is not there, or not what the manifest says.
        """
        if fault(self.cache, name, expected) is None:
            return
        with one_at_a_time(self.cache.with_suffix(LOCK)):
            if fault(self.cache, name, expected) is not None:  # another process may have fetched it
                self._fetch(name, expected)

    def _fetch(self, name: str, expected: FileEntry) -> None:
        path = self.cache / name
        for directory in reversed(path.relative_to(self.cache).parents):
            if kind_of(self.cache / directory) not in ("directory", "nothing"):
                discard(self.cache / directory)  # a link that somebody put there: nothing is written behind it
        path.parent.mkdir(parents=True, exist_ok=True)
        discard(path)
        with written_aside(path) as part:
            with _reached(f"{self.url}/{name}"):
                self.filesystem.get_file(f"{self.root}/{name}", str(part))
            if what := fault(part.parent, part.name, expected):
                raise ArtifactError(
                    f"{self.url}/{name}: {what}; `grasp verify {shlex.quote(self.url)}` names everything that is broken"
                )

    def fault(self, name: str, expected: FileEntry) -> str | None:
        """What is wrong with a file where it lies, read as a stream; None: nothing."""
        digest, size = xxhash.xxh3_128(), 0
        try:
            with _reached(f"{self.url}/{name}"), self.filesystem.open(f"{self.root}/{name}", "rb") as handle:
                while size <= expected.bytes and (data := handle.read(_READ_BYTES)):
                    digest.update(data)
                    size += len(data)
        except ArtifactError as err:
            return "missing" if isinstance(err.__cause__, FileNotFoundError) else str(err)
        if what := size_fault(size, expected) or checksum_fault(digest.hexdigest(), expected):
            return what
        kept = kind_of(self.cache / name) != "nothing" and fault(self.cache, name, expected)
        return f"{kept} (the copy of it in {self.cache}; it is fetched again when it is needed)" if kept else None


def staging_directory(url: str) -> Path:
    """Where the artifact of a URL is built; the same for every build that goes there from this machine."""
    return cache_directory("building", url)


def cache_directory(kind: str, name: str) -> Path:
    """A directory of our own under $GRASP_CACHE, or the user's cache."""
    base = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "grasp"
    return Path(base) / kind / hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


def is_published(url: str) -> bool:
    """Whether a complete artifact lies at the URL."""
    filesystem, root = _connect(url)
    with _reached(url):
        return bool(filesystem.exists(f"{root}/{MANIFEST}"))


def publish_artifact(local: Path, url: str) -> None:
    """Copy a complete artifact to a URL, the manifest last. Cut off, the same call goes on with what is missing.

    Raises:
        ArtifactError: another artifact lies there; the place cannot be reached or written to.
    """
    data = (local / MANIFEST).read_bytes()
    manifest = parse_manifest(local / MANIFEST, data)
    filesystem, root = _connect(url)
    with _reached(url):
        if filesystem.exists(f"{root}/{MANIFEST}"):
            if filesystem.cat_file(f"{root}/{MANIFEST}") == data:
                return
            raise ArtifactError(f"{url}: another artifact lies here; delete it, or choose another URL")
    journal = local / f"published-{hashlib.blake2b(url.encode(), digest_size=8).hexdigest()}"
    noted = set(journal.read_text(encoding="utf-8").splitlines()) if journal.exists() else set()
    there = _sizes(filesystem, root, url)
    with journal.open("a", encoding="utf-8") as note:
        for name, entry in manifest.files.items():
            line = f"{entry.checksum} {name}"
            if line not in noted or there.get(name) != entry.bytes:
                _put(filesystem, local / name, f"{root}/{name}", f"{url}/{name}")
                note.write(line + "\n")
                note.flush()
    there = _sizes(filesystem, root, url)
    if lost := [name for name, entry in manifest.files.items() if there.get(name) != entry.bytes]:
        raise ArtifactError(
            f"{url}: {len(lost)} of {len(manifest.files)} files did not arrive, e.g. {lost[0]}; run again with "
            "--resume to send them"
        )
    with _reached(f"{url}/{MANIFEST}"):
        filesystem.pipe_file(f"{root}/{MANIFEST}", data)


def _put(filesystem: Any, source: Path, to: str, where: str) -> None:
    with _reached(where):
        if where.partition(":")[0] not in OBJECT_STORES:  # there it would make a bucket of a misspelt name
            filesystem.makedirs(to.rpartition("/")[0], exist_ok=True)
        filesystem.put_file(str(source), to)


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
    """Remove what a published artifact was built from."""
    shutil.rmtree(staging_directory(url), ignore_errors=True)


def _connect(url: str) -> tuple[Any, str]:
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except ImportError as err:
        protocol = url.partition(":")[0]
        extra = "pip install 'grasp-attribution[s3]'" if protocol in ("s3", "s3a") else f"{err}"
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
