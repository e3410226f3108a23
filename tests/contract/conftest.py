from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
from store_lab import Lab, eventually, our_threads, real_pause

from tmrun.store.embedded import EmbeddedEtcd
from tmrun.store.etcd import EtcdStore
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
