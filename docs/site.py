"""A hook of mkdocs: what the pages say for GitHub and for the tests, as the site needs it.

Files that pages link to outside docs/ (examples, models, schemas) become files of the site, and the links follow. The word after a
block's language (`slow`, `skip`, `file=`: how the tests treat it) is dropped. The second heading of one name is `#name-1` on
GitHub, here `#name_1`.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
LINK = re.compile(r"(\]\()([^)#:\s]+)")


def outside(link: str, page: str) -> str | None:
    """The path below the project's root of a file that lies outside docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith(("docs/", "..")) or not (DOCS.parent / path).is_file() else path


def on_files(files: Files, config) -> Files:
    pages = [(page.src_uri, Path(page.abs_src_path).read_text()) for page in files.documentation_pages()]
    linked = {outside(link, page) for page, text in pages for _, link in LINK.findall(text)}
    for path in sorted(path for path in linked if path is not None):
        files.append(File.generated(config, f"project/{path}", content=(DOCS.parent / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    markdown = re.sub(r"^(```\w+) .*$", r"\1", markdown, flags=re.MULTILINE)
    if page.file.src_uri == "project/README.md":
        return markdown.replace("](docs/", "](../")

    def followed(match: re.Match) -> str:
        path = outside(match[2], page.file.src_uri)
        return match[0] if path is None else match[1] + "../" * page.file.src_uri.count("/") + f"project/{path}"

    markdown = LINK.sub(followed, markdown)
    return re.sub(r"(#[a-z]+)-(\d+)\)", r"\1_\2)", markdown) if page.file.src_uri == "api.md" else markdown
