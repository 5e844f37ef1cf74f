"""Files of the prefix cache: what is found again, what is removed, and what happens when the disk takes no part."""

import os
import time
from types import SimpleNamespace

import pytest

from engine.cache.disk_tier import HEADER, DiskTier
from engine.cache.host_index import Record
from engine.cache.host_slab import crc

KEY = b"weights and codec"
SIZE = 1000


def record(n, is_state=False):
    return Record(is_state, bytes([n]) * 32, bytes([n - 1]) * 32, 64 * n)


def content(n):
    """Two parts, as layers are."""
    return [memoryview(bytearray([n] * 600)), memoryview(bytearray([n + 100] * 400))]


def blank():
    return [memoryview(bytearray(600)), memoryview(bytearray(400))]


def write(tier, n, is_state=False):
    tier.write(record(n, is_state), content(n), crc(content(n)))


def is_read(tier, n, is_state=False):
    parts = blank()
    return tier.read(record(n, is_state), parts) and parts == content(n)


def open_tier(directory, limit=10**6, key=KEY):
    return DiskTier(directory, key, limit)


def files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "not there yet"


def test_another_service_finds_what_was_written(directory):
    tier = open_tier(directory)
    write(tier, 1)
    write(tier, 1, is_state=True)
    write(tier, 2)
    other = open_tier(directory)
    assert [other.has(False, record(n).block_hash) for n in (1, 2, 3)] == [True, True, False]
    assert is_read(other, 1) and is_read(other, 2) and is_read(other, 1, is_state=True)
    assert not is_read(other, 2, is_state=True)
    assert other.num_bytes == tier.num_bytes == 3 * (HEADER.size + SIZE)
    assert not other.counts


def test_other_weights_see_nothing_but_make_room(directory):
    first = open_tier(directory)
    write(first, 1)
    other = open_tier(directory, key=b"other weights", limit=2 * (HEADER.size + SIZE))
    assert not other.has(False, record(1).block_hash)
    for n in (2, 3):
        write(other, n)
    assert not open_tier(directory).has(False, record(1).block_hash)
    assert other.counts == {"num_evicted": 1}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[: HEADER.size],
        lambda data: b"",
        lambda data: data[:-7] + bytes([data[-7] ^ 1]) + data[-6:],
        lambda data: b"LLDISK00" + data[8:],
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: data[:72] + bytes([data[72] ^ 1]) + data[73:],
    ],
)
def test_a_damaged_foreign_or_short_file_is_removed_and_counted(directory, damage):
    write(open_tier(directory), 1)
    (file,) = files(directory)
    file.write_bytes(damage(file.read_bytes()))
    tier = open_tier(directory)
    assert not is_read(tier, 1)
    assert tier.counts == {"num_damaged": 1}
    assert files(directory) == [] and tier.num_bytes == 0
    write(tier, 1)
    assert is_read(tier, 1)


def test_what_was_used_longest_ago_goes(directory):
    tier = open_tier(directory, limit=4 * (HEADER.size + SIZE))
    for n in (1, 2, 3, 4):
        write(tier, n)
        os.utime(files(directory)[-1], (n, n))
    tier = open_tier(directory, limit=4 * (HEADER.size + SIZE))
    assert is_read(tier, 1)
    write(tier, 5)
    assert [tier.has(False, record(n).block_hash) for n in (1, 2, 3, 4, 5)] == [True, False, True, True, True]
    # the use is remembered by the files
    tier = open_tier(directory, limit=2 * (HEADER.size + SIZE))
    assert tier.has(False, record(5).block_hash) and not tier.has(False, record(3).block_hash)
    assert tier.num_bytes <= 2 * (HEADER.size + SIZE)


def test_what_is_larger_than_the_limit_is_not_written(directory):
    tier = open_tier(directory, limit=SIZE)
    write(tier, 1)
    assert files(directory) == []


def test_a_full_disk_is_a_warning_and_a_count(directory, monkeypatch, caplog):
    tier = open_tier(directory)
    write(tier, 1)
    real_write = os.write
    monkeypatch.setattr("os.write", lambda file, data: _full() if len(data) == 400 else real_write(file, data))
    write(tier, 2)
    write(tier, 3)
    assert tier.counts == {"num_failures": 2}
    assert caplog.text.count("No space left") == 1
    assert [path.suffix for path in files(directory)] == [".kv"]
    monkeypatch.undo()
    write(tier, 2)
    assert is_read(tier, 1) and is_read(tier, 2)


def test_a_file_system_smaller_than_the_limit_keeps_what_is_newest(directory, monkeypatch):
    tier = open_tier(directory)
    real_write = os.write

    def write_while_there_is_room(file, data):
        held = sum(path.stat().st_size for path in files(directory) if path.suffix != ".part")
        return _full() if held > 5000 else real_write(file, data)

    monkeypatch.setattr("os.write", write_while_there_is_room)
    for number in range(1, 40):
        write(tier, number)
    assert is_read(tier, 39) and not tier.has(False, record(1).block_hash)
    assert tier.counts["num_failures"] == 0 and tier.counts["num_evicted"] > 10
    assert tier.num_bytes == sum(path.stat().st_size for path in files(directory)) <= 5700


@pytest.fixture
def file_system(monkeypatch):
    """One of 20,000 bytes, of which a twentieth is left to others."""

    def has_free(count, size=20_000):
        told = SimpleNamespace(f_frsize=1, f_blocks=size, f_bavail=count, f_bfree=count + 5000)
        monkeypatch.setattr("os.statvfs", lambda path: told)

    return has_free


def test_no_more_is_kept_than_was_free_at_the_start(directory, file_system, caplog):
    file_system(6000)
    tier = open_tier(directory)
    assert "holds 4.9KiB instead of disk_cache_bytes, 976.6KiB" in caplog.text
    for number in range(1, 40):
        write(tier, number)
    assert is_read(tier, 39) and not tier.has(False, record(1).block_hash)
    assert 3000 < tier.num_bytes <= 5000 and tier.counts["num_failures"] == 0


def test_the_files_that_are_there_count_as_room(directory, file_system, caplog):
    tier = open_tier(directory)
    for number in range(1, 6):
        write(tier, number)
    held = tier.num_bytes
    file_system(1000 + HEADER.size + SIZE)
    tier = open_tier(directory, limit=held + HEADER.size + SIZE)
    write(tier, 6)
    assert [tier.has(False, record(n).block_hash) for n in (1, 6)] == [True, True] and not caplog.text
    # others have filled it: as much is given back as they are to have
    file_system(0)
    tier = open_tier(directory)
    assert tier.num_bytes == sum(path.stat().st_size for path in files(directory)) <= held + HEADER.size + SIZE - 1000
    assert is_read(tier, 6)


def test_both_limits_are_told(directory, monkeypatch, caplog):
    told = SimpleNamespace(f_frsize=4096, f_blocks=2**38 // 4096, f_bavail=10 * 2**30 // 4096)
    monkeypatch.setattr("os.statvfs", lambda path: told)
    open_tier(directory, limit=64 * 2**30)
    assert "holds 6.0GiB instead of disk_cache_bytes, 64.0GiB" in caplog.text
    assert "take 0B, of the file system 10.0GiB are free, and 4.0GiB" in caplog.text


def test_a_file_system_without_room_or_numbers_ends_no_start(directory, file_system, monkeypatch, caplog):
    file_system(500)
    tier = open_tier(directory)
    write(tier, 1)
    assert files(directory) == [] and "holds 0B" in caplog.text
    # nothing is known: what is asked for is taken
    caplog.clear()
    file_system(0, size=0)
    write(open_tier(directory), 1)
    monkeypatch.setattr("os.statvfs", lambda path: _full())
    tier = open_tier(directory)
    assert is_read(tier, 1) and not caplog.text


def _full():
    raise OSError(28, "No space left on device")


def test_a_directory_that_cannot_be_made_or_read_is_gone_without(tmp_path, caplog):
    (tmp_path / "file").write_text("no directory")
    tier = open_tier(tmp_path / "file" / "cache")
    write(tier, 1)
    assert not is_read(tier, 1)
    assert tier.counts["num_failures"] >= 1
    assert "goes on without" in caplog.text


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_holds_nobody_up_and_makes_room(directory, make, is_late):
    """Under the name of a block, there at the start or put there later."""
    write(open_tier(directory), 1)
    (file,) = files(directory)
    tier = open_tier(directory) if is_late else None
    file.unlink()
    make(file)
    tier = tier or open_tier(directory)
    assert not is_read(tier, 1)
    write(tier, 1)
    assert is_read(tier, 1) and tier.num_bytes == HEADER.size + SIZE


def test_a_directory_in_which_nothing_can_be_written_is_told_at_the_start(tmp_path, caplog):
    (tmp_path / "file").write_text("no directory")
    open_tier(tmp_path / "file" / "cache")
    assert "cannot be written" in caplog.text


def test_a_file_that_vanished_is_missed_once(directory):
    tier = open_tier(directory)
    write(tier, 1)
    files(directory)[0].unlink()
    assert not is_read(tier, 1)
    assert not tier.has(False, record(1).block_hash) and tier.num_bytes == 0


def test_what_a_dead_service_wrote_aside_is_removed_and_others_files_are_not(directory):
    tier = open_tier(directory)
    write(tier, 1)
    (own,) = files(directory)
    old, new, mine = (own.with_name(name) for name in ("a.kv.1.part", "b.kv.2.part", "notes.txt"))
    for path in (old, new, mine):
        path.write_bytes(b"x" * 10)
    long_ago = time.time() - 10_000
    os.utime(old, (long_ago, long_ago))
    (directory / "README").write_text("mine")
    tier = open_tier(directory)
    assert not old.exists() and new.exists() and mine.exists() and (directory / "README").exists()
    assert tier.num_files == 1
