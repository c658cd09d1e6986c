"""Software bills of materials (CycloneDX 1.5, JSON)."""

import json
import time
import uuid

from components import UNNAMED_LICENCE, Component, debian_packages
from files import sha256_of, write_file
from inputs import Inputs

# UUID namespace of serial numbers, which depend only on the content.
NAMESPACE = uuid.UUID("6c1d5a3e-5d0f-5b7a-9a55-0f5b1f0e7a39")


def entry(component: Component) -> dict:
    found = {
        "type": "library",
        "bom-ref": component.purl,
        "name": component.name,
        "version": component.version,
        "purl": component.purl,
    }
    if component.licence != UNNAMED_LICENCE:
        found["licenses"] = [{"expression": component.licence}]
    return found


def document(inputs: Inputs, name: str, components: list[Component], digest: str | None = None) -> bytes:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(inputs.epoch))
    about = {"type": "application", "bom-ref": name, "name": name, "version": inputs.version}
    if digest:
        about["hashes"] = [{"alg": "SHA-256", "content": digest}]
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"timestamp": moment, "component": about},
        "components": [entry(component) for component in components],
        "dependencies": [{"ref": name, "dependsOn": sorted(c.purl for c in components)}],
    }
    text = json.dumps(content, sort_keys=True)
    content["serialNumber"] = f"urn:uuid:{uuid.uuid5(NAMESPACE, text)}"
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def build(inputs: Inputs, components: dict[str, list[Component]]) -> None:
    """Writes FILE.cdx.json for each package file with third-party code."""
    for name, content in sorted(inputs.contents.items()):
        path = inputs.out / f"{name}.cdx.json"
        found = components[content] + debian_packages(inputs.debian_status.get(name, b""))
        text = document(inputs, name, found, sha256_of(inputs.out / name))
        write_file(path, text)
