"""The Hadoop settings in effect: our defaults, then the files of HADOOP_CONF_DIR, then the settings of the driver."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from lockstep.storage.errors import ConfigError
from lockstep.storage.tokens import for_web, held, hold

# Chosen by the measurements in docs/decisions/001-hdfs-calls.md.
DEFAULTS = {
    "dfs.client.socket-timeout": "10000",
    "dfs.client.failover.sleep.base.millis": "100",
    "dfs.client.failover.sleep.max.millis": "1000",
    "dfs.client.failover.max.attempts": "8",
    "lockstep.storage.call-deadline-s": "20",
    "lockstep.storage.data-deadline-s": "45",
    "lockstep.storage.give-up-s": "60",
}
# Hadoop's own defaults. A driver passes them along with its settings although no user chose them, and hdfs-native works
# badly with them, so they do not override ours.
_HADOOP_DEFAULTS = {
    "dfs.client.socket-timeout": "60000",
    "dfs.client.failover.sleep.base.millis": "500",
    "dfs.client.failover.sleep.max.millis": "15000",
    "dfs.client.failover.max.attempts": "15",
}
_PREFIXES = ("fs.", "dfs.", "hadoop.security.", "hadoop.rpc.", "lockstep.storage.")
_OF_AWS = {
    "fs.s3a.endpoint": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    "fs.s3a.endpoint.region": ("AWS_DEFAULT_REGION", "AWS_REGION"),
}
_CREDENTIAL = re.compile(r"(access|account|secret|encryption)\.key|password|token$|secret$|[.]key[.]", re.IGNORECASE)
WEBHDFS_TOKEN = "LOCKSTEP_WEBHDFS_TOKEN"
_TOKENS = "lockstep.storage.tokens"
_FILES = ("core-site.xml", "hdfs-site.xml")
_of_the_driver: dict[str, str] = {}
_from_files: tuple[str | None, dict[str, str]] = (None, {})


def hadoop_settings() -> dict[str, str]:
    """The settings in effect. Raises ConfigError where HADOOP_CONF_DIR holds a file that is not Hadoop's XML."""
    return DEFAULTS | _conf_dir_settings() | _environment() | _of_the_driver


def without_credentials(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings without keys, passwords and tokens of object stores: for a place that others may see."""
    return {key: value for key, value in settings.items() if not _CREDENTIAL.search(key)}


def settings_for_tasks() -> dict[str, str]:
    """The settings in effect with the delegation tokens, a secret: for a task's function, which Spark neither stores
    nor logs.
    """
    return hadoop_settings() | ({_TOKENS: held()} if held() else {})


def set_hadoop_settings(settings: Mapping[str, str]) -> None:
    """Replace the settings of the driver: its effective fs.*, dfs.*, hadoop.security.* and lockstep.storage.* settings;
    others are ignored. Tokens of `settings_for_tasks` are held.
    """
    hold(settings.get(_TOKENS, ""))
    _of_the_driver.clear()
    for key, value in settings.items():
        if key == _TOKENS:
            continue
        unset = key.startswith("fs.s3a.") and value == ""  # Hadoop's default of an endpoint
        if key.startswith(_PREFIXES) and _HADOOP_DEFAULTS.get(key) != str(value) and not unset:
            _of_the_driver[key] = str(value)


def give_up_s() -> float:
    """Seconds after which an operation that keeps failing ends with an error."""
    return seconds(hadoop_settings(), "lockstep.storage.give-up-s")


def write_give_up_s() -> float:
    """Seconds for which a write is retried when DataNodes fail: a little longer than a NameNode takes to declare a
    DataNode dead (2 x recheck + 10 heartbeats: 630 s unless configured).
    """
    settings = hadoop_settings()
    if "lockstep.storage.write-give-up-s" in settings:
        return seconds(settings, "lockstep.storage.write-give-up-s")
    found = {"dfs.namenode.heartbeat.recheck-interval": "300000", "dfs.heartbeat.interval": "3"} | settings
    recheck_s = seconds(found, "dfs.namenode.heartbeat.recheck-interval") / 1000
    return max(give_up_s(), 2 * recheck_s + 10 * seconds(found, "dfs.heartbeat.interval") + 15)


def hadoop_user() -> str:
    """The user name for an HDFS without Kerberos: HADOOP_USER_NAME, else the user of this process."""
    return os.environ.get("HADOOP_USER_NAME") or getpass.getuser()


def with_kerberos(settings: Mapping[str, str]) -> bool:
    """Whether HDFS asks for a ticket or a token."""
    return settings.get("hadoop.security.authentication", "simple").lower() == "kerberos"


def webhdfs_token(service: str = "") -> str | None:
    """The delegation token for webhdfs:// from LOCKSTEP_WEBHDFS_TOKEN, else that of the name service among this
    process's tokens, else None.

    It is not among the settings, which are logged and sent with tasks: executors get it by
    `--conf spark.executorEnv.LOCKSTEP_WEBHDFS_TOKEN=...`, which Spark hides in its page.
    """
    return os.environ.get(WEBHDFS_TOKEN) or (for_web(service) if service else None)


def seconds(settings: Mapping[str, str], key: str) -> float:
    """A setting in seconds. Raises ConfigError unless it is a positive number."""
    try:
        value = float(settings[key].removesuffix("s"))
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(
            f"setting {key} is not a time",
            got=settings[key],
            allowed="seconds above 0",
            next_step="Correct the setting.",
        )
    return value


def _environment() -> dict[str, str]:
    # LOCKSTEP_STORAGE_GIVE_UP_S=10 sets lockstep.storage.give-up-s: for a job started by hand, or a test.
    keys = [*(key for key in DEFAULTS if key.startswith("lockstep.")), "lockstep.storage.write-give-up-s"]
    names = {key: key.upper().replace(".", "_").replace("-", "_") for key in keys}
    found = {key: os.environ[name] for key, name in names.items() if name in os.environ}
    for key, variables in _OF_AWS.items():  # so that tasks on other hosts ask the same store
        for value in filter(None, map(os.environ.get, variables)):
            found[key] = value
    return found


def _conf_dir_settings() -> dict[str, str]:
    global _from_files
    folder = os.environ.get("HADOOP_CONF_DIR")
    if folder is None or folder == "":
        return {}
    if _from_files[0] != folder:
        found: dict[str, str] = {}
        for name in _FILES:
            found |= _properties(Path(folder) / name)
        _from_files = (folder, found)
    return _from_files[1]


def _properties(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read as a Hadoop configuration",
            got=str(error),
            allowed="XML with <property> entries",
            next_step="Repair the file or correct HADOOP_CONF_DIR.",
        ) from error
    entries = [(entry.findtext("name"), entry.findtext("value")) for entry in root.iter("property")]
    return {
        name.strip(): value.strip() for name, value in entries if name and value and name.strip().startswith(_PREFIXES)
    }
