"""The built packages of the SDKs: types, generated files, installation."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
NODE_MODULES = Path(os.environ["JIFFY_NODE_PACKAGES"]) / "node_modules"
PACKAGES = Path(os.environ["JIFFY_SDK_PACKAGES"])

PYTHON_PROGRAM = """
import e2b, jiffy
from jiffy import AsyncSandbox, Function, Host, Sandbox, Snapshot, Template
assert issubclass(Sandbox, e2b.Sandbox) and issubclass(AsyncSandbox, e2b.AsyncSandbox)
with Sandbox.create() as sandbox:
    print(sandbox.commands.run("echo installed").stdout, end="")
"""
NODE_PROGRAM = """
import * as e2b from 'e2b'
import { Sandbox } from '@jiffy/sandbox'
const sandbox = await Sandbox.create()
if (!(sandbox instanceof e2b.Sandbox)) throw new Error('another class')
console.log((await sandbox.commands.run('echo installed')).stdout.trim())
await sandbox.kill()
process.exit(0)
"""
# A program whose types are checked in strict mode.
TYPED_PYTHON = """
import asyncio
from jiffy import AsyncSandbox, Outcome, Sandbox

def length(fork: Sandbox) -> int:
    return len(fork.files.read("/etc/hostname"))

def blocking() -> str | None:
    with Sandbox.create("base", name="typed", memory_mb=512) as sandbox:
        outcome: Outcome[Sandbox] = sandbox.try_each([length, length], keep=lambda all_: all_[0])
        snapshot = outcome.sandbox.snapshot(ack="captured")
        with sandbox.checkpoint() as point:
            print(point.stopped_ms, sandbox.rollback(snapshot).diff()[0].kind)
        return sandbox.boot_mode

async def main() -> None:
    async with await AsyncSandbox.create() as sandbox:
        async with sandbox.checkpoint():
            print((await sandbox.stats()).mem_used)

asyncio.run(main())
"""
TYPED_NODE = """
import { Sandbox, Template, errors, isApiError, type Outcome } from '@jiffy/sandbox'
const sandbox: Sandbox = await Sandbox.create('base', { name: 'typed', memoryMB: 512 })
const outcome: Outcome<Sandbox, number> = await sandbox.tryEach(
  [async (fork) => (await fork.files.read('/etc/hostname')).length],
  { keep: (all) => all[0] }
)
const text: string = await sandbox.checkpoint(async (point) => point.snapshotId)
try {
  await sandbox.rollback(text)
} catch (error) {
  if (error instanceof errors.SnapshotNotFoundError || isApiError(error)) console.log(error.requestId)
}
console.log(outcome.result?.toFixed(), Template().fromTemplate('base'))
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel():
    (wheel,) = PACKAGES.glob("jiffy_sandbox-*-py3-none-any.whl")
    return wheel


@pytest.fixture(scope="module")
def tarball():
    (tarball,) = PACKAGES.glob("jiffy-sandbox-*.tgz")
    return tarball


def test_the_generated_error_classes_are_current():
    run(sys.executable, ROOT / "sdk" / "generate", "--check")


def test_the_generated_references_are_current():
    run(sys.executable, ROOT / "sdk" / "reference", "--check")


def test_the_packages_have_their_licence_and_types(wheel, tarball):
    names = run(sys.executable, "-m", "zipfile", "-l", wheel)
    assert all(name in names for name in ("jiffy/py.typed", "licenses/LICENSE", "jiffy/sandbox.py"))
    names = run("tar", "tzf", tarball).split()
    assert {"package/LICENSE", "package/dist/index.js", "package/dist/index.d.ts", "package/README.md"} <= set(names)
    assert not [name for name in names if "node_modules" in name]


# Two type checkers, of which each takes up to a minute on a busy host.
@pytest.mark.timeout(240)
def test_the_python_sdk_passes_strict_type_checks(tmp_path):
    (tmp_path / "typed.py").write_text(TYPED_PYTHON)
    builds = shutil.ignore_patterns("*.egg-info", "build")
    sources = shutil.copytree(ROOT / "sdk" / "python", tmp_path / "python", ignore=builds) / "src"
    mypy = (sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache")
    run(*mypy, sources, tmp_path / "typed.py", env=os.environ | {"MYPYPATH": str(sources)})
    configuration = {"include": ["typed.py", "python/src"], "extraPaths": ["python/src"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(configuration))
    pyright = ("node", NODE_MODULES / "pyright" / "index.js", "--warnings", "--pythonpath", sys.executable)
    assert "0 errors, 0 warnings" in run(*pyright, "-p", tmp_path)


def test_the_typescript_sdk_passes_strict_type_checks(tmp_path):
    (tmp_path / "typed.mts").write_text(TYPED_NODE)
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    options = ("--strict", "--noEmit", "--skipLibCheck", "--module", "NodeNext", "--target", "ES2022")
    libraries = ("--lib", "ES2022,ESNext.Disposable,DOM", "--types", "node")
    run(NODE_MODULES / ".bin" / "tsc", *options, *libraries, "typed.mts", cwd=tmp_path)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Interpreter of a fresh environment with the wheel and the newest `e2b` that it accepts."""
    directory = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", directory)
    python = directory / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel, env=plain_variables())
    return python


def plain_variables():
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@pytest.mark.timeout(120)
def test_the_wheel_installs_in_a_fresh_environment(installed, tmp_path):
    assert run(installed, "-c", PYTHON_PROGRAM, cwd=tmp_path, env=plain_variables()) == "installed\n"


# The scenarios run again only if the registry has a newer version than the pinned one.
@pytest.mark.timeout(600)
def test_the_scenarios_pass_with_the_newest_e2b(installed):
    newest = run(installed, "-c", "import importlib.metadata as m; print(m.version('e2b'))").strip()
    if newest == importlib.metadata.version("e2b"):
        return
    newer = run(installed, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    scenarios = ("-m", "pytest", "-q", "-c", "pytest.ini", "--rootdir", ".")
    options = {"cwd": ROOT / "tests" / "sdk" / "jiffy" / "python", "env": os.environ | {"PYTHONPATH": newer}}
    done = subprocess.run((sys.executable, *scenarios), capture_output=True, text=True, timeout=580, **options)
    assert done.returncode == 0, f"e2b {newest}: {done.stdout[-20000:]}{done.stderr}"


@pytest.mark.timeout(120)
def test_the_npm_package_installs_in_a_fresh_environment(tarball, tmp_path):
    (tmp_path / "package.json").write_text('{"private": true, "type": "module"}')
    run("npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", tarball, "e2b", cwd=tmp_path)
    (tmp_path / "program.mjs").write_text(NODE_PROGRAM)
    assert run("node", "program.mjs", cwd=tmp_path) == "installed\n"
