"""The file of --html: a job replaces only pages that it wrote itself."""

from __future__ import annotations

from lockstep.storage.errors import ExistsError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.page_style import page_start
from lockstep.storage.urls import parent


def check_page(url: str, job: str) -> None:
    """Raise NotFoundError if the folder of `url` is missing, ExistsError if `url` exists and is no page of this job."""
    fs, folder = filesystem(url), parent(url)
    if not fs.exists(folder):
        raise NotFoundError(
            f"--html: no such folder {folder}",
            got="nothing there",
            allowed="a file in a folder that exists",
            next_step="Correct the path after --html, or make the folder first.",
        )
    if fs.exists(url) and not _is_page(fs, url, job):
        raise ExistsError(
            f"--html: {url} exists and is not a page of lockstep {job}",
            got="a folder" if fs.stat(url).is_dir else "another file",
            allowed=f"a new name, or a page that lockstep {job} wrote",
            next_step="Choose another name after --html.",
        )


def _is_page(fs: FileSystem, url: str, job: str) -> bool:
    if fs.stat(url).is_dir:
        return False
    start = page_start(job).encode()
    with fs.open_read(url) as file:
        return file.read(len(start)) == start
