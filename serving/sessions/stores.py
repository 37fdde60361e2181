"""Where pages of demoted sessions go: to host memory, and from there to disk."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from kvjax.client.errors import ResourceExhausted
from kvjax.serving.sessions.disk_tier import DiskTier
from kvjax.serving.sessions.session import Record

logger = logging.getLogger(__name__)

RETRY_S = 60.0
"""After a failed write, the disk counts as full for so long."""


class Stores:
    """Host memory and disk, for pages of demoted sessions.

    page_bytes: of one page, by layer group. host_bytes: the most bytes in host memory; None: no limit. disk_tier: the disk; None: there is
    none.
    """

    def __init__(self, page_bytes: Mapping[str, int], host_bytes: int | None, disk_tier: DiskTier | None):
        self._page_bytes, self.host_bytes, self._disk = page_bytes, host_bytes, disk_tier
        self._failed = float("-inf")

    def live_bytes(self, record: Record) -> int:
        """Bytes of a session's pages on the device."""
        pages = record.sequence.pages.items()
        return sum(self._page_bytes[name] * sum(page >= 0 for page in ids) for name, ids in pages)

    def stored_bytes(self, record: Record, on_disk: bool) -> int:
        """Bytes of a demoted session's pages in host memory, or on disk."""
        if record.sequence.suspended is None or record.on_disk != on_disk:
            return 0
        return sum(self._page_bytes[name] * len(ids) for name, ids in record.sequence.held.items())

    def look(self, records: Iterable[Record], now: float) -> Look:
        """What the stores hold. records: all sessions, the one used longest ago first. now: seconds, on the clock of `to_disk`."""
        if self.host_bytes is None:
            return Look(self, None, 0, [], {})
        hosted, order, on_disk = [], {}, 0
        for number, record in enumerate(records):
            order[record] = number
            if record.sequence.suspended is None:
                continue
            if record.on_disk:
                on_disk += self.stored_bytes(record, on_disk=True)
            else:
                hosted.append((number, record, self.stored_bytes(record, on_disk=False)))
        room = 0 if self._disk is None or now < self._failed + RETRY_S else self._disk.most - on_disk
        return Look(self, self.host_bytes - sum(size for *_, size in hosted), room, hosted, order)

    def to_disk(self, record: Record, now: float) -> None:
        """Move a demoted session's pages from host memory to disk. ResourceExhausted if they cannot be written; then they stay."""
        try:
            record.sequence.suspended = self._disk.put(record.sequence.suspended)
        except OSError as error:
            self._failed = now
            raise ResourceExhausted(f"pages of a session could not be written to {self._disk.folder}: {error.strerror}") from error


class Look:
    """What the stores held at one moment, to ask for several sessions. `moves` of all of them together takes time in proportion to the
    number of sessions and of their pages, however many there are. It holds until pages move in another way than by `moved`."""

    def __init__(
        self, stores: Stores, host_left: int | None, disk_left: int, hosted: list[tuple[int, Record, int]], order: Mapping[Record, int]
    ):
        self._stores, self._host_left, self._disk_left = stores, host_left, disk_left
        self._hosted, self._order = hosted, order
        self._searched = False

    @property
    def full(self) -> bool:
        """Whether not even one page has room."""
        return self._host_left is not None and self._host_left <= 0 and self._disk_left <= 0

    def moves(self, record: Record) -> list[Record] | None:
        """Which sessions' pages go from host memory to disk, possibly its own, so that those of `record` fit there; None if they cannot.

        Those used longest ago go first. After one search that found too few, only what fits into host memory as it is is moved.
        """
        if self._host_left is None:
            return []
        size = self._stores.live_bytes(record)
        surplus, room, found = size - self._host_left, self._disk_left, []
        if surplus <= 0:
            return []
        if self._searched or surplus > room:
            return None
        for _, each, held in sorted([*self._hosted, (self._order[record], record, size)], key=lambda entry: entry[0]):
            if 0 < held <= room:
                found.append(each)
                surplus, room = surplus - held, room - held
                if surplus <= 0:
                    return found
        self._searched = True
        return None

    def moved(self, record: Record, size: int, went: list[Record], disk_failed: bool) -> None:
        """`record`, with `size` bytes on the device, was demoted, and `went` are on disk now. disk_failed: nothing more fits there."""
        if self._host_left is None:
            return
        entries = sorted([*self._hosted, (self._order[record], record, size)], key=lambda entry: entry[0])
        gone = set(went)
        on_disk = sum(held for _, each, held in entries if each in gone)
        self._hosted = [entry for entry in entries if entry[1] not in gone]
        self._host_left, self._disk_left = self._host_left - size + on_disk, 0 if disk_failed else self._disk_left - on_disk
