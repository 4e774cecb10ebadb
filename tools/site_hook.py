"""A hook of mkdocs: pages from outside docs/, links that leave it, and docstrings as help() shows them.

A link to a file of the repository becomes one to the site's page of that file, or to the file at `repo_url`; without a
`repo_url` its text remains. tools/check_docs.py finds links that lead nowhere.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "flash_mla"), str(ROOT / "flash_attn_3"), str(ROOT)]  # docstrings are those of this checkout
PAGES = {  # of the site: the file
    "index.md": "README.md",
    "laboratory.md": "benchmarks/lab/README.md",
    "minimal.md": "examples/minimal/README.md",
    "learn.md": "examples/minimal/learn.md",
    "changelog.md": "CHANGELOG.md",
}
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
BADGE = re.compile(r"^\[!\[.*\n", re.MULTILINE)  # those are images of other hosts
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files, config):
    for page, source in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    source = Path(page.file.abs_src_path)

    def link(match):
        is_image, text, place, fragment = match[1], match[2], match[3], match[4] or ""
        if not place or re.match(r"[a-z]+:", place):
            return match[0]
        target = (source.parent / place).resolve()
        name = target.relative_to(ROOT).as_posix()
        in_site = site_path(target, name)
        if in_site is None and is_image:
            in_site = name
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(target)))
        if in_site is not None:
            place = os.path.relpath(in_site, Path(page.file.src_uri).parent)
            return f"{is_image}[{text}]({place}{fragment})"
        if not config.repo_url:
            return text
        kind = "tree" if target.is_dir() else "blob"
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{name}{fragment})"

    parts = FENCE.split(BADGE.sub("", markdown))  # code at odd indices
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))


def site_path(target, name):
    """Where the site has a file of the repository, or None."""
    for page, source in PAGES.items():
        if name == source:
            return page
    return os.path.relpath(name, "docs") if name.startswith("docs/") and target.is_file() else None


class Runtime(griffe.Extension):
    """What exists after the import alone: docstrings that are completed then, names of `__all__` that are made then."""

    def on_function_instance(self, *, func, **kwargs):
        if func.docstring and re.search(r"^ *<\w+>$", func.docstring.value, re.MULTILINE):
            func.docstring.value = inspect.getdoc(griffe.dynamic_import(func.path))

    def on_package(self, *, pkg, **kwargs):
        for module in modules_of(pkg):
            for name in map(str, module.exports or ()):
                member = module.members.get(name)
                if member is None or not (member.is_module or member.docstring):
                    module.set_member(name, made_at_import(module, name))


def made_at_import(module, name):
    imported = getattr(griffe.dynamic_import(module.path), name)
    if inspect.isfunction(imported):
        return griffe.inspect(module.path, filepath=module.filepath).members[name]
    return griffe.Class(name, docstring=griffe.Docstring(inspect.getdoc(imported)))


def modules_of(module):
    yield module
    for member in module.modules.values():
        if not member.is_alias:
            yield from modules_of(member)
