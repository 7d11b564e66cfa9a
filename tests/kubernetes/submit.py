"""Jobs on the control plane of the tests, by spark-submit as docs/kubernetes.md has it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from lockstep.storage.fs import filesystem
from lockstep.training.run.lineage import checkpoints
from lockstep.training.run.paths import RunPaths
from tests.kubernetes.control_plane import ROOT, ControlPlane
from tests.waiting import until

LIMIT_S = 900.0
SPACE = "default"
LOG = ROOT / "data" / "weblogs" / "nasa_access_log_1995-07-09.log.gz"
RANKS = "spark-role=executor"


class Jobs:
    """spark-submit in client and cluster mode, with one folder that this machine and all pods see at the same place."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane, self.folder = plane, folder

    def submit(self, mode: str, job: str, *flags: str, conf: dict[str, str] | None = None) -> Submitted:
        """Start a job; its output goes to a file."""
        volume = {"mount.path": str(self.folder), "options.path": str(self.folder)}
        settings = {
            f"spark.kubernetes.{role}.volumes.hostPath.data.{name}": value
            for role in ("driver", "executor")
            for name, value in volume.items()
        }
        settings |= {"spark.ui.enabled": "false", "spark.kubernetes.executor.request.cores": "0.5"}
        if mode == "client":
            settings |= {"spark.driver.host": self.plane.address, "spark.driver.bindAddress": self.plane.address}
        settings |= conf or {}
        script = f"local:///opt/lockstep/jobs/{job}.py" if mode == "cluster" else f"jobs/{job}.py"
        command = ["spark-submit", "--master", f"k8s://{self.plane.url}", "--deploy-mode", mode]
        command += ["--properties-file", "conf/kubernetes/spark.properties", "--num-executors", "2"]
        command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        return Submitted(self.plane, [*command, script, *flags], self.folder)

    def etl(self, mode: str, output: str, **more: Any) -> Submitted:
        """The page's ETL job."""
        flags = ("--input", f"{self.folder}/raw", "--output", output, "--split", "group:visitor:80/20")
        return self.submit(mode, "etl_logs", *flags, **more)

    def train(self, mode: str, dataset: str, run: str, *flags: str, **more: Any) -> Submitted:
        """The page's training, with an audit."""
        ours = ("--dataset", dataset, "--run", run, "--model", "logistic", "--num-ranks", "2", "--global-batch", "128")
        return self.submit(mode, "train", *ours, "--audit", *flags, **more)


class Submitted:
    """A spark-submit and the pods of its application."""

    def __init__(self, plane: ControlPlane, command: list[str], folder: Path) -> None:
        self.plane = plane
        number = len(list(folder.glob("submit-*.log")))
        self.log = folder / f"submit-{number}.log"
        environment = {**os.environ, **plane.env}
        for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME"):
            environment.pop(name, None)
        before = {pod["metadata"]["uid"] for pod in plane.api.pods(SPACE)}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        self._before = before

    def pods(self, role: str) -> list[dict[str, Any]]:
        """Pods of a role that have come since the job was submitted."""
        found = self.plane.api.pods(SPACE, f"spark-role%3D{role}")
        return [pod for pod in found if pod["metadata"]["uid"] not in self._before]

    def running(self, role: str) -> list[str]:
        """Names of the pods of a role that run and are not about to end."""
        return [
            str(pod["metadata"]["name"])
            for pod in self.pods(role)
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]

    def ended(self) -> tuple[int, str]:
        """Exit code and output of spark-submit; in cluster mode with what the driver's pod has printed."""
        code = self.process.wait(LIMIT_S)
        return code, self.printed()

    def printed(self) -> str:
        """What spark-submit and the driver's pod have printed so far."""
        logs = self.plane.folder / "pod-logs" / SPACE
        drivers = [pod["metadata"]["name"] for pod in self.pods("driver")]
        return self.log.read_text() + "".join(path.read_text() for name in drivers for path in logs.glob(f"{name}/*"))

    def until_checkpoint(self, run: str, least: int = 1) -> None:
        """Wait for checkpoints of a run."""
        fs, paths = filesystem(run), RunPaths(run)

        def there() -> bool:
            assert self.process.poll() is None, self.printed()[-6000:]
            return fs.exists(paths.checkpoints) and len(checkpoints(fs, paths)) >= least

        until(there, LIMIT_S)
