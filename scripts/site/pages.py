"""Which files of the repository are on the site: those that the README leads to, link by link."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

FIRST = ("README.md", "docs/README.md", "examples/README.md")
FILES_FOR_READERS = ("SKILL.md",)
_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")
_FOLDER = re.compile(r"\]\((?!https?:)([^)#\s]+)/\)")
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def linked(root: Path) -> list[Path]:
    """The paths, relative to the root, of all files that a reader reaches from the first pages; a folder is its README.

    Raises FileNotFoundError for a link that leads nowhere, ValueError for one that leaves the repository.
    """
    found: set[Path] = set()
    waiting = [Path(name) for name in FIRST]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        if (root / path).is_dir():
            waiting += sorted(file.relative_to(root) for file in (root / path).glob("*.md"))
            continue
        if not (root / path).is_file():
            raise FileNotFoundError(f"a page links to {path}, which is not there")
        found.add(path)
        if path.suffix == ".md":
            waiting += [_within(path, target) for target in targets((root / path).read_text(encoding="utf-8"))]
    return sorted(found)


def staged(root: Path) -> dict[str, str | Path]:
    """What each file of the site is: its text, or the file to copy.

    A link to a folder becomes one to its README, or to a list of its pages where it has none.
    """
    sources: dict[str, str | Path] = {}
    for path in linked(root):
        if path.suffix != ".md":
            sources[str(path)] = path
            continue
        text = (root / path).read_text(encoding="utf-8")
        sources[str(path)] = _FOLDER.sub(r"](\1/README.md)", text)
        for target in targets(text):
            folder = _within(path, target)
            if target.endswith("/") and not (root / folder / "README.md").exists():
                sources[f"{folder}/README.md"] = _list(root, folder)
    return sources


def _list(root: Path, folder: Path) -> str:
    """A page that lists the pages of a folder."""
    pages = sorted((root / folder).glob("*.md"))
    titles = [title_and_purpose(page.read_text(encoding="utf-8"))[0] for page in pages]
    lines = [f"* [{title}]({page.name})" for title, page in zip(titles, pages, strict=True)]
    return f"# {folder.name.capitalize()}\n\n" + "\n".join(lines) + "\n"


def targets(text: str) -> list[str]:
    """The files that a page links to, as it writes them."""
    return _LINK.findall(_CODE.sub("", text))


def _within(page: Path, target: str) -> Path:
    parts: list[str] = []
    for part in (PurePosixPath(page.parent) / target).parts:
        if part != "..":
            parts.append(part)
        elif parts:
            parts.pop()
        else:
            raise ValueError(f"{page} links to {target}, outside of the repository")
    return Path(*parts)


def title_and_purpose(text: str) -> tuple[str, str]:
    """A page's heading, and the first paragraph below it on one line."""
    heading = re.search(r"^# (.*)$", text, re.MULTILINE)
    if heading is None:
        raise ValueError("a page has no heading")
    paragraphs = [part for part in text[heading.end() :].split("\n\n") if part.strip()]
    return heading[1], " ".join(paragraphs[0].split()) if paragraphs else ""


def texts_for_assistants(root: Path) -> dict[str, str]:
    """`llms.txt`, a list of the pages with what each is for, and `llms-full.txt`, all of them as one text."""
    found = [path for path in linked(root) if path.parent == Path("docs") or path.parts[0] == "examples"]
    pages = [Path("README.md"), *sorted(found)]
    texts = {page: (root / page).read_text(encoding="utf-8") for page in pages if page.suffix == ".md"}
    lines = []
    for page, text in texts.items():
        title, purpose = title_and_purpose(text)
        lines.append(f"- [{title}]({page}): {purpose[:300]}")
    index = "# Lockstep\n\n> " + title_and_purpose(texts[Path("README.md")])[1] + "\n\n## Pages\n\n" + "\n".join(lines)
    full = "\n\n".join(f"<!-- {page} -->\n\n{text}" for page, text in texts.items())
    return {"llms.txt": index + "\n", "llms-full.txt": full}
