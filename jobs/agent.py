"""Learn to act: processes play an environment of Gymnasium, learners correct their delay (IMPALA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from lockstep.jobs._cli import JobParser, check_master, print_result, run_job
from lockstep.jobs._launch import launch_of


def widths(text: str) -> tuple[int, ...]:
    """The type of --widths."""
    return tuple(map(int, text.split(",")))


def parser() -> JobParser:
    """The command line."""
    job = JobParser("agent", __doc__ or "", "agent")
    add = job.add_argument
    add("--env", required=True, metavar="ID", help="CartPole-v1 or another id of Gymnasium; or your module:function")
    add("--run", required=True, metavar="URL", help="the run: a new one, or one to resume")
    add("--learners", type=int, metavar="N", help="ranks that share gradients (default 1)")
    add("--actors", type=int, metavar="N", help="processes that play, for each learner (default 2)")
    add("--steps", type=int, metavar="N", help="steps of environments in all (default 500000)")
    add("--seed", type=int, metavar="N", help="the seed of weights and draws (default 0)")
    add("--envs", type=int, metavar="N", help="environments of an actor, stepped together (default 8)")
    add("--unroll", type=int, metavar="N", help="steps of each environment in a trajectory (default 20)")
    add("--batch", type=int, metavar="N", help="trajectories in a learner's part of an update (default 1)")
    add("--widths", type=widths, metavar="N,N", help="units of each hidden layer (default 64,64)")
    add("--learning-rate", type=float, metavar="R", help="at the start; it falls to 0 at the last step")
    add("--discount", type=float, metavar="G", help="what a reward is worth one step later (default 0.99)")
    add("--entropy", type=float, metavar="W", help="the weight of the policy's entropy (default 0.01)")
    text = "drop a trajectory whose weights are more updates old (default 32)"
    add("--max-lag", type=int, metavar="N", help=text)
    add("--save-every", dest="save_every_s", type=float, metavar="S", help="seconds between checkpoints (default 30)")
    text = "where learners run, with their actors: this host (default) or a Spark barrier stage"
    add("--launcher", choices=["local", "barrier"], default="local", help=text)
    add("--master", metavar="URL", help="Spark master for --launcher barrier (default: spark-submit's)")
    job.add_code_flag()
    job.add_json_flag()
    return job


def main(argv: Sequence[str]) -> int:
    """Play and learn; prints the result. Returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.actors.agent import play
    from lockstep.training.actors.config import AgentConfig

    check_master(args)
    known = {field.name for field in fields(AgentConfig)}
    config = AgentConfig(**{name: one for name, one in vars(args).items() if name in known and one is not None})
    with launch_of(args.launcher, "agent", args.master, args.code) as launch:
        found = play(config, launch, report=(lambda line: None) if args.json else print)
    print_result(found.words(), found.to_json(), args.json)
    return 0


if __name__ == "__main__":
    run_job(main)
