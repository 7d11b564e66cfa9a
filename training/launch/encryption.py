"""Whether Spark itself keeps secret what it carries to its tasks: the generation's key and the ranks' certificates."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.storage.errors import ConfigError

ENCRYPTS = ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled")


def check_spark_encrypts(master: str, settings: Mapping[str, str]) -> None:
    """Raise ConfigError where TLS is asked for and Spark would send the secrets that it rests on in the clear.

    Executors on this host (local masters) are reached over loopback, which nobody else hears.
    """
    if master.startswith("local") or any(settings.get(name, "false").lower() == "true" for name in ENCRYPTS):
        return
    raise ConfigError(
        "--tls on protects nothing while Spark sends the ranks' keys in the clear",
        got=", ".join(f"{name}={settings.get(name, 'false')}" for name in ENCRYPTS),
        allowed=f"{ENCRYPTS[0]}=true (with spark.authenticate=true) or {ENCRYPTS[1]}=true",
        next_step="Give spark-submit --conf spark.authenticate=true --conf spark.network.crypto.enabled=true, "
        "or leave --tls off (docs/security.md).",
    )
