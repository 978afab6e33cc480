"""Laws: one run has one holder; an abandoned one has one heir; what is given back is free at once."""

import errno
import os
import subprocess
import sys
import threading
import time

import pytest

from grasp.store import locks as leases

WORKER = """
import sys, time
from pathlib import Path
from grasp.store.locks import acquire_lease
directory, go = Path(sys.argv[1]), Path(sys.argv[2])
(directory / f"ready-{sys.argv[3]}").touch()
while not go.exists():
    time.sleep(0.001)
for k in range(200):
    lease = acquire_lease(directory / "claims", f"run-{k}", ttl=60)
    if lease is not None:
        print(k)
"""


def age(lease, seconds):
    os.utime(lease.path, (time.time() - seconds,) * 2)


def test_a_leased_run_cannot_be_acquired_until_it_is_released(tmp_path):
    lease = leases.acquire_lease(tmp_path / "claims", "a-0")
    assert lease is not None
    assert leases.acquire_lease(tmp_path / "claims", "a-0") is None
    assert leases.acquire_lease(tmp_path / "claims", "a-1") is not None
    assert f"process {os.getpid()}" in (tmp_path / "claims" / "a-0.0").read_text()
    age(lease, 301)
    lease.renew()
    assert leases.acquire_lease(tmp_path / "claims", "a-0") is None
    lease.release()
    assert leases.acquire_lease(tmp_path / "claims", "a-0") is not None


def test_an_expired_lease_is_acquired_by_one_process(tmp_path):
    age(leases.acquire_lease(tmp_path, "a-0"), 301)
    heirs = [leases.acquire_lease(tmp_path, "a-0") for _ in range(3)]
    assert [heir is not None for heir in heirs] == [True, False, False]
    age(heirs[0], 301)
    assert leases.acquire_lease(tmp_path, "a-0").path.name == "a-0.2"


def test_runs_with_a_common_name_prefix_have_separate_leases(tmp_path):
    assert leases.acquire_lease(tmp_path, "a") is not None
    assert leases.acquire_lease(tmp_path, "a.5") is not None
    assert leases.acquire_lease(tmp_path, "a.5.7") is not None
    assert leases.acquire_lease(tmp_path, "a") is None


def test_held_renews_while_the_block_runs_and_gives_back(tmp_path):
    lease = leases.acquire_lease(tmp_path, "a-0")
    with leases.keep_renewed([lease], ttl=0.5):
        time.sleep(0.8)
        assert leases.acquire_lease(tmp_path, "a-0", ttl=0.5) is None
    assert leases.acquire_lease(tmp_path, "a-0", ttl=0.5) is not None


def test_a_share_that_fails_for_a_moment_ends_no_renewal(tmp_path, monkeypatch):
    lease, touch, failed = leases.acquire_lease(tmp_path, "a-0"), os.utime, []

    def fails_at_first(path, times):
        if len(failed) < 2:
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error", str(path))
        touch(path, times)

    monkeypatch.setattr(os, "utime", fails_at_first)
    with leases.keep_renewed([lease], ttl=0.5):
        time.sleep(0.9)
        assert leases.acquire_lease(tmp_path, "a-0", ttl=0.5) is None
    assert failed == [lease.path] * 2


def test_a_lease_that_cannot_be_released_keeps_no_other_and_hides_no_error(tmp_path, monkeypatch):
    held = [leases.acquire_lease(tmp_path, name) for name in ("a-0", "b-0")]
    touch = os.utime

    def fails_for_the_first(path, times):
        if path == held[0].path:
            raise OSError(errno.EIO, "Input/output error", str(path))
        touch(path, times)

    monkeypatch.setattr(os, "utime", fails_for_the_first)
    with pytest.raises(ZeroDivisionError), leases.keep_renewed(held, ttl=60):
        _ = 1 / 0
    assert leases.acquire_lease(tmp_path, "b-0") is not None


def test_an_old_list_of_generations_gives_no_second_lease(tmp_path):
    assert leases.generations(tmp_path / "claims") == {}
    age(leases.acquire_lease(tmp_path, "a-0"), 301)
    known = leases.generations(tmp_path)
    assert known == {"a-0": 0}
    assert leases.acquire_lease(tmp_path, "a-0") is not None
    assert leases.acquire_lease(tmp_path, "a-0", known=known) is None


def test_threads_that_race_for_an_abandoned_run_have_one_winner(tmp_path):
    for k in range(20):
        age(leases.acquire_lease(tmp_path, f"run-{k}"), 1_000)
    start, won = threading.Barrier(8), []

    def race():
        start.wait()
        won.extend(k for k in range(20) if leases.acquire_lease(tmp_path, f"run-{k}") is not None)

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(20))


def test_processes_that_race_share_the_runs_out(tmp_path):
    (tmp_path / "claims").mkdir()
    for k in range(0, 200, 2):
        age(leases.acquire_lease(tmp_path / "claims", f"run-{k}"), 1_000)
    go = tmp_path / "go"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), str(go), str(k)], stdout=subprocess.PIPE, text=True
        )
        for k in range(3)
    ]
    while len(list(tmp_path.glob("ready-*"))) < 3:
        assert all(worker.poll() is None for worker in workers)
        time.sleep(0.01)
    go.touch()
    won = [int(line) for worker in workers for line in worker.communicate(timeout=60)[0].split()]
    assert sorted(won) == list(range(200))


def test_renewing_a_lease_without_a_file_does_nothing(tmp_path):
    lease = leases.acquire_lease(tmp_path, "a-0")
    lease.path.unlink()
    lease.renew()
    lease.release()
    assert not lease.path.exists()
