"""An HDFS as sites have it: a name service of two NameNodes, and with a `Realm` Kerberos, tokens and TLS."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.conf import HOST, write_conf, write_properties
from tests.cluster.daemons import START_LIMIT_S, Cluster, ClusterError
from tests.cluster.jars import java_home
from tests.cluster.realm import REALM, USER, Realm

SERVICE = "ns1"
NAMENODES = {"namenode": "nn1", "namenode-2": "nn2"}
DAEMONS = ("journalnode", *NAMENODES, "datanode-1", "datanode-2")
HAADMIN = "org.apache.hadoop.hdfs.tools.DFSHAAdmin"


class Site(Cluster):
    """`hdfs://ns1`: two NameNodes that share their edits through a JournalNode, and two DataNodes.

    With `ticket_s` it has a realm, `.realm`, whose tickets are good for so many seconds, and lets nobody in without a
    ticket or a token; `more` are more properties of hdfs-site.xml.
    """

    def __init__(self, folder: Path, *, ticket_s: int | None = None, more: Mapping[str, str] | None = None) -> None:
        super().__init__(folder)
        self.realm = Realm(folder / "realm", ticket_s) if ticket_s else None
        self._more = dict(more or {})
        self._host = "localhost" if ticket_s else HOST  # servers' principals have host names

    @property
    def hdfs_url(self) -> str:
        return f"hdfs://{SERVICE}"

    @property
    def yarn_url(self) -> str:
        return f"http://{self._host}:{self.ports['resourcemanager-http']}"

    @property
    def env(self) -> dict[str, str]:
        return super().env | (self.realm.env if self.realm else {})

    def start_hdfs(self) -> Site:
        self._start_on_free_ports(DAEMONS)
        return self

    def start_gateways(self) -> None:
        """A key server (KMS), which lets everyone make and use keys, and HttpFS; without Kerberos only."""
        conf = Path(self.conf_dir)
        url = f"jceks://file@{self.folder}/kms.keystore"
        server = {"key.provider.uri": url, "http.port": str(self.ports["kms"]), "http.host": HOST}
        write_properties(conf / "kms-site.xml", {f"hadoop.kms.{key}": value for key, value in server.items()})
        acls = [f"hadoop.kms.acl.{name}" for name in ("CREATE", "GET_KEYS", "GENERATE_EEK", "DECRYPT_EEK")]
        acls += [f"default.key.acl.{name}" for name in ("MANAGEMENT", "GENERATE_EEK", "DECRYPT_EEK", "READ")]
        write_properties(conf / "kms-acls.xml", dict.fromkeys(acls, "*"))
        web = {"httpfs.http.port": str(self.ports["httpfs"]), "httpfs.http.hostname": HOST}
        write_properties(conf / "httpfs-site.xml", {**web, "httpfs.hadoop.config.dir": self.conf_dir})
        self._start_all(["kms", "httpfs"])

    def stop(self) -> None:
        super().stop()
        if self.realm is not None:
            self.realm.stop()

    def heal(self) -> None:
        super().heal()
        self._one_active()

    def active(self) -> str:
        """The NameNode that is active now, "" if none is."""
        return next((name for name in NAMENODES if self._state(name) == "active"), "")

    def fail_over(self) -> None:
        """Make the other NameNode active, whether the one that is, or was, active lives, is frozen or is dead."""
        lost = [name for name in NAMENODES if name in self._paused or not self.running(name)]
        now = self.active() or (lost[0] if lost else "namenode")
        (other,) = NAMENODES.keys() - {now}
        self.admin("failover", HAADMIN, "-failover", NAMENODES[now], NAMENODES[other])
        self._one_active()

    def admin(self, name: str, main: str, *arguments: str) -> str:
        """Run a command of Hadoop; returns its output."""
        self._run(name, self._jvm(64, main, *arguments))
        return self.log(name).read_text(encoding="utf-8")

    def _core(self) -> dict[str, str]:
        if self.realm is None:
            keys = f"kms://http@{HOST}:{self.ports['kms']}/kms"
            gateway = f"hadoop.proxyuser.{getpass.getuser()}"  # HttpFS acts for its callers
            return {
                "fs.defaultFS": self.hdfs_url, "hadoop.security.key.provider.path": keys,
                f"{gateway}.hosts": "*", f"{gateway}.groups": "*",
            }  # fmt: skip
        http = {"principal": f"HTTP/localhost@{REALM}", "keytab": str(self.realm.keytab)}
        return {
            "fs.defaultFS": self.hdfs_url,
            "hadoop.security.authentication": "kerberos",
            "hadoop.security.authorization": "true",
            "hadoop.rpc.protection": "privacy",
            "hadoop.user.group.static.mapping.overrides": f"{USER}=root",  # who may write anywhere, and fail over
            # else WebHDFS takes any user's word
            "hadoop.http.filter.initializers": "org.apache.hadoop.security.AuthenticationFilterInitializer",
            "hadoop.http.authentication.type": "kerberos",
            "hadoop.http.authentication.signature.secret.file": str(self.folder / "http-secret"),
            **{f"hadoop.http.authentication.kerberos.{key}": value for key, value in http.items()},
        }

    def _kerberos(self) -> dict[str, str]:
        if self.realm is None:
            return {}
        found = {
            "dfs.block.access.token.enable": "true",
            "dfs.data.transfer.protection": "privacy",
            "ignore.secure.ports.for.testing": "true",
            "dfs.web.authentication.kerberos.principal": f"HTTP/localhost@{REALM}",
            "dfs.web.authentication.kerberos.keytab": str(self.realm.keytab),
            "dfs.http.policy": "HTTP_AND_HTTPS",
        }
        for name, node in NAMENODES.items():
            found[f"dfs.namenode.https-address.{SERVICE}.{node}"] = f"localhost:{self.ports[f'{name}-https']}"
        for server, name in (("namenode", "nn"), ("journalnode", "nn"), ("datanode", "dn")):
            found[f"dfs.{server}.kerberos.principal"] = f"{name}/localhost@{REALM}"
            found[f"dfs.{server}.keytab.file"] = str(self.realm.keytab)
            found[f"dfs.{server}.kerberos.internal.spnego.principal"] = f"HTTP/localhost@{REALM}"
        return found

    def _yarn(self) -> dict[str, str]:
        """Containers run as this process' user, as with all of Hadoop's executors but the Linux one."""
        found: dict[str, str] = {}
        if self.realm is None:
            return found
        for server, name in (("resourcemanager", "rm"), ("nodemanager", "nm")):
            found[f"yarn.{server}.principal"] = f"{name}/localhost@{REALM}"
            found[f"yarn.{server}.webapp.spnego-principal"] = f"HTTP/localhost@{REALM}"
            for key in ("keytab", "webapp.spnego-keytab-file"):
                found[f"yarn.{server}.{key}"] = str(self.realm.keytab)
        return found

    def _hdfs(self) -> dict[str, str]:
        provider = "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
        found = {
            "dfs.nameservices": SERVICE,
            f"dfs.ha.namenodes.{SERVICE}": ",".join(NAMENODES.values()),
            f"dfs.client.failover.proxy.provider.{SERVICE}": provider,
            "dfs.namenode.shared.edits.dir": f"qjournal://{self._host}:{self.ports['journalnode']}/{SERVICE}",
            "dfs.journalnode.rpc-address": f"{self._host}:{self.ports['journalnode']}",
            "dfs.journalnode.http-address": f"{self._host}:{self.ports['journalnode-http']}",
            "dfs.journalnode.https-address": f"{self._host}:{self.ports['journalnode-https']}",
            "dfs.journalnode.edits.dir": str(self.folder / "journalnode"),
            # the JournalNode's epoch keeps an old active NameNode out
            "dfs.ha.fencing.methods": "shell(/bin/true)",
            "dfs.ha.tail-edits.period": "1s",
            "dfs.ha.log-roll.period": "10s",
        }
        for name, node in NAMENODES.items():
            found[f"dfs.namenode.rpc-address.{SERVICE}.{node}"] = f"{self._host}:{self.ports[name]}"
            found[f"dfs.namenode.http-address.{SERVICE}.{node}"] = f"{self._host}:{self.ports[f'{name}-http']}"
            found[f"dfs.namenode.name.dir.{SERVICE}.{node}"] = (self.folder / name).as_uri()
        return found | self._kerberos() | self._more

    def _configure(self) -> None:
        if self.realm is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "http-secret").write_bytes(os.urandom(16))
            self._certify()
        write_conf(Path(self.conf_dir), self.folder, self.ports, self._core(), self._hdfs(), self._yarn())

    def _certify(self) -> None:
        """The servers' certificate and key in a keystore, and `.ca`, the certificate alone."""
        store, password = self.folder / "https.p12", "a-password"
        if not store.exists():
            keytool = [str(java_home() / "bin" / "keytool"), "-keystore", str(store), "-storepass", password]
            names = [
                "-alias",
                "site",
                "-keyalg",
                "EC",
                "-dname",
                "CN=localhost",
                "-ext",
                "san=dns:localhost,ip:127.0.0.1",
            ]
            subprocess.run([*keytool, "-genkeypair", *names], check=True, capture_output=True)
            export = [*keytool, "-exportcert", "-rfc", "-alias", "site", "-file", str(self.ca)]
            subprocess.run(export, check=True, capture_output=True)
        entries = {"location": str(store), "password": password, "keypassword": password, "type": "pkcs12"}
        write_properties(
            Path(self.conf_dir) / "ssl-server.xml", {f"ssl.server.keystore.{k}": v for k, v in entries.items()}
        )

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def _settings(self, name: str) -> list[str]:
        if name in NAMENODES:
            return ["-D", f"dfs.ha.namenode.id={NAMENODES[name]}"]
        if name.startswith("datanode") and self.realm is not None:
            more = {"dfs.datanode.https.address": f"{HOST}:{self.ports[f'{name}-https']}"}
            return [*super()._settings(name), *(part for k, v in more.items() for part in ("-D", f"{k}={v}"))]
        return super()._settings(name)

    def _options(self) -> list[str]:
        logging = f"-Dlog4j.configuration={Path(self.conf_dir, 'log4j.properties').as_uri()}"  # KMS asks for it
        folders = [f"-Dkms.config.dir={self.conf_dir}", f"-Dhttpfs.home.dir={self.folder}"]
        folders += [f"-Dhttpfs.{name}.dir={self.folder}" for name in ("log", "temp")]
        folders.append(f"-Dhttpfs.config.dir={self.conf_dir}")
        return [logging, *folders, *([f"-Djava.security.krb5.conf={self.realm.conf}"] if self.realm else [])]

    def _environment(self) -> dict[str, str]:
        return super()._environment() | (self._ticket() if self.realm else {})

    def _ticket(self) -> dict[str, str]:
        assert self.realm is not None
        return self.realm.env | self.realm.ticket(self.folder / "operator")

    def _get(self, role: str, path: str) -> dict[str, object]:
        if self.realm is None:
            return super()._get(role, path)
        url = f"http://localhost:{self.ports[role]}{path}"
        command = ["curl", "--silent", "--fail", "--max-time", "30", "--negotiate", "--user", ":", url]
        done = subprocess.run(command, env={**os.environ, **self._ticket()}, capture_output=True)
        return json.loads(done.stdout)

    def _format(self) -> None:
        if self.realm is not None:
            self.realm.stop()
            self.realm.start(self.ports["kdc"])
        for name in DAEMONS:
            subprocess.run(["rm", "-rf", str(self.folder / name)], check=True)
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        super()._start_all(["journalnode"])
        self._run("namenode-format", [*self._java("namenode"), "-format", "-nonInteractive"])

    def _start_all(self, names: Sequence[str]) -> None:
        if "journalnode" not in names or self.running("namenode"):
            super()._start_all(names)
            return
        super()._start_all(["namenode"])
        self._run("bootstrap", [*self._java("namenode-2"), "-bootstrapStandby", "-nonInteractive"])
        super()._start_all(["namenode-2", "datanode-1", "datanode-2"])
        self.admin("transition", HAADMIN, "-transitionToActive", "nn1")
        self._one_active()

    def _one_active(self) -> None:
        """Wait until one NameNode is active and out of safe mode."""
        deadline = time.monotonic() + START_LIMIT_S
        while not (active := self.active()) or not self._out_of_safe_mode(active):
            if time.monotonic() > deadline:
                raise ClusterError("no NameNode is active", got=str({n: self._state(n) for n in NAMENODES}))
            if not active and all(self._state(name) == "standby" for name in NAMENODES):
                self.admin("transition", HAADMIN, "-transitionToActive", "nn1")
            time.sleep(0.2)

    def _serves(self, name: str) -> bool:
        if name in NAMENODES:
            return self._state(name) in ("active", "standby")
        if name in ("kms", "httpfs"):
            path = "/kms/v1/keys/names?" if name == "kms" else "/webhdfs/v1/?op=GETHOMEDIRECTORY&"
            with contextlib.suppress(OSError, ValueError):
                self._get(name, f"{path}user.name=root")
                return True
            return False
        if name == "journalnode":
            return bool(self._ask(name, "service=JournalNode,name=JournalNodeInfo"))
        return super()._serves(name)

    def _state(self, name: str) -> str:
        if name in self._paused:
            return ""
        return str(self._ask(name, "service=NameNode,name=NameNodeStatus").get("State", ""))

    def _out_of_safe_mode(self, name: str) -> bool:
        return self._ask(name, "service=NameNode,name=FSNamesystemState").get("FSState") == "Operational"

    def _ask(self, name: str, query: str) -> dict[str, object]:
        try:
            return self._bean(f"{name}-http", query)
        except (OSError, ValueError, KeyError):
            return {}  # it does not serve yet, or not any more
