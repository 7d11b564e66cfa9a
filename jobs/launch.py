"""Run your own training script on N ranks; each line of its output starts with the rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from lockstep.jobs._cli import JobParser, check_master, names, run_job
from lockstep.jobs._split_script import split_script
from lockstep.spark.session import hadoop_settings_of, spark_session
from lockstep.training.comm.options import Algorithm, Backend


def parser() -> JobParser:
    """The command line up to the script."""
    job = JobParser("launch", __doc__ or "", "launch")
    job.usage = f"{job.prog} --num-ranks N [flags] script.py [what follows goes to the script]"
    add = job.add_argument
    add("--num-ranks", type=int, required=True, metavar="N", help="processes that run the script")
    add("--launcher", choices=["barrier", "local"], default="barrier", help="Spark barrier stage (default) | this host")
    add("--master", metavar="URL", help="Spark master, such as local[2] (default: spark-submit's)")
    add("--files", type=names, default=(), metavar="A,B", help="files and modules for the ranks, in $LOCKSTEP_FILES")
    add("--output", choices=["all", "leader", "none"], default="all", help="whose lines to print (default all)")
    add("--logs", metavar="URL", help="folder for the complete output of each rank")
    add(
        "--start-limit",
        dest="start_limit_s",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds for all ranks to start (300)",
    )
    add(
        "--stall-limit",
        dest="stall_limit_s",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds that a call waits for other ranks (600)",
    )
    add("--tls", choices=["on", "off"], default="off", help="encrypt between hosts (default off; docs/security.md)")
    add("--backend", choices=get_args(Backend), default="auto", help="what carries all_reduce (nccl: docs/gpu.md)")
    add("--algorithm", choices=get_args(Algorithm), default="auto", help="how all_reduce sums (docs/performance.md)")
    add("--trust-network", metavar="IFACE", help="interface that may carry gRPC and NCCL, which are unauthenticated")
    add("--max-restarts", type=int, default=0, metavar="N", help="restarts of all ranks after failures (default 0)")
    return job


def main(argv: Sequence[str]) -> int:
    """Run the job; returns the exit code."""
    job = parser()
    flags, script, arguments = split_script(job, argv)
    args = job.parse(flags)
    from lockstep.training.launch.barrier import OnSpark
    from lockstep.training.launch.local import run_local
    from lockstep.training.launch.script_driver import ScriptConfig, launch_script, local_files

    check_master(args)
    values = {k: v for k, v in vars(args).items() if k not in ("config", "debug", "master")}
    values["files"] = tuple(filter(None, args.files))
    config = ScriptConfig(script=script, arguments=arguments, **values)
    if config.launcher == "local":
        with local_files(config.files):
            launch_script(config, run_local)
        return 0
    with spark_session(f"lockstep launch {Path(script).name}", args.master, input_bytes=0) as spark:
        for path in config.files:
            spark.sparkContext.addFile(path)
        launch_script(config, OnSpark(spark), hadoop_settings_of(spark))
    return 0


if __name__ == "__main__":
    run_job(main)
