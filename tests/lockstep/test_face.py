"""`import lockstep` and `python -m lockstep`: what they load, their examples, and that a job is the same by both."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.etl.choices import MAX_DESCRIBED_RECORDS
from lockstep.jobs.describe import parser as describe_job
from lockstep.storage.errors import ConfigError
from lockstep.training import models
from lockstep.training.config import TrainConfig
from lockstep.training.launch.session import Launch
from tests.training import _torch_stand_in
from tests.training._tiny import write_table

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("tensorflow", "keras", "pyspark", "pyarrow", "numba", "numpy")
OF_DATASETS = ("write_dataset", "write_logs", "write_images", "spark_session")
# In this order: what loads after a Spark session has ended must not come from the copy that was shipped to executors.
OF_A_RUN = ("train", "evaluate", "predict", "predict_udf", "read_history")
SEVERAL_RUNS = ("cross_validate", "tune")
MODULES = ("data", "embeddings", "horovod", "on_ranks", "optimizers", "petastorm")
# In a process of its own: an example ends its Spark session, which the tests of this process share.
RUN_EXAMPLES = """
import sys
from tests.lockstep.test_face import example_failures
for name in sys.argv[1:]:
    if found := example_failures(name):
        sys.exit(found)
"""


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, in the folder `cwd`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


def example_failures(name: str) -> str:
    """Run the example in the docstring of a public name (`data.loader`); returns what differed, or an empty text."""
    text = inspect.getdoc(attrgetter(name)(lockstep)) or ""
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert example.examples, f"{name} has no example"
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=told.append)
    return "".join(told)


def test_import_loads_nothing_heavy(tmp_path: Path) -> None:
    code = f"import lockstep, sys; print([name for name in {HEAVY} if name in sys.modules], dir(lockstep))"
    done = python("-c", code, cwd=tmp_path)
    assert done.stdout == f"[] {lockstep.__all__}\n", done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tain'"):
        lockstep.tain  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "name",
    sorted({*lockstep.__all__} - {*OF_DATASETS, *OF_A_RUN, *SEVERAL_RUNS, "__version__", *MODULES}),
)
def test_an_example_that_starts_no_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    assert example_failures(name) == ""


@pytest.mark.slow
def test_examples_of_datasets_by_spark(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    done = python("-c", RUN_EXAMPLES, *OF_DATASETS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_examples_of_a_run(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    done = python("-c", RUN_EXAMPLES, *OF_A_RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The run is complete, so this starts nothing.
    again = lockstep.train(tmp_path / "data", tmp_path / "run", "logistic", global_batch=16, epochs=1, num_ranks=2)
    assert again.steps == 6 and again.model is not None
    assert lockstep.verify(tmp_path / "run") == []


@pytest.mark.soak
@pytest.mark.slow
def test_examples_of_several_runs(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    write_table(tmp_path / "folds", records={"fold-0": 50, "fold-1": 50})
    done = python("-c", RUN_EXAMPLES, *SEVERAL_RUNS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_examples_of_scripts_of_ranks_and_of_readers_of_batches(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    names = [f"on_ranks.{name}" for name in lockstep.on_ranks.__all__]
    names += [f"data.{name}" for name in lockstep.data.__all__ if name not in ("loader", "PlannedDataset")]
    done = python("-c", RUN_EXAMPLES, *names, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_modules_of_public_names_load_what_a_name_needs_when_it_is_used(tmp_path: Path) -> None:
    code = (
        "import sys; from lockstep import data, on_ranks\n"
        "loaded = lambda: [name for name in ('tensorflow', 'numpy') if name in sys.modules]\n"
        "print(dir(on_ranks) == on_ranks.__all__, dir(data) == data.__all__, loaded())\n"
        "on_ranks.communicator, data.numpy_batches; print(loaded())"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.stdout == "True True []\n['numpy']\n", done.stderr
    for module in (lockstep.data, lockstep.on_ranks):
        with pytest.raises(AttributeError, match="no attribute 'tain'"):
            module.tain  # noqa: B018


def test_the_example_of_a_torch_loader_with_a_stand_in_for_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _torch_stand_in.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "lockstep.training.batches.torch_data", raising=False)
    write_table(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    assert example_failures("data.loader") == ""
    monkeypatch.delitem(sys.modules, "lockstep.training.batches.torch_data")


def test_torch_loader_needs_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "lockstep.training.batches.torch_data", raising=False)
    write_table(tmp_path / "data")
    planned = lockstep.data.PlannedBatches.open(str(tmp_path / "data"), global_batch=16)
    with pytest.raises(ConfigError, match="needs PyTorch"):
        lockstep.data.loader(planned)


def refused(**options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        lockstep.train("data", "run", **{"model": "logistic", "global_batch": 16, "epochs": 1, **options})
    assert caught.value.got and caught.value.allowed and caught.value.next_step
    return caught.value


def test_train_refuses_options_and_functions_that_ranks_cannot_take() -> None:
    assert "perhaps `augment`" in refused(augmnt="flip").got
    assert "launcher" not in refused(launcher="barrier").allowed
    with pytest.raises(ConfigError, match="write_logs has no option `lable`") as caught:
        lockstep.write_logs(None, "access.log", "data", lable="page = 1")  # type: ignore[call-arg, arg-type]
    assert "perhaps `label`" in caught.value.got and "lockstep etl_logs --help" in caught.value.next_step

    lock = threading.Lock()

    def with_lock(signature: object, options: object) -> object:
        return lock

    def large(signature: object, options: object) -> object:
        return bytes_of_a_table

    bytes_of_a_table = os.urandom(1 << 20)
    assert "neither a name nor a function" in refused(model=object()).what
    assert "cannot be sent to the ranks" in refused(model=with_lock).what
    assert "lock" in refused(model=with_lock).got and "bytes with all" in refused(model=large).got


# A script as a user writes it, without `if __name__`: ranks get the function and never run the script.
OWN_MODEL = """
import sys
import lockstep

print("this script runs", file=sys.stderr)
UNITS = 3
def build(signature, options):
    import keras

    inputs = {name: keras.Input(spec.shape, name=name) for name, spec in signature.features.items()}
    hidden = keras.layers.Dense(UNITS, name="of_the_script")(keras.layers.Concatenate()(list(inputs.values())))
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    return model

for epochs in (1, 2):  # the second call resumes
    result = lockstep.train(["data"], "run", build, global_batch=16, epochs=epochs, num_ranks=2)
print(result.steps, result.epochs, lockstep.evaluate("run", "data", "test")["samples"])
"""


@pytest.mark.slow
def test_ranks_get_a_function_of_the_script_that_calls_train(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    (tmp_path / "own.py").write_text(OWN_MODEL)
    done = python("own.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "12 2 30"
    logs = "".join(path.read_text() for path in (tmp_path / "run").glob("logs/*/*/*.log"))
    assert logs and "this script runs" not in logs
    assert json.loads((tmp_path / "run/run.json").read_text())["config"]["model"]["model"] == "__main__:build"


def test_any_function_reaches_the_rank_as_text() -> None:
    def scaled(factor: int, signature: int, options: int) -> int:
        return factor * (signature + options)

    for function in (partial(scaled, 2), lambda signature, options: scaled(2, signature, options)):
        name, text = lockstep._name_and_text(function)
        assert name == "__main__:model" and text is not None
        with pytest.raises(ConfigError, match="only its own call can send"):
            models.function_of("__main__:model")
        models.receive(name, text)
        assert models.function_of(name)(3, 4) == 14  # type: ignore[arg-type]
        models._sent.clear()


def test_a_mocked_driver_gets_an_importable_function_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "data")
    (tmp_path / "face_model.py").write_text("def build(signature, options): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    build = importlib.import_module("face_model").build
    seen: list[str] = []

    def train(config: TrainConfig, launch: Launch, **more: Any) -> None:
        seen.append(config.model.model)
        raise InterruptedError

    monkeypatch.setattr("lockstep.training.driver.train.train", train)
    with pytest.raises(InterruptedError):
        lockstep.train(tmp_path / "data", tmp_path / "run", build, global_batch=16, epochs=1)
    assert seen == ["face_model:build"]


def test_the_table_of_jobs_loads_nothing_heavy(tmp_path: Path) -> None:
    done = python("-X", "importtime", "-m", "lockstep", cwd=tmp_path)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    jobs = {path.stem for path in (ROOT / "jobs").glob("[a-z]*.py")}
    table = dict(line.split(maxsplit=1) for line in done.stdout.split("\n\n")[1].splitlines())
    assert done.returncode == 0 and "argparse" in loaded and not loaded & {*HEAVY}
    assert table.keys() == jobs and all(text[0].isupper() and "`python" not in text for text in table.values())


@pytest.mark.slow
def test_a_job_by_either_name_is_one_job(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    for words in (["verify", "data"], ["train", "--no-such-flag"]):
        here = python("-m", "lockstep", *words, cwd=tmp_path)
        there = python("-m", f"lockstep.jobs.{words[0]}", *words[1:], cwd=tmp_path)
        assert (here.returncode, here.stdout, here.stderr) == (there.returncode, there.stdout, there.stderr)
        assert here.stdout or here.stderr.startswith("error: ")


def test_an_unknown_job_is_one_error_of_four_parts(tmp_path: Path) -> None:
    done = python("-m", "lockstep", "trian", cwd=tmp_path)
    assert done.returncode == 2 and "(perhaps `train`)" in done.stderr and done.stderr.startswith("error: ")
    assert all(f"\n  {part}: " in done.stderr for part in ("got", "allowed", "next"))


def test_both_ways_to_describe_read_as_many_records() -> None:
    here = inspect.signature(lockstep.describe).parameters["max_records"].default
    assert here == MAX_DESCRIBED_RECORDS == describe_job().parse(["data"]).max_records
