"""A user's own modules: the folder of a call, or --code, for this process, ranks and executors."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.jobs import export
from lockstep.process import own_code
from lockstep.process.installed import ROOMS, ROOT
from lockstep.process.own_code import CodeFolder
from lockstep.storage.errors import ConfigError
from lockstep.training.models import check_name
from tests.training._tiny import write_table

MODEL = """
import keras
from training import helper

def build(signature, options):
    inputs = {name: keras.Input(spec.shape, name=name) for name, spec in signature.features.items()}
    out = helper.Out(1, activation="sigmoid")(keras.layers.Concatenate()([*inputs.values()]))
    model = keras.Model(inputs, out)
    model.compile("sgd", "binary_crossentropy")
    return model
"""
HELPER = """
import keras

@keras.saving.register_keras_serializable()
class Out(keras.layers.Dense):
    pass
"""
# Names of our folders, of Python and installed packages, plain ones, and what is no module.
OWN = {"training", "jobs", "etl", "mine", "own"}  # neither Python nor a package has these names
NAMES = ["training", "jobs", "etl", "json", "queue", "numpy", "yaml", "mine", "own", "a-b", ".hidden"]


def put(folder: Path, *files: str) -> Path:
    """`folder` with these empty Python files."""
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has what an installation has, and none of the checkout's other folders."""
    folder = tmp_path_factory.mktemp("site")
    for room in ROOMS:
        (folder / room).symlink_to(ROOT / room)
    return folder


def run(site: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with Lockstep installed, called in a folder."""
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@given(files=st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from([".py", "/__init__.py", "/part.py"]))))
def test_a_zip_has_what_python_would_import_from_a_folder_that_is_last_on_its_path(
    tmp_path_factory: pytest.TempPathFactory, files: set[tuple[str, str]]
) -> None:
    folder = put(tmp_path_factory.mktemp("code"), *(name + end for name, end in files))
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if Path(entry).resolve() != ROOT]  # as installed
    try:
        code = CodeFolder.of_call(str(folder))
        assert code is not None
        code.use()
        found = set(code.modules())
        assert code.pack(str(folder / "own.zip")) == bool(found)
    finally:
        sys.path[:] = path
    possible = {name for name, _ in files}
    assert found == possible & OWN
    with zipfile.ZipFile(folder / "own.zip") as archive:
        packed = {name for name in archive.namelist() if name[-1] != "/"}
    assert packed == {name + end for name, end in files if name in found}


def test_python_itself_imports_the_packed_modules_and_no_other(tmp_path: Path, site: Path) -> None:
    folder = put(tmp_path / "code", "mine.py", "deep/__init__.py", "deep/er/leaf.py", "space/x.py", "json.py",
                 "training/__init__.py", "env/pyvenv.cfg", "env/lib/module.py", "node_modules/m.py")  # fmt: skip
    lines = f"""
import importlib, sys
sys.path.append({str(folder)!r})
from lockstep.process.own_code import CodeFolder
print(CodeFolder.of_call({str(folder)!r}).pack('own.zip'))
sys.path[-1] = 'own.zip'
for name in ("mine", "deep.er.leaf", "space.x", "json", "training", "env.lib.module", "node_modules.m"):
    try:
        print(name, 'own.zip' in str(importlib.import_module(name)))
    except ImportError:
        print(name, None)
"""
    done = run(site, tmp_path, "-c", lines)
    expected = ["True", "mine True", "deep.er.leaf True", "space.x True", "json False", "training True",
                "env.lib.module None", "node_modules.m None"]  # fmt: skip
    assert done.stdout.splitlines() == expected, done.stderr


def test_a_folder_that_is_too_large_is_refused_if_it_is_named_and_else_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_code, "MOST_FILES", 2)
    monkeypatch.syspath_prepend(str(put(tmp_path, "a1.py", "b1.py", "c1/d.py")))
    with pytest.raises(ConfigError, match="more than can be sent"):
        CodeFolder(tmp_path, True).pack(str(tmp_path / "own.zip"))
    assert not CodeFolder(tmp_path, False).pack(str(tmp_path / "own.zip"))
    assert "name a folder of modules with --code" in caplog.text
    with pytest.raises(ConfigError, match="--code names no folder"):
        CodeFolder.of_call(str(tmp_path / "absent"))


def test_a_module_that_is_not_there_or_is_hidden_is_named_without_importing_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "numpy/__init__.py", "numpy/mine.py", "deep1/__init__.py", "deep1/good.py")
    (tmp_path / "deep1" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    check_name("deep1.good:build", here=True)
    with pytest.raises(ConfigError, match=r"no module named `deep1\.bad`"):
        check_name("deep1.bad:build", here=True)
    hides = rf"no module named `numpy\.mine` .*/numpy hides that in {tmp_path}/numpy"
    with pytest.raises(ConfigError, match=hides):
        check_name("numpy.mine:build", here=True)


@pytest.mark.slow
def test_a_model_of_a_project_trains_and_is_evaluated_and_exported(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on executors, in a project whose folders have the names of ours; elsewhere the module is missed."""
    write_table(tmp_path / "data")
    rooms = ("etl", "jobs", "data", "utils", "features")
    mine = put(
        tmp_path / "mine", "models/__init__.py", "training/__init__.py", *(f"{room}/__init__.py" for room in rooms)
    )
    for room in rooms:
        (mine / room / "__init__.py").write_text("raise RuntimeError('imported')")
    (mine / "models" / "mymodel.py").write_text(MODEL)
    (mine / "training" / "helper.py").write_text(HELPER)
    lockstep = ("-P", "-m", "lockstep")
    where = ["--dataset", str(tmp_path / "data"), "--run", str(tmp_path / "run")]
    train = [*where, "--model", "models.mymodel:build", "--global-batch", "16", "--epochs", "1", "--num-ranks", "1"]
    done = run(site, mine, *lockstep, "train", *train, "--launcher", "barrier", "--master", "local[1]")
    assert done.returncode == 0, done.stderr
    done = run(site, tmp_path, *lockstep, "evaluate", *where, "--split", "train", "--code", "mine")
    assert done.returncode == 0, done.stderr

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match="no module named `models`"):
        export.main(["--run", str(tmp_path / "run"), "--output", str(tmp_path / "model")])
