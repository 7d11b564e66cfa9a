"""The checks of lockstep doctor that concern a site's HDFS: its NameNodes, the ticket, tokens. None shows a secret."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from lockstep.jobs._checks import CheckFailed
from lockstep.storage.errors import LockstepError, StorageTimeoutError
from lockstep.storage.settings import WEBHDFS_TOKEN, hadoop_settings, hadoop_user, with_kerberos
from lockstep.storage.tokens import VARIABLE, shown
from lockstep.storage.urls import split_url

KEYTAB = "KRB5_CLIENT_KTNAME"
LOOK_S = 5.0


def site_checks(url: str) -> list[tuple[str, Callable[[], str]]]:
    """The checks by name for a URL of HDFS; none for another file system."""
    if split_url(url)[0] not in ("hdfs", "webhdfs", "swebhdfs"):
        return []
    return [("namenodes", lambda: check_namenodes(url)), ("ticket", check_ticket), ("tokens", check_tokens)]


def check_namenodes(url: str) -> str:
    """Which NameNode of a name service is active."""
    settings = hadoop_settings()
    authority = split_url(url)[1] or split_url(settings.get("fs.defaultFS", "hdfs:///"))[1]
    names = [name.strip() for name in settings.get(f"dfs.ha.namenodes.{authority}", "").split(",")]
    addresses = {name: settings.get(f"dfs.namenode.rpc-address.{authority}.{name}", "") for name in names if name}
    if not addresses:
        return f"{authority or url} is no name service of HADOOP_CONF_DIR: without another NameNode to fail over to"
    states = {f"{name} {address}": _state(address, settings) for name, address in addresses.items()}
    found = f"name service {authority}: " + ", ".join(f"{name} is {state}" for name, state in states.items())
    if "active" not in states.values():
        raise CheckFailed(
            found, next_step=f"Start a NameNode, or make one active: `hdfs haadmin -failover {' '.join(addresses)}`."
        )
    return found


def _state(address: str, settings: dict[str, str]) -> str:
    from lockstep.storage.files.hdfs import HdfsFileSystem

    fs = HdfsFileSystem(address, {**settings, "dfs.client.failover.max.attempts": "1"})
    try:
        fs.stat_once(f"hdfs://{address}/", LOOK_S)
    except StorageTimeoutError:
        return f"not answering within {LOOK_S:.0f} s"
    except LockstepError as error:
        if "state standby" in error.got:
            return "standby"
        return f"not answering ({error.got or error.what})"
    return "active"


def check_ticket() -> str:
    """Whose Kerberos ticket is used, until when, and whether it will be renewed."""
    if not with_kerberos(hadoop_settings()):
        return f"HDFS without Kerberos (hadoop.security.authentication): this user is {hadoop_user()}"
    from lockstep.storage.files.spnego import NoTicketError, ticket

    renewed = f"renewed by {KEYTAB}={os.environ[KEYTAB]}" if os.environ.get(KEYTAB) else "not renewed by a keytab"
    try:
        principal, left_s = ticket()
    except NoTicketError as error:
        if os.environ.get(VARIABLE):
            return f"no ticket: {VARIABLE} has tokens"
        raise CheckFailed(
            f"no Kerberos ticket: {error}", next_step=f"Run kinit, or name a keytab in {KEYTAB} (docs/sites.md)."
        ) from None
    if not left_s:
        next_step = f"Run kinit, or name a keytab in {KEYTAB} (docs/sites.md)."
        raise CheckFailed(f"the ticket of {principal} has expired", next_step=next_step)
    return f"{principal} until {_utc(time.time() + left_s)}, {renewed}"


def check_tokens() -> str:
    """The delegation tokens of the environment, and until when they may be renewed."""
    web = f"{WEBHDFS_TOKEN} is set" if os.environ.get(WEBHDFS_TOKEN) else ""
    path = os.environ.get(VARIABLE)
    if not path:
        return web or "none in the environment; under Kerberos a Spark session fetches its own"
    next_step = f"Fetch new ones (`hdfs fetchdt FILE`), or unset {VARIABLE}."
    try:
        tokens = shown(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckFailed(f"{VARIABLE}={path} cannot be read: {error}", next_step=next_step) from None
    ends = {token: f" of {token.owner} until {_utc(token.until_s)}" for token in tokens if token.until_s is not None}
    texts = [token.kind + ends.get(token, "") for token in tokens]
    found = "; ".join(filter(None, [*texts, web])) or "no tokens"
    if not tokens or any(token.until_s is not None and token.until_s < time.time() for token in tokens):
        raise CheckFailed(f"{VARIABLE}={path}: {found}", next_step=next_step)
    return found


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
