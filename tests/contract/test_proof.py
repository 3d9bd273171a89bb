"""Whether a store checks uploads, as far as the client decides: what a plan takes of it is what daemons find."""

from __future__ import annotations

import pytest

from diloco_cli.store.open import client_of
from diloco_cli.store.proof import checked_by, checks_uploads
from tests.contract.conftest import REMOTE, Backend


@pytest.mark.parametrize("backend", ["local", "obstore-file", *REMOTE], indirect=True)
def test_what_the_client_decides_is_known_without_a_trial(backend: Backend) -> None:
    store = backend.open_again()
    client = client_of(backend.url or "")
    assert type(store) is client
    found, known = checks_uploads(store, "trial"), checked_by(client)
    assert known in (found, None) and store.list("") == []
    assert (known is None) == (backend.name in {"gcs", "s3"}), "there the service decides, which must be asked"


def test_a_store_in_memory_checks_nothing() -> None:
    assert checked_by(client_of("memory://m")) is False
