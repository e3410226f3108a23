"""Open a job's store, from the value that says how to reach it.

May not know: jobs, what is stored.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tmrun.config import StoreAccess
from tmrun.store.endpoints import TlsFiles, endpoints

if TYPE_CHECKING:
    from tmrun.store.etcd import EtcdStore

ENV_PASSWORD = "TMRUN_ETCD_PASSWORD"
"""Password for the store's user."""
ENV_SECRET = "TMRUN_SECRET"
"""The job's secret, the same on every host; secures an embedded store with mutual TLS."""


def open_store(access: StoreAccess, deadline_s: float) -> EtcdStore:
    """A client; connects at its first call, and every call ends within ``deadline_s``. Raises UsageError for missing files."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our errors say it; read when grpc is first imported
    from tmrun.store.etcd import EtcdStore  # slow to import, and a usage error does not need it

    password = os.environ.get(ENV_PASSWORD) if access.user else None
    return EtcdStore(endpoints(access.endpoints), access.user or None, password, tls_files(access), deadline_s=deadline_s)


def tls_files(access: StoreAccess) -> TlsFiles | None:
    """The PEM files, if any. Raises UsageError when one is missing."""
    if not (access.ca or access.cert or access.key):
        return None
    return TlsFiles(*(Path(p) if p else None for p in (access.ca, access.cert, access.key)))


def with_tls(where: str, files: TlsFiles | None) -> StoreAccess:
    """Access to ``where`` with these files."""
    if files is None:
        return StoreAccess(where)
    return StoreAccess(where, "", *("" if p is None else str(p) for p in (files.ca, files.cert, files.key)))
