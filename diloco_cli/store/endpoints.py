"""Where a client may send its requests: an address from the environment is as good as whoever set it."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from diloco_cli.config.store_url import without_credentials
from diloco_cli.store.port import StoreForbiddenError

_METADATA_NAMES = {"metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal"}
_METADATA_ADDRESSES = {ip_address("fd00:ec2::254"), ip_address("100.100.100.200")}


def check_endpoint(url: str, where: str) -> str:
    """The URL itself, with its scheme (http if it has none); StoreForbiddenError for plain http beyond this machine,
    which would show credentials and payloads to everybody on the way, and for the addresses at which clouds hand out
    a machine's credentials."""
    full = url if "://" in url else f"http://{url}"
    shown = f"{where}={without_credentials(url)!a}"
    try:
        parts = urlsplit(full)
    except ValueError as error:
        raise StoreForbiddenError(f"not an address: {error}", where=shown, hint="https://HOST[:PORT]") from error
    host = (parts.hostname or "").rstrip(".").lower()
    if parts.scheme not in {"http", "https"} or not host:
        raise StoreForbiddenError("not an address of a store", where=shown, hint="https://HOST[:PORT]")
    if is_metadata_host(host):
        raise StoreForbiddenError("this address hands out credentials of the machine and is no store", where=shown)
    if parts.scheme == "http" and not is_loopback(host):
        raise StoreForbiddenError(
            "plain http is for loopback addresses only", where=shown, hint=f"use https://, or unset {where}"
        )
    return full


def is_loopback(host: str) -> bool:
    """Whether the name or address can only be this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_metadata_host(host: str) -> bool:
    """Whether this is a cloud's metadata service: a link-local address, or one of its names."""
    if host in _METADATA_NAMES:
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_link_local) or mapped in _METADATA_ADDRESSES
