"""Our wheel in an environment of its own, in a project whose folders have the names of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from lockstep.process.installed import ROOT, VERSION, is_linked, python_files

LOG = ROOT / "data" / "weblogs" / "nasa_access_log_1995-07-09.log.gz"
SOURCE = ("lockstep", "etl", "training", "jobs", "pyspark_tfrecord", "pyproject.toml", "requirements.txt")
ROOMS = ("data", "etl", "features", "jobs", "training", "utils")
NET = """
import keras
from training.parts import head

def build(signature, options):
    inputs = {name: keras.Input(spec.shape, name=name) for name, spec in signature.features.items()}
    flat = [keras.layers.Flatten()(keras.ops.cast(each, "float32")) for each in inputs.values()]
    model = keras.Model(inputs, head(keras.layers.Concatenate()(flat)))
    model.compile("adam", "binary_crossentropy")
    return model
"""
PARTS = """
import keras

def head(x):
    return keras.layers.Dense(1, activation="sigmoid")(x)
"""
OF_PYTHON = """
import sys
import etl, jobs, training.parts  # the project's
import lockstep, lockstep.horovod.tensorflow.keras, lockstep.on_ranks
lockstep.TrainConfig, lockstep.write_dataset, lockstep.train
from lockstep.jobs import models
ours = [name for name, module in sys.modules.items() if "site/lockstep" in str(getattr(module, "__file__", ""))]
print(lockstep.__version__, sorted({name.partition(".")[0] for name in ours}), etl.__file__)
"""

# A project as strict users write it: nothing of this may be refused.
TYPED = """
from pathlib import Path

import pandas as pd

import lockstep
import lockstep.horovod.tensorflow.keras as hvd
from lockstep import data, embeddings, on_ranks, optimizers

def etl(folder: Path) -> int:
    with lockstep.spark_session("visits", "local[2]") as spark:
        logs = lockstep.write_logs(spark, folder / "logs", folder / "clicks", log_format="csv", columns=["a"], seed=1)
        lockstep.write_images(spark, [folder], "images", source="folder", image_size=(8, 8), max_bad="2%")
        rows = spark.range(9).selectExpr("id", "id % 2 AS label")
        made = lockstep.write_dataset(rows, "rows", id_columns="id", label="label", fmt="parquet")
        schema = lockstep.propose_schema(rows, "label")
        lockstep.write_dataset(pd.DataFrame({"id": [1]}), "more", id_columns=["id"], schema=schema)
    return logs.counts.read + made.splits["train"].records

def build(signature: lockstep.Signature, options: lockstep.ModelOptions) -> object:
    return [signature.features["a"].shape, options.extra.get("width", 32)]

def train(folder: Path) -> float:
    result = lockstep.train(
        [folder / "a", "b"], "run", build, global_batch=64, epochs=2, num_ranks=2, learning_rate=0.1, mix=[3, 1],
        extra={"width": 64}, strategy="async", staleness=2, checkpoint_every="60s", batchnorm="ghost",
    )
    lockstep.cross_validate("folds", "cv", "logistic", global_batch=16, epochs=1, validate="val")
    space = {"learning_rate": {"low": 1e-3, "high": 1.0, "log": True}, "set.width": {"choices": [16, 32]}}
    lockstep.tune("data", "search", build, space, metric="auc:max", global_batch=16, epochs=1, sampler="grid", seed=3)
    found = lockstep.evaluate(["run", folder], "data", slices="hour", checkpoint="best")
    lockstep.predict("run", pd.DataFrame({"a": [0.5]}), batch=8)
    lockstep.predict(folder, {"a": [0.5, 2.0]})
    udf = lockstep.predict_udf(folder, returns="double")
    faults = [finding.what for finding in lockstep.verify(folder)]
    steps = lockstep.read_history("run").steps
    return float(found["metrics"]["auc"]) + result.steps + len(faults) + len(steps) + len(str(udf.returnType))

def batches() -> int:
    planned = data.PlannedBatches.open("data", global_batch=16, epochs=1)
    rows = sum(len(batch.x["a"]) for batch in data.numpy_batches("data", global_batch=32, seed=1, augment=["flip"]))
    state = data.loader(planned, num_workers=2, pin_memory=True).state_dict()
    return rows + (planned.steps or 0) + len(state)

def own_loop() -> list[float]:
    comm = on_ranks.communicator()
    try:
        hvd.init()
        return [float(comm.rank), float(comm.num_ranks), float(hvd.rank()), hvd.size() / hvd.local_size()]
    except lockstep.LockstepError as error:
        raise SystemExit(error.next_step) from error

names = (optimizers.LARS, optimizers.scale_learning_rate, embeddings.ShardedEmbedding, on_ranks.distribute)
text: str = lockstep.__version__ + lockstep.describe("data", max_records=10)
"""
# One mistake a line: each line must be refused, by each checker.
WRONG = """
import lockstep
from lockstep import data, on_ranks
import lockstep.horovod as hvd
lockstep.train("data", "run", "logistic", global_batch=16, epochs=1, learning_rat=0.1)
lockstep.train("data", "run", "logistic", global_batch=16, epochs=1, learning_rate="fast")
lockstep.train("data", "run", "logistic", global_batch=16, epochs=1, batchnorm="gost")
lockstep.train("data", "run", lambda signature: None, global_batch=16, epochs=1)
lockstep.train("data", "run", "logistic", epochs=1)
lockstep.cross_validate("data", "run", "logistic", global_batch=16, epochs=1, mix=[1, 2])
lockstep.write_logs(lockstep.spark_session(), "a", "b", lable="page")
lockstep.write_images(lockstep.spark_session(), "a", "b", image_size="8x8")
lockstep.write_dataset(3, "b", id_columns="id")
lockstep.write_dataset(lockstep.spark_session().range(9), "b", id_columns="id", fmt="orc")
lockstep.evaluate("run", "data", batch="512")
data.numpy_batches("data", globalbatch=16)
data.numpy_batches("data", global_batch=16, seeds=1)
lockstep.predict("run", 5)
lockstep.numpy_batches("data", global_batch=16)
on_ranks.gathr
hvd.alreduce
steps: str = lockstep.train("data", "run", "logistic", global_batch=16, epochs=1).steps
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip installs of this checkout, without the packages that it requires."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = folder / "source"  # setuptools leaves build/ there
    source.mkdir()
    for name in SOURCE:
        (source / name).symlink_to(ROOT / name)
    wheel_of = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(wheel_of, check=True, timeout=300, cwd=folder)
    (wheel,) = folder.glob("lockstep-*.whl")
    install = [*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.endswith(".py")}
    assert packed == {name for name, _ in python_files()}
    return folder / "site"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of its own, with folders that have the names of ours."""
    folder = tmp_path / "project"
    for room in (*ROOMS, "models"):
        (folder / room).mkdir(parents=True)
        (folder / room / "__init__.py").touch()
    (folder / "models" / "net.py").write_text(NET)
    (folder / "training" / "parts.py").write_text(PARTS)
    return folder


def python(site: Path, cwd: Path, *words: str) -> str:
    """What Python prints with the wheel on its path."""
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installation_takes_two_names(site: Path, project: Path) -> None:
    assert sorted(path.name for path in site.iterdir() if path.suffix != ".dist-info" and path.name != "bin") == [
        "lockstep", "pyspark_tfrecord",
    ]  # fmt: skip
    assert not [path for path in site.rglob("*") if path.is_symlink()]
    assert (site / "lockstep" / "py.typed").is_file() and (site / "lockstep" / "spark" / "log4j2.properties").is_file()
    assert python(site, project, "-m", "lockstep", "--version") == f"lockstep {VERSION}\n"
    printed = python(site, project, "-c", OF_PYTHON)
    assert printed == f"{VERSION} ['lockstep'] {project}/etl/__init__.py\n"


@pytest.mark.slow
def test_a_project_with_folders_of_our_names_trains_its_own_model(site: Path, project: Path) -> None:
    call = ("-m", "lockstep")
    etl = ["etl_logs", "--input", str(LOG), "--output", "clicks", "--split", "group:visitor:80/20"]
    assert "clicks: 35272 read" in python(site, project, *call, *etl, "--master", "local[2]")
    common = ["--dataset", "clicks", "--model", "models.net:build", "--global-batch", "256", "--epochs", "1"]
    for launcher, run in ((["local"], "here"), (["barrier", "--master", "local[2]"], "there")):
        words = [*common, "--num-ranks", "2", "--run", run, "--launcher", *launcher]
        assert "1 epoch" in python(site, project, *call, "train", *words)
    assert "auc" in python(site, project, *call, "evaluate", "--run", "there", "--dataset", "clicks")


@pytest.fixture
def of_the_wheel(site: Path, tmp_path: Path) -> Path:
    """The Python of an environment that has the wheel in place of this checkout, and the packages that are here."""
    venv.create(tmp_path / "env", with_pip=False)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "all.pth").write_text(f"{site}\n{sysconfig.get_path('purelib')}\n")
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "wrong.py").write_text(WRONG)
    return tmp_path / "env" / "bin" / "python"


LINES_THAT_ARE_WRONG = set(range(5, len(WRONG.splitlines()) + 1))


@pytest.mark.slow
def test_mypy_strict_accepts_a_typed_project_and_refuses_each_mistake(of_the_wheel: Path, tmp_path: Path) -> None:
    words = ["--strict", "--no-error-summary", "--hide-error-context", "--no-pretty", "--config-file", os.devnull]
    found = checked("mypy", *words, "--python-executable", str(of_the_wheel), "typed.py", "wrong.py", cwd=tmp_path)
    assert refused(found) == {"wrong.py": LINES_THAT_ARE_WRONG}, found


@pytest.mark.slow
def test_pyright_accepts_a_typed_project_and_refuses_each_mistake(of_the_wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard", "include": ["*.py"]}')
    found = checked("basedpyright", "--level", "error", "--pythonpath", str(of_the_wheel), cwd=tmp_path)
    assert refused(found) == {"wrong.py": LINES_THAT_ARE_WRONG}, found


def checked(tool: str, *words: str, cwd: Path) -> str:
    """What a type checker of this environment prints in a folder without our sources."""
    command = [str(Path(sys.executable).with_name(tool)), *words]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=400).stdout


def refused(found: str) -> dict[str, set[int]]:
    """The lines with an error by the file's name."""
    lines: dict[str, set[int]] = {}
    for path, line in re.findall(r"^\s*(\S+\.py):(\d+)(?::\d+)?[ :-]+error", found, re.MULTILINE):
        lines.setdefault(Path(path).name, set()).add(int(line))
    return lines


def test_links_are_known_by_name_and_place(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    assert is_linked(ROOT / "training") and not is_linked(tmp_path / "training") and not is_linked(ROOT / "tests")
    names = [name for name, _ in python_files()]
    assert len(names) == len({*names}) > 300 and {"lockstep/etl/columns.py", "pyspark_tfrecord/source.py"} <= {*names}
