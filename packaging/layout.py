"""Layout of an installation below its prefix."""

from files import PROGRAM_MODE, Entry, gzipped
from inputs import GVISOR, HOST_PROGRAMS, ROOT, Inputs
from licences import kernel_patches

SHELLS = {
    "bash": "share/bash-completion/completions/jiffy",
    "zsh": "share/zsh/site-functions/_jiffy",
    "fish": "share/fish/vendor_completions.d/jiffy.fish",
}


def programs(inputs: Inputs, gvisor: bool) -> list[Entry]:
    entries = [Entry("bin/jiffy", inputs.programs["jiffy"], PROGRAM_MODE)]
    for name in HOST_PROGRAMS:
        entries.append(Entry(f"lib/jiffy/{name}", inputs.programs[name], PROGRAM_MODE))
    if gvisor and GVISOR in inputs.programs:
        entries.append(gvisor_program(inputs))
    return entries


def gvisor_program(inputs: Inputs) -> Entry:
    return Entry(f"lib/jiffy/{GVISOR}", inputs.programs[GVISOR], PROGRAM_MODE)


def package_files(inputs: Inputs, kind: str) -> list[Entry]:
    """Returns the kind of the package, the checksums of template files, and the image of the agent,
    with which hosts without mkfs.erofs can use gVisor."""
    return [
        Entry("lib/jiffy/package", f"{kind}\n".encode()),
        Entry("lib/jiffy/templates.sha256", inputs.template_sums()),
        inputs.agent_image().below("lib/jiffy"),
    ]


def references(inputs: Inputs, packed: bool = False) -> list[Entry]:
    """Returns shell completions and manual pages."""
    entries = [Entry(name, inputs.output_of("completions", shell)) for shell, name in SHELLS.items()]
    for page in inputs.man_pages():
        if packed:
            page = Entry(f"{page.name}.gz", gzipped(page.content()))
        entries.append(page.below("share/man/man1"))
    return entries


def unit(prefix: str) -> Entry:
    text = (ROOT / "packaging/jiffy.service").read_text().replace("@PREFIX@", prefix)
    return Entry("lib/systemd/system/jiffy.service", text.encode())


def apparmor_profile(prefix: str) -> Entry:
    text = (ROOT / "packaging/apparmor").read_text().replace("@PREFIX@", prefix)
    return Entry("share/jiffy/apparmor", text.encode())


def notices(inputs: Inputs, gvisor: bool) -> list[Entry]:
    """Returns the licences of all content, and the kernel's patches, which the source offer refers to."""
    entries = [
        Entry("licences.txt", inputs.licences["host"]),
        Entry("kernel-patches.gz", gzipped(kernel_patches())),
    ]
    if gvisor and "gvisor" in inputs.licences:
        entries.append(Entry("licences-gvisor.txt", inputs.licences["gvisor"]))
    return [entry.below("share/doc/jiffy") for entry in entries]


def template_files(inputs: Inputs) -> list[Entry]:
    return [Entry(f"share/jiffy/templates/{n}", p) for n, p in sorted(inputs.templates.items())]


def installation(inputs: Inputs, prefix: str) -> list[Entry]:
    """Returns the files of `make install`. The results of `package_files` (for example the kind of
    the package) and of `notices` are only in packages."""
    return [
        *programs(inputs, gvisor=True),
        *references(inputs),
        unit(prefix),
        apparmor_profile(prefix),
    ]
