"""Validators and generators accept the OpenAPI document of the daemon without a warning."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

HERE = Path(__file__).parent
PROGRAMS = Path(sys.executable).parent
NODE_PROGRAMS = Path(os.environ["JIFFY_NODE_PACKAGES"]) / "node_modules" / ".bin"
# Findings in `.redocly.lint-ignore.yaml`.
ACCEPTED_FINDINGS = 5
METHODS = {"get", "put", "post", "delete", "patch"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory with the document and the configuration of Redocly."""
    directory = tmp_path_factory.mktemp("openapi")
    document = httpx.get(os.environ["E2B_API_URL"] + "/openapi.json", trust_env=False).json()
    (directory / "openapi.json").write_text(json.dumps(document, indent=1))
    for name in ("redocly.yaml", ".redocly.lint-ignore.yaml"):
        shutil.copy(HERE / name, directory)
    return directory


@pytest.fixture(scope="module")
def document(directory):
    return json.loads((directory / "openapi.json").read_text())


def run(directory, *command):
    environment = os.environ | {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "REDOCLY_TELEMETRY": "off", "CI": "true"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_without_warning(directory, *command):
    done = run(directory, *command)
    output = done.stdout + done.stderr
    assert "warning" not in output.lower(), output


def operations(document):
    return [call for path in document["paths"].values() for method, call in path.items() if method in METHODS]


def test_the_validator_accepts_the_document(directory):
    run_without_warning(directory, PROGRAMS / "openapi-spec-validator", "openapi.json")


def test_redocly_accepts_the_document_and_its_examples(directory):
    # Warnings of the program itself, for example about Node.js, are on standard error.
    done = run(directory, NODE_PROGRAMS / "redocly", "lint", "openapi.json", "--format", "json")
    assert json.loads(done.stdout)["totals"] == {"errors": 0, "warnings": 0, "ignored": ACCEPTED_FINDINGS}


def test_openapi_typescript_generates_types_that_compile(directory, document):
    run_without_warning(directory, NODE_PROGRAMS / "openapi-typescript", "openapi.json", "--output", "api.ts")
    text = (directory / "api.ts").read_text()
    for call in operations(document):
        assert f"    {call['operationId']}: {{" in text, call["operationId"]
    run(directory, NODE_PROGRAMS / "tsc", "--strict", "--noEmit", "--skipLibCheck", "api.ts")


def test_openapi_python_client_generates_every_operation_and_schema(directory, document):
    options = ("--path", "openapi.json", "--output-path", "client", "--meta", "none")
    run_without_warning(directory, PROGRAMS / "openapi-python-client", "generate", *options)
    calls = [file for file in (directory / "client" / "api").glob("*/*.py") if file.name != "__init__.py"]
    assert len(calls) == len(operations(document))
    models = (directory / "client" / "models" / "__init__.py").read_text()
    names = {"".join(part.lower() for part in name) for name in document["components"]["schemas"]}
    missing = [name for name in sorted(names) if f'"{name}"' not in models.lower()]
    assert not missing
