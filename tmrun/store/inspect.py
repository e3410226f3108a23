"""Ask an etcd about itself: versions, members, alarms, permissions, latency. For ``tmrun doctor``.

Reads and writes only below ``PROBE`` (and deletes what it wrote). May not know: what is made of the answers (``core.checks``), jobs.
"""

from __future__ import annotations

import http.client
import re
import ssl
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tmrun.core.checks import Server, StoreFacts
from tmrun.core.errors import StoreDenied, StoreError
from tmrun.core.txn import Absent, Delete, Put, Txn
from tmrun.store.channels import Channels
from tmrun.store.embedded import MEMBER_NAME
from tmrun.store.endpoints import Endpoints, TlsFiles
from tmrun.store.etcd import EtcdStore
from tmrun.store.etcd_stubs import rpc

PROBE = "/tmrun/doctor/"
SAMPLES = 7
_DEADLINE_S = 3.0
_ALARMS = {1: "NOSPACE", 2: "CORRUPT"}


def inspect(where: Endpoints, user: str, password: str | None, tls: TlsFiles | None) -> StoreFacts:
    """Everything that can be found out; what cannot be is left empty, never raised."""
    facts = StoreFacts(tuple(_server(a, where.tls, user, password, tls) for a in where.addresses), user=user)
    if all(s.error for s in facts.servers):
        return facts
    channels = Channels(where, user or None, password, tls, _DEADLINE_S)
    try:
        names = _members(channels)
        own = bool(names) and all(n.startswith(MEMBER_NAME) for n in names)
        facts = replace(facts, bundled=own, members=len(names), alarms=_alarms(channels), auth=_auth(where, tls))
    finally:
        channels.close()
    store = EtcdStore(where, user or None, password, tls, deadline_s=_DEADLINE_S)
    try:
        return replace(facts, latency_s=_latency(store))
    except StoreError as error:
        return replace(facts, refused=str(error))
    finally:
        store.close()


def _server(address: str, secure: bool, user: str, password: str | None, tls: TlsFiles | None) -> Server:
    channels = Channels(Endpoints((address,), secure), user or None, password, tls, _DEADLINE_S)
    try:
        told = channels.call(lambda e: rpc.MaintenanceStub(e.channel).Status, rpc.StatusRequest(), name="status request")
        me = told.header.member_id
        size, quota = told.dbSize, _quota(address, secure, tls)
        return Server(
            address, version=told.version, leader=told.leader == me, has_leader=told.leader != 0, db_bytes=size, quota_bytes=quota
        )
    except StoreError as error:
        return Server(address, str(error), denied=isinstance(error, StoreDenied))
    finally:
        channels.close()


def _members(channels: Channels) -> list[str]:
    reply = _ask(channels, lambda e: rpc.ClusterStub(e.channel).MemberList, rpc.MemberListRequest())
    return [m.name for m in reply.members] if reply is not None else []


def _alarms(channels: Channels) -> tuple[str, ...]:
    """Needs the root user where authentication is on; then none are told."""
    reply = _ask(channels, lambda e: rpc.MaintenanceStub(e.channel).Alarm, rpc.AlarmRequest(action=rpc.AlarmRequest.GET))
    return tuple(sorted({_ALARMS.get(a.alarm, str(a.alarm)) for a in reply.alarms})) if reply is not None else ()


def _ask(channels: Channels, method: Callable[[Any], Any], request: Any) -> Any:
    try:
        return channels.call(method, request, name="inspection")
    except StoreError:
        return None


def _auth(where: Endpoints, tls: TlsFiles | None) -> bool | None:
    """On, when a read without a user is refused."""
    anonymous = Channels(where, None, None, tls, _DEADLINE_S)
    try:
        anonymous.call(lambda e: e.kv.Range, rpc.RangeRequest(key=PROBE.encode(), count_only=True), name="anonymous read")
        return False
    except StoreDenied:
        return True
    except StoreError:
        return None
    finally:
        anonymous.close()


def _latency(store: EtcdStore) -> dict[str, tuple[float, ...]]:
    """Raises StoreDenied when this user may not do what a job does."""
    key = f"{PROBE}{uuid.uuid4().hex}"
    lease = store.grant(30)
    try:
        store.list(PROBE)
        puts = _timed(lambda: store.put(key, "x", lease))
        store.commit(Txn((), (Delete(key),), "doctor"))
        txn = Txn((Absent(f"{key}.none"),), (Put(key, "y", lease),), "doctor")
        txns = _timed(lambda: store.commit(txn))
        renewals = _timed(lambda: store._channels.call(_time_to_live, rpc.LeaseTimeToLiveRequest(ID=lease), name="lease query"))
        return {"put": puts, "transaction": txns, "keep-alive": renewals}
    finally:
        store.revoke(lease)


def _time_to_live(endpoint: Any) -> Any:
    """Answered by the leader, as a keep-alive is, without a stream to open."""
    return endpoint.lease.LeaseTimeToLive


def _timed(what: Callable[[], object]) -> tuple[float, ...]:
    what()  # connects
    samples = []
    for _ in range(SAMPLES):
        began = time.monotonic()
        what()
        samples.append(time.monotonic() - began)
    return tuple(samples)


def _quota(address: str, secure: bool, tls: TlsFiles | None) -> int:
    """etcd tells its quota among its metrics only; 0 when it does not."""
    connection: http.client.HTTPConnection = http.client.HTTPConnection(address, timeout=2)
    if secure:
        context = ssl.create_default_context(cafile=str(tls.ca) if tls and tls.ca else None)
        if tls and tls.cert:
            context.load_cert_chain(tls.cert, tls.key)
        connection = http.client.HTTPSConnection(address, timeout=2, context=context)
    try:
        connection.request("GET", "/metrics")
        found = re.search(r"^etcd_server_quota_backend_bytes (\S+)$", connection.getresponse().read().decode(), re.MULTILINE)
        return int(float(found.group(1))) if found else 0
    except (OSError, http.client.HTTPException, ValueError):
        return 0
    finally:
        connection.close()
