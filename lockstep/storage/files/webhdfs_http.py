"""From the authority of a URL to the NameNodes' HTTP addresses, and from hdfs:// to webhdfs:// and back."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lockstep.storage.errors import ConfigError
from lockstep.storage.urls import split_url

_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]):([0-9]{1,5})")
_HTTP, _RPC = "dfs.namenode.http-address", "dfs.namenode.rpc-address"


def http_addresses(authority: str, settings: Mapping[str, str]) -> tuple[str, ...]:
    """ "http://host:port" of each NameNode: "host:port[,host:port]" as written, or those of a name service by the
    settings. Raises ConfigError for what is neither.
    """
    parts = authority.split(",")
    if all(_valid(part) for part in parts):
        return tuple(f"http://{part}" for part in parts)
    nodes = _of_service(authority, _HTTP, settings)
    if nodes:
        return tuple(f"http://{node}" for node in nodes)
    raise ConfigError(
        "a webhdfs:// URL names no NameNode",
        got=f"webhdfs://{authority}",
        allowed="webhdfs://HOST:HTTP_PORT/PATH, webhdfs://HOST:PORT,HOST2:PORT2/PATH, or a name service whose"
        f" {_HTTP} HADOOP_CONF_DIR or Spark's settings give",
        next_step="Write the NameNode's host and HTTP port (9870 unless configured).",
    )


def as_webhdfs(url: str, settings: Mapping[str, str]) -> str:
    """The webhdfs:// URL of the same path; an hdfs:// URL's NameNode is looked up in the settings (ConfigError)."""
    return _converted(url, "webhdfs", _RPC, _HTTP, settings)


def as_hdfs(url: str, settings: Mapping[str, str]) -> str:
    """The hdfs:// URL of the same path; a webhdfs:// URL's NameNode is looked up in the settings (ConfigError)."""
    return _converted(url, "hdfs", _HTTP, _RPC, settings)


def path_of(url: str) -> str:
    """The path on HDFS. Raises ConfigError for `.` and `..`, which an HTTP client would resolve by itself."""
    path = re.sub("/+", "/", split_url(url)[2]).rstrip("/") or "/"
    if any(part in (".", "..") for part in path.split("/")):
        raise ConfigError(
            f"{url} is not a plain path",
            got="`.` or `..` in it",
            allowed="names",
            next_step="Write the path that is meant.",
        )
    return path


def _converted(url: str, scheme: str, have: str, want: str, settings: Mapping[str, str]) -> str:
    known, authority, path = split_url(url)
    if known == scheme:
        return url
    if not authority:
        authority = split_url(settings.get("fs.defaultFS", ""))[1] if settings.get("fs.defaultFS") else ""
    if f"dfs.ha.namenodes.{authority}" in settings:
        return f"{scheme}://{authority}{path}"  # a name service has the same name in both
    nodes = set(authority.split(","))
    for key, value in sorted(settings.items()):
        suffix = key.removeprefix(have)
        if (key == have or key.startswith(have + ".")) and value in nodes:
            service = suffix[1:].partition(".")[0]
            if service and f"dfs.ha.namenodes.{service}" in settings:
                return f"{scheme}://{service}{path}"
            if want + suffix in settings:
                return f"{scheme}://{settings[want + suffix]}{path}"
    raise ConfigError(
        f"{url} cannot be reached by {scheme}: the NameNode's address for it is not known",
        got=f"no {want} beside {have} = {authority or '(none)'}",
        allowed=f"{scheme}://HOST:PORT/PATH, or both addresses in the files of HADOOP_CONF_DIR",
        next_step=f"Write --output {scheme}://HOST:PORT{path}, or set HADOOP_CONF_DIR.",
    )


def _of_service(service: str, key: str, settings: Mapping[str, str]) -> list[str]:
    names = [name.strip() for name in settings.get(f"dfs.ha.namenodes.{service}", "").split(",")]
    found = [settings.get(f"{key}.{service}.{name}", "") for name in names if name]
    return [node for node in found if _valid(node)]


def _valid(address: str) -> bool:
    found = _ADDRESS.fullmatch(address)
    return found is not None and 0 < int(found.group(2)) < 1 << 16
