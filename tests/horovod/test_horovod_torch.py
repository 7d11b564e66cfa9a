"""lockstep.horovod.torch on two real ranks of PyTorch, in .venv-torch, and in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
TORCH = ROOT / ".venv-torch" / "bin" / "python"


def run_torch(*arguments: str, limit_s: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the Python that has PyTorch, one thread a process."""
    assert TORCH.exists(), "run `make torch-venv` first; `make test` does"
    return subprocess.run(
        [str(TORCH), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def launch_torch(script: str | Path, *arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run an example, or a script of tests/scripts, on two ranks."""
    launch = ["-m", "lockstep.jobs.launch", "--num-ranks", "2", "--launcher", "local", *flags]
    return run_torch(*launch, str(SCRIPTS / script), *arguments)


def test_every_call_and_a_script_whose_ranks_differ() -> None:
    done = launch_torch("torch_calls.py")
    lines = done.stdout.splitlines()
    assert "[rank 0] every call is right" in lines and "[rank 1] every call is right" in lines, (
        done.stdout + done.stderr
    )
    assert done.returncode == 1
    assert "ranks 0 and 1 make different calls" in done.stderr
    assert "rank 0: allreduce odd of float32[3]" in done.stderr and "rank 1: broadcast even" in done.stderr


@pytest.mark.parametrize(
    ("then", "call"),
    [
        ("mean", "rank 1: allreduce loss of float32[1] by Average, factors 1 and 1 (call 4)"),
        ("end", "rank 1: none: its script has ended, or called hvd.shutdown()"),
    ],
)
def test_a_rank_with_fewer_batches_ends_all_with_both_calls_named(then: str, call: str) -> None:
    done = launch_torch("torch_uneven.py", then, flags=("--stall-limit", "250"))
    assert done.returncode == 1
    assert "ranks 0 and 1 make different calls" in done.stderr
    assert f"got: rank 0: the gradients of DistributedOptimizer 1 (call 4); {call}" in done.stderr
    assert "Rank 1 may have fewer batches: give each rank as many, by dataset.take(n)" in done.stderr
    assert "waited 250 s" not in done.stderr


def test_the_survivor_of_a_killed_rank_says_so_in_a_line() -> None:
    done = launch_torch("torch_uneven.py", "killed")
    assert done.returncode == 1
    assert "failed after 3 calls to other ranks" in done.stderr and "its process was killed by SIGKILL" in done.stderr
    lost = [line for line in (done.stdout + done.stderr).splitlines() if "lost rank 1 during" in line]
    assert len(lost) == 1 and lost[0].startswith("[rank 0] CommunicationError: rank 0: lost rank 1 during"), lost
    assert "Traceback" not in done.stdout + done.stderr


ALONE = """
import pytest, torch
import lockstep.horovod.torch as hvd
from lockstep.storage.errors import ConfigError

with pytest.raises(ConfigError, match="initialised rank"):
    hvd.allreduce(torch.ones(2))
hvd.init()
assert (hvd.rank(), hvd.size()) == (0, 1) and hvd.allreduce(torch.ones(2), op=hvd.Max).tolist() == [1, 1]
assert hvd.broadcast_object({"a": torch.ones(1)})["a"].item() == 1 and not hvd.nccl_built()
for name in hvd.ABSENT:
    with pytest.raises(ConfigError, match=f"has no `{name}`"):
        getattr(hvd, name)
with pytest.raises(AttributeError, match="did you mean 'allreduce'"):
    hvd.allreduced
linear = torch.nn.Linear(2, 2)
named = list(linear.named_parameters())
def distributed(named=None, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(linear.parameters(), 0.1), named, **options)
for words, call in {
    "op=Adasum": lambda: distributed(op=hvd.Adasum),
    "op=Max": lambda: distributed(op=hvd.Max),
    "gradient_predivide_factor": lambda: distributed(op=hvd.Sum, gradient_predivide_factor=2.0),
    "backward_passes_per_step": lambda: distributed(backward_passes_per_step=0),
    "compression": lambda: distributed(compression=int),
    "1 parameters of the optimizer less": lambda: distributed(named[:1]),
    "with the name weight": lambda: distributed([*named, named[0]]),
    "process_set": lambda: distributed(process_set=object()),
    "no tensor": lambda: hvd.broadcast_parameters({"lr": 0.1}, 0),
    "dense PyTorch tensor": lambda: hvd.allreduce_([1.0]),
    "cannot be sent": lambda: hvd.broadcast_object(object()),
}.items():
    with pytest.raises(ConfigError, match=words):
        call()
optimizer = distributed(named)
optimizer.zero_grad()
linear(torch.ones(1, 2)).sum().backward()
before = linear.bias.detach().clone()
optimizer.step()
assert torch.allclose(before - linear.bias, torch.full((2,), 0.1))
hvd.shutdown()
"""


def test_one_rank_and_what_is_refused() -> None:
    done = run_torch("-c", ALONE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_pytorch_it_says_so() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport lockstep.horovod.torch"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "lockstep.horovod.torch needs PyTorch" in done.stderr
