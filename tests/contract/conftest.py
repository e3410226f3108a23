from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator

import pytest
from store_lab import Lab, admin, eventually, our_threads, real_pause

from tmrun.store.embedded import EmbeddedEtcd
from tmrun.store.endpoints import TlsFiles
from tmrun.store.etcd import EtcdStore
from tmrun.store.etcd_stubs import rpc
from tmrun.store.memory import MemoryWorld


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as etcd:
        yield etcd


@pytest.fixture
def own_etcd() -> Iterator[EmbeddedEtcd]:
    """For tests that hurt it."""
    with EmbeddedEtcd() as etcd:
        yield etcd


@pytest.fixture(params=["memory", "etcd"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    prefix = f"/{uuid.uuid4().hex}/"
    if request.param == "memory":
        world = MemoryWorld()
        store = world.client()
        yield Lab(store, prefix, lambda: world.advance(0.1))
    else:
        store = EtcdStore(request.getfixturevalue("shared_etcd").endpoint)
        yield Lab(store, prefix, real_pause)
    store.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., EtcdStore]]:
    """EtcdStore, closed after the test."""
    stores: list[EtcdStore] = []

    def open_store(*args: object, **options: object) -> EtcdStore:
        stores.append(EtcdStore(*args, **options))  # type: ignore[arg-type]
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    yield
    eventually(lambda: not our_threads(), 5.0)


@pytest.fixture
def guarded_etcd(own_etcd: EmbeddedEtcd, connect: Callable[..., EtcdStore]) -> EmbeddedEtcd:
    """root may everything, reader may read below r/."""
    store = connect(own_etcd.endpoint)
    read = rpc.AuthRoleGrantPermissionRequest(name="reader")
    read.perm.permType, read.perm.key, read.perm.range_end = read.perm.READ, b"r/", b"r0"
    for method, request in (
        ("UserAdd", rpc.AuthUserAddRequest(name="root", password="secret")),
        ("UserGrantRole", rpc.AuthUserGrantRoleRequest(user="root", role="root")),
        ("RoleAdd", rpc.AuthRoleAddRequest(name="reader")),
        ("RoleGrantPermission", read),
        ("UserAdd", rpc.AuthUserAddRequest(name="reader", password="weak")),
        ("UserGrantRole", rpc.AuthUserGrantRoleRequest(user="reader", role="reader")),
        ("AuthEnable", rpc.AuthEnableRequest()),
    ):
        if request.DESCRIPTOR.name == "AuthUserGrantRoleRequest" and request.role == "root":
            admin(store, lambda e: e.auth.RoleAdd, rpc.AuthRoleAddRequest(name="root"))
        admin(store, lambda e, method=method: getattr(e.auth, method), request)
    return own_etcd


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A CA, and one certificate for 127.0.0.1 that serves and asks."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make certificates with")
    folder = tmp_path_factory.mktemp("tls")
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n")
    new = "-newkey rsa:2048 -nodes"
    for command in (
        f"req -x509 {new} -days 2 -subj /CN=ca -keyout ca.key -out ca.crt",
        f"req {new} -subj /CN=root -keyout node.key -out node.csr",
        "x509 -req -days 2 -in node.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile ext -out node.crt",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return TlsFiles(folder / "ca.crt", folder / "node.crt", folder / "node.key")
