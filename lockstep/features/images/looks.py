"""Operations that change what pixels look like where they are: colour, and a part cut out."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.features.images.aligned import aligned_empty
from lockstep.features.images.augment import Draws
from lockstep.features.images.moves import ONE
from lockstep.features.images.operation import Images, Operation, need


@dataclass(frozen=True, slots=True)
class Colour(Operation):
    """Brightness, contrast and saturation, in this order, each by a factor of its own from 1 - setting to 1 + setting.

    Brightness scales each value, contrast its distance from the image's mean luma, saturation its distance from the
    pixel's luma (ITU-R 601); each is rounded and cut to 0..255. Saturation needs 3 channels.
    """

    brightness: float
    contrast: float = 0.0
    saturation: float = 0.0

    def __post_init__(self) -> None:
        settings = (self.brightness, self.contrast, self.saturation)
        need(self, all(0 <= setting <= 1 for setting in settings), "settings from 0 to 1")

    def check(self, shape: tuple[int, int, int]) -> None:
        need(self, shape[2] in (1, 3), f"images of 1 or 3 channels; these have {shape[2]}")
        need(self, not self.saturation or shape[2] == 3, "no saturation: images of 1 channel have none")

    def apply(self, images: Images, draws: Draws) -> Images:
        from lockstep.features.images.look_kernels import colour

        settings = (self.brightness, self.contrast, self.saturation)
        most = [round(setting * ONE) for setting in settings]
        factors = [draws.between(ONE - width, ONE + width, number) for number, width in enumerate(most)]
        out = aligned_empty(images.shape)
        colour(images, *factors, out)
        return out


@dataclass(frozen=True, slots=True)
class Cutout(Operation):
    """A square of `side` pixels, its middle anywhere in the image with equal chance, becomes `fill` (T. DeVries and
    G. Taylor, "Improved regularization of convolutional neural networks with cutout", 2017); what stands over is lost.
    """

    side: int
    fill: int = 0

    def __post_init__(self) -> None:
        need(self, 0 <= self.side <= 4096, "a side from 0 to 4096 pixels")
        need(self, 0 <= self.fill <= 255, "a fill from 0 to 255")

    def apply(self, images: Images, draws: Draws) -> Images:
        from lockstep.features.images.look_kernels import cut

        height, width = images.shape[1:3]
        out = aligned_empty(images.shape)
        out[:] = images
        half = self.side // 2
        cut(out, draws.below(height, 0) - half, draws.below(width, 1) - half, self.side, self.fill)
        return out
