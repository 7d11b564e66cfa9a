"""The differential privacy of a federated run: epsilon for a delta, by the accountant of dp-accounting."""

from __future__ import annotations

from typing import Any

from lockstep.storage.errors import ConfigError
from training.config import TrainConfig


def check_accountant(config: TrainConfig) -> None:
    """Raise ConfigError if the run will need dp-accounting and it is not installed."""
    if not config.noise_multiplier:
        return
    try:
        import dp_accounting  # noqa: F401 - whether it is there
    except ImportError as error:
        raise ConfigError(
            "epsilon needs the package dp-accounting",
            got=f"--noise-multiplier {config.noise_multiplier}, and {error}",
            allowed="dp-accounting where the driver runs",
            next_step="pip install -r requirements-privacy.txt, or leave out --noise-multiplier.",
        ) from None


def privacy_of(config: TrainConfig, rounds: int) -> dict[str, Any] | None:
    """{epsilon, delta, unit, noise_multiplier, client_fraction, rounds} of a run with noise; None without noise.

    Each round draws each client by itself and adds Gaussian noise to a sum in which a client changes at most
    `update_clip`: `rounds` Poisson-sampled Gaussian events, for neighbours that differ by one whole client. A repeated
    round repeats its noise, and reveals nothing more.
    """
    if not config.noise_multiplier or config.privacy_delta is None:
        return None
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    event = PoissonSampledDpEvent(config.client_fraction, GaussianDpEvent(config.noise_multiplier))
    accountant = PLDAccountant().compose(SelfComposedDpEvent(event, rounds))
    return {
        "epsilon": float(accountant.get_epsilon(config.privacy_delta)),
        "delta": config.privacy_delta,
        "unit": "client",
        "noise_multiplier": config.noise_multiplier,
        "client_fraction": config.client_fraction,
        "rounds": rounds,
    }
