from __future__ import annotations

from dataclasses import replace

import pytest

from tmrun.core import checks
from tmrun.core.checks import Check, Grade, HostFacts, Server, StoreFacts

GOOD = StoreFacts((Server("a:1", "", "3.5.21", True, True, 1 << 20, 2 << 30),), members=3, auth=False, latency_s={"put": (0.001,) * 7})
HOST = HostFacts("h", "10.0.0.1", "", "eth0", ("10.0.0.1",), 65536, "2.13.0+cpu", ("gloo",), 0, "/usr/bin/c++", 8192)


def _worst(found: list[Check]) -> dict[str, Grade]:
    return {c.code: c.grade for c in found if c.grade is not Grade.OK}


def test_a_healthy_store_and_host_have_nothing_to_say() -> None:
    found = checks.store_checks(GOOD) + checks.host_checks(HOST)
    assert _worst(found) == {}
    assert checks.exit_code(found) == 0


def _with_server(**changes: object) -> StoreFacts:
    return replace(GOOD, servers=(replace(GOOD.servers[0], **changes),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (replace(GOOD, servers=(Server("a:1", "refused"),)), {"ETCD_UNREACHABLE": Grade.BAD}),
        (replace(GOOD, servers=(Server("a:1", "etcd at a:1 refused the login", denied=True),)), {"ETCD_LOGIN": Grade.BAD}),
        (replace(GOOD, servers=(*GOOD.servers, Server("b:1", "refused"))), {"ETCD_UNREACHABLE": Grade.WARN}),
        (_with_server(has_leader=False), {"ETCD_NO_LEADER": Grade.BAD}),
        (_with_server(version="3.5.1"), {"ETCD_KNOWN_BUG": Grade.WARN}),
        (replace(_with_server(version="3.5.1"), bundled=True, members=1), {}),
        (replace(_with_server(version="3.5.1"), bundled=True, members=3), {"ETCD_KNOWN_BUG": Grade.WARN}),
        (_with_server(version="3.6.0-rc.1"), {}),
        (replace(GOOD, members=1), {"ETCD_MEMBERS": Grade.WARN}),
        (replace(GOOD, refused="permission denied"), {"ETCD_PERMISSION": Grade.BAD}),
        (replace(GOOD, latency_s={"put": (0.06, 0.06, 0.2)}), {"LATENCY_PUT": Grade.WARN}),
        (replace(GOOD, latency_s={"keep-alive": (1.5,)}), {"LATENCY_KEEP_ALIVE": Grade.BAD}),
        (_with_server(db_bytes=int(0.7 * (2 << 30))), {"ETCD_DATABASE": Grade.WARN}),
        (_with_server(db_bytes=2 << 30), {"ETCD_DATABASE": Grade.BAD}),
        (_with_server(db_bytes=2 << 30, quota_bytes=0), {}),
        (replace(GOOD, alarms=("NOSPACE",)), {"ETCD_ALARM_NOSPACE": Grade.BAD}),
        (replace(GOOD, tls_days={"ca.pem": 3.0}), {"TLS_EXPIRY": Grade.WARN}),
        (replace(GOOD, tls_days={"ca.pem": -3.0}), {"TLS_EXPIRY": Grade.BAD}),
    ],
)
def test_what_is_wrong_with_a_store(facts: StoreFacts, expected: dict[str, Grade]) -> None:
    found = checks.store_checks(facts)
    assert _worst(found) == expected
    assert all(c.advice for c in found if c.grade is not Grade.OK)
    assert checks.exit_code(found) == max([{Grade.WARN: 1, Grade.BAD: 2}[g] for g in expected.values()], default=0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"no_route": "no route to the store"}, {"ADDRESS": Grade.BAD}),
        ({"address": ""}, {}),
        ({"interface": ""}, {"INTERFACE": Grade.WARN}),
        ({"resolved": ()}, {"HOSTNAME": Grade.WARN}),
        ({"resolved": ("127.0.1.1",)}, {"HOSTNAME": Grade.WARN}),
        ({"resolved": ("127.0.1.1",), "address": "127.0.0.1"}, {}),
        ({"resolved": ("10.9.9.9",)}, {}),
        ({"files": 1024}, {"OPEN_FILES": Grade.WARN}),
        ({"torch": ""}, {"TORCH": Grade.BAD}),
        ({"torch": "2.9.1"}, {"TORCH": Grade.BAD}),
        ({"backends": ("nccl",)}, {"TORCH": Grade.BAD}),
        ({"gpus": 8}, {"TORCH": Grade.WARN}),
        ({"compiler": ""}, {}),
        ({"shm_mb": 64}, {"SHM": Grade.WARN}),
    ],
)
def test_what_is_wrong_with_a_host(changes: dict[str, object], expected: dict[str, Grade]) -> None:
    found = checks.host_checks(replace(HOST, **changes))  # type: ignore[arg-type]
    assert _worst(found) == expected
    assert all(c.advice for c in found if c.grade is not Grade.OK)
