"""Another replica than a failed DataNode's: for WebHDFS the NameNode chooses one, and is told whom to leave out.

It knows a DataNode by its address for data transfer (measured with Hadoop 3.5: any other name is ignored in silence),
whereas a client has been sent to its HTTP address. Where the blocks lie tells both.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hdfs.util import HdfsError

from lockstep.storage.files.webhdfs_client import location
from lockstep.storage.files.webhdfs_errors import OTHER_FORM


def locate(client: Any, path: str, offset: int, length: int, failed: Collection[str] = ()) -> str:
    """The URL at a DataNode for `length` bytes of a file from `offset`; at none of `failed` ("host:port" of HTTP) if
    another one has the bytes.
    """
    left_out = ",".join(_transfer_addresses(client, path, offset, failed)) if failed else ""
    if left_out:
        try:
            return location(client._locate_open(path, offset=offset, length=length, excludedatanodes=left_out))
        except HdfsError:
            left_out = ""  # nobody else has them: one that failed may answer by now, and else its error is told
    return location(client._locate_open(path, offset=offset, length=length))


def _transfer_addresses(client: Any, path: str, offset: int, failed: Collection[str]) -> list[str]:
    """ "ip:port" of those among `failed` that have the byte at `offset`."""
    try:
        blocks = client._get_block_locations(path, offset=offset, length=1).json()["LocatedBlocks"]["locatedBlocks"]
        return [
            f"{node['ipAddr']}:{node['xferPort']}"
            for block in blocks
            for node in block["locations"]
            for host in (node["hostName"], node["ipAddr"])
            if f"{host}:{node['infoPort']}" in failed
        ]
    except (HdfsError, *OTHER_FORM):  # a server that does not tell is asked as if nothing had failed
        return []
