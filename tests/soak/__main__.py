"""Run all parts, one after another, and say which of them failed."""

from __future__ import annotations

import subprocess
import sys

from tests.soak import PARTS

failed = [part for part in PARTS if subprocess.run([sys.executable, "-m", part]).returncode]
print(f"soak: {len(PARTS) - len(failed)} of {len(PARTS)} parts passed" + "".join(f"\nFAILED {name}" for name in failed))
sys.exit(bool(failed))
