"""Whether what a store confirms has been checked, so that it need not be read back before a commit names it.

A network may damage an upload, and a service may keep other bytes than it was sent. GCS and S3 compare an upload with
the checksum that comes with it; some services take it and never look. So it is tried, with a wrong one. A directory has
the bytes that were written once fsync has returned: to read them again would show the same memory.
"""

from __future__ import annotations

from diloco_cli.store.bucket import BucketStore
from diloco_cli.store.local import LocalStore
from diloco_cli.store.port import Store


def checks_uploads(store: Store, key: str) -> bool:
    """Tries it at this key, where nothing stays. From then on the store's creates say that they are checked."""
    if isinstance(store, BucketStore):
        return store.prove_uploads(key)
    return isinstance(store, LocalStore)
