"""How a native checkpoint comes into being: out of any loader's sight, then whole, then named by ``latest``.

Files are written to ``.ucpstore/files/<plan>/``. The commit gives that folder the tag's name with one
rename, then writes ``.ucpstore/commit.json``, and ``latest`` last: DeepSpeed (0.19.8,
``runtime/engine.py`` ``load_checkpoint``) loads what ``latest`` names, and ``zero_to_fp32`` takes every file
of the tag's folder that matches a pattern, so that nothing else may lie in it.

A destination holds one checkpoint. Somebody else's are never replaced, added to or hidden by a new
``latest``: neither those that lie there when a conversion begins nor those that are saved meanwhile.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import xxhash

from ucpstore.claims import COMMIT, STAGING, VERSION, ClaimLog, dump_json, load_json
from ucpstore.commit import LoggedTarget
from ucpstore.contracts import Record, Task
from ucpstore.errors import (
    AlreadyExistsError,
    CheckpointNotFoundError,
    IntegrityError,
    Kind,
    PlanError,
    listing,
)
from ucpstore.formats.deepspeed.files import LATEST
from ucpstore.io.base import Files, FileStat, Folder, check_name

__all__ = ["DeepSpeedLog", "FolderTarget"]

_BLOCK = 4 << 20
_LATEST_LIMIT = 4096  # bytes of `latest` that are looked at
_ANOTHER = (
    "Choose another destination. To add the result to a run, convert it elsewhere, move its folder there,"
    " and write the folder's name into `latest`."
)


class DeepSpeedLog(ClaimLog):
    """The claims of a destination, and the commit that ``latest`` makes visible."""

    def finish(self, tag: str) -> None:
        """Commit, once the tag's folder is in place. Only under a seal.

        Raises
        ------
        AlreadyExistsError
            Somebody else wrote a ``latest`` meanwhile.
        """
        document = {
            "version": VERSION,
            "format": "deepspeed",
            "plan_digest": self.digest,
            "tag": tag,
        }
        self._files.write(COMMIT, dump_json(document, COMMIT))
        if not self._files.create(LATEST, tag.encode()):
            found = self._latest() or b""
            if found != tag.encode():
                raise self._foreign(found)

    def _committed(self, digest: str) -> bool:
        found, latest = self._document(), self._latest()
        if found is None:
            if latest is not None:  # ours comes after the commit document
                raise self._foreign(latest)
            return False
        if found.get("plan_digest") != digest:
            raise AlreadyExistsError(
                f"{self._files.url} holds a committed checkpoint of another plan: found"
                f" {found.get('plan_digest')}, expected {digest}.",
                hint=_ANOTHER,
                url=self._files.url,
            )
        tag = str(found.get("tag"))
        if latest is not None and tag in self._files.folders():
            return True
        if latest not in (None, tag.encode()):  # trained on, and the tag was deleted since
            raise self._foreign(latest)
        return False

    def _is_visible(self) -> bool:
        return self._document() is not None and self._latest() is not None

    def _document(self) -> Mapping[str, Any] | None:
        """Which plan's files lie in their place, if any."""
        try:
            document = load_json(self._files.read(COMMIT))
        except CheckpointNotFoundError:
            return None
        except ValueError as error:
            raise IntegrityError(
                f"{self._files.url}/{COMMIT} is no JSON: {error}.", kind=Kind.MALFORMED
            ) from error
        return document if isinstance(document, dict) else {}

    def _latest(self) -> bytes | None:
        try:
            return self._files.read(LATEST, 0, _LATEST_LIMIT)
        except CheckpointNotFoundError:
            return None

    def _foreign(self, latest: bytes) -> AlreadyExistsError:
        return AlreadyExistsError(
            f"{self._files.url} belongs to something else: found a `latest` that names"
            f" {latest[:80].decode(errors='replace')!r}, expected none.",
            hint=_ANOTHER,
            url=self._files.url,
        )


class FolderTarget(LoggedTarget):
    """A target whose files become one folder, whole.

    Parameters
    ----------
    files : Files
        The destination: a local folder.
    tag : str
        Name of the checkpoint's folder.

    Raises
    ------
    PlanError
        The destination is no local folder, or ``tag`` no plain name.
    """

    _log: DeepSpeedLog

    def __init__(self, files: Files, tag: str) -> None:
        if not files.is_local:
            raise PlanError(
                f"{files.url}: a native DeepSpeed checkpoint is written to a local folder, as DeepSpeed reads no"
                " other; found an object store.",
                hint="Give a local folder of the machine that loads it: the source may be in a bucket. Or convert to"
                " the Zarr format there (to='zarr').",
            )
        if "/" in check_name(tag) or tag.startswith(".") or tag == LATEST:
            raise PlanError(f"tag {tag!r} is no plain folder name.", kind=Kind.NAME)
        super().__init__(files, DeepSpeedLog(files))
        self._folder = cast("Folder", files)  # all local files can be moved
        self._tag = tag

    def begin(self, digest: str) -> bool:
        """See `ucpstore.claims.ClaimLog.begin`. Frees the space that abandoned plans still take."""
        if not super().begin(digest):
            return False
        self._require_free()
        dead = [name for name in self._strays() if not name.startswith(f"{self._staging}/")]
        if dead:
            self._log.check(cached=False)
            self._files.delete(dead)
        return True

    def stored_nbytes(self) -> int:
        """Bytes of files that are there already, or that `begin` will free."""
        return sum(
            stat.nbytes for prefix in (STAGING, self._tag) for stat in self._files.list(prefix)
        )

    # ------------------------------------------------------------------ internal

    @abstractmethod
    def tasks(self) -> Sequence[Task]:
        """One per file; keys are ``<tag>/<file>``."""

    @property
    def _staging(self) -> str:
        """Where this plan's files wait: other plans' remains lie elsewhere."""
        return f"{STAGING}/{self._log.digest.rpartition(':')[2][:16]}"

    def _place(self, task: Task) -> str:
        return f"{self._staging}{task.key.removeprefix(self._tag)}"

    def _objects(self) -> dict[str, FileStat]:
        """Files in their place or, where they are not there, out of sight.

        In this order: a folder that is moved while it is listed is seen in its new place.
        """
        staged = self._files.list(self._staging)
        found = {f"{self._tag}{stat.name.removeprefix(self._staging)}": stat for stat in staged}
        return {**found, **{stat.name: stat for stat in self._files.list(self._tag)}}

    def _find(self, task: Task) -> FileStat | None:
        for name in (task.key, self._place(task), task.key):
            if (stat := self._files.stat(name)) is not None:
                return stat
        return None

    def _read_back(self, task: Task, name: str) -> int | None:
        digest = xxhash.xxh3_128()
        for start in range(0, task.nbytes, _BLOCK):
            try:
                digest.update(self._files.read(name, start, _BLOCK))
            except CheckpointNotFoundError:  # moved to its place meanwhile
                return self._read_back(task, task.key) if name != task.key else None
        return digest.intdigest()

    def _check(self, records: Mapping[int, Record]) -> Mapping[int, Record]:
        self._require_free()
        return super()._check(records)

    def _require_free(self) -> None:
        """Before the seal, a folder with the tag's name is somebody else's."""
        if self._tag in self._files.folders() and not self._log.sealed:
            self._log.check(cached=False)  # another writer of this plan may have gone that far
            if not self._log.sealed:
                raise self._taken(f"found a folder {self._tag!r}, expected none")

    def _settle(self) -> None:
        """Put the tag's folder in its place, whole: one rename."""
        there = not self._folder.move(self._staging, self._tag)
        here = {stat.name for stat in self._files.list(self._tag)}
        if strange := here - {task.key for task in self.tasks()}:
            raise self._taken(f"found {listing(sorted(strange))} among the files of this plan")
        if there:
            # The run that sealed the claim died since, or another writer was faster. Files that
            # were lost from the folder have been written anew.
            for task in self.tasks():
                if task.key not in here:
                    self._folder.move(self._place(task), task.key)
        super()._settle()

    def _strays(self) -> Sequence[str]:
        return [stat.name for stat in self._files.list(STAGING)]

    def _reveal(self, records: Mapping[int, Record]) -> None:
        self._files.sync()  # files that another writer of this plan replaced by the same bytes
        self._log.finish(self._tag)

    def _lost_hint(self) -> str:
        if self._log.sealed:
            return (
                "Delete those that are there and run the same command again: it writes them anew."
            )
        return super()._lost_hint()

    def _taken(self, found: str) -> AlreadyExistsError:
        return AlreadyExistsError(
            f"{self.url} belongs to something else: {found}.", hint=_ANOTHER, url=self.url
        )
