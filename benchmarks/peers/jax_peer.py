"""JAX's CPU collectives over gloo, as a process of another environment: benchmarks.all_reduce starts two.

PYTHON_WITH_JAX benchmarks/peers/jax_peer.py RANK PORT
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from all_reduce_turns import Run, repeatedly, serve
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def main() -> None:
    """Serve until stdin ends."""
    rank, port = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(rank))
    mesh = Mesh(np.array(jax.devices()), ("ranks",))

    def prepare(size: int) -> Run:
        mine = np.zeros((1, size // 4), np.float32)
        rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("ranks")), mine, (2, size // 4))
        summed = jax.jit(
            jax.shard_map(lambda x: jax.lax.psum(x, "ranks"), mesh=mesh, in_specs=P("ranks"), out_specs=P())
        )
        return repeatedly(lambda: summed(rows).block_until_ready())

    tiny = prepare(4)
    serve(f"JAX {jax.__version__}", prepare, lambda: tiny(1))


if __name__ == "__main__":
    main()
