"""URLs of stores: what is allowed, what is refused and with what advice."""

from __future__ import annotations

import pytest

from diloco_cli.errors import UsageError
from diloco_cli.store.open import open_store
from diloco_cli.store.url import join_url, parse_url, split_url


@pytest.mark.parametrize(
    "url",
    ["", "http://169.254.169.254/x", "https://x/y", "ftp://x", "simplecache::gs://b/x", "memory://a::gs://bucket/x",
     "gs://", "gs:///x", "gs://UPPER/x", "gs://bucket/../x", "gs://bucket/a b", "gs://bucket/a?x=1", "gs://u:p@bucket/x",
     "file://host/dir", "file://", "gs://buc\nket/x", "memory://", "gs://bucket/x#frag", "zip://a", "github://a:b@/",
     "gs://user:secret@bucket/x", "gs://bucket/x?token=secret", "gs://b/../../x", "gs://[::1", "s3://B A/x", "a\x00b",
     "~nobody-here/x"],
)  # fmt: skip
def test_other_urls_are_refused_with_what_is_allowed(url: str) -> None:
    """Row 22 of tests/security: URL schemes allow-listed."""
    with pytest.raises(UsageError) as refused:
        open_store(url)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("url", "joined"),
    [("gs://bucket", "gs://bucket/run"), ("gs://bucket/a/b/", "gs://bucket/a/b/run"), ("memory://m", "memory://m/run"),
     ("s3://bucket/x", "s3://bucket/x/run"), ("/data/store/", "file:///data/store/run"),
     ("file:///data/a%20b", "file:///data/a%20b/run")],
)  # fmt: skip
def test_join_and_split_are_inverse(url: str, joined: str) -> None:
    assert join_url(url, "run") == joined
    outer, name = split_url(joined)
    assert (parse_url(outer), name) == (parse_url(url), "run")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://acct.blob.core.windows.net/data/runs", "az://data/runs with AZURE_STORAGE_ACCOUNT=acct"),
        ("wasbs://data@acct.blob.core.windows.net/runs", "az://data/runs with AZURE_STORAGE_ACCOUNT=acct"),
        ("abfs://data@acct.dfs.core.windows.net/runs", "az://data/runs with AZURE_STORAGE_ACCOUNT=acct"),
        ("https://acct.blob.core.windows.net", "az://CONTAINER/PREFIX with AZURE_STORAGE_ACCOUNT=acct"),
        ("abfss://data/runs", "write az://data/runs with AZURE_STORAGE_ACCOUNT"),
        ("gcs://b/x", "write gs://b/x"),
        ("https://storage.googleapis.com/b/x/", "write gs://b/x"),
        ("https://b.s3.us-west-2.amazonaws.com/x", "write s3://b/x"),
        ("https://s3.amazonaws.com/b/x", "write s3://b/x"),
        ("s3a://b/x", "write s3://b/x"),
        ("S3://b/x", "write s3://b/x"),
        ("r2://b/x", "write s3://b/x with AWS_ENDPOINT_URL=https://ACCOUNT.r2.cloudflarestorage.com"),
        ("https://me.r2.cloudflarestorage.com/b?x=secret", "s3://b with AWS_ENDPOINT_URL=https://me.r2.cloud"),
        ("http://minio.lan:9000/b/x", "s3://b/x with AWS_ENDPOINT_URL=http://minio.lan:9000"),
        ("ceph://b", "write s3://b with AWS_ENDPOINT_URL=https://HOST"),
        ("hf://buckets/me", "Hugging Face"),
        ("r2://key:secret@b/x", "services that speak S3"),
        ("https://key:secret@minio.lan/b/x", "services that speak S3"),
        ("FILE:///x", "write file:///x"),
    ],
)
def test_what_other_tools_call_a_store_is_answered_with_what_to_write(url: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_url(url)
    assert said in (refused.value.hint or "")
    assert "secret" not in f"{refused.value}{refused.value.hint}"
