"""Runs ranks as processes of this host."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.storage.errors import ConfigError, LockstepError
from lockstep.training import devices
from lockstep.training.control.failures import LauncherError
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch.process import SupervisorSpec
from lockstep.training.launch.session import Session, SessionLauncher
from lockstep.training.launch.supervisor import supervise

LOOPBACK = "127.0.0.1"


class LocalSession(Session):
    """A session whose supervisors are threads of this process."""

    def __init__(
        self, num_ranks: int, limits: Limits | None = None, own_devices: tuple[str, ...] | None = None
    ) -> None:
        super().__init__(num_ranks, limits or Limits(), LOOPBACK, LOOPBACK)
        self._own_devices = own_devices
        self._threads: list[threading.Thread] = []

    def _check(self, task: RankTask, ended: Callable[[], BaseException | None]) -> None:
        self._shares = devices.shares_of_host(os.environ, self.num_ranks, self._own_devices)

    def _begin(self, control: tuple[str, int], secret: bytes) -> None:
        hosts = (LOOPBACK,) * self.num_ranks
        for rank, share in enumerate(self._shares):
            spec = SupervisorSpec(rank, hosts, control, secret, self.limits, share)
            thread = threading.Thread(target=self._supervise, args=(spec,), name=f"supervisor-{rank}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _end(self) -> None:
        for thread in self._threads:
            thread.join(self.limits.grace_s + 5.0)

    def _supervise(self, spec: SupervisorSpec) -> None:
        try:
            supervise(spec)
        except LockstepError as error:  # a supervisor that fails ends the launch
            self.fail(error)
        except Exception as error:
            self.fail(LauncherError(f"the supervisor of rank {spec.rank} failed", got=repr(error)))
            raise


def slots_in(path: str) -> int:
    """The number in a slots file. Raises ConfigError if there is none."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the slots file {path} has no number",
            got=str(error),
            allowed="a text file with the number of ranks that may run on this host",
            next_step="Write one, such as 2, and change it while the run trains.",
        ) from None


@dataclass(frozen=True, slots=True)
class OnHost(SessionLauncher):
    """`run_local`, and the sessions that the driver restarts ranks in."""

    devices: tuple[str, ...] | None = None
    """The only GPUs that its ranks get; None: all of this host."""

    def session(self, num_ranks: int, limits: Limits) -> Session:
        """Open a session whose supervisors run several generations."""
        return LocalSession(num_ranks, limits, self.devices)

    def divided(self, runs: int, num_ranks: int) -> Sequence[SessionLauncher]:
        """One for each run, with its share of the GPUs of this host."""
        return [OnHost(share) for share in devices.of_runs(os.environ, runs, num_ranks)]


run_local = OnHost()
