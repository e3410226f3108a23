"""What only a real etcd can do to us: freeze, die, compact, refuse. And what we may do to it: leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_lab import Frozen, RawEtcd, Seen, admin, eventually, gone

from tmrun.core.errors import OutcomeUnknown, StoreDenied, StoreError, StoreUnavailable, UsageError
from tmrun.core.txn import Absent, Listing, Put, Txn
from tmrun.store import embedded
from tmrun.store.embedded import EmbeddedEtcd, _free_port
from tmrun.store.endpoints import Endpoints, TlsFiles, endpoints
from tmrun.store.etcd import EtcdStore, boottime
from tmrun.store.etcd_stubs import rpc
from tmrun.store.etcd_watch import EtcdWatch

Connect = Callable[..., EtcdStore]


@pytest.fixture
def raw_etcd(tmp_path: Path) -> Iterator[RawEtcd]:
    client = _free_port("127.0.0.1", set())
    etcd = RawEtcd(tmp_path, client, _free_port("127.0.0.1", {client}))
    etcd.start()
    yield etcd
    etcd.kill()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Accepts connections and never says a word, as a frozen machine's kernel does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


# --- frozen


def test_every_call_on_a_frozen_etcd_ends(own_etcd: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(own_etcd.endpoint, deadline_s=2.0)
    lease = store.grant(60)
    with Frozen(own_etcd.pid):
        began = time.monotonic()
        for call in (
            lambda: store.get("a"),
            lambda: store.list("a"),
            lambda: store.put("a", "1"),
            lambda: store.grant(5),
            lambda: store.revoke(lease),
        ):
            with pytest.raises(StoreUnavailable, match=own_etcd.endpoint):
                call()
        assert time.monotonic() - began < 5 * 2.0 + 5
    assert eventually(lambda: store.get("nothing") is None)


def test_an_unanswered_commit_is_an_unknown_outcome(own_etcd: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(own_etcd.endpoint)
    store.put("a", "0")
    with Frozen(own_etcd.pid), pytest.raises(OutcomeUnknown, match="the-name"):
        store.commit(Txn((), (Put("a", "1"),), "the-name"))
    eventually(lambda: getattr(store.get("a"), "value", None) in ("0", "1"))


def test_a_commit_that_was_surely_not_sent_is_unavailable(own_etcd: EmbeddedEtcd, connect: Connect, silent_port: int) -> None:
    txn = Txn((), (Put("a", "1"),))
    with Frozen(own_etcd.pid), pytest.raises(StoreUnavailable):
        connect(own_etcd.endpoint, deadline_s=2.0).commit(txn)
    with pytest.raises(StoreUnavailable):
        connect(f"127.0.0.1:{silent_port}", deadline_s=2.0).commit(txn)
    store = connect(own_etcd.endpoint, deadline_s=2.0)
    assert store.get("a") is None
    own_etcd.close()
    with pytest.raises((StoreUnavailable, OutcomeUnknown)):  # the first may meet the closing connection
        store.commit(txn)
    with pytest.raises(StoreUnavailable):
        store.commit(txn)


def test_a_kept_lease_survives_a_freeze(own_etcd: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(own_etcd.endpoint)
    lost: list[str] = []
    lease = store.grant(6)
    store.put("leased", "v", lease)
    alive = store.keep_alive(lease, 6, lambda: lost.append("it"))
    eventually(lambda: alive.last_renewed > boottime() - 1)
    with Frozen(own_etcd.pid):
        frozen_at = boottime()
        time.sleep(2.0)
        assert alive.last_renewed <= frozen_at
    eventually(lambda: alive.last_renewed > frozen_at)
    control = store.grant(6)
    store.put("control", "v", control)
    eventually(lambda: store.get("control") is None)
    assert store.get("leased") is not None
    assert not alive.lost
    assert lost == []


def test_close_does_not_wait_for_a_frozen_etcd(own_etcd: EmbeddedEtcd) -> None:
    store = EtcdStore(own_etcd.endpoint)
    seen = Seen()
    store.watch("w/", seen)
    store.keep_alive(store.grant(2), 2, lambda: None)
    eventually(lambda: seen.resyncs)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            store.get("a")
        except StoreUnavailable as error:
            errors.append(error)

    with Frozen(own_etcd.pid):
        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.5)
        began = time.monotonic()
        store.close()
        reader.join()
        assert time.monotonic() - began < 5
    assert len(errors) == 1


# --- fail-over


def test_the_answering_member_is_found(shared_etcd: EmbeddedEtcd, connect: Connect, silent_port: int) -> None:
    dead = _free_port("127.0.0.1", set())
    for _ in range(3):  # the first member is chosen at random
        store = connect([f"127.0.0.1:{dead}", f"127.0.0.1:{silent_port}", shared_etcd.endpoint])
        assert store.commit(Txn((), (Put("failover", "1"),))).succeeded
        seen = Seen()
        store.watch("failover", seen)
        eventually(lambda seen=seen: seen.fold() == {"failover": "1"})


def test_a_watch_resumes_after_a_restart(raw_etcd: RawEtcd, connect: Connect) -> None:
    store = connect(raw_etcd.endpoint)
    seen = Seen()
    store.watch("w/", seen)
    eventually(lambda: seen.resyncs)
    store.put("w/a", "1")
    eventually(lambda: seen.changes)
    raw_etcd.kill()
    raw_etcd.start()
    store.put("w/a", "2")
    eventually(lambda: len(seen.changes) >= 2)
    raw_etcd.kill()
    time.sleep(0.5)
    raw_etcd.start()
    store.put("w/a", "3")
    eventually(lambda: len(seen.changes) >= 3)
    assert seen.changes == [("w/a", "1"), ("w/a", "2"), ("w/a", "3")]
    assert len(seen.resyncs) == 1


def test_a_kept_lease_survives_a_restart(raw_etcd: RawEtcd, connect: Connect) -> None:
    store = connect(raw_etcd.endpoint)
    lease = store.grant(5)
    store.put("leased", "v", lease)
    alive = store.keep_alive(lease, 5, lambda: None)
    raw_etcd.kill()
    killed_at = boottime()
    raw_etcd.start()
    eventually(lambda: alive.last_renewed > killed_at)
    assert store.get("leased") is not None


# --- compaction and re-listing


def test_a_compacted_watch_lists_anew(own_etcd: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(own_etcd.endpoint)
    for value in "123":
        store.put("w/a", value)
    admin(store, lambda e: e.kv.Compact, rpc.CompactionRequest(revision=store.list("w/").revision))
    stale = iter([Listing(1, ())])
    seen = Seen()
    watch = EtcdWatch(store._channels, {"w/": seen}, lambda _: next(stale, None) or store.list("w/"))
    eventually(lambda: len(seen.resyncs) == 2)
    store.put("w/b", "4")
    eventually(lambda: seen.changes)
    watch.close()
    assert seen.fold() == {"w/a": "3", "w/b": "4"}
    assert seen.changes == [("w/b", "4")]


def test_a_watch_lists_anew_from_time_to_time_and_misses_nothing(shared_etcd: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(shared_etcd.endpoint, relist_s=0.3)
    seen = Seen()
    store.watch("periodic/", seen)
    count = 0
    while len(seen.resyncs) < 4:
        count += 1
        store.put("periodic/a", str(count))
        time.sleep(0.005)
    eventually(lambda: seen.fold() == {"periodic/a": str(count)})
    revisions = [e.listing.revision if hasattr(e, "listing") else e.revision for e in seen.events]
    assert revisions == sorted(revisions)


# --- auth and TLS


def test_password(guarded_etcd: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(guarded_etcd.endpoint, "root", "secret")
    seen = Seen()
    store.watch("w/", seen)
    lease = store.grant(2)
    alive = store.keep_alive(lease, 2, lambda: None)
    assert store.commit(Txn((Absent("w/a"),), (Put("w/a", "1", lease),))).succeeded
    eventually(lambda: seen.fold() == {"w/a": "1"})
    granted = alive.last_renewed
    eventually(lambda: alive.last_renewed > granted)


def test_a_refusal_is_said_at_once(guarded_etcd: EmbeddedEtcd, connect: Connect) -> None:
    for store in (
        connect(guarded_etcd.endpoint, "root", "wrong"),
        connect(guarded_etcd.endpoint, "nobody", "secret"),
        connect(guarded_etcd.endpoint),
    ):
        with pytest.raises(StoreDenied):
            store.get("a")
        with pytest.raises(StoreDenied):
            store.commit(Txn((), (Put("a", "1"),)))
    reader = connect(guarded_etcd.endpoint, "reader", "weak")
    assert reader.list("r/").entries == ()
    for call in (lambda: reader.put("r/a", "1"), lambda: reader.get("a"), lambda: reader.commit(Txn((), (Put("r/a", "1"),)))):
        with pytest.raises(StoreDenied):
            call()


def test_user_and_password_for_an_etcd_without_auth(shared_etcd: EmbeddedEtcd, connect: Connect) -> None:
    with pytest.raises(StoreDenied, match="not enabled"):
        connect(shared_etcd.endpoint, "root", "secret").get("a")


def test_an_expired_token_is_renewed(guarded_etcd: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(guarded_etcd.endpoint, "root", "secret")
    for call in (
        lambda: store.get("a"),
        lambda: store.put("a", "1"),
        lambda: store.commit(Txn((), (Put("a", "2"),))),
        lambda: store.grant(5),
    ):
        store._channels._token = "expired.1"
        call()
    store._channels._token = "expired.2"
    seen = Seen()
    stale = iter([Listing(store.list("a").revision, ())])
    store._channels._token = "expired.3"
    watch = EtcdWatch(store._channels, {"a": seen}, lambda _: next(stale))
    eventually(lambda: store._channels._token != "expired.3")
    store.put("a", "3")
    eventually(lambda: seen.changes == [("a", "3")])
    watch.close()


def test_mutual_tls(certificates: TlsFiles, connect: Connect) -> None:
    with EmbeddedEtcd(tls=certificates) as etcd:
        store = connect(etcd.url, tls=certificates)
        assert store.commit(Txn((), (Put("a", "1"),))).succeeded
        with pytest.raises(StoreUnavailable):
            connect(etcd.url, tls=TlsFiles(certificates.ca), deadline_s=2.0).get("a")
        with pytest.raises(StoreUnavailable):
            connect(etcd.url, deadline_s=2.0).get("a")  # the system's roots do not know this CA
        with pytest.raises(StoreUnavailable):
            connect(f"http://{etcd.endpoint}", deadline_s=2.0).get("a")


def test_tls_with_only_the_server_shown(certificates: TlsFiles, connect: Connect) -> None:
    with EmbeddedEtcd(tls=TlsFiles(None, certificates.cert, certificates.key)) as etcd:
        assert connect(etcd.url, tls=TlsFiles(certificates.ca)).get("a") is None


# --- leftovers


def test_a_killed_clients_lease_expires(shared_etcd: EmbeddedEtcd, connect: Connect) -> None:
    code = (
        "import sys, time; from tmrun.store.etcd import EtcdStore; s = EtcdStore(sys.argv[1]); l = s.grant(2); s.put('orphan', 'v', l)\n"
        "s.keep_alive(l, 2, lambda: None); print('ready', flush=True); time.sleep(600)"
    )
    store = connect(shared_etcd.endpoint)
    with subprocess.Popen([sys.executable, "-c", code, shared_etcd.endpoint], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"ready\n"
        store.put("control", "v", store.grant(3))
        eventually(lambda: store.get("control") is None)
        assert store.get("orphan") is not None
        client.kill()
    eventually(lambda: store.get("orphan") is None)


def test_a_store_leaves_no_descriptors(shared_etcd: EmbeddedEtcd) -> None:
    def use() -> None:
        store = EtcdStore(shared_etcd.endpoint)
        seen = Seen()
        store.watch("w/", seen)
        store.keep_alive(store.grant(5), 5, lambda: None)
        eventually(lambda: seen.resyncs)
        store.close()

    def count() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    use()  # gRPC keeps some for the process
    time.sleep(0.5)
    before, threads = count(), threading.active_count()
    for _ in range(5):
        use()
    eventually(lambda: count() <= before and threading.active_count() <= threads)


OWNER = (
    "import json, sys, time; from tmrun.store.embedded import EmbeddedEtcd; e = EmbeddedEtcd()\n"
    "print(json.dumps([e.pid, e.guard_pid, str(e.data_dir)]), flush=True); time.sleep(600)"
)


def test_etcd_dies_with_its_killed_owner() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid, guard_pid, data_dir = json.loads(owner.stdout.readline())
        assert not gone(pid)
        assert os.getsid(guard_pid) != os.getsid(owner.pid)
        owner.kill()
    eventually(lambda: gone(pid) and gone(guard_pid) and not Path(data_dir).exists())


def test_a_frozen_etcd_dies_with_its_owner_too() -> None:
    with EmbeddedEtcd() as etcd:
        os.kill(etcd.pid, signal.SIGSTOP)
    assert gone(etcd.pid)
    assert not etcd.data_dir.exists()


def test_etcd_dies_with_its_guard() -> None:
    with EmbeddedEtcd() as etcd:
        os.kill(etcd.guard_pid, signal.SIGKILL)
        eventually(lambda: gone(etcd.pid))
    assert not etcd.data_dir.exists()


def test_the_death_of_etcd_is_noticed() -> None:
    with EmbeddedEtcd() as etcd:
        assert etcd.exit_code() is None
        os.kill(etcd.pid, signal.SIGKILL)
        assert eventually(etcd.exit_code) == 128 + signal.SIGKILL


# --- refusals at the start


def test_a_taken_port_is_named(silent_port: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{silent_port}.*taken.*choose another"):
        EmbeddedEtcd(tmp_path / "data", client_port=silent_port)


def test_a_wanted_port_is_used(tmp_path: Path, connect: Connect) -> None:
    port = _free_port("127.0.0.1", set())
    with EmbeddedEtcd(tmp_path / "data", client_port=port) as etcd:
        assert etcd.endpoint == f"127.0.0.1:{port}"
        assert connect(etcd.endpoint).get("a") is None
        with pytest.raises(UsageError, match="not empty"):
            EmbeddedEtcd(tmp_path / "data")
    assert (tmp_path / "data" / "etcd.log").exists()  # a directory that was given is kept


def test_a_port_taken_in_between_is_replaced(silent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    unlucky = [(_free_port("127.0.0.1", set()), silent_port), (silent_port, _free_port("127.0.0.1", set()))]
    choose = embedded._ports
    monkeypatch.setattr(embedded, "_ports", lambda host, port: unlucky.pop() if unlucky else choose(host, port))
    with EmbeddedEtcd() as etcd:
        assert etcd.client_port != silent_port
        assert not unlucky


def test_a_program_that_ends_at_once_is_reported(tmp_path: Path) -> None:
    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\necho no luck today >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(StoreError, match="no luck today"):
        EmbeddedEtcd(tmp_path / "data", binary=program, remove_data=True)
    assert not (tmp_path / "data").exists()
    with pytest.raises(UsageError, match="no etcd program at"):
        EmbeddedEtcd(binary=tmp_path / "absent")


# --- addresses


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("h", Endpoints(("h:2379",))),
        ("h:1", Endpoints(("h:1",))),
        ("http://h:2379/, http://h2", Endpoints(("h:2379", "h2:2379"))),
        ("https://h,https://h:2379,https://10.0.0.1:99", Endpoints(("h:2379", "10.0.0.1:99"), True)),
        ("[::1]", Endpoints(("[::1]:2379",))),
        ("https://[fe80::1]:99", Endpoints(("[fe80::1]:99",), True)),
        (["a:1", "b:2"], Endpoints(("a:1", "b:2"))),
    ],
)
def test_endpoints(given: str | list[str], expected: Endpoints) -> None:
    assert endpoints(given) == expected


@pytest.mark.parametrize(
    "given",
    [
        "",
        " , ",
        "ftp://h",
        "h:port",
        "h:0",
        "h:70000",
        "::1",
        "[::1",
        ":2379",
        "http://",
        "http://h,https://h2",
        "h/path",
        "u:p@h",
        "h:1?x",
    ],
)
def test_bad_endpoints(given: str) -> None:
    with pytest.raises(UsageError):
        endpoints(given)


def test_the_contract_is_cheap_to_import() -> None:
    code = (
        "import sys, tmrun.store.api, tmrun.store.embedded, tmrun.store.memory\n"
        "sys.exit(any(m in sys.modules for m in ('grpc', 'etcd3', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
