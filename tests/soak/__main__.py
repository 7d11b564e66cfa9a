"""Run all parts, one after another, and say which of them failed or could not run."""

from __future__ import annotations

import subprocess
import sys

from tests.soak import NOT_RUN, PARTS

codes = {part: subprocess.run([sys.executable, "-m", part]).returncode for part in PARTS}
print(f"soak: {sum(not code for code in codes.values())} of {len(PARTS)} parts passed")
for part, code in codes.items():
    if code:
        print(f"{'NOT RUN' if code == NOT_RUN else 'FAILED'} {part}")
sys.exit(any(code not in (0, NOT_RUN) for code in codes.values()))
