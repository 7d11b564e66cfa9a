"""MPICH over shared memory, as processes of another environment: benchmarks.all_reduce starts them by its mpiexec.

MPIEXEC -n 2 PYTHON_WITH_MPI4PY benchmarks/peers/mpich_peer.py

Rank 0 alone has stdin and tells the other; its figure is the slower rank's.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial

import numpy as np
from all_reduce_turns import repeatedly
from mpi4py import MPI


def main() -> None:
    """Serve until stdin ends."""
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        print(json.dumps(f"{MPI.Get_library_version().split()[0]} {MPI.Get_library_version().split()[2]}"), flush=True)
        turns = iter(sys.stdin)
    size_before, run = 0, repeatedly(comm.Barrier)
    while True:
        if comm.rank == 0:
            turn = next(turns, "").split()
            comm.send(turn, 1)
        else:
            while not comm.Iprobe():  # MPI waits by spinning, which would take a core from the others' turns
                time.sleep(0.005)
            turn = comm.recv()
        if not turn:
            return
        size, repeats = map(int, turn)
        if size != size_before:
            size_before, run = size, repeatedly(partial(comm.Allreduce, MPI.IN_PLACE, np.zeros(size // 4, np.float32)))
            run(repeats)
        run(1)
        comm.Barrier()
        began = time.perf_counter()
        run(repeats)
        slower = comm.reduce((time.perf_counter() - began) / repeats, MPI.MAX)
        if comm.rank == 0:
            print(json.dumps(slower), flush=True)


if __name__ == "__main__":
    main()
