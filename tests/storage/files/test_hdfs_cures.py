"""Errors of HDFS with a known cure, in the words of Hadoop 3.5.0: our class, what is wrong and what to do."""

from __future__ import annotations

import pytest

from lockstep.storage.errors import (
    ConfigError,
    DeniedError,
    DiskFullError,
    ExistsError,
    LockstepError,
    RetryableStorageError,
    StorageError,
)
from lockstep.storage.files import hdfs, webhdfs_http

PROTOCOL, NAMENODE = "org.apache.hadoop.hdfs.protocol", "org.apache.hadoop.hdfs.server.namenode"
NO_NODES = (
    "File /f could only be written to 0 of the 1 minReplication nodes. There are 2 datanode(s) running and {} node(s) "
    "are excluded in this operation."
)
TABLE = [
    (
        f"{PROTOCOL}.NSQuotaExceededException",
        "The NameSpace quota (directories and files) of directory /user/a is exceeded: quota=5 file count=6",
        DiskFullError,
        ["quota of names of /user/a is used up: 6 with this one, of 5", "--keep-checkpoints", "-setQuota N /user/a"],
    ),
    (
        f"{PROTOCOL}.DSQuotaExceededException",
        "The DiskSpace quota of /user/a is exceeded: quota = 1048576 B = 1 MB but diskspace consumed = 67108864 B",
        DiskFullError,
        ["space of /user/a is used up: 67108864", "of 1048576 bytes", "-setSpaceQuota N /user/a", "dfs.blocksize"],
    ),
    (f"{PROTOCOL}.DSQuotaExceededException", "something else", DiskFullError, ["a quota is used up"]),
    (
        f"{PROTOCOL}.QuotaByStorageTypeExceededException",
        "Quota by storage type : SSD on path : /s is exceeded. quota : 1 MB but space consumed : 2 MB",
        DiskFullError,
        ["quota of SSD of /s", "-storageType SSD"],
    ),
    (
        f"{PROTOCOL}.FSLimitException$MaxDirectoryItemsExceededException",
        "The directory item limit of /d is exceeded: limit=1048576 items=1048576",
        DiskFullError,
        ["/d is full: it has 1048576 entries"],
    ),
    (
        f"{PROTOCOL}.FSLimitException$PathComponentTooLongException",
        "The maximum path component name limit of aaaa in directory /d is exceeded: limit=255 length=300",
        ConfigError,
        ["too long: 300 bytes", "at most 255 bytes"],
    ),
    (
        "java.io.IOException",
        "create: Pathname too long.  Limit 8000 characters, 1000 levels.",
        ConfigError,
        ["shorter"],
    ),
    (
        "org.apache.hadoop.security.AccessControlException",
        'Permission denied: user=bob, access=WRITE, inode="/a":root:supergroup:drwxr-xr-x',
        DeniedError,
        ["bob has no WRITE at /a, which belongs to root:supergroup (drwxr-xr-x)", "-setfacl -m user:bob:rwx /a"],
    ),
    (
        "org.apache.hadoop.security.AccessControlException",
        "Permission denied by sticky bit: user=bob, path=/tmp/x",
        DeniedError,
        ["permission denied", "HADOOP_USER_NAME"],
    ),
    (
        "org.apache.hadoop.security.AccessControlException",
        "Cannot delete/rename non-empty protected directory /data",
        DeniedError,
        ["protected against removal", "fs.protected.directories"],
    ),
    (
        f"{PROTOCOL}.SnapshotAccessControlException",
        "Modification on a read-only snapshot is disallowed",
        DeniedError,
        ["in a snapshot, which is read-only"],
    ),
    (
        "java.io.IOException",
        "The directory /s cannot be deleted since /s is snapshottable and already has snapshots",
        DeniedError,
        ["/s has snapshots", "-deleteSnapshot /s NAME"],
    ),
    (
        "org.apache.hadoop.security.authorize.AuthorizationException",
        "User: a is not allowed to impersonate b",
        DeniedError,
        ["hadoop.proxyuser"],
    ),
    (
        f"{NAMENODE}.SafeModeException",
        "Cannot create file/f. Name node is in safe mode.\nIt was turned on manually. Use -safemode leave",
        RetryableStorageError,
        ["an administrator has turned safe mode on", "-safemode leave"],
    ),
    (
        f"{NAMENODE}.SafeModeException",
        "Cannot create file/f. Name node is in safe mode.\nResources are low on NN. Please free up more resources",
        RetryableStorageError,
        ["NameNode's own disk is full"],
    ),
    (
        f"{NAMENODE}.SafeModeException",
        "Cannot create file/f. Name node is in safe mode.\nThe reported blocks 0 needs additional 9 blocks",
        RetryableStorageError,
        ["has left safe mode", "needs additional 9"],
    ),
    ("java.io.IOException", NO_NODES.format("no"), RetryableStorageError, ["none of the 2 DataNodes", "DFS Remaining"]),
    ("java.io.IOException", NO_NODES.format("2"), RetryableStorageError, ["no DataNode takes a block"]),
    (
        f"{PROTOCOL}.RecoveryInProgressException",
        "Failed to APPEND_FILE /f: lease recovery is in progress. Try again later.",
        RetryableStorageError,
        ["lease of a writer that has ended"],
    ),
    (
        f"{NAMENODE}.LeaseExpiredException",
        "No lease on /f (inode 16387): File is not open for writing.",
        RetryableStorageError,
        ["taken over by another writer"],
    ),
    (
        "java.io.IOException",
        "/a can't be moved into an encryption zone.",
        StorageError,
        ["border of an encryption zone", "-listZones"],
    ),
    (
        "java.io.IOException",
        "Specified block size is less than configured minimum value (dfs.namenode.fs-limits.min-block-size): 10 < 1024",
        ConfigError,
        ["block size of 10 bytes", "1024 bytes or more"],
    ),
    (
        "java.io.IOException",
        "File has reached the limit on maximum number of blocks (dfs.namenode.fs-limits.max-blocks-per-file): 9 >= 9",
        ConfigError,
        ["more than 9 blocks", "--shard-bytes"],
    ),
    (
        "java.io.IOException",
        "Requested replication factor of 9 exceeds maximum of 2 for /f from 127.0.0.1",
        ConfigError,
        ["replication"],
    ),
]


@pytest.mark.parametrize(("java", "message", "kind", "words"), TABLE, ids=[f"{row[0]} {row[1][:40]}" for row in TABLE])
def test_the_error_says_what_is_wrong_and_what_cures_it(
    java: str, message: str, kind: type[LockstepError], words: list[str]
) -> None:
    text = f"{message}\n\tat org.apache.hadoop.X(Y.java:1)"
    literal = text.replace('"', r"\"").replace("\n", r"\n").replace("\t", r"\t")  # as Rust prints it
    over_rpc: BaseException = RuntimeError(f'RPCError("{java}", "{literal}")')
    over_http = webhdfs_http.RefusedError(java.rpartition(".")[2].rpartition("$")[2], text, 403)
    for found in (
        hdfs.translate(over_rpc, verb="create", place="hdfs://nn/f", whom="the NameNode at nn"),
        webhdfs_http.translate(over_http, verb="create", place="webhdfs://nn/f", whom="the NameNode at nn"),
    ):
        assert type(found) is kind, found
        assert all(word in str(found) for word in words), found
        assert "java" not in str(found) and "{" not in str(found) and found.allowed != "success"


def test_a_name_that_another_writer_holds_is_taken() -> None:
    text = "Failed to CREATE_FILE /f for client_1 because this file lease is currently owned by client_2"
    error = FileExistsError(text)
    assert type(hdfs.translate(error, verb="create", place="hdfs://nn/f", whom="nn")) is ExistsError
    refused = webhdfs_http.RefusedError("AlreadyBeingCreatedException", text, 403)
    assert type(webhdfs_http.translate(refused, verb="create", place="webhdfs://nn/f", whom="nn")) is ExistsError
