"""Real spark-submit, Spark, API server and scheduler; pods are processes of a stand-in kubelet (decision 051)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from lockstep.training.results.audit import check_run_audit
from lockstep.training.run.lineage import checkpoints, read_claims
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result
from tests.kubernetes.control_plane import ROOT, ControlPlane
from tests.kubernetes.submit import LIMIT_S, LOG, SPACE, Jobs
from tests.training._tiny import write_table
from tests.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def kubectl(plane: ControlPlane, *words: str, text: str | None = None) -> str:
    """What kubectl prints."""
    done = subprocess.run(
        ["kubectl", *words], env=os.environ | plane.env, input=text, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    plane = ControlPlane(tmp_path_factory.mktemp("plane"))
    try:
        plane.start()
        kubectl(plane, "apply", "-f", str(ROOT / "conf" / "kubernetes" / "service-account.yaml"))
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="module")
def jobs(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    folder = tmp_path_factory.mktemp("data")
    (folder / "raw").mkdir()
    (folder / "raw" / LOG.name).write_bytes(LOG.read_bytes())
    return Jobs(plane, folder)


@pytest.fixture(scope="module")
def dataset(jobs: Jobs) -> str:
    """A small table: the tests of training need no ETL before them."""
    output = jobs.folder / "table"
    write_table(output, records={"train": 12_800, "test": 300})
    return str(output)


def check_run(run: str, dataset: str, epochs: int) -> list[str]:
    """Check a run to its last byte and sample; returns the checkpoints that its generations began with."""
    fs, paths = filesystem(run), RunPaths(run)
    result = find_result(fs, paths)
    assert result is not None and result["steps"] == epochs * load_dataset(dataset).splits["train"].records // 128
    assert check_run_audit(run).ok and verify(run) == []
    return [str(claim.parent) for claim in read_claims(fs, paths).values()]


def step_of(run: str) -> int:
    """The newest step in the run's status."""
    status = Path(run, "status.json")
    return int(json.loads(status.read_text())["step"]) if status.exists() else 0


def test_etl_makes_the_same_bytes_in_client_and_cluster_mode(jobs: Jobs) -> None:
    outputs = {mode: f"{jobs.folder}/{mode}-dataset" for mode in ("client", "cluster")}
    for mode, output in outputs.items():
        code, text = jobs.etl(mode, output).ended()
        assert code == 0 and f"{output}: 35272 read, 12103 written" in text, text[-6000:]
        assert verify(output) == []
    shards = [path.relative_to(outputs["client"]) for path in Path(outputs["client"]).rglob("part-*")]
    assert len(shards) > 1
    for shard in shards:
        assert Path(outputs["client"], shard).read_bytes() == Path(outputs["cluster"], shard).read_bytes()


def test_training_in_client_mode(jobs: Jobs, dataset: str) -> None:
    """In cluster mode: the tests below."""
    run = f"{jobs.folder}/client"
    code, text = jobs.train("client", dataset, run, "--epochs", "2").ended()
    assert code == 0, text[-6000:]
    assert check_run(run, dataset, 2) == ["None"]


def test_memory_gpus_and_secrets_of_an_executors_pod(jobs: Jobs) -> None:
    """GPUs are numbers that the stand-in counts. The script that finds them reads the secret's file, or finds none."""
    gpus, words = jobs.folder / "gpus.sh", "that only pods know"
    found = """echo '{"name": "gpu", "addresses": ["0"]}'"""
    gpus.write_text(f"""#!/bin/sh\n[ "$(cat /etc/store-keys/credentials)" = "{words}" ] && {found}\n""")
    gpus.chmod(0o755)
    kubectl(jobs.plane, "create", "secret", "generic", "store-keys", f"--from-literal=credentials={words}")
    conf = {f"spark.kubernetes.{role}.secrets.store-keys": "/etc/store-keys" for role in ("driver", "executor")}
    resource = {"amount": "1", "vendor": "nvidia.com", "discoveryScript": str(gpus)}
    conf |= {f"spark.executor.resource.gpu.{name}": value for name, value in resource.items()}
    etl = jobs.etl("cluster", f"{jobs.folder}/secret-dataset", conf=conf)
    until(lambda: etl.running("executor") or etl.process.poll() is not None, LIMIT_S)
    (pod, *_) = etl.pods("executor")
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "2560Mi", "nvidia.com/gpu": "1"}
    assert words not in json.dumps(pod)
    code, text = etl.ended()
    assert code == 0 and "35272 read, 12103 written" in text, text[-6000:]


def test_a_ranks_pod_is_killed_in_mid_epoch(jobs: Jobs, dataset: str) -> None:
    run = f"{jobs.folder}/killed"
    training = jobs.train("cluster", dataset, run, "--epochs", "20", "--checkpoint-every", "20")
    training.until_checkpoint(run)
    victim = training.running("executor")[0]
    jobs.plane.api.delete_pod(SPACE, victim, 0)
    code, text = training.ended()
    assert code == 0, text[-6000:]
    parents = check_run(run, dataset, 20)
    assert len(parents) == 2 and parents[1] != "None", text[-6000:]
    assert "was deleted by a user or the framework" in text or "not found in the cluster" in text


def test_a_pod_that_is_to_end_has_all_ranks_write_a_checkpoint_first(jobs: Jobs, dataset: str) -> None:
    """No step is repeated, and none was due for a checkpoint: the one that counts came from the notice."""
    run = f"{jobs.folder}/notice"
    training = jobs.train("cluster", dataset, run, "--epochs", "20", "--checkpoint-every", "1000000")
    until(lambda: step_of(run) > 50 or training.process.poll() is not None, LIMIT_S)
    jobs.plane.api.delete_pod(SPACE, training.running("executor")[0])
    code, text = training.ended()
    assert code == 0, text[-6000:]
    parents = check_run(run, dataset, 20)
    assert len(parents) == 2 and int(parents[1].split(".")[0].removeprefix("step-")) > 50, parents
    assert "failed" not in text


def test_the_drivers_pod_is_killed_and_a_second_driver_resumes(jobs: Jobs, dataset: str) -> None:
    run, flags = f"{jobs.folder}/driver", ("--epochs", "20", "--checkpoint-every", "20")
    first = jobs.train("cluster", dataset, run, *flags)
    first.until_checkpoint(run)
    (driver,) = first.running("driver")
    jobs.plane.api.delete_pod(SPACE, driver, 0)
    first.process.wait(LIMIT_S)
    until(lambda: not first.pods("executor"), LIMIT_S)  # they end without their driver, or are collected as its own
    code, text = jobs.train("cluster", dataset, run, *flags).ended()
    assert code == 0, text[-6000:]
    parents = check_run(run, dataset, 20)
    assert len(parents) == 2 and parents[1] != "None"


def test_a_job_starts_the_driver_again_when_its_pod_is_killed(jobs: Jobs, dataset: str) -> None:
    run, plane = f"{jobs.folder}/job", jobs.plane
    file = str(ROOT / "conf" / "kubernetes" / "train-job.yaml")
    documents = json.loads(kubectl(plane, "apply", "--dry-run=client", "-o", "json", "-f", file))["items"]
    (container,) = documents[1]["spec"]["template"]["spec"]["containers"]
    ours = {"--dataset": dataset, "--run": run, "--epochs": "20", "--checkpoint-every": "20"}
    flags = [word for word in container["args"] if word.partition("=")[0] not in ours]
    script = flags.index("jobs/train.py")
    volumes = [
        f"--conf=spark.kubernetes.executor.volumes.hostPath.data.{p}={jobs.folder}"
        for p in ("mount.path", "options.path")
    ]
    container["args"] = [*flags[:script], *volumes, *flags[script:], "--audit", *(f"{k}={v}" for k, v in ours.items())]
    container["volumeMounts"] = [{"name": "data", "mountPath": str(jobs.folder)}]
    documents[1]["spec"]["template"]["spec"]["volumes"] = [{"name": "data", "hostPath": {"path": str(jobs.folder)}}]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    kubectl(plane, "apply", "-f", "-", text=listed)

    def drivers() -> list[str]:
        return [str(pod["metadata"]["name"]) for pod in plane.api.pods(SPACE, "lockstep%3Dtrain")]

    fs, paths = filesystem(run), RunPaths(run)
    until(lambda: fs.exists(paths.checkpoints) and checkpoints(fs, paths), LIMIT_S)
    (first,) = drivers()
    plane.api.delete_pod(SPACE, first, 0)
    job = f"/apis/batch/v1/namespaces/{SPACE}/jobs/lockstep-train"
    until(lambda: plane.api.get(job)["status"].get("succeeded"), LIMIT_S)
    assert first not in drivers()
    parents = check_run(run, dataset, 20)
    assert len(parents) == 2 and parents[1] != "None"
