"""Clients of object stores: where a store is and with which credentials it is asked, and errors in our words.

Credentials come from Spark's settings, the environment, a profile, or the machine (instance, container, web identity),
the first that has some. A profile is read again for each request, and the machine's are renewed by obstore.
"""

from __future__ import annotations

import configparser
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.storage.errors import (
    ConfigError,
    DeniedError,
    ExistsError,
    LockstepError,
    NotFoundError,
    RetryableStorageError,
    StorageError,
)
from lockstep.storage.settings import seconds

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

CA_FILE = "lockstep.storage.ca-file"
_OWN = ("fs.s3a.", "fs.gs.auth.", "fs.azure.account.key.", "lockstep.storage.")
_ENVIRONMENT_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
_AZURE_KEY = re.compile(r"fs\.azure\.account\.key\.(?P<account>[^.]+)\..*")
_SECRET = re.compile(r"(WebIdentityToken|X-Amz-[A-Za-z-]+|sig|Signature|assertion)=[^&\s'\")]+")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired")
_PASSING_STATUS = ("408", "409", "429", "500", "502", "503", "504")
_PASSING_CODES = ("", "InternalError", "ServiceUnavailable", "SlowDown")  # in an answer with status 200; "" is no code
# What obstore says of a connection that broke, of an answer that was cut off, and of an error in a status of success.
_BROKEN = ("HTTP error", "error decoding", "Got invalid", "Server returned error response")


def object_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings that concern object stores, out of all Hadoop settings."""
    return {key: value for key, value in settings.items() if key.startswith(_OWN)}


def clients(kind: str, bucket: str, settings: Mapping[str, str]) -> tuple[Any, Any]:
    """Two clients of a bucket: one that makes each request once, so that its caller knows what happened, and one that
    repeats requests of its own, for uploads in parts.
    """
    if not bucket:
        raise ConfigError(
            f"{kind}:// names no bucket", got=f"{kind}:///", allowed=f"{kind}://BUCKET/PATH", next_step="Add the name."
        )
    make: Callable[..., Any] = {"s3": _s3, "gs": _gs, "az": _az}[kind]
    again_s = seconds(settings, "lockstep.storage.give-up-s")
    try:
        once = make(bucket, settings, {"max_retries": 0, "retry_timeout": timedelta(seconds=again_s)})
        return once, make(bucket, settings, {"max_retries": 10, "retry_timeout": timedelta(seconds=again_s)})
    except LockstepError:
        raise
    except Exception as error:  # obstore's own, such as of an unknown setting in the environment
        raise ConfigError(
            f"{kind}://{bucket} cannot be opened",
            got=first_line(error),
            allowed="settings that docs/object-stores.md lists",
            next_step="Correct the settings or the environment.",
        ) from error


def whom(kind: str, bucket: str, settings: Mapping[str, str]) -> str:
    """Who serves a bucket, for errors."""
    endpoint = {"s3": lambda: _endpoint(bucket, settings), "gs": _google_endpoint, "az": _azure_endpoint}[kind]()
    return f"the object store of {kind}://{bucket}" + (f" at {endpoint}" if endpoint else "")


def _s3(bucket: str, settings: Mapping[str, str], retry: Any) -> S3Store:
    from obstore.store import S3Store

    def of(name: str) -> str | None:
        return _s3a(bucket, settings, name)

    config: Any = {"copy_if_not_exists": os.environ.get("AWS_COPY_IF_NOT_EXISTS", "multipart")}
    profile = _profile()
    if (region := of("endpoint.region") or profile.get("region")) is not None:
        config["region"] = region
    if (endpoint := _endpoint(bucket, settings)) is not None:
        config["endpoint"] = endpoint
    else:
        config["virtual_hosted_style_request"] = True
    provider: Callable[[], Any] | None = None
    if (key := of("access.key")) and (secret := of("secret.key")):
        config |= {"access_key_id": key, "secret_access_key": secret}
        if token := of("session.token"):
            config["session_token"] = token
    elif "Anonymous" in (of("aws.credentials.provider") or ""):
        config["skip_signature"] = True
    elif not any(os.environ.get(name) for name in _ENVIRONMENT_KEYS) and "aws_access_key_id" in profile:
        provider = _profile_reader()
    options = _client_options(settings, endpoint)
    return S3Store(bucket, config=config, client_options=options, retry_config=retry, credential_provider=provider)


def _gs(bucket: str, settings: Mapping[str, str], retry: Any) -> GCSStore:
    from obstore.store import GCSStore

    config: Any = {}
    if file := settings.get("fs.gs.auth.service.account.json.keyfile"):
        config["service_account"] = file
    endpoint = _google_endpoint()
    if endpoint:
        # An obstore that signs nothing by `skip_signature` still asks the machine for a token before it writes.
        nothing = {"client_email": "", "private_key": "", "private_key_id": "", "disable_oauth": True}
        config = {"service_account_key": json.dumps(nothing | {"gcs_base_url": endpoint})}
    return GCSStore(bucket, config=config, client_options=_client_options(settings, endpoint), retry_config=retry)


def _az(container: str, settings: Mapping[str, str], retry: Any) -> AzureStore:
    from obstore.store import AzureStore

    config: Any = {}
    for name, key in settings.items():
        if (found := _AZURE_KEY.fullmatch(name)) is not None:
            config = {"account_name": found["account"], "account_key": key}
    endpoint = _azure_endpoint()
    options = _client_options(settings, endpoint)
    return AzureStore(container, config=config, client_options=options, retry_config=retry)


def _google_endpoint() -> str | None:
    """The URL of an emulator of Google's storage, which Google's own clients take from this variable too."""
    found = os.environ.get("STORAGE_EMULATOR_HOST")
    return found if not found or "://" in found else f"http://{found}"


def _azure_endpoint() -> str | None:
    """The URL of the account where it is not Azure's public one."""
    return os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT")


def _client_options(settings: Mapping[str, str], endpoint: str | None) -> Any:
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=seconds(settings, "lockstep.storage.data-deadline-s")),
        "connect_timeout": timedelta(seconds=min(5.0, seconds(settings, "lockstep.storage.call-deadline-s"))),
        "allow_http": endpoint is not None and endpoint.startswith("http://"),
    }
    if file := settings.get(CA_FILE) or os.environ.get("AWS_CA_BUNDLE"):
        try:
            options["root_certificate"] = Path(file).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read",
                got=error.strerror or str(error),
                allowed=f"a file of PEM certificates in {CA_FILE} or AWS_CA_BUNDLE",
                next_step="Correct the path.",
            ) from error
    return options


def _s3a(bucket: str, settings: Mapping[str, str], name: str) -> str | None:
    """A setting as Spark and Hadoop spell it, that of the bucket first; None if it is empty or absent."""
    found = settings.get(f"fs.s3a.bucket.{bucket}.{name}") or settings.get(f"fs.s3a.{name}")
    return found or None


def _endpoint(bucket: str, settings: Mapping[str, str]) -> str | None:
    """The URL of an S3 that is not Amazon's; None for Amazon's."""
    profile = _profile()
    found = _s3a(bucket, settings, "endpoint") or profile.get("endpoint_url")
    if found is None or found.rstrip("/").endswith(("amazonaws.com", "amazonaws.com.cn")):
        return None  # a region's own host follows from the region
    if "://" not in found:
        plain = (_s3a(bucket, settings, "connection.ssl.enabled") or "true").lower() == "false"
        found = f"{'http' if plain else 'https'}://{found}"
    return found.rstrip("/")


def _profile() -> dict[str, str]:
    """The entries of the profile AWS_PROFILE, by default `default`, in the files of AWS's own tools."""
    name = os.environ.get("AWS_PROFILE", "default")
    found: dict[str, str] = {}
    for variable, default in (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials")):
        path = Path(os.environ.get(variable) or Path.home() / ".aws" / default)
        parser = configparser.ConfigParser(interpolation=None, default_section="")
        try:
            parser.read(path)
        except (OSError, configparser.Error, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} cannot be read as a file of profiles",
                got=str(error).splitlines()[0],
                allowed="sections of `name = value`",
                next_step="Repair the file.",
            ) from error
        for section in (name, f"profile {name}"):
            if parser.has_section(section):
                found |= dict(parser.items(section))
    return found


def _profile_reader() -> Callable[[], dict[str, Any]]:
    """A provider of the profile's credentials, read again for each request: what renews the file renews a run.

    While the file is being written it may have none, and the last ones hold.
    """
    last: dict[str, Any] = {}

    def read() -> dict[str, Any]:
        with suppress(ConfigError, KeyError):
            profile = _profile()
            found = {
                "access_key_id": profile["aws_access_key_id"],
                "secret_access_key": profile["aws_secret_access_key"],
            }
            last.update(found, token=profile.get("aws_session_token"))
        return last | {"expires_at": datetime.now(UTC)}

    return read


def first_line(error: BaseException) -> str:
    """What an error of obstore says, without its XML, its debugging text and secrets in URLs."""
    text = str(error).partition("\n\nDebug source")[0].strip()
    code = _CODE.search(text)
    line = text.splitlines()[0] if text else repr(error)
    line = re.split(r"<\?xml|<Error|<DeleteResult", line)[0].rstrip(": ")
    line += f": {code[1]}" if code and code[1] not in line else ""
    return _SECRET.sub(r"\1=...", line)[:500]


def translate(error: BaseException, *, verb: str, place: str, whom: str) -> LockstepError:
    """Our error for one of obstore's, raised while `verb`-ing `place` on `whom`."""
    from obstore import exceptions

    what, text = f"cannot {verb} {place}", first_line(error)
    code = found[1] if (found := _CODE.search(str(error))) else ""
    status = found[1] if (found := _STATUS.search(str(error))) else ""
    if code == "NoSuchBucket":
        return NotFoundError(
            f"{what}: there is no such bucket", got=text, allowed="an existing bucket", next_step="Create it first."
        )
    unexplained = status == "400" and not code and verb == "find"  # an answer to HEAD has no text
    if code in _EXPIRED or unexplained:  # newer ones may be on their way
        return RetryableStorageError(
            f"{what}: the credentials {'may ' if unexplained else ''}have expired",
            got=text,
            allowed="credentials that are renewed: of a profile, an instance, a web identity",
            next_step="Renew them, and start the job again: see docs/object-stores.md.",
        )
    if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
        return ExistsError(
            f"{what}: the name is taken",
            got=text,
            allowed="a name that is free, or the version that was read",
            next_step="Choose another name, or delete the existing one.",
        )
    if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
        return NotFoundError(
            f"{what}: not there", got=text, allowed="an existing path", next_step="Check the path and its bucket."
        )
    if code == "RequestTimeTooSkewed":
        return StorageError(
            f"{what}: {whom} refuses requests of another time than its own",
            got=f"{text}, at {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} by this machine's clock",
            allowed="a clock that differs by less than 15 minutes",
            next_step="Set this machine's clock (chrony, ntpd), then run again.",
        )
    denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
    if denied or status in ("401", "403") or code == "AccessDenied":
        return DeniedError(
            f"{what}: {whom} refuses these credentials",
            got=text,
            allowed="credentials that may read, write, list and delete there",
            next_step="Check the keys, profile or role, and the bucket's policy: see docs/object-stores.md.",
        )
    if "redirect" in text:
        return ConfigError(
            f"{what}: the bucket is in another region",
            got=text,
            allowed="the bucket's own region",
            next_step="Set AWS_REGION or fs.s3a.endpoint.region.",
        )
    if isinstance(error, exceptions.InvalidPathError):
        return ConfigError(
            f"{what}: it cannot be a name in an object store",
            got=text,
            allowed="parts without control characters, and neither `.` nor `..`",
            next_step="Rename it.",
        )
    broken = not status and code in _PASSING_CODES and any(words in text for words in _BROKEN)
    if status in _PASSING_STATUS or broken:
        return RetryableStorageError(
            what, got=text, allowed="an answer", next_step=f"Check that {whom} can be reached from here."
        )
    return StorageError(what, got=text, allowed="success", next_step=f"See the log of {whom}.")
