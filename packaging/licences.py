"""Licence texts of everything in a package, each text once."""

import gzip
from pathlib import Path

from components import Component, licence_texts
from inputs import ROOT

COMMON = Path("/usr/share/common-licenses")
KERNEL_OFFER = """\
The program jiffy contains a Linux kernel and its modules, which are licensed under the GNU General
Public License, version 2. Their complete corresponding source is Debian's package {source}
(SHA-256 {digest}) with the patches, the configuration and the build script in the directory kernel/
of Jiffy's source. The patches are in this package's {patches}. The distributor of this package gives
any third party, on request, a complete machine-readable copy of that source. The charge is at most
the cost of the transfer. The offer is valid for three years from the day on which you received this
package.
"""


def kernel_offer(patches: str) -> str:
    digest, source = (ROOT / "kernel/source.sha256").read_text().split()
    return KERNEL_OFFER.format(source=source, digest=digest, patches=patches)


def kernel_patches() -> bytes:
    """Returns the kernel's patches and configuration as one text."""
    paths = [*sorted((ROOT / "kernel/patches").iterdir()), ROOT / "kernel/guest.config", ROOT / "kernel/build"]
    return b"".join(b"==== %s\n%s\n" % (path.name.encode(), path.read_bytes()) for path in paths)


def notice(title: str, components: list[Component], patches: str | None) -> bytes:
    """Returns a text with the licences of Jiffy and of all components.

    `patches` is the path of the file with the kernel's patches, if the package has the kernel.
    """
    texts: dict[str, list[str]] = {}
    jiffy = (ROOT / "LICENSE").read_text()
    texts[jiffy] = ["Jiffy"]
    missing = []
    lines = [title, "=" * len(title), "", "Jiffy is licensed under Apache-2.0.", ""]
    if patches:
        lines += [kernel_offer(patches), ""]
    lines += ["Components", "----------"]
    for component in components:
        label = f"{component.name} {component.version}"
        authors = f" ({', '.join(component.authors)})" if component.authors else ""
        lines.append(f"{label}: {component.licence}{authors}")
        found = licence_texts(component)
        if not found:
            missing.append(component)
        for text in found:
            texts.setdefault(text, []).append(label)
    for component in missing:
        for text in standard_texts(component):
            texts.setdefault(text, []).append(f"{component.name} {component.version}")
    lines += ["", "Texts", "-----"]
    for text, users in texts.items():
        lines += ["", "=" * 80, "Applies to: " + ", ".join(users), "", text]
    return ("\n".join(lines) + "\n").encode()


def standard_texts(component: Component) -> list[str]:
    """Returns the texts of licences that a component refers to but does not contain."""
    found = []
    for identifier, text in STANDARD.items():
        if identifier in component.licence:
            found.append(text())
    if not found:
        label = f"{component.name} {component.version}"
        raise SystemExit(f"package: no licence text is available for {label} ({component.licence})")
    return found


def common_text(name: str) -> str:
    path = COMMON / name
    if path.exists():
        return path.read_text()
    packed = path.with_name(name + ".gz")
    return gzip.decompress(packed.read_bytes()).decode()


STANDARD = {
    "Apache-2.0": lambda: (ROOT / "LICENSE").read_text(),
    "MIT": lambda: MIT,
    "GPL-2.0": lambda: common_text("GPL-2"),
    "CC0-1.0": lambda: common_text("CC0-1.0"),
    "BSD-3-Clause": lambda: common_text("BSD"),
}

MIT = """\
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction,
including without limitation the rights to use, copy, modify, merge, publish, distribute,
sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial
portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES
OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""
