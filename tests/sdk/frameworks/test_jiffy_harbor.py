"""`jiffy-harbor`: tasks of Terminal-Bench's harness in sandboxes that start from one snapshot per task."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import jiffy
import pytest
from harbor.models.task.config import EnvironmentConfig, NetworkPolicy
from harbor.models.trial.paths import TrialPaths
from jiffy_harbor import JiffyEnvironment

DOCKERFILE = """\
FROM base
ENV PATH=/opt/tool/bin:$PATH GREETING=hello
COPY tool /opt/tool/bin/tool
RUN chmod 755 /opt/tool/bin/tool
WORKDIR /app
"""
TASK = """\
version = "1.0"
[environment]
cpus = 1
memory_mb = 512
storage_mb = 2048
"""
# The task is solved if the files of the image, of `setup` and of the solution exist.
CHECK = """\
#!/bin/bash
[ "$(tool)" = tool ] && [ "$GREETING" = hello ] && [ -e /setup ] && [ "$(cat /app/answer)" = 42 ]
echo $((1 - $?)) >/logs/verifier/reward.txt
"""


@pytest.fixture
def task(tmp_path, unique, templates):
    """Directory of a task whose image is new."""
    files = {
        "task.toml": TASK, "instruction.md": "Write 42 to /app/answer.\n", "environment/Dockerfile": DOCKERFILE,
        "environment/tool": f"#!/bin/sh\n# {unique}\necho tool\n",
        "solution/solve.sh": "#!/bin/bash\npwd\necho 42 >/app/answer\n", "tests/test.sh": CHECK,
    }
    for name, text in files.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yield tmp_path / "task"
    for snapshot in list(jiffy.Snapshot.list()):
        if any(name.startswith("harbor-") for name in snapshot.names):
            snapshot.delete()


@pytest.fixture
async def environment(task, tmp_path):
    """Creates environments of the task and stops them."""
    made = []

    async def make(start=True, policy=None, **options):
        paths = TrialPaths(tmp_path / f"trial-{len(made)}")
        config = EnvironmentConfig(cpus=1, memory_mb=512, storage_mb=2048)
        environment = JiffyEnvironment(
            task / "environment", "task", f"task__{len(made)}__env", paths, config, network_policy=policy, **options
        )
        made.append(environment)
        if start:
            await environment.start(force_build=False)
        return environment

    yield make
    for environment in made:
        await environment.stop(delete=True)


def test_a_job_starts_all_trials_of_a_task_from_one_snapshot(task, tmp_path):
    """The command line of harbor, with the agent `oracle`, which executes the solution."""
    command = [
        Path(sys.executable).parent / "harbor", "run", "--path", task, "--agent", "oracle", "--n-attempts", "3",
        "--environment-import-path", "jiffy_harbor:JiffyEnvironment", "--ek", "setup=touch /setup",
        "--jobs-dir", tmp_path / "jobs", "--job-name", "job", "--yes",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = [json.loads(path.read_text()) for path in (tmp_path / "jobs/job").glob("*/result.json")]
    assert len(results) == 3, done.stdout
    for result in results:
        assert result["exception_info"] is None, result["exception_info"]
        assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    names = [name for snapshot in jiffy.Snapshot.list() for name in snapshot.names]
    assert len([name for name in names if name.startswith("harbor-")]) == 1, names


async def test_trials_share_files_and_processes_of_the_snapshot_and_nothing_else(environment):
    setup = "(sleep 1000 & echo $! >/pid) >/dev/null 2>&1; date +%N >/setup"
    first, *others = await asyncio.gather(*(environment(setup=setup) for _ in range(3)))
    stamp = (await first.exec("cat /setup")).stdout
    for other in others:
        result = await other.exec("cat /setup; kill -0 $(cat /pid) && echo alive; touch /mine; tool; id -un; pwd")
        assert result.stdout == f"{stamp}alive\ntool\nroot\n/app\n", result
    assert (await first.exec("test -e /mine")).return_code == 1
    assert len({one._sandbox.sandbox_id for one in (first, *others)}) == 3


async def test_files_and_directories_keep_modes_and_links(environment, tmp_path):
    trial = await environment()
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "run").write_text("#!/bin/sh\necho ran\n")
    (source / "run").chmod(0o755)
    (source / "link").symlink_to("run")
    await trial.upload_dir(source, "/data/dir")
    await trial.upload_file(source / "run", "/data/file")
    result = await trial.exec("/data/dir/link; /data/file; test -d /data/dir/empty; stat -c %U /data/file")
    assert (result.stdout, result.return_code) == ("ran\nran\nroot\n", 0), result
    await trial.exec("mkfifo /data/dir/pipe; ln -s /etc /data/dir/outside; head -c 3000000 /dev/urandom >/data/dir/big")
    await trial.download_dir("/data/dir", tmp_path / "copy")
    await trial.download_file("/data/dir/big", tmp_path / "big")
    assert (tmp_path / "copy/run").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "copy/link").readlink() == Path("run")
    assert not (tmp_path / "copy/outside").exists()
    assert (tmp_path / "copy/big").read_bytes() == (tmp_path / "big").read_bytes()
    with pytest.raises(RuntimeError, match="cannot pack /missing"):
        await trial.download_dir("/missing", tmp_path / "none")


async def test_commands_end_at_their_timeout_and_if_they_are_cancelled(environment):
    trial = await environment(max_output=2000)
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        await trial.exec("exec sleep 1001", timeout_sec=1)
    task = asyncio.create_task(trial.exec("touch /begun; exec sleep 1001"))
    while (await trial.exec("test -e /begun")).return_code:
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await trial.exec("pgrep -fx 'sleep 1001'")).return_code == 1
    result = await trial.exec("echo first; yes | head -c 5000000; exit 3", env={"A": "b"})
    assert result.return_code == 3 and result.stdout.startswith("first") and len(result.stdout) < 2100


async def test_the_network_policy_is_enforced_and_changes(environment):
    trial = await environment(policy=NetworkPolicy(network_mode="no-network"))
    connect = "timeout 5 bash -c 'echo >/dev/tcp/1.1.1.1/80'"
    assert (await trial.exec(connect)).return_code != 0
    await trial.set_network_policy(NetworkPolicy(network_mode="allowlist", allowed_hosts=["1.1.1.1", "example.com"]))
    info = await trial._sandbox.get_info()
    assert info.network["allow_out"] == ["1.1.1.1", "example.com"]


async def test_a_failing_setup_leaves_no_snapshot_and_no_sandbox(environment):
    trial = await environment(start=False, setup="echo broken >&2; exit 4")
    with pytest.raises(RuntimeError, match="(?s)cannot set up the task.*exit code 4.*broken"):
        await trial.start(force_build=False)
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        await trial.exec("true")
    assert not [item for item in jiffy.Snapshot.list() if trial.snapshot_name in item.names]


async def test_a_forced_build_replaces_the_snapshot(environment, task):
    trial = await environment(setup="date +%N >/setup")
    before = [item.snapshot_id for item in jiffy.Snapshot.list(name=trial.snapshot_name)]
    other = await environment(start=False, setup="date +%N >/setup")
    from jiffy_harbor import environment as module

    module._prepared.clear()
    await other.start(force_build=True)
    after = [item.snapshot_id for item in jiffy.Snapshot.list(name=trial.snapshot_name)]
    assert len(before) == len(after) == 1 and before != after
    assert (await trial.exec("cat /setup")).stdout != (await other.exec("cat /setup")).stdout


async def test_an_image_that_cannot_be_pulled_is_an_error_with_the_log(environment, task):
    (task / "environment/Dockerfile").write_text("FROM missing.invalid/image\n")
    trial = await environment(start=False)
    with pytest.raises(RuntimeError, match="(?s)cannot build template .* from missing.invalid/image.*option `images`"):
        await trial.start(force_build=False)
    replaced = await environment(images={"missing.invalid/image": "base"})
    assert (await replaced.exec("id -un; pwd")).stdout == "root\n/\n"
