"""Known weaknesses of the packages in requirements.lock: pip-audit asks PyPI's service, in an environment of its own.

Exits with 1 for a weak package, and with NOT_RUN where the service cannot be reached: of a package that it cannot look
up, pip-audit says "skipped" and ends with 0. A version with a known weakness is asked for too, and must be found.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.soak import NOT_RUN

ROOT = Path(__file__).resolve().parents[2]
WEAK = "jinja2==3.1.2"  # CVE-2024-22195
LIMIT_S = 900.0


def audit(python: str, *requirements: str) -> dict[str, Any]:
    """pip-audit's report on files of requirements."""
    files = [word for file in requirements for word in ("-r", file)]
    done = subprocess.run(
        [python, "-m", "pip_audit", "--disable-pip", "--no-deps", "--format", "json", *files],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if not done.stdout.startswith("{"):
        return {"dependencies": [{"name": "all", "skip_reason": (done.stderr.strip() or "no answer").splitlines()[-1]}]}
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def verdict(weak: Mapping[str, Any], report: Mapping[str, Any]) -> tuple[int, list[str]]:
    """(exit code, lines), from the reports on the version that is known to be weak and on the lock."""
    found = [
        f"FAILED {one['name']} {one['version']}: {vuln['id']}, mended in {vuln['fix_versions']}"
        for one in report["dependencies"]
        for vuln in one.get("vulns", ())
    ]
    skipped = [one for one in (*weak["dependencies"], *report["dependencies"]) if "skip_reason" in one]
    known = any(one.get("vulns") for one in weak["dependencies"])
    if skipped or not known:
        reason = skipped[0]["skip_reason"] if skipped else f"it knows no weakness of {WEAK}"
        return (1 if found else NOT_RUN), [
            *found,
            f"NOT AUDITED: {len(skipped)} packages could not be looked up: {reason}",
        ]
    return bool(found), [*found, f"audited: {len(report['dependencies'])} packages, {len(found)} known weaknesses"]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="lockstep-audit-") as folder:
        python = str(Path(folder, "venv", "bin", "python"))
        subprocess.run([sys.executable, "-m", "venv", f"{folder}/venv"], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-r", "requirements-audit.txt"], cwd=ROOT, check=True)
        weak = Path(folder, "weak.txt")
        weak.write_text(f"{WEAK}\n")
        code, lines = verdict(audit(python, str(weak)), audit(python, "requirements.lock"))
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
