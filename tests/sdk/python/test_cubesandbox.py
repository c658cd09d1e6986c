"""CubeSandbox's client uses the same API by host name, as root, and with rollbacks."""

import time

import pytest
from cubesandbox import (
    Action,
    ApiError,
    Config,
    FilesystemNotFoundError,
    Inject,
    Match,
    PtySize,
    Rule,
    Sandbox,
    SandboxNotFoundError,
    Template,
    TemplateNotFoundError,
    Volume,
    VolumeMount,
)
from cubesandbox._exceptions import AuthenticationError


@pytest.fixture
def cube():
    """Creates a sandbox for a test, and kills it after the test."""
    with Sandbox.create(timeout=120, metadata={"made": "by cubesandbox"}, env_vars={"MARK": "m"}) as sandbox:
        yield sandbox


def test_the_daemon_reports_its_health():
    assert Sandbox.health()["status"] == "ok"


def test_code_runs_and_preserves_state(cube):
    cube.run_code("x = 41")
    output = []
    execution = cube.run_code("print('heard'); x + 1", on_stdout=lambda message: output.append(str(message)))
    assert execution.text == "42" and "".join(output) == "heard\n"
    assert cube.run_code("1 / 0").error.name == "ZeroDivisionError"
    assert "".join(cube.run_code("echo $((6 * 7))", language="bash").logs.stdout) == "42\n"


def test_commands_run_as_root_by_default(cube):
    result = cube.commands.run("id -un; echo $MARK; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("root\nm\n", "err\n", 3)
    assert cube.commands.run("id -un; pwd", user="user", cwd="/tmp", envs={"A": "b"}).stdout == "user\n/tmp\n"


def test_files_are_written_read_listed_moved_and_removed(cube):
    cube.files.write("/tmp/cube/a.txt", "text ünï")
    assert cube.files.read("/tmp/cube/a.txt") == "text ünï"
    assert cube.files.write_files([("/tmp/cube/b", b"b"), ("/tmp/cube/c", "c")]) == 2
    assert {entry["name"] for entry in cube.files.list("/tmp/cube")} == {"a.txt", "b", "c"}
    assert cube.files.stat("/tmp/cube/b")["type"] == "FILE_TYPE_FILE"
    cube.files.rename("/tmp/cube/b", "/tmp/cube/d")
    assert cube.files.exists("/tmp/cube/d") and not cube.files.exists("/tmp/cube/b")
    cube.files.remove("/tmp/cube")
    with pytest.raises(FilesystemNotFoundError):
        cube.files.stat("/tmp/cube")
    with pytest.raises(OSError):
        cube.files.read("/tmp/cube/a.txt")
    assert cube.files.make_dir("/tmp/cube")["type"] == "FILE_TYPE_DIRECTORY"


def test_a_directory_is_watched(cube):
    with cube.files.watch_dir("/tmp") as watch:
        cube.files.write("/tmp/watched", "x")
        event = next(iter(watch))
    assert (event.name, event.type) == ("watched", "EVENT_TYPE_CREATE")


def test_a_rollback_restores_memory_and_files(cube):
    cube.run_code("state = 'before'")
    cube.files.write("/root/file", "before")
    snapshot = cube.create_snapshot()
    cube.run_code("state = 'after'")
    cube.files.write("/root/file", "after")
    answer = cube.rollback(snapshot.snapshot_id)
    assert (answer["sandboxID"], answer["snapshotID"]) == (cube.sandbox_id, snapshot.snapshot_id)
    assert cube.run_code("state").text == "before"
    assert cube.files.read("/root/file") == "before"
    # A second rollback undoes the changes since the first.
    cube.files.write("/root/file", "again")
    cube.rollback(snapshot.snapshot_id)
    assert cube.files.read("/root/file") == "before"
    Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_a_rollback_to_an_unknown_snapshot_is_rejected_and_changes_nothing(cube):
    cube.files.write("/root/file", "kept")
    with pytest.raises((ApiError, TemplateNotFoundError, SandboxNotFoundError)) as refusal:
        cube.rollback("no-such-snapshot")
    assert refusal.value.status_code in (400, 404, 409)
    assert cube.files.read("/root/file") == "kept"


def test_clones_have_the_memory_of_their_source_and_are_cleaned_up(cube):
    cube.run_code("state = 7")
    clones = cube.clone(3, concurrency=3)
    assert len({clone.sandbox_id for clone in clones} | {cube.sandbox_id}) == 4
    for number, clone in enumerate(clones):
        assert clone.run_code(f"state += {number}; state").text == str(7 + number)
    assert cube.run_code("state").text == "7"
    for clone in clones:
        clone.kill()
    snapshots, _ = Sandbox.list_snapshots(sandbox_id=cube.sandbox_id)
    assert snapshots == []


def test_snapshots_are_listed_and_usable_as_templates(cube):
    cube.files.write("/root/file", "in the snapshot")
    snapshot = cube.create_snapshot("cube-named")
    listed, token = Sandbox.list_snapshots(sandbox_id=cube.sandbox_id)
    assert [item.snapshot_id for item in listed] == [snapshot.snapshot_id] and token is None
    with Sandbox.create(snapshot.snapshot_id, timeout=60) as copy:
        assert copy.files.read("/root/file") == "in the snapshot"
    Sandbox.delete_snapshot(snapshot.snapshot_id)
    with pytest.raises(TemplateNotFoundError):
        Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_memory_survives_a_pause(cube):
    cube.run_code("state = 'kept'")
    cube.pause(interval=0.05)
    assert cube.get_info()["state"] == "paused"
    again = Sandbox.connect(cube.sandbox_id)
    assert again.run_code("state").text == "kept"
    cube.pause(interval=0.05)
    cube.resume()
    assert cube.get_info()["state"] == "running"
    assert cube.run_code("state").text == "kept"
    with pytest.raises(ApiError) as refusal:
        cube.resume()
    assert refusal.value.status_code == 409
    again.close()


def test_a_sandbox_can_have_no_timeout(cube):
    cube.set_timeout(-1)
    assert cube.get_info()["state"] == "running"
    again = Sandbox.connect(cube.sandbox_id, timeout=-1)
    assert again.commands.run("echo alive").stdout == "alive\n"
    again.close()


def test_a_nested_lifecycle_object_is_accepted():
    with Sandbox.create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True}) as sandbox:
        sandbox.files.write("/dev/shm/kept", "kept")
        sandbox.pause(interval=0.05)
        assert sandbox.files.read("/dev/shm/kept") == "kept"
        assert sandbox.get_info()["lifecycle"] == {"onTimeout": "pause", "autoResume": True}


def test_a_restricted_sandbox_requires_the_token_of_its_client():
    with Sandbox.create(timeout=60, network={"allow_public_traffic": False}) as sandbox:
        assert sandbox.traffic_access_token
        assert sandbox.run_code("6 * 7").text == "42"
        sandbox._data.pop("trafficAccessToken")
        sandbox.close()
        with pytest.raises(ApiError) as refusal:
            sandbox.run_code("6 * 7")
        assert refusal.value.status_code == 403


def test_rules_of_a_running_sandbox_are_replaced(cube):
    cube.update_network({"allow_internet_access": False})
    assert cube.get_info()["allowInternetAccess"] is False
    ports = {"allow_public_traffic": False, "mask_request_host": "localhost:${PORT}"}
    cube.update_network({"deny_out": ["192.0.2.0/24"], **ports})
    info = cube.get_info()
    assert info["allowInternetAccess"] is None
    assert info["network"]["denyOut"] == ["192.0.2.0/24"]
    assert info["network"]["allowPublicTraffic"] is False
    assert info["network"]["maskRequestHost"] == "localhost:${PORT}"
    cube.update_network({"allow_public_traffic": True})
    info = cube.get_info()
    assert info["network"]["denyOut"] == [] and info["network"]["allowPublicTraffic"] is True


def test_sandboxes_are_listed_by_both_methods(cube):
    for listed in (Sandbox.list(), Sandbox.list_v2()):
        mine = [item for item in listed if item["sandboxID"] == cube.sandbox_id]
        assert len(mine) == 1 and mine[0]["state"] == "running"
        assert mine[0]["metadata"] == {"made": "by cubesandbox"}


def test_a_terminal_has_a_size_and_can_be_closed(cube):
    shown = []
    handle = cube.pty.create(PtySize(rows=24, cols=80))
    cube.pty.resize(handle.pid, PtySize(rows=33, cols=99))
    cube.pty.send_stdin(handle.pid, b"stty size; exit\n")
    assert handle.wait(on_data=shown.append) == 0
    assert b"33 99\r\n" in b"".join(shown)


def test_unknown_objects_are_not_found():
    with pytest.raises(TemplateNotFoundError):
        Sandbox.create("no-such-template")
    with pytest.raises(SandboxNotFoundError):
        Sandbox.connect("i0000000000000000000")


def test_a_killed_sandbox_no_longer_exists(cube):
    cube.kill()
    with pytest.raises(SandboxNotFoundError):
        cube.get_info()
    with pytest.raises(SandboxNotFoundError, match="does not exist"):
        cube.kill()


def test_a_wrong_key_is_rejected():
    with pytest.raises(AuthenticationError):
        Sandbox.create(config=Config(api_key="wrong"))


def test_volumes_are_created_listed_and_destroyed():
    volume = Volume.create()
    try:
        assert volume.name == volume.volume_id
        assert volume.volume_id in [found.volume_id for found in Volume.list()]
        assert Volume.connect(volume.volume_id).token == volume.token
        with pytest.raises(ApiError):
            Volume.create("other", driver="cos")
    finally:
        assert Volume.destroy(volume.volume_id) is True
    assert Volume.destroy(volume.volume_id) is False


def test_a_sandbox_mounts_a_volume_read_only(cube):
    if cube.commands.run("uname -r").stdout.strip().endswith("-gvisor"):
        return
    volume = Volume.create("cube-mounted")
    try:
        mounts = {"/workspace": volume, "/dataset": VolumeMount(volume, read_only=True)}
        with Sandbox.create(timeout=120, volume_mounts=mounts) as sandbox:
            sandbox.files.write("/workspace/text", "content")
            assert sandbox.files.read("/dataset/text") == "content"
            denied = sandbox.commands.run("touch /dataset/new")
            assert denied.exit_code == 1 and "Read-only" in denied.stderr
    finally:
        Volume.destroy(volume.volume_id)


def test_rules_add_headers_whose_values_are_not_returned(cube):
    rule = Rule(
        name="key",
        match=Match(host="api.example.com", method=["GET"], scheme="https"),
        action=Action(allow=True, inject=[Inject(header="Authorization", secret="value", format="Bearer ${SECRET}")]),
    )
    cube.update_network({"rules": [rule]})
    rules = cube.get_info()["network"]["rules"]
    assert rules == {"api.example.com": [{"transform": {"headers": {"authorization": "***"}}}]}
    with pytest.raises(ApiError):
        cube.update_network({"rules": [Rule(name="all", match=Match(), action=Action(allow=True))]})
    cube.update_network({"rules": []})


def test_templates_are_built_from_images_rebuilt_and_renamed(unique):
    name = f"cube-{unique}"
    # The image that stands for the template `base` of the host.
    job = Template.build(
        image="e2bdev/base",
        name=name,
        cpu_count=1500,
        memory_mb=640,
        envs={"MADE": "by $cube"},
        exposed_ports=[8080],
        probe_port=8080,
        probe_path="/",
        command=["python3", "-m", "http.server", "8080"],
        allow_internet_access=False,
        allow_out=["*.example.com"],
        deny_out=["192.0.2.0/24"],
        network_type="tap",
        instance_type="cubebox",
        writable_layer_size="2G",
        registry_username="u",
        registry_password="p-that-is-not-stored",
    )
    renamed = f"{name}-2"
    try:
        assert job.template_id and job.job_id
        built(job)
        described = Template.get(name)
        assert (described.template_id, described.cpu_count, described.memory_mb) == (job.template_id, 2, 640)
        assert described.allow_internet_access is False
        with Sandbox.create(name, timeout=60) as sandbox:
            info = sandbox.get_info()
            assert info["allowInternetAccess"] is False
            assert info["network"]["allowOut"] == ["*.example.com"]
            assert info["network"]["denyOut"] == ["192.0.2.0/24"]
            # Rules by name accept connections to port 443 until the name is known.
            denied = sandbox.commands.run("timeout 5 bash -c '</dev/tcp/1.1.1.1/853'")
            assert denied.exit_code != 0
            said = sandbox.commands.run("echo $MADE; curl -s -o /dev/null -w %{http_code} localhost:8080")
            assert said.stdout == "by $cube\n200"
        again = Template.rebuild(job.template_id)
        assert again.template_id == job.template_id and again.job_id != job.job_id
        built(again)
        assert [build.status for build in Template.get(job.template_id).builds] == ["ready", "ready"]

        assert Template.set_alias(job.template_id, renamed).name == renamed
        with pytest.raises(TemplateNotFoundError):
            Template.get(name)
        with Sandbox.create(renamed, timeout=60) as sandbox:
            assert sandbox.commands.run("echo $MADE").stdout == "by $cube\n"
        for taken in ("base", "no/name", "x:y"):
            with pytest.raises(ApiError):
                Template.set_alias(renamed, taken)
        assert Template.set_alias(renamed).name.startswith("tpl-")
        for field, value in {"dns": ["no.address"], "network_type": "bridge", "nodes": ["a"]}.items():
            with pytest.raises(ApiError):
                Template.build(image="e2bdev/base", name=name, **{field: value})
    finally:
        Template.delete(job.template_id)
    with pytest.raises(TemplateNotFoundError):
        Template.rebuild(job.template_id)


def built(job):
    """Waits for a build, which must succeed."""
    for _ in range(600):
        status = Template.get_build_status(job.template_id, job.build_id)
        if status.status in ("ready", "error"):
            break
        time.sleep(0.1)
    assert status.status == "ready", Template.get_build_logs(job.template_id, job.build_id)
