"""The driver of a run: claim, launch, commit, restart."""
