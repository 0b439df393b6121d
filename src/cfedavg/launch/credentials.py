"""Keys and certificates of a federation: a CA, the server's certificate, and a key pair for every node.

Each is made once and then kept. Private keys are files that only their owner can read, from the start.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cfedavg.core.errors import InputError
from cfedavg.core.files import read_file, replace_file, write_atomic

HOSTS = ("127.0.0.1", "localhost")
DAYS = 3650  # more than any federation lasts
AUTHORITY = "cfedavg CA"

T = TypeVar("T")
_DAMAGE = (ValueError, TypeError, UnsupportedAlgorithm)  # what is raised for files that are no keys


@dataclass(frozen=True)
class Certificates:
    """Files of the server: the CA that its certificate is checked against, the certificate, its key."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class NodeKey:
    """Files of a node: its private key, which stays with it, and the public one that is registered."""

    private: Path
    public: Path


def certificates(folder: Path, hosts: Sequence[str] = HOSTS) -> Certificates:
    """Those in the folder, made now if there are none. The CA's own key is not kept: it signs once."""
    files = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    if not files.ca.exists():  # written last, so that it vouches for the others
        ca_key, key = _new_key(), _new_key()
        ca = _ca(ca_key)
        _write_private(files.key, _private(key, serialization.PrivateFormat.PKCS8))
        write_atomic(files.certificate, _pem(_server_certificate(key, ca_key, hosts)))
        write_atomic(files.ca, _pem(ca))
    _check_certificates(files)
    return files


def node_key(folder: Path, name: str) -> NodeKey:
    """The key pair of this name in the folder, P-384 as OpenSSH writes it, made now if there is none."""
    files = NodeKey(folder / name, folder / f"{name}.pub")
    if not files.public.exists():
        key = _new_key()
        _write_private(files.private, _private(key, serialization.PrivateFormat.OpenSSH))
        ssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        write_atomic(files.public, key.public_key().public_bytes(*ssh) + f" {name}\n".encode())
    _check_pair(files)
    return files


def _check_certificates(files: Certificates) -> None:
    """Check that the CA has signed the certificate, and that the key is the certificate's.

    Flower's processes would only say that they cannot connect.
    """
    remedy = f"remove {files.ca} to have new certificates made"
    ca, certificate = (
        _parsed(path, x509.load_pem_x509_certificate, remedy) for path in (files.ca, files.certificate)
    )
    key = _parsed(files.key, lambda data: serialization.load_pem_private_key(data, None), remedy)
    try:
        certificate.verify_directly_issued_by(ca)
    except (*_DAMAGE, InvalidSignature):
        raise InputError(f"{files.ca} has not signed {files.certificate}; {remedy}") from None
    if key.public_key() != certificate.public_key():
        raise InputError(f"{files.key} is not the key of {files.certificate}; {remedy}")


def _check_pair(files: NodeKey) -> None:
    """Check that the keys of a node are a pair."""
    remedy = "put it back, or begin in another folder"
    private = _parsed(files.private, lambda data: serialization.load_ssh_private_key(data, None), remedy)
    if private.public_key() != _parsed(files.public, serialization.load_ssh_public_key, remedy):
        raise InputError(f"{files.private} is not the private key of {files.public}; {remedy}")


def _parsed(path: Path, parse: Callable[[bytes], T], remedy: str) -> T:
    """Return what a file holds; a pipe would make Flower's processes wait for ever."""
    try:
        return parse(read_file(path))
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}); {remedy}") from None
    except _DAMAGE:
        raise InputError(f"{path} is damaged; {remedy}") from None


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _pem(certificate: x509.Certificate) -> bytes:
    return bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _write_private(path: Path, data: bytes) -> None:
    """Nobody else can open the file at any moment: it is made with its mode, not given it afterwards."""

    def private(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_EXCL, 0o600)

    with replace_file(path) as temporary, open(temporary, "wb", opener=private) as file:
        file.write(data)


def _ca(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    builder = _builder(AUTHORITY, key.public_key(), key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(_usage(signs_certificates=True), critical=True).sign(key, hashes.SHA384())


def _server_certificate(
    key: ec.EllipticCurvePrivateKey, ca_key: ec.EllipticCurvePrivateKey, hosts: Sequence[str]
) -> x509.Certificate:
    builder = _builder(hosts[0], key.public_key(), ca_key.public_key())
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([_host(host) for host in hosts]), False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(ca_key, hashes.SHA384())


def _builder(
    name: str, public: ec.EllipticCurvePublicKey, issuer: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    """What both certificates have: names, the time they are good for, and whose key is whose."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(AUTHORITY))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ a little
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
