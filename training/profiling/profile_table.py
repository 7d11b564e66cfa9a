"""A profile in words."""

from __future__ import annotations

from training.profiling.profile import Profile
from training.profiling.profile_advice import SLOW_COPY_S
from training.profiling.profile_verdict import PARTS, WORDS
from training.profiling.verdict import CACHED, COLD, SYNTHETIC, Spread

_WHAT = {
    SYNTHETIC: "one batch again and again",
    CACHED: "blocks from memory or cache",
    COLD: "blocks not read before",
}


def table(profile: Profile) -> str:
    """Steps by kind of data, the input alone, shares, the verdict and what to change."""
    measured, setting, verdict = profile.measured, profile.setting, profile.verdict
    ranks = f"{setting.num_ranks} rank{'s' if setting.num_ranks > 1 else ''}"
    head = f"{profile.steps} steps of {setting.global_batch} samples on {ranks}, each kind in"
    lines = [
        f"{head} {profile.rounds} rounds, in turns; medians, quartiles in brackets",
        f"{'data':<11}{'':<29}{'ms a step':<31}{'samples/s':>11}{'waits for data':>17}",
    ]
    kinds = {SYNTHETIC: measured.synthetic, CACHED: measured.cached, COLD: measured.cold}
    for kind, spread in kinds.items():
        rate = f"{setting.global_batch / spread.median:>11.0f}"
        lines.append(f"{kind:<11}{_WHAT[kind]:<29}{_milliseconds(spread):<31}{rate}{measured.waiting[kind]:>17.1%}")
    alone = f"{_milliseconds(measured.cached_alone)} ms cached, {_milliseconds(measured.cold_alone)} ms cold"
    lines.append(f"input alone, a batch of the slowest rank: {alone}; {measured.input_cpu_s * 1e3:.1f} ms of CPU")
    copy = f"a checkpoint ({profile.state_bytes / 1e6:.1f} MB of state) holds a step up for about"
    lines.append(f"{copy} {profile.copy_s * 1e3:.1f} ms{_too_slow(profile.copy_s)}")
    if profile.repeats:
        lines.append("note: the split is smaller than what was read, so the storage may have had cold data in memory")
    if profile.steps < 2 * profile.chunk_steps:
        chunk = f"{profile.chunk_steps} batches are encoded at a time"
        lines.append(f"note: {chunk}; with fewer than {2 * profile.chunk_steps} --steps the input may look too cheap")
    lines.append("a step on cold data:")
    lines += [f"  {verdict.shares[part]:>6.1%}  {WORDS[part]}" for part in PARTS]
    lines.append(f"bound by: {_bound(profile)}")
    if not verdict.steady:
        lines.append(f"note: the rounds are unsteady: quartiles {measured.cold.width:.0%} of the median apart")
    lines += [f"  - {one}" for one in profile.advice]
    return "\n".join(lines)


def _bound(profile: Profile) -> str:
    verdict = profile.verdict
    if verdict.bound_by == "nothing clear":
        return "nothing clear"
    without = "with twice the ranks" if verdict.bound_by == "computing" else "without that"
    return f"{WORDS[verdict.bound_by]}; {without} at most {verdict.gain_at_most:.2f} times as fast"


def _milliseconds(spread: Spread) -> str:
    return f"{spread.median * 1e3:.2f} ({spread.low * 1e3:.2f} to {spread.high * 1e3:.2f})"


def _too_slow(copy_s: float) -> str:
    return ": --checkpoint-every auto chooses how often by that" if copy_s > SLOW_COPY_S else ""
