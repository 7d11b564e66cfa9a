"""`make kubernetes` and `make kubernetes-stop`: a control plane to try things on, with a stand-in for its kubelets."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lockstep.jobs._cli import run_job
from lockstep.storage.errors import ConfigError
from tests.cluster.process import end_all, read_state, write_state
from tests.kubernetes.control_plane import PARTS, ControlPlane

FOLDER = Path(".kubernetes")
STATE = "plane.json"


def up() -> int:
    """Start it, and write the file for a shell."""
    folder = FOLDER.resolve()
    if any(process.alive for process in read_state(folder / STATE)[1].values()):
        raise ConfigError(
            f"a control plane under {folder} runs already",
            got=f"live processes of {folder / STATE}",
            allowed="one for each checkout",
            next_step="Run `make kubernetes-stop`, then `make kubernetes` again.",
        )
    print(f"Starting {', '.join(PARTS)} ...", flush=True)
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    plane = ControlPlane(folder, keep=True).start()
    write_state(folder / STATE, {plane.bridge: 443}, plane.processes.values())
    for name, process in plane.processes.items():
        print(f"  {name:24} pid {process.pid}")
    variables = {**plane.env, "KUBERNETES": f"k8s://{plane.url}", "DRIVER_HOST": plane.address}
    variables["JAVA_HOME"] = os.environ.get("JAVA_HOME", "")
    text = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    (folder / "env.sh").write_text(text, encoding="utf-8")
    print(f"Kubernetes {plane.url}; point a shell at it by `source {FOLDER}/env.sh`")
    return 0


def down() -> int:
    """End just the processes that `up` started here, and remove the bridge."""
    state = FOLDER.resolve() / STATE
    bridges, _ = read_state(state)
    end_all(state, f"No control plane runs under {FOLDER}.")
    for bridge in bridges:
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run `up` or `down`."""
    return {"up": up, "down": down}[argv[0]]()


if __name__ == "__main__":
    run_job(main)
