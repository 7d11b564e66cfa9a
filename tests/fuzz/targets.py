"""All fuzz targets by name."""

from __future__ import annotations

from tests.fuzz import document_targets, image_targets, log_targets, record_targets
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (log_targets, record_targets, document_targets, image_targets)
    for target in module.TARGETS
}
