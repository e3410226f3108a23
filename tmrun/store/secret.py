"""Mutual TLS from one shared secret: every host derives the same certificate authority and issues its own certificate.

The CA's P-256 key is HKDF(secret), so nothing has to be copied between hosts but the secret itself. Who knows it is in; nobody else can
connect, listen in, or pretend to be the store. May not know: etcd, where the secret comes from.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tmrun.core.errors import UsageError
from tmrun.store.endpoints import TlsFiles

SHORTEST = 16
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_EPOCH = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
_FOREVER = datetime.datetime(2120, 1, 1, tzinfo=datetime.timezone.utc)
"""The secret is the credential and lives as long as the job; an expiry would only add a way to fail (clocks)."""


def issue(secret: str, folder: Path, names: Iterable[str]) -> TlsFiles:
    """Write ca.pem, cert.pem and key.pem (0600) for a host that is reached under ``names`` (host names or addresses).

    Raises UsageError for a secret that is too short to be one.
    """
    if len(secret) < SHORTEST:
        raise UsageError(f"the job's secret has {len(secret)} characters: at least {SHORTEST}, e.g. from `openssl rand -hex 16`")
    authority = _authority_key(secret)
    own = ec.generate_private_key(ec.SECP256R1())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = TlsPaths(folder)
    _write(files.ca, _ca(authority).public_bytes(serialization.Encoding.PEM))
    _write(files.cert, _leaf(authority, own, names).public_bytes(serialization.Encoding.PEM))
    pem = own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(files.key, pem)
    return TlsFiles(files.ca, files.cert, files.key)


class TlsPaths:
    """Where the files are."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.cert, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"


def _authority_key(secret: str) -> ec.EllipticCurvePrivateKey:
    """48 bytes reduced modulo the order: the bias is below 2^-128."""
    raw = HKDF(hashes.SHA256(), 48, salt=b"tmrun", info=b"store certificate authority v1").derive(secret.encode())
    return ec.derive_private_key(int.from_bytes(raw, "big") % (_P256_ORDER - 1) + 1, ec.SECP256R1())


def _builder(subject: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tmrun job authority")])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    builder = x509.CertificateBuilder().issuer_name(issuer).subject_name(name).public_key(key)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(_EPOCH).not_valid_after(_FOREVER)


def _ca(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    builder = _builder("tmrun job authority", key.public_key())
    return builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).sign(key, hashes.SHA256())


def _leaf(authority: ec.EllipticCurvePrivateKey, own: ec.EllipticCurvePrivateKey, names: Iterable[str]) -> x509.Certificate:
    alternatives = x509.SubjectAlternativeName([_general(n) for n in dict.fromkeys([*names, "localhost", "127.0.0.1"])])
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = _builder("tmrun host", own.public_key()).add_extension(alternatives, critical=False).add_extension(uses, critical=False)
    return builder.sign(authority, hashes.SHA256())


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)
