"""A Kerberos realm of its own: a KDC on a free port, keytabs and tickets in one folder; nothing of the host is used."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from pathlib import Path

from lockstep.storage.errors import ConfigError
from tests.cluster.conf import HOST
from tests.cluster.process import Process, spawn
from tests.waiting import until

REALM = "SITE.TEST"
SERVERS = ("nn/localhost", "dn/localhost", "rm/localhost", "nm/localhost", "HTTP/localhost")
USER = "alice"
PROGRAMS = ("krb5kdc", "kdb5_util", "kadmin.local", "kinit", "klist")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def why_not() -> str | None:
    """What this machine lacks for a realm, if anything."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"no {', '.join(missing)} (Debian: krb5-kdc, krb5-admin-server, krb5-user)" if missing else None


class Realm:
    """The KDC under `folder`; `start(port)` and `stop()`. Tickets are good for `ticket_s` seconds."""

    def __init__(self, folder: Path, ticket_s: int) -> None:
        self.folder, self.ticket_s = folder.resolve(), ticket_s
        self.conf = self.folder / "krb5.conf"
        self._client_conf = self.folder / "client.conf"  # servers get tickets for a day
        self.keytab = self.folder / "servers.keytab"
        self.user_keytab = self.folder / f"{USER}.keytab"
        self._kdc: Process | None = None

    def principal(self, name: str) -> str:
        return f"{name}@{REALM}"

    @property
    def env(self) -> dict[str, str]:
        """Variables with which Kerberos' programs and libraries find this realm; no ticket and no keytab."""
        return {
            "KRB5_CONFIG": str(self._client_conf), "KRB5_KDC_PROFILE": str(self.folder / "kdc.conf"),
            "KRB5CCNAME": str(self.folder / "none"),
        }  # fmt: skip

    def start(self, port: int) -> None:
        if (why := why_not()) is not None:
            next_step = "Run `scripts/setup.sh kerberos` as root."
            raise ConfigError("Kerberos' programs are missing", got=why, allowed="a KDC", next_step=next_step)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for path, lifetime_s in ((self.conf, 86_400), (self._client_conf, self.ticket_s)):
            path.write_text(
                f"""[libdefaults]
default_realm = {REALM}
dns_lookup_realm = false
dns_lookup_kdc = false
rdns = false
dns_canonicalize_hostname = false
udp_preference_limit = 1
clockskew = 5
ticket_lifetime = {lifetime_s}s
[realms]
{REALM} = {{
  kdc = {HOST}:{port}
}}
"""
            )
        (self.folder / "kdc.conf").write_text(
            f"""[kdcdefaults]
kdc_listen = {HOST}:{port}
kdc_tcp_listen = {HOST}:{port}
[realms]
{REALM} = {{
  database_name = {self.folder}/principal
  key_stash_file = {self.folder}/stash
  acl_file = {self.folder}/acl
  supported_enctypes = aes256-cts:normal aes128-cts:normal
  max_life = 1d
}}
"""
        )
        self._do("kdb5_util", "create", "-s", "-r", REALM, "-P", secrets.token_hex(8))
        for name in (*SERVERS, USER):
            keytab = self.user_keytab if name == USER else self.keytab
            self._do("kadmin.local", "-q", f"addprinc -randkey {name}")
            self._do("kadmin.local", "-q", f"ktadd -k {keytab} {name}")
        log = self.folder / "kdc.log"
        environment = {**os.environ, **self.env, "PATH": PATH}
        program = shutil.which("krb5kdc", path=PATH)
        assert program is not None
        self._kdc = spawn("kdc", [program, "-n"], environment, log, keep=False)
        until(lambda: "commencing operation" in log.read_text(errors="replace") or self._answers())

    def stop(self) -> None:
        if self._kdc is not None:
            self._kdc.end()

    def ticket(self, cache: Path, seconds: int | None = None) -> dict[str, str]:
        """Get the user a ticket into `cache`; returns the variable that names it."""
        self._do("kinit", "-l", f"{seconds or self.ticket_s}s", "-kt", str(self.user_keytab), "-c", str(cache), USER)
        return {"KRB5CCNAME": str(cache)}

    def _answers(self) -> bool:
        try:
            self.ticket(self.folder / "probe")
        except subprocess.CalledProcessError:
            return False
        return True

    def _do(self, *command: str) -> None:
        environment = {**os.environ, **self.env, "PATH": PATH}
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
