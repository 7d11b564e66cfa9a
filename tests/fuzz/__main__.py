"""Fuzz the targets by atheris, each in a process of its own with a limit to its time and memory.

    make fuzz                       all targets, 120 seconds each
    PYTHONPATH=.fuzz/packages .venv/bin/python -m tests.fuzz tars images --seconds 600

What is learnt stays in .fuzz/corpus/TARGET and is gone on with; what crashes, hangs or takes too much memory is put
into .fuzz/found/TARGET. After the repair such a file belongs into tests/fuzz/corpus/TARGET, which every test run reads.
Exit code 1 where something was found, 2 where nothing could be looked for.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
WORK = HERE.parents[1] / ".fuzz"
ADDRESS_SPACE_BYTES = 8 << 30  # allocators of Arrow and Numba reserve far more than they use
MEMORY_MIB, INPUT_LIMIT_S = 1024, 20
START_LIMIT_S = 300  # for imports and kernels, and for the last input to end
INSTRUMENTED = ["lockstep", "etl", "tests.fuzz"]
# What Numba compiles must stay as it is written.
COMPILED = [
    "lockstep.storage.kernels",
    "lockstep.features.images.kernels",
    "lockstep.features.examples.foreign_kernels",
    "lockstep.features.encode.hash_kernels",
    "lockstep.features.examples",
]


def main() -> int:
    """Run the targets one after another; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="which (default: all)")
    parser.add_argument("--seconds", type=int, default=120, metavar="S", help="for each target (default 120)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return fuzz(args.targets[0], args.seconds)
    from tests.fuzz.targets import TARGETS

    unknown = sorted(set(args.targets) - set(TARGETS))
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    if find_spec("atheris") is None:
        print("atheris is missing: `make fuzz` installs it into .fuzz", file=sys.stderr)
        return 2
    found, before = [], _cpu_seconds()
    for name in args.targets or TARGETS:
        command = [sys.executable, "-m", "tests.fuzz", name, "--child", "--seconds", str(args.seconds)]
        code, out, err = _run(command, args.seconds + START_LIMIT_S)
        told = [line for line in err.splitlines() if line.startswith(("Done", "#"))]
        spent, before = _cpu_seconds() - before, _cpu_seconds()
        word = "found" if code else "OK   "
        print(f"{word} {name}: {told[-1] if told else ''}, {spent:.0f} s of CPU", flush=True)
        if code:
            found.append(name)
            print(out[-2000:], err[-3000:], sep="\n", flush=True)
    return 1 if found else 0


def _run(command: list[str], limit_s: int) -> tuple[int, str, str]:
    """Exit code, output and errors of a process; one that has not ended after `limit_s` is killed: a hang is a find."""
    with subprocess.Popen(
        command, cwd=HERE.parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            return 1, out, f"{err}\nnot done after {limit_s} s"
    return process.returncode, out, err


def _cpu_seconds() -> float:
    """What the processes that this one has awaited took, their starts included."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def fuzz(name: str, seconds: int) -> int:
    """Fuzz one target in this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED, exclude=COMPILED):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    for seed in [b"", *target.seeds()]:
        target.run(seed)  # compiles what is compiled, outside the time limit of an input
    learnt, crashes = WORK / "corpus" / name, WORK / "found" / name
    for folder in (learnt, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (learnt / f"seed-{number}").write_bytes(seed)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = [
        f"-max_total_time={seconds}", f"-max_len={target.max_bytes}", f"-timeout={INPUT_LIMIT_S}",
        f"-rss_limit_mb={MEMORY_MIB}", f"-artifact_prefix={crashes}/", "-print_final_stats=1",
    ]  # fmt: skip
    folders = [str(learnt), *(str(path) for path in [HERE / "corpus" / name] if path.is_dir())]
    atheris.Setup([sys.argv[0], *limits, *folders], target.run)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
