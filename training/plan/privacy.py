"""The differential privacy of a federated run: epsilon for a delta, by the accountant of dp-accounting."""

from __future__ import annotations

from typing import Any

from lockstep.features.schema.encodings import fitted_part, is_declared
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig
from lockstep.training.ways import Federated


def check_accountant(config: TrainConfig) -> None:
    """Raise ConfigError if the run will need dp-accounting and it is not installed."""
    if not isinstance(config.way, Federated) or not config.way.noise_multiplier:
        return
    try:
        import dp_accounting  # noqa: F401 - whether it is there
    except ImportError as error:
        raise ConfigError(
            "epsilon needs the package dp-accounting",
            got=f"--noise-multiplier {config.way.noise_multiplier}, and {error}",
            allowed="dp-accounting where the driver runs",
            next_step="pip install -r requirements-privacy.txt, or leave out --noise-multiplier.",
        ) from None


def uncovered(config: TrainConfig, schema: Schema) -> list[str]:
    """What of a run's model was made from clients' rows without noise, in words: epsilon does not cover it."""
    found = []
    for field in schema.fitted_fields:
        part = fitted_part(field.encoding)
        assert part is not None
        if not is_declared(part):
            what = "the vocabulary" if part["kind"] == "vocabulary" else "mean and deviation"
            found.append(f"{what} of `{field.name}`, fitted on all rows")
    for field in schema:
        if field.is_baked and (field.encoding or {}).get("fitted", {}).get("splits"):
            found.append(f"what --bake has stored of `{field.name}`, fitted on all rows")
    if config.validation.early_stop is not None:
        found.append(f"the end that --early-stop {config.validation.early_stop} chose by metrics")
    if config.checkpoints.keep_best is not None:
        found.append(f"the checkpoint that --keep-best {config.checkpoints.keep_best} chose by metrics")
    return found


def privacy_of(config: TrainConfig, rounds: int, schema: Schema) -> dict[str, Any] | None:
    """Return {epsilon, delta, unit, noise_multiplier, client_fraction, rounds, not_covered} of a run with noise; None
    without.

    Each round draws each client by itself and adds Gaussian noise to a sum in which a client changes at most
    `update_clip`: `rounds` Poisson-sampled Gaussian events, for neighbours that differ by one whole client. A repeated
    round repeats its noise, and reveals nothing more.
    """
    way = config.way
    if not isinstance(way, Federated) or not way.noise_multiplier or way.privacy_delta is None:
        return None
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    event = PoissonSampledDpEvent(way.client_fraction, GaussianDpEvent(way.noise_multiplier))
    accountant = PLDAccountant().compose(SelfComposedDpEvent(event, rounds))
    return {
        "epsilon": float(accountant.get_epsilon(way.privacy_delta)),
        "delta": way.privacy_delta,
        "unit": "client",
        "noise_multiplier": way.noise_multiplier,
        "client_fraction": way.client_fraction,
        "rounds": rounds,
        "not_covered": uncovered(config, schema),
    }
