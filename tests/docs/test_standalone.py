"""docs/cluster.md on a standalone master: the lines of its section, in order, in one shell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conf import free_ports
from tests.cluster.jars import java_home
from tests.docs.steps import ROOT, STEP_LIMIT_S, not_seen, project_in

SECTION = (
    (ROOT / "docs" / "cluster.md").read_text("utf-8").partition("## A standalone master\n")[2].partition("\n## ")[0]
)


@pytest.mark.soak
def test_the_lines_of_the_page_run_a_job_and_two_ranks_on_two_workers(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)
    (seen,) = re.findall(r"```text\n(.*?)```", SECTION, re.DOTALL)
    port, page = list(free_ports().values())[:2]
    commands = commands.replace("7077", str(port)).replace(f"--port {port}", f"--port {port} --webui-port {page}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    environment |= {"JAVA_HOME": str(java_home()), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with project_in(tmp_path) as folder:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            printed, errors = shell.communicate(timeout=STEP_LIMIT_S)
        finally:
            if shell.poll() != 0:
                os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, printed[-3000:] + errors[-5000:]
    missing = not_seen(seen.splitlines(), [line.replace(f"{folder}/", "") for line in printed.splitlines()])
    assert not missing, f"not seen: {missing}\n{printed[-4000:]}"
    hosts = [path.name for path in (folder / ".demo" / "work").glob("app-*/*")]
    assert len(hosts) >= 6, hosts  # an executor on each worker for each of the three jobs
