"""`hvd.global_process_set`: the set of all ranks, the only one there is."""

from __future__ import annotations

from training.horovod.place import rank, size


class AllRanks:
    """What Horovod's `process_set` arguments may name."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """The ranks in it."""
        return list(range(size()))

    def included(self) -> bool:
        """Whether this rank is in it."""
        return True

    def size(self) -> int:
        """The number of ranks in it."""
        return size()

    def rank(self) -> int:
        """This rank's number in it."""
        return rank()


global_process_set = AllRanks()
