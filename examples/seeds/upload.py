"""Image files to HDFS by the client `hdfs.InsecureClient` (WebHDFS), each read back and compared by its SHA-256.

`lockstep upload` does the same with retries, resumes a copy that was killed, and takes Kerberos and tokens.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
from pathlib import Path

from hdfs import InsecureClient

parser = argparse.ArgumentParser()
parser.add_argument("--namenode", required=True, help="the HTTP address, such as http://127.0.0.1:9870")
parser.add_argument("--input", required=True, nargs="+")
parser.add_argument("--output", required=True, help="a folder of HDFS, such as /data/pictures")
args = parser.parse_args()

client = InsecureClient(args.namenode, user=getpass.getuser())
for path in map(Path, args.input):
    target = f"{args.output}/{path.name}"
    client.upload(target, str(path), overwrite=True)
    digest = hashlib.sha256()
    with client.read(target, chunk_size=1 << 20) as chunks:
        for chunk in chunks:
            digest.update(chunk)
    assert digest.digest() == hashlib.sha256(path.read_bytes()).digest(), f"{target} differs from {path}"
    print(f"{target}: {client.status(target)['length']} bytes, as sent")
