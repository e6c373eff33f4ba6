"""How participants talk through the destination: what each holds, and bytes for each other.

**Agreement**: every participant publishes what it holds (``.ucpstore/index/RANK-of-WORLD.json``), waits for the
others, and then says which set of documents it saw (``.ucpstore/index/DIGEST/RANK``). All have agreed once
everybody saw the same set. What a dead attempt left cannot be taken for a living participant's: the set that
it is in is one that nobody living will confirm.

**Staging**: the bytes of one participant that a group of another's objects needs are one object of their own
(``.ucpstore/parts/PLAN/GROUP-RANK``), with their hash at the end; once all of a participant's are durable, it
says so (``.ucpstore/parts/PLAN/done/RANK``). The commit deletes them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import xxhash

from ucpstore.claims import INDEX, PARTS
from ucpstore.errors import (
    AlreadyExistsError,
    IntegrityError,
    Kind,
    StorageError,
    UcpStoreError,
    WorkerError,
    listing,
)
from ucpstore.io.base import Files

__all__ = ["DIGEST_BYTES", "Exchange"]

DIGEST_BYTES = 16
_PREPARED = "prepared"
_FAILED = "-failed-"
_LONGEST_TEXT = 2000
_FIRST_DELAY = 0.02
_LONGEST_DELAY = 1.0

Found = TypeVar("Found")


class Exchange:
    """One participant's view of the others.

    Parameters
    ----------
    files : Files
        The destination.
    rank, world : int
        Which participant this is, of how many.
    timeout : float, seconds
        How long to wait for others at any one step.
    """

    def __init__(self, files: Files, rank: int, world: int, *, timeout: float) -> None:
        self.rank = rank
        self.world = world
        self._files = files
        self._timeout = timeout
        self._seen: dict[int, tuple[str, bytes]] = {}
        self._agreed = ""

    # ----------------------------------------------------------------- agreement

    def agree(self, document: bytes) -> list[bytes]:
        """Publish what this participant holds, and wait until all have seen the same set of documents.

        Parameters
        ----------
        document : bytes

        Returns
        -------
        list of bytes
            The documents of all participants, in order.

        Raises
        ------
        WorkerError
            Somebody did not come.
        AlreadyExistsError
            Another process is this participant (``ABANDONED``).
        """
        mine = self._document(self.rank)
        if self._files.stat(mine) is None or self._files.read(mine) != document:
            self._files.write(mine, document)

        def look() -> list[bytes] | None:
            documents = self._read_documents(document)
            if len(documents) < self.world:
                return None
            folder = self._folder(documents)
            if self._agreed != folder:
                self._files.create(f"{folder}/{self.rank:06d}", b"agreed\n")
                self._agreed = folder
            there = {stat.name for stat in self._files.list(folder, recursive=False)}
            there.discard(f"{folder}/{_PREPARED}")
            return documents if len(there) == self.world else None

        return self._wait(look, self._absent)

    def prepare(self, act: Callable[[], None]) -> None:
        """Let participant 0 do something after the agreement, which the others wait for.

        Where it cannot, the others go on, too: what it did not do stops them as well.

        Raises
        ------
        WorkerError, AlreadyExistsError
        """
        name = f"{self._agreed}/{_PREPARED}"
        if self.rank == 0:
            try:
                act()
            finally:
                self._files.create(name, b"prepared\n")
            return

        def look() -> bool | None:
            if self._files.stat(name) is not None:
                return True
            self.require_current()
            return None

        self._wait(look, lambda: ([0], "prepared the destination"))

    def give_up(self, error: UcpStoreError) -> None:
        """Tell the others that this participant failed, so that they need not wait for it."""
        with suppress(StorageError):  # what failed may be the destination
            text = str(error)[:_LONGEST_TEXT].encode("utf-8", "replace")
            self._files.create(f"{self._agreed}{_FAILED}{self.rank:06d}", text)

    def require_current(self) -> None:
        """Refuse to go on once a participant has failed or begun anew.

        Raises
        ------
        WorkerError
            A participant failed.
        AlreadyExistsError
            ``ABANDONED``: what was agreed on is no longer what they hold.
        """
        now = {stat.name: stat.token for stat in self._files.list(INDEX, recursive=False)}
        changed = [
            rank
            for rank, (token, _) in self._seen.items()
            if now.get(self._document(rank)) != token
        ]
        if changed:
            raise self._superseded(changed)
        for name in now:
            if name.startswith(f"{self._agreed}{_FAILED}"):
                text = self._files.read(name).decode("utf-8", "replace")
                raise WorkerError(
                    f"{self._files.url}: participant {int(name[-6:])} of {self.world} failed: {text}",
                    hint="Nothing is visible; begin again with all of them.",
                )

    # ------------------------------------------------------------------- staging

    def stage(self, plan: str, group: int, nbytes: int, blocks: Iterable[memoryview]) -> None:
        """Write the bytes that this participant has for a group of objects; durable by `staged`."""
        digest = xxhash.xxh3_128()
        sink = self._files.sink(_part(plan, group, self.rank), nbytes + DIGEST_BYTES)
        try:
            for block in blocks:
                digest.update(block)
                sink.write([block])
            sink.write([digest.digest()])
            sink.close()
        except BaseException:
            sink.abort()
            raise

    def has_staged(self, plan: str) -> bool:
        """Whether an earlier run of this participant has staged everything."""
        return self._files.stat(_done(plan, self.rank)) is not None

    def staged(self, plan: str) -> None:
        """Make everything that was staged durable, and tell the others."""
        self._files.sync()
        self._files.create(_done(plan, self.rank), b"staged\n")

    def wait_for_parts(
        self, plan: str, ranks: Iterable[int], *, committed: Callable[[], bool]
    ) -> bool:
        """Wait until ``ranks`` have staged everything.

        Returns
        -------
        bool
            False where the plan was committed meanwhile, and nothing is left to do.

        Raises
        ------
        WorkerError, AlreadyExistsError
        """
        missing = set(ranks)

        def look() -> bool | None:
            there = {stat.name for stat in self._files.list(f"{PARTS}/{_key(plan)}/done")}
            missing.difference_update([r for r in missing if _done(plan, r) in there])
            if not missing:
                return True
            self.require_current()
            return False if committed() else None

        return self._wait(look, lambda: (sorted(missing), "staged their parts"))

    def read_part(self, plan: str, group: int, rank: int, nbytes: int) -> bytes:
        """What ``rank`` staged for a group of objects.

        Raises
        ------
        IntegrityError
            It is not what was written.
        """
        name = _part(plan, group, rank)
        data = self._files.read(name)
        content = memoryview(data)[:nbytes]
        if len(data) != nbytes + DIGEST_BYTES or (
            xxhash.xxh3_128(content).digest() != data[nbytes:]
        ):
            raise IntegrityError(
                f"{self._files.url}/{name}: found {len(data)} bytes that are not those that participant {rank}"
                f" staged, expected {nbytes + DIGEST_BYTES} with their hash.",
                kind=Kind.CHECKSUM,
                hint=f"Delete {self._files.url}/{PARTS}, then run all participants again.",
                name=name,
            )
        return bytes(content)

    def wait_for_commit(self, committed: Callable[[], bool]) -> None:
        """Wait until the others have finished and somebody has committed.

        Raises
        ------
        WorkerError, AlreadyExistsError
        """

        def look() -> bool | None:
            if committed():
                return True
            self.require_current()
            return None

        self._wait(look, lambda: ([], "committed"))

    # ------------------------------------------------------------------ internal

    def _document(self, rank: int) -> str:
        return f"{INDEX}/{rank:06d}-of-{self.world:06d}.json"

    def _folder(self, documents: Sequence[bytes]) -> str:
        digest = hashlib.sha256()
        for document in documents:
            digest.update(hashlib.sha256(document).digest())
        return f"{INDEX}/{digest.hexdigest()[:32]}"

    def _read_documents(self, own: bytes) -> list[bytes]:
        """The documents that are there now; only those that changed are read again."""
        there = {stat.name: stat for stat in self._files.list(INDEX, recursive=False)}
        found = []
        for rank in range(self.world):
            stat = there.get(self._document(rank))
            if stat is None:
                self._seen.pop(rank, None)
                continue
            if rank not in self._seen or self._seen[rank][0] != stat.token:
                self._seen[rank] = (stat.token, self._files.read(stat.name))
            found.append(self._seen[rank][1])
        if self.rank in self._seen and self._seen[self.rank][1] != own:
            raise self._superseded([self.rank])
        return found

    def _absent(self) -> tuple[list[int], str]:
        return [r for r in range(self.world) if r not in self._seen], "agreed on what they hold"

    def _wait(
        self, look: Callable[[], Found | None], absent: Callable[[], tuple[list[int], str]]
    ) -> Found:
        stop = time.monotonic() + self._timeout
        for delay in _delays():
            found = look()
            if found is not None:
                return found
            if time.monotonic() > stop:
                break
            time.sleep(delay)
        missing, what = absent()
        who = f"participants {listing(map(str, missing))}" if missing else "not all participants"
        raise WorkerError(
            f"{self._files.url}: participant {self.rank} of {self.world} waited {self._timeout:.0f} s until all had"
            f" {what}: {who} {'are missing' if missing else 'did'}.",
            hint="Did one of them fail? Nothing is visible; begin again with all of them.",
        )

    def _superseded(self, ranks: Sequence[int]) -> AlreadyExistsError:
        return AlreadyExistsError(
            f"{self._files.url} no longer belongs to this attempt: another one has begun as participant"
            f" {listing(map(str, ranks))} of {self.world}.",
            kind=Kind.ABANDONED,
            hint="Nothing more was written. Only one attempt can go on.",
            url=self._files.url,
        )


def _delays() -> Iterator[float]:
    delay = _FIRST_DELAY
    while True:
        yield delay
        delay = min(1.5 * delay, _LONGEST_DELAY)


def _key(plan: str) -> str:
    return plan.partition(":")[2][:32]


def _part(plan: str, group: int, rank: int) -> str:
    return f"{PARTS}/{_key(plan)}/{group:09d}-{rank:06d}"


def _done(plan: str, rank: int) -> str:
    return f"{PARTS}/{_key(plan)}/done/{rank:06d}"
