"""Whether a run's model can be imported, asked before anything is started."""

from __future__ import annotations

from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.models import SENT, check_name
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.run_json import read_run


def check_importable(run: str, *, here: bool) -> None:
    """Raise ConfigError if the module of the run's `module:function` cannot be found; imports nothing.

    `here`: what uses the model has this process' import path. A path that is no run, such as an exported model, passes.
    """
    fs, paths = filesystem(run), RunPaths(run)
    if not fs.exists(paths.run_json):
        return
    config = TrainConfig.from_json(read_run(fs, paths)["config"])
    if not config.model.model.startswith(f"{SENT}:"):
        check_name(config.model.model, config.model.extra, here=here)
