"""How fast one process can move objects to a bucket and back: python -m tests.benchmarks.one_process [--rounds 5]

All transfers of a process share the thread of one loop: more connections help where each of them is slow, but never
beyond what one core does for its bytes. Here that is counted: bytes of a large object a second of this process's CPU,
checks and TLS included, through the port and gcsfs, to and from a fake GCS in another process. `plan` takes this rate
for the fastest link that a process can use (plan/link.py).
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.benchmarks.measure import machine, row
from tests.contract.emulators import environment, server


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name, now = ec.generate_private_key(ec.SECP256R1()), x509.Name([]), datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    signed = built.add_extension(address, critical=True).sign(key, hashes.SHA256())
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(signed.public_bytes(encoding))
    paths[1].write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    return paths


def rates(data: bytes, rounds: int) -> dict[str, list[float]]:
    """MB a second of CPU, up and down, of the server that the environment names."""
    from diloco_cli.store.gcs import GCSStore

    store = GCSStore("bucket")
    found: dict[str, list[float]] = {"up": [], "down": []}
    for turn in range(rounds + 1):  # one round more comes first and does not count
        key = f"k{turn}"
        for way, values in found.items():
            started = time.process_time()
            if way == "up":
                store.create(key, data)
            else:
                assert store.get(key) == data
            if turn:
                values.append(len(data) / 1e6 / (time.process_time() - started))
        store.delete(key)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=512)
    arguments = parser.parse_args()
    print(machine())
    data = os.urandom(1 << 20) * arguments.megabytes
    with tempfile.TemporaryDirectory() as folder:
        paths = write_certificate(Path(folder))
        for scheme, options in (("https", ["--certificate", *map(str, paths)]), ("http", [])):
            with server("fake_gcs", "bucket", *options) as url:
                trusted = {
                    "STORAGE_EMULATOR_HOST": url,
                    "SSL_CERT_FILE": str(paths[0]),
                }  # read when aiohttp is imported
                with environment(trusted):
                    for way, values in rates(data, arguments.rounds).items():
                        print(row(f"{scheme}, {way}: MB a second of CPU", values, "", None, digits=0), flush=True)


if __name__ == "__main__":
    main()
