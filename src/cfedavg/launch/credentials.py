"""Keys and certificates of a federation: a CA, the server's certificate, and a key pair for every node.

Each file is made once and then reused. The file of a private key is created in such a way that only its owner
can ever read it.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cfedavg.core.errors import InputError
from cfedavg.core.files import read_file, replace_file, write_atomic
from cfedavg.launch.processes import HOST

DAYS = 3650  # validity of a certificate: longer than any federation lasts
AUTHORITY = "cfedavg CA"
CURVE = ec.SECP384R1()

_USES = (
    "digital_signature", "key_cert_sign", "crl_sign", "content_commitment", "key_encipherment",
    "data_encipherment", "key_agreement", "encipher_only", "decipher_only",
)  # fmt: skip
T = TypeVar("T")
_DAMAGE = (ValueError, TypeError, UnsupportedAlgorithm)  # raised for files that are no keys


class Certificates(NamedTuple):
    """The paths of the CA's certificate, the server's certificate, and the server's private key."""

    ca: Path
    certificate: Path
    key: Path


class NodeKey(NamedTuple):
    """The paths of a node's private key and public key. The SuperLink must know the public key."""

    private: Path
    public: Path


def ensure_certificates(folder: Path) -> Certificates:
    """Return the paths of the certificates in `folder`; make the files if there are none.

    The CA's private key signs these certificates and is not stored. The files are checked, because with wrong
    files Flower's processes would only report that they cannot connect.
    """
    files = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    if not files.ca.exists():  # written last: if this file exists, the others exist
        ca_key, server_key = (ec.generate_private_key(CURVE) for _ in range(2))
        _write_private(files.key, server_key, serialization.PrivateFormat.PKCS8)
        write_atomic(files.certificate, _sign_certificate(server_key, ca_key, is_ca=False))
        write_atomic(files.ca, _sign_certificate(ca_key, ca_key, is_ca=True))
    remedy = f"remove {files.ca} to have new certificates made"
    ca, certificate = (
        _parse(path, x509.load_pem_x509_certificate, remedy) for path in (files.ca, files.certificate)
    )
    key = _parse(files.key, lambda data: serialization.load_pem_private_key(data, None), remedy)
    try:
        certificate.verify_directly_issued_by(ca)
    except (*_DAMAGE, InvalidSignature):
        raise InputError(f"the CA of {files.ca} has not signed {files.certificate}; {remedy}") from None
    if key.public_key() != certificate.public_key():
        raise InputError(f"{files.key} is not the private key of {files.certificate}; {remedy}")
    return files


def ensure_node_key(folder: Path, name: str) -> NodeKey:
    """Return the paths of the P-384 key pair `name`, in OpenSSH format; make the files if there are none."""
    files = NodeKey(folder / name, folder / f"{name}.pub")
    if not files.public.exists():
        key = ec.generate_private_key(CURVE)
        _write_private(files.private, key, serialization.PrivateFormat.OpenSSH)
        ssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        write_atomic(files.public, key.public_key().public_bytes(*ssh) + f" {name}\n".encode())
    remedy = "put the original file back, or start in another folder"
    private = _parse(files.private, lambda data: serialization.load_ssh_private_key(data, None), remedy)
    if private.public_key() != _parse(files.public, serialization.load_ssh_public_key, remedy):
        raise InputError(f"{files.private} is not the private key of {files.public}; {remedy}")
    return files


def _parse(path: Path, parse: Callable[[bytes], T], remedy: str) -> T:
    """Return the parsed file; raise InputError if it is damaged or a pipe (Flower would wait for ever)."""
    try:
        return parse(read_file(path))
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}); {remedy}") from None
    except _DAMAGE:
        raise InputError(f"{path} is damaged; {remedy}") from None


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    """Write a private key to a file that is created with mode 600, so that no other user can ever read it."""

    def open_private(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_EXCL, 0o600)

    data = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with replace_file(path) as temporary, open(temporary, "wb", opener=open_private) as file:
        file.write(data)


def _sign_certificate(
    key: ec.EllipticCurvePrivateKey, ca_key: ec.EllipticCurvePrivateKey, *, is_ca: bool
) -> bytes:
    """Return a certificate of the key's public part, signed with the CA's key, as PEM text."""
    public, now = key.public_key(), datetime.datetime.now(datetime.UTC)
    subject, issuer = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
        for text in (AUTHORITY if is_ca else HOST, AUTHORITY)
    )
    allowed = ("key_cert_sign", "crl_sign") if is_ca else ("digital_signature",)
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.SubjectKeyIdentifier.from_public_key(public), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False),
        (x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), True),
        (x509.KeyUsage(**{name: name in allowed for name in _USES}), True),
    ]
    if not is_ca:
        hosts = [x509.IPAddress(ipaddress.ip_address(HOST)), x509.DNSName("localhost")]
        extensions.append((x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False))
        extensions.append((x509.SubjectAlternativeName(hosts), False))
    builder = x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=public,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(minutes=5),  # clocks differ a little
        not_valid_after=now + datetime.timedelta(days=DAYS),
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return bytes(builder.sign(ca_key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))
