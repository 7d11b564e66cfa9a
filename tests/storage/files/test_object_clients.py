"""Which store is asked and with which credentials, and what an error says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.errors import ConfigError, DeniedError, LockstepError, NotFoundError, RetryableStorageError
from lockstep.storage.files.object_clients import clients, object_settings, translate, whom
from lockstep.storage.fs import filesystem
from lockstep.storage.settings import DEFAULTS, hadoop_settings, set_hadoop_settings, without_credentials


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def config_of(settings: dict[str, str], bucket: str = "b") -> dict[str, Any]:
    client: Any = clients("s3", bucket, DEFAULTS | settings)[0]
    return dict(client.config)


def test_spark_settings_name_endpoint_region_and_keys() -> None:
    found = config_of(
        {
            "fs.s3a.endpoint": "store.example:9000",
            "fs.s3a.connection.ssl.enabled": "false",
            "fs.s3a.endpoint.region": "eu-west-1",
            "fs.s3a.access.key": "key",
            "fs.s3a.secret.key": "hidden",
            "fs.s3a.bucket.b.access.key": "of-this-bucket",
        }
    )
    assert found["endpoint"] == "http://store.example:9000" and found["region"] == "eu-west-1"
    assert (found["access_key_id"], found["secret_access_key"]) == ("of-this-bucket", "hidden")
    assert "virtual_hosted_style_request" not in found


def test_amazon_is_asked_by_the_name_of_the_bucket() -> None:
    for settings in ({}, {"fs.s3a.endpoint": "s3.amazonaws.com"}):
        found = config_of(settings)
        assert "endpoint" not in found and found["virtual_hosted_style_request"] in (True, "true")
    assert whom("s3", "b", DEFAULTS) == "the object store of s3://b"


def test_the_environment_reaches_tasks_without_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3:1")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    found = hadoop_settings()
    assert (found["fs.s3a.endpoint"], found["fs.s3a.endpoint.region"]) == ("http://s3:1", "eu-west-1")
    assert "hidden" not in found.values()
    set_hadoop_settings({"fs.s3a.endpoint": "", "fs.s3a.endpoint.region": "us-west-2"})  # Hadoop's default is empty
    try:
        found = hadoop_settings()
        assert (found["fs.s3a.endpoint"], found["fs.s3a.endpoint.region"]) == ("http://s3:1", "us-west-2")
    finally:
        set_hadoop_settings({})


def test_settings_that_others_may_see_have_no_credentials() -> None:
    shown = {"fs.s3a.endpoint": "x", "fs.defaultFS": "hdfs://nn", "fs.s3a.path.style.access": "true"}
    hidden = {
        "fs.s3a.access.key": "1",
        "fs.s3a.secret.key": "2",
        "fs.s3a.session.token": "3",
        "fs.s3a.bucket.b.secret.key": "4",
        "fs.azure.account.key.me.dfs.core.windows.net": "5",
        "fs.s3a.encryption.key": "6",
    }
    assert without_credentials(shown | hidden) == shown
    assert "fs.defaultFS" not in object_settings(shown) and "fs.s3a.secret.key" in object_settings(hidden)


def test_a_profile_is_read_from_the_files_of_awss_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "config").write_text("[profile work]\nregion = eu-north-1\nendpoint_url = http://own:1/\n")
    (folder / "credentials").write_text("[work]\naws_access_key_id = one\naws_secret_access_key = a%b\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    client: Any = clients("s3", "b", DEFAULTS)[0]
    assert client.config["region"] == "eu-north-1" and client.config["endpoint"] == "http://own:1"
    first = client.credential_provider()
    assert (first["access_key_id"], first["secret_access_key"], first["token"]) == ("one", "a%b", None)
    (folder / "credentials").write_text(
        "[work]\naws_access_key_id = two\naws_secret_access_key = c\naws_session_token = t\n"
    )
    second = client.credential_provider()  # whoever renews the file renews the run
    assert (second["access_key_id"], second["token"]) == ("two", "t") and second["expires_at"] >= first["expires_at"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "environment")
    client = clients("s3", "b", DEFAULTS)[0]
    assert client.credential_provider is None


def test_a_broken_profile_and_a_missing_ca_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("no section\n")
    with pytest.raises(ConfigError, match="profiles"):
        clients("s3", "b", DEFAULTS)
    (tmp_path / ".aws" / "credentials").unlink()
    with pytest.raises(ConfigError, match=r"none\.pem cannot be read"):
        clients("s3", "b", DEFAULTS | {"lockstep.storage.ca-file": str(tmp_path / "none.pem")})


def test_google_and_azure_have_their_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    google: Any = clients("gs", "b", DEFAULTS)[0]
    assert json.loads(google.config["service_account_key"])["gcs_base_url"] == "http://127.0.0.1:1"
    assert whom("gs", "b", DEFAULTS) == "the object store of gs://b at http://127.0.0.1:1"
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "https://me.blob.example")
    assert whom("az", "c", DEFAULTS) == "the object store of az://c at https://me.blob.example"
    azure: Any = clients("az", "c", DEFAULTS | {"fs.azure.account.key.me.dfs.core.windows.net": "QUJD"})[0]
    assert azure.config["account_name"] == "me" and azure.config["account_key"] == "QUJD"


@pytest.mark.parametrize("url", ["s3:///x", "gs:///x"])
def test_a_url_needs_a_bucket(url: str) -> None:
    with pytest.raises(ConfigError, match="names no bucket"):
        filesystem(url)


ANSWER = "Error performing GET http://h/b/k?WebIdentityToken=abc&x=1 in 2ms - Server returned non-2xx status code: "


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (ANSWER + "404 Not Found: <?xml?><Error><Code>NoSuchBucket</Code></Error>", NotFoundError),
        (ANSWER + "400 Bad Request: <Error>\n<Code>ExpiredToken</Code></Error>", RetryableStorageError),
        (ANSWER + "403 Forbidden: <Error><Code>AccessDenied</Code></Error>", DeniedError),
        (ANSWER + "503 Service Unavailable: <Error><Code>SlowDown</Code></Error>", RetryableStorageError),
        (
            "Error performing PUT http://h/b - HTTP error: error sending request",
            RetryableStorageError,
        ),
        ("Received redirect without LOCATION, this normally indicates an incorrectly configured region", ConfigError),
    ],
)
def test_errors_are_ours_and_hold_no_secret(text: str, kind: type[LockstepError]) -> None:
    from obstore.exceptions import GenericError

    found = translate(GenericError(text + "\n\nDebug source:\nGeneric {"), verb="read", place="s3://b/k", whom="S")
    assert type(found) is kind
    assert "abc" not in str(found) and "Debug" not in str(found) and "<" not in found.got
