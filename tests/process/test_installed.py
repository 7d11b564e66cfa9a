"""Our wheel in an environment of its own, in a project whose folders have the names of ours."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_links_are_known_by_name_and_place(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    assert is_linked(ROOT / "training") and not is_linked(tmp_path / "training") and not is_linked(ROOT / "tests")
    names = [name for name, _ in python_files()]
    assert len(names) == len({*names}) > 300 and {"lockstep/etl/columns.py", "pyspark_tfrecord/source.py"} <= {*names}
