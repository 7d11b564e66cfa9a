"""The style that all of Lockstep's HTML pages share: light and dark, narrow and wide, readable without a network.

Names and values on a page come from untrusted data. The template engines of the pages escape every text; if one passed
unescaped, the policy in `page_head` keeps the browser from running or fetching anything, but a page's own script.
"""

from __future__ import annotations

import base64
import hashlib

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
COLOURS = {
    "ink": ("#1d232b", "#e4e7eb"),
    "paper": ("#ffffff", "#15181c"),
    "dim": ("#59636e", "#9aa4b0"),
    "line": ("#d4d9df", "#3a414a"),
    "card": ("#f6f8fa", "#1d2126"),
    "link": ("#1f5fa8", "#7fb2ee"),
    "light": ("#b9cbe0", "#3f5f82"),
    "dark": ("#1f4e89", "#7fb2ee"),
    "other": ("#c8641b", "#f0984f"),
    "third": ("#2e7d4f", "#66bd8a"),
    "fourth": ("#7a4ea3", "#b48be0"),
    "grey": ("#777777", "#9a9a9a"),
}
"""Each colour of the pages by its name: on light and on dark paper. A page uses it as `var(--NAME)`."""


def _variables(which: int) -> str:
    return "; ".join(f"--{name}: {pair[which]}" for name, pair in COLOURS.items())


STYLE = f"""\
:root {{ color-scheme: light dark; {_variables(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}
* {{ box-sizing: border-box }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 1.5rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper) }}
h1 {{ font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere }}
h2 {{ font-size: 1.15rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere }}
h3 {{ font-size: 1rem; margin: .2rem 0; overflow-wrap: anywhere }}
p, li, code, pre {{ overflow-wrap: anywhere }} pre {{ white-space: pre-wrap }}
a {{ color: var(--link) }} .dim {{ color: var(--dim) }}
.wide {{ overflow-x: auto; max-width: 100% }}
table {{ border-collapse: collapse; margin: .5rem 0 }}
td, th {{ border: 1px solid var(--line); padding: .2rem .6rem; text-align: left; vertical-align: top }}
th {{ background: var(--card); font-weight: 600 }}
td, th {{ font-variant-numeric: tabular-nums; white-space: nowrap }}
.wide tr > th:first-child {{ position: sticky; left: 0; z-index: 1 }} .wide th.long {{ max-width: 50vw }}
.long {{ white-space: normal; overflow-wrap: anywhere; min-width: 9rem }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 23rem), 1fr)); gap: 1rem }}
.card {{ border: 1px solid var(--line); border-radius: 6px; background: var(--card); padding: .5rem .8rem;
  margin: 0; overflow: hidden; min-width: 0 }}
.key {{ display: inline-block; max-width: 100%; overflow-wrap: anywhere; margin-right: .5rem }}
svg {{ max-width: 100%; height: auto }} svg text {{ fill: currentColor }}
fieldset {{ border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0 }}
.scripted {{ display: none }} .js .scripted {{ display: inline }} .off {{ display: none }}
.lit .run {{ opacity: .12 }} .lit .run.this {{ opacity: 1 }}
button {{ font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer }}
fieldset button {{ border: 1px solid var(--line); border-radius: 4px; padding: 0 .5rem; margin-right: .5rem }}
[aria-sort=ascending] button::after {{ content: " \\25B2" }}
[aria-sort=descending] button::after {{ content: " \\25BC" }}
figcaption {{ overflow-wrap: anywhere }}
.sheet {{ display: flex; flex-wrap: wrap; gap: .7rem }} .sheet figure {{ margin: 0; text-align: center }}
.sheet img {{ width: 6rem; height: 6rem; object-fit: contain; image-rendering: pixelated; background: var(--card) }}
.sheet figcaption {{ font-size: .8rem; max-width: 6rem }}
.whole {{ overflow-x: auto }} .whole svg {{ width: 100%; min-width: 40rem; max-width: none }}
"""


def page_head(script: str = "") -> str:
    """The policy and the size of a page; `script` is the one script that the browser may run on it, by its digest."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{digest}'" if script else POLICY
    return f"""\
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
"""


HEAD = page_head()


def page_start(job: str) -> str:
    """The beginning of each page that the job of this name writes, by which it recognises its own pages."""
    meta = f'<meta name="generator" content="lockstep {job}">'
    return f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{meta}\n'
