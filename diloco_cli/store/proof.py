"""Whether what a store confirms has been checked, so that it need not be read back before a commit names it.

A network may damage an upload, and a service may keep other bytes than it was sent. GCS and S3 compare an upload with
the checksum that comes with it; some services take it and never look. So it is tried, with a wrong one. A directory has
the bytes that were written once fsync has returned: to read them again would show the same memory.
"""

from __future__ import annotations

from collections.abc import Callable

from diloco_cli import clock
from diloco_cli.errors import StoreError
from diloco_cli.store.bucket import BucketStore
from diloco_cli.store.local import LocalStore
from diloco_cli.store.port import Store
from diloco_cli.store.retry import RetryingStore

TRIAL_S = 5.0


def checks_uploads(store: Store, key: str, sleep: Callable[[float], object] = clock.sleep_s) -> bool:
    """Tries it at this key, where nothing stays. From then on the store's creates say that they are checked. False also
    if no try within TRIAL_S has an answer: a run goes on without."""
    known = checked_by(type(store))
    if known is not None or not isinstance(store, BucketStore):
        return bool(known)
    try:
        trying = RetryingStore(store, TRIAL_S, sleep=sleep)
        return trying.persist("create", lambda: store.prove_uploads(key))
    except StoreError:
        return False


def checked_by(client: type[Store]) -> bool | None:
    """Whether what this client has stored is checked; None: the service decides, and must be tried."""
    if not issubclass(client, BucketStore):
        return issubclass(client, LocalStore)
    return None if client.sends_checksums else False
