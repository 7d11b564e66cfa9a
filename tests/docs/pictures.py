"""Pictures of the pages, of real runs in a real browser: `python -m tests.docs.pictures` writes docs/pictures."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from tests.debian import Unpacked
from tests.docs.steps import ROOT, project_in, run_steps, steps_of

FOLDER = ROOT / "docs" / "pictures"
CHROMIUM = Unpacked(
    "chromium-of-debian",
    packages=("chromium",),
    programs=("chromium",),
    wanted="chromium|lib",
)
LIMIT_S = 120
FIRST = ".demo/first"
TRAIN = f"lockstep train --dataset {FIRST}/dataset --num-ranks 2 --launcher local --global-batch 128 --epochs 10"
COMMANDS = f"""source .venv/bin/activate
lockstep evaluate --run {FIRST}/run --dataset {FIRST}/dataset --baseline rate:page --report
{TRAIN} --validate test --model logistic --run {FIRST}/runs/logistic
{TRAIN} --validate test --model mlp --run {FIRST}/runs/layers
{TRAIN} --validate test --model mlp --learning-rate 0.01 --run {FIRST}/runs/faster
lockstep runs {FIRST}/runs --compare --html {FIRST}/runs.html
lockstep describe {FIRST}/dataset --html {FIRST}/dataset.html
"""


def photograph(page: Path, picture: Path, width: int = 1000, height: int = 800) -> None:
    """Write what a browser shows of a page, in pixels, as PNG. Raises AssertionError for an empty picture."""
    root = CHROMIUM.root()
    assert root is not None, "no chromium"
    command = [
        str(root / "usr" / "lib" / "chromium" / "chromium"), "--headless", "--no-sandbox", "--disable-gpu",
        "--hide-scrollbars", "--run-all-compositor-stages-before-draw",
        f"--window-size={width},{height}", "--virtual-time-budget=4000",
        f"--screenshot={picture}", page.resolve().as_uri(),
    ]  # fmt: skip
    subprocess.run(command, env=CHROMIUM.environment(), capture_output=True, timeout=LIMIT_S, check=True)
    Image.open(picture).convert("RGB").quantize(64).save(picture, optimize=True)
    assert (share := filled(picture)) > 0.02, f"{picture.name}: {share:.1%} of the picture is not background"


def filled(picture: Path) -> float:
    """The share of a picture's pixels that have another colour than the most frequent one."""
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3)  # (pixels, 3) uint8
    counts = np.unique(pixels, axis=0, return_counts=True)[1]
    return float(1 - counts.max() / len(pixels))


def take(folder: Path) -> None:
    """Run the README's first commands and COMMANDS, and write a picture of each page that they make."""
    first = steps_of((ROOT / "README.md").read_text(encoding="utf-8"))[:2]
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary, project_in(Path(temporary)) as project:
        run_steps(first, project)
        subprocess.run(["bash", "-ec", COMMANDS], cwd=project, capture_output=True, timeout=1200, check=True)
        (report,) = (project / FIRST / "run" / "reports").glob("*.html")
        photograph(report, folder / "report.png")
        photograph(project / FIRST / "runs.html", folder / "runs.png")
        photograph(project / FIRST / "dataset.html", folder / "dataset.png")


if __name__ == "__main__":
    CHROMIUM.fetch()
    FOLDER.mkdir(exist_ok=True)
    take(FOLDER)
    sys.exit(0)
