"""Make a PyTorch importable without CUDA: `python scripts/torch_without_cuda.py SITE_PACKAGES`.

PyTorch's wheel for Linux names 2.4 GB of libraries that a CPU never calls. This links one library in their place, in
which each of their functions returns an error code. CUDA's runtime itself, 3 MB, must be real: PyTorch asks it for the
number of GPUs. Needs a C compiler and readelf; does nothing where PyTorch needs no CUDA.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

STUB = "libno_cuda.so"
RUNTIME = "libcudart.so"
NEEDED = re.compile(r"\(NEEDED\).*\[(lib(?:cu|nccl|nv)[^\]]*)\]")
UNDEFINED = re.compile(r" UND (_*(?:cu|nccl|nv)\w+)(?:@(\S+))?")
FAILS = 999  # CUDA's "unknown error"; not 0 in any of these libraries


def main(site_packages: str) -> None:
    """Write the library and its links next to PyTorch's own."""
    folder = Path(site_packages, "torch", "lib")
    functions: dict[str, set[str]] = defaultdict(set)  # by the version that the linker asks for; "" is none
    libraries: set[str] = set()
    for path in sorted(folder.glob("lib*.so*")):
        if path.is_symlink() or path.name == STUB:
            continue
        command = ["readelf", "--wide", "--dyn-syms", "--dynamic", str(path)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        libraries.update(name for name in NEEDED.findall(found) if not name.startswith(RUNTIME))
        for name, version in UNDEFINED.findall(found):
            if not version.startswith(RUNTIME):
                functions[version].add(name)
    if not libraries:
        return
    with tempfile.TemporaryDirectory() as scratch:
        source, versions = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        names = sorted(set().union(*functions.values()))
        source.write_text("".join(f"int {name}(void) {{ return {FAILS}; }}\n" for name in names))
        versions.write_text(
            "".join(f"{of} {{ global: {'; '.join(sorted(names))}; }};\n" for of, names in functions.items() if of)
        )
        options = ["-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,--version-script={versions}"]
        subprocess.run(["cc", *options, "-o", str(folder / STUB), str(source)], check=True)
    for name in libraries:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(STUB)


if __name__ == "__main__":
    main(sys.argv[1])
