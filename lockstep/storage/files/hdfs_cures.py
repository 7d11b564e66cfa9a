"""Errors of HDFS that have a known cure: Java's class and words -> our class, what is wrong, and what to do about it.

Both backends ask here first. What is not here, such as a missing path or a lost connection, each translates itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.storage.errors import (
    ConfigError,
    DeniedError,
    DiskFullError,
    LockstepError,
    RetryableStorageError,
    StorageError,
)

_REMOVE = (
    "Remove what is not needed there (old datasets; runs: fewer checkpoints by lockstep train --keep-checkpoints, then "
    "logs and metrics of older generations)"
)
_LIST_DATANODES = "`hdfs dfsadmin -report` lists them"


@dataclass(frozen=True, slots=True)
class Cure:
    """An error of HDFS: how to know it, and what to say. Texts may use groups of `words` by name, as in {folder}."""

    java: str
    """The end of Java's class, without package and outer class; empty where any class may say `words`."""
    words: str
    """A regular expression, searched for in the first line of the message; empty: any message."""
    kind: Callable[..., LockstepError]
    what: str
    """What is wrong, after "cannot VERB PLACE: "."""
    allowed: str
    next_step: str


CURES = (
    Cure(
        "NSQuotaExceededException",
        r"directory (?P<folder>.+?) is exceeded: quota=(?P<quota>\d+) file count=(?P<used>\d+)",
        DiskFullError,
        "the quota of names of {folder} is used up: {used} with this one, of {quota} files and folders",
        "at most {quota} files and folders in {folder}, itself included",
        _REMOVE + ", or have an administrator of HDFS raise the quota: `hdfs dfsadmin -setQuota N {folder}`."
        " `hdfs dfs -count -q -v {folder}` shows what remains.",
    ),
    Cure(
        "DSQuotaExceededException",
        r"quota of (?P<folder>.+?) is exceeded: quota = (?P<quota>\d+) B.*? but diskspace consumed = (?P<used>\d+) B",
        DiskFullError,
        "the quota of space of {folder} is used up: {used} with the block that is asked for, of {quota} bytes",
        "at most {quota} bytes in {folder}, all replicas counted; a file under way counts whole blocks (dfs.blocksize)",
        _REMOVE + ", or have an administrator of HDFS raise the quota: `hdfs dfsadmin -setSpaceQuota N {folder}`."
        " `hdfs dfs -count -q -v {folder}` shows what remains.",
    ),
    Cure(
        "QuotaByStorageTypeExceededException",
        r"type : (?P<type>\w+) on path : (?P<folder>\S+) is exceeded",
        DiskFullError,
        "the quota of {type} of {folder} is used up",
        "as many bytes on {type} as the quota of {folder} allows",
        _REMOVE + ", or have an administrator of HDFS raise the quota:"
        " `hdfs dfsadmin -setSpaceQuota N -storageType {type} {folder}`.",
    ),
    Cure(
        "QuotaExceededException",
        "",
        DiskFullError,
        "a quota is used up",
        "names and bytes within the quotas of the folders above",
        _REMOVE + ", or have an administrator of HDFS raise the quota. `hdfs dfs -count -q -v FOLDER` shows both.",
    ),
    Cure(
        "MaxDirectoryItemsExceededException",
        r"limit of (?P<folder>.+?) is exceeded: limit=(?P<limit>\d+)",
        DiskFullError,
        "{folder} is full: it has {limit} entries",
        "at most {limit} entries in a folder (dfs.namenode.fs-limits.max-directory-items)",
        "Move or remove entries of {folder}, or choose another folder.",
    ),
    Cure(
        "PathComponentTooLongException",
        r"limit=(?P<limit>\d+) length=(?P<length>\d+)",
        ConfigError,
        "a name in it is too long: {length} bytes",
        "names of at most {limit} bytes (dfs.namenode.fs-limits.max-component-length)",
        "Choose a shorter name.",
    ),
    Cure(
        "",
        r"Pathname too long",
        ConfigError,
        "the path is too long",
        "8000 characters and 1000 levels",
        "Choose a shorter path.",
    ),
    Cure(
        "",
        r"[Nn]on-empty protected directory (?P<folder>\S+)|descendant directory is protected",
        DeniedError,
        "the folder is protected against removal",
        "folders that are not in fs.protected.directories of the NameNode",
        "Choose another folder, or have an administrator of HDFS take it from that list.",
    ),
    Cure(
        "AccessControlException",
        r"user=(?P<user>[^,]+), access=(?P<access>\w+), inode=\\?\"(?P<folder>[^\"\\]+)\\?\":"
        r"(?P<owner>[^:]*):(?P<group>[^:]*):(?P<mode>\S+)",
        DeniedError,
        "permission denied: {user} has no {access} at {folder}, which belongs to {owner}:{group} ({mode})",
        "{access} at {folder} for this user",
        "Have {owner} or an administrator of HDFS allow it"
        " (`hdfs dfs -setfacl -m user:{user}:rwx {folder}`, or -chmod, -chown), or be another user: HADOOP_USER_NAME;"
        " under Kerberos kinit.",
    ),
    Cure(
        "SnapshotAccessControlException",
        "",
        DeniedError,
        "it is in a snapshot, which is read-only",
        "a path without /.snapshot/",
        "Choose a path outside of the snapshot.",
    ),
    Cure(
        "",
        r"The directory (?P<folder>\S+) cannot be deleted since (?P<root>\S+) is snapshottable",
        DeniedError,
        "{root} has snapshots, and is therefore neither renamed nor removed",
        "folders without snapshots",
        "Choose another folder, or have its owner remove the snapshots: `hdfs lsSnapshottableDir`,"
        " `hdfs dfs -deleteSnapshot {root} NAME`.",
    ),
    Cure(
        "AccessControlException",
        "",
        DeniedError,
        "permission denied",
        "a user with the right to do so",
        "Set HADOOP_USER_NAME, or ask for the permission; under Kerberos run kinit.",
    ),
    Cure(
        "AuthorizationException",
        "",
        DeniedError,
        "the NameNode does not let this user in",
        "users whom hadoop-policy.xml of the NameNode admits, or hadoop.proxyuser for one who acts for another",
        "Have an administrator of HDFS add the user.",
    ),
    Cure(
        "",
        r"Resources are low on NN",
        RetryableStorageError,
        "the NameNode's own disk is full, and it is in safe mode",
        "room on the disks of dfs.namenode.name.dir (dfs.namenode.resource.du.reserved)",
        "Have an administrator of HDFS free space there, then run `hdfs dfsadmin -safemode leave`.",
    ),
    Cure(
        "",
        r"safe mode.*It was turned on manually",
        RetryableStorageError,
        "an administrator has turned safe mode on",
        "an HDFS that can be written",
        "Have an administrator of HDFS run `hdfs dfsadmin -safemode leave`.",
    ),
    Cure(
        "",
        r"could only be written to \d+ of the (?P<least>\d+) minReplication nodes.*?"
        r"(?P<nodes>\d+) datanode\(s\) running and no node",
        RetryableStorageError,
        "none of the {nodes} DataNodes that run takes a block",
        "{least} DataNode with room for a block (dfs.blocksize) and a thread for it",
        f"Free space on the DataNodes' disks, or add one: {_LIST_DATANODES} (DFS Remaining).",
    ),
    Cure(
        "",
        r"could only be written to \d+ of the (?P<least>\d+) minReplication nodes",
        RetryableStorageError,
        "no DataNode takes a block",
        "{least} DataNode that lives and has room for a block (dfs.blocksize)",
        f"Start the DataNodes, or free space on their disks: {_LIST_DATANODES}.",
    ),
    Cure(
        "RecoveryInProgressException",
        "",
        RetryableStorageError,
        "the lease of a writer that has ended is being recovered",
        "a file without a writer",
        "Wait a minute and run again; `hdfs debug recoverLease -path FILE` asks for it at once.",
    ),
    Cure(
        "LeaseExpiredException",
        "",
        RetryableStorageError,
        "the file was deleted, renamed or taken over by another writer",
        "a file that only this writer changes",
        "Look for another run or a cleaning job at work there, then run again.",
    ),
    Cure(
        "",
        r"can't be moved (from|into|between)",
        StorageError,
        "the rename crosses the border of an encryption zone",
        "source and target in one zone",
        "Choose a folder that is wholly inside or outside of the zone: `hdfs crypto -listZones`.",
    ),
    Cure(
        "",
        r"block size is less than configured minimum value.*?: (?P<size>\d+) < (?P<least>\d+)",
        ConfigError,
        "the block size of {size} bytes is below that of the NameNode",
        "{least} bytes or more (dfs.namenode.fs-limits.min-block-size)",
        "Set dfs.blocksize in HADOOP_CONF_DIR or by --conf spark.hadoop.dfs.blocksize.",
    ),
    Cure(
        "",
        r"maximum number of blocks.*?: (?P<blocks>\d+) >=",
        ConfigError,
        "the file would have more than {blocks} blocks",
        "{blocks} blocks in a file (dfs.namenode.fs-limits.max-blocks-per-file)",
        "Make smaller files (--shard-bytes), or set a larger dfs.blocksize.",
    ),
    Cure(
        "",
        r"Requested replication factor of",
        ConfigError,
        "the NameNode does not allow this replication",
        "from dfs.namenode.replication.min to dfs.replication.max",
        "Set dfs.replication in HADOOP_CONF_DIR or by --conf spark.hadoop.dfs.replication.",
    ),
)


def first_line(message: str) -> str:
    """The first line of a message of Java, before its stack; of safe mode also the second, which says why."""
    lines = [line.strip() for line in re.split(r"\\n|\n|\\t|\t", message) if line.strip()] or [""]
    return " ".join(lines[:2] if "safe mode" in lines[0] else lines[:1])


def cured(what: str, java: str, text: str) -> LockstepError | None:
    """Our error for Java's class (short name) and the first line of its message; None if no cure is known.

    `what` is "cannot VERB PLACE".
    """
    name = java.rpartition("$")[2]
    for cure in CURES:
        if not name.endswith(cure.java) or (found := re.search(cure.words, text)) is None:
            continue
        groups = {key: value or "" for key, value in found.groupdict().items()}
        return cure.kind(
            f"{what}: {cure.what.format(**groups)}",
            got=text,
            allowed=cure.allowed.format(**groups),
            next_step=cure.next_step.format(**groups),
        )
    return None
