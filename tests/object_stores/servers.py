"""The servers of the tests by name: moto and Ceph speak S3, Azurite is Azure's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from tests.object_stores import azure, ceph
from tests.object_stores.server import PYTHON, ObjectServer, serving

SERVERS: dict[str, Callable[[Path, int], AbstractContextManager[ObjectServer]]] = {
    "moto": serving,
    "ceph": ceph.serving_ceph,
    "azure": azure.serving_azure,
}


def why_not(name: str) -> str | None:
    """What this machine lacks for a server, if anything."""
    there = {"moto": PYTHON.exists, "ceph": ceph.CEPH.root, "azure": azure.program().exists}[name]()
    return (
        None if there else f"no {name} here: `scripts/setup.sh {'stores' if name == 'moto' else 'servers'}` fetches it"
    )
