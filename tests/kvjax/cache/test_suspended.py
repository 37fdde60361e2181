"""Pages of suspended sequences: which go to disk, and what comes back."""

import os
from pathlib import Path

import numpy as np
import pytest

from kvjax.cache.stores.suspended import SuspendedPages


def test_what_was_used_longest_ago_goes_to_disk_first(tmp_path):
    store, page = SuspendedPages(), np.zeros((1, 1), np.uint8)
    store.limit(3, tmp_path, 2)
    for key in "abc":
        store.put(key, {"full": page})
    store.touch("a")
    store.put("d", {"full": page}, briefly=True)
    assert store.get("d")["full"] is page
    assert store.make_room(1)
    assert [*store.on_host, *store.on_disk] == [*"cab"]
    assert not store.make_room(3)
    assert store.usage() == {"host_bytes": 2, "disk_bytes": 1, "host_pages": 2, "disk_pages": 1}
    assert store.make_room(2)
    assert (store.full, store.make_room(2), store.moved) == (False, True, 2)


def test_every_read_of_pages_on_disk_is_checked(tmp_path):
    blocks = np.arange(12, dtype=np.uint8).reshape(3, 4)
    store = SuspendedPages()
    store.limit(0, tmp_path, 100)
    for bit in range(8 * blocks.size):
        store.put(bit, {"full": blocks, "none": blocks[:0]})
        assert store.make_room(0)
        assert bit in store.on_disk
        flipped = blocks.copy()
        flipped.reshape(-1)[bit // 8] ^= 1 << bit % 8
        whole, store.on_disk[bit]["full"] = store.on_disk[bit]["full"], flipped
        for _ in range(2):
            with pytest.raises(ValueError, match="other pages of layer group full"):
                store.get(bit)
        store.on_disk[bit]["full"] = whole
        assert (store.get(bit)["full"] == blocks).all()
        store.drop(bit)
    assert not any(store.usage().values())


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="finds the file, which has no name, by its handle")
def test_a_file_that_cannot_be_read_whole_is_damage_and_ends_no_process(tmp_path):
    store = SuspendedPages()
    store.limit(0, tmp_path, 1 << 20)
    store.put("a", {"full": np.ones((4, 65536), np.uint8), "none": np.ones((0, 4), np.uint8)})
    assert store.make_room(0)
    held = [each for each in Path("/proc/self/fd").iterdir() if os.path.lexists(each) and str(tmp_path) in os.readlink(each)]
    for each in held:
        os.truncate(each, 65536)
    with pytest.raises(ValueError, match="other pages of layer group full"):
        store.get("a")
    store.drop("a")
    assert not any(os.path.lexists(each) and str(tmp_path) in os.readlink(each) for each in held)
