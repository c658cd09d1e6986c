"""Templates, built by the packages' own builder."""

import asyncio
import os

import e2b
import pytest
from e2b.api.client import Client as Generated
from e2b.api.client.api.tags import get_templates_template_id_tags_count as count
from e2b.api.client.api.tags import get_templates_template_id_tags_exists as exists
from e2b.api.client.api.tags import get_templates_template_id_tags_groups as groups
from e2b.api.client.api.tags import get_templates_template_id_tags_tag_assignments as assignments
from e2b.api.client.api.templates import get_default_templates, get_v2_templates
from e2b.api.client.api.templates import patch_templates_template_id as patch_template
from e2b.api.client.models import GetTemplatesTemplateIDTagsGroupsSort, TemplateUpdateRequest


@pytest.fixture
def builder(sdk):
    """Returns the builder of the package under test."""
    return e2b.Template if sdk.blocking else e2b.AsyncTemplate


@pytest.fixture
async def build(sdk, builder, unique):
    """Builds templates and removes them after the test."""
    names = []

    async def make(template, name=None, **options):
        name = name or f"made-{unique}"
        names.append(name.split(":")[0])
        logs = []
        info = await sdk(builder.build, template, name, on_build_logs=logs.append, **options)
        info.lines = [log.message for log in logs]
        return info

    yield make
    await with_key(names)
    assert not [pool for pool in await pools() if pool["templateID"] in names and pool["ready"]]


async def pools():
    """Returns the warm pools of the host."""
    import httpx

    async with httpx.AsyncClient(base_url=os.environ["E2B_API_URL"], trust_env=False) as api:
        return (await api.get("/pools", headers={"X-API-KEY": os.environ["E2B_API_KEY"]})).json()


async def with_key(names):
    """Removes a template through the API, because the packages have no such call."""
    import httpx

    async with httpx.AsyncClient(base_url=os.environ["E2B_API_URL"], trust_env=False) as api:
        for name in set(names):
            await api.delete(f"/templates/{name}", headers={"X-API-KEY": os.environ["E2B_API_KEY"]})


async def test_a_template_with_files_commands_variables_and_a_server(sdk, builder, build, create, unique, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text(f"page {unique}")
    (tmp_path / "notes.txt").write_text("notes")
    template = (
        builder(file_context_path=tmp_path)
        .from_base_image()
        .copy("site", "/home/user/site")
        .copy("notes.txt", "/etc/notes", user="root", mode=0o640)
        .set_envs({"GREETING": "hello"})
        .set_envs({"AGAIN": "$GREETING you"})
        .run_cmd("echo made by $(whoami) > made.txt")
        .run_cmd("echo root was here > /root-was-here", user="root")
        .set_workdir("/home/user/site")
        .set_start_cmd("python3 -m http.server 8123", e2b.wait_for_port(8123))
    )
    info = await build(template, cpu_count=1, memory_mb=512)
    assert any("RUN" in line for line in info.lines), info.lines
    sandbox = await create(f"made-{unique}")
    page = "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123').read().decode())\""
    result = await sdk(
        sandbox.commands.run,
        f"cat /home/user/made.txt /root-was-here; stat -c '%a %U' /etc/notes; stat -c %U index.html; echo $AGAIN; nproc; {page}",
    )
    assert result.stdout.split("\n")[:7] == [
        "made by user",
        "root was here",
        "640 root",
        "user",
        "hello you",
        "1",
        f"page {unique}",
    ]


async def test_a_second_build_uses_the_cache_of_the_first(sdk, builder, build, unique):
    template = builder().from_template("base").run_cmd(f"echo {unique}").run_cmd("echo two")
    await build(template)
    again = await build(template)
    assert sum(line.startswith("CACHED") for line in again.lines) == 2, again.lines
    fresh = await build(template, skip_cache=True)
    assert not any(line.startswith("CACHED") for line in fresh.lines), fresh.lines


async def test_a_failed_step_raises_an_error_with_its_output(builder, build, unique):
    template = builder().from_base_image().run_cmd(f"echo said {unique}; exit 3")
    with pytest.raises(e2b.BuildException) as refusal:
        await build(template)
    assert "exit status 3" in str(refusal.value)


async def test_tags_are_added_and_removed(sdk, builder, build, create, unique):
    name = f"tagged-{unique}"
    first = await build(builder().from_base_image().run_cmd("echo 1 > v"), f"{name}:v1")
    second = await build(builder().from_base_image().run_cmd("echo 2 > v"), f"{name}:v2")
    assert await sdk(builder.alias_exists, name)
    assert not await sdk(builder.alias_exists, f"{name}-not")
    await sdk(builder.assign_tags, f"{name}:v1", ["stable"])
    tags = await sdk(builder.get_tags, name + ":v1")
    assert {t.tag: t.build_id for t in tags}["stable"] == first.build_id
    check_generated_calls(name, first, second)
    for tag, version in [("v1", "1"), ("v2", "2"), ("stable", "1")]:
        sandbox = await create(f"{name}:{tag}")
        result = await sdk(sandbox.commands.run, "cat v")
        assert result.stdout.strip() == version, tag
    await sdk(builder.remove_tags, name, ["stable"])
    with pytest.raises(e2b.SandboxException):
        await create(f"{name}:stable")


def check_generated_calls(name, first, second):
    """Checks calls of the package that only its generated client has. E2B's dashboard uses them."""
    with Generated(os.environ["E2B_API_URL"], headers={"X-API-KEY": os.environ["E2B_API_KEY"]}) as client:

        def mine():
            listed = get_v2_templates.sync(client=client)
            return [template for template in listed if template.template_id == second.template_id]

        assert [(template.public, template.is_default) for template in mine()] == [(False, False)]
        change = TemplateUpdateRequest(public=True)
        assert patch_template.sync_detailed(name, client=client, body=change).status_code == 200
        assert [template.public for template in mine()] == [True]
        defaults = get_default_templates.sync(client=client)
        assert {"base", "code-interpreter-v1"} <= {template.template_id for template in defaults}
        assert all(template.is_default for template in defaults)
        assert count.sync(name, client=client).total == 3
        for tag, present in (("v2", True), ("v3", False)):
            assert exists.sync(name, client=client, tag=tag).exists is present
        order = GetTemplatesTemplateIDTagsGroupsSort.NAME_DESC
        page = groups.sync(name, client=client, tags_limit=2, sort=order)
        assert [group.tag for group in page.tags] == ["v2", "v1"] and page.next_cursor == "v1"
        rest = groups.sync(name, client=client, tags_cursor=page.next_cursor, sort=order)
        assert [group.tag for group in rest.tags] == ["stable"] and rest.next_cursor is None
        assert [group.tag for group in groups.sync(name, client=client, search="v").tags] == ["v2", "v1"]
        for tag, build in (("v2", second), ("stable", first)):
            assigned = assignments.sync(name, tag, client=client)
            assert [str(one.build_id) for one in assigned.data] == [build.build_id]
            assert assigned.data[0].build_created_at <= assigned.data[0].assigned_at


async def test_a_background_build_can_be_polled(sdk, builder, unique):
    template = builder().from_base_image().run_cmd("sleep 0.2; echo done")
    info = await sdk(builder.build_in_background, template, f"behind-{unique}")
    for _ in range(600):
        status = await sdk(builder.get_build_status, info)
        if status.status.value in ("ready", "error"):
            break
        await asyncio.sleep(0.1)
    assert status.status.value == "ready"
    await with_key([f"behind-{unique}"])


async def test_a_dockerfile_parsed_by_the_package_is_built(sdk, builder, build, create, tmp_path):
    (tmp_path / "hello.txt").write_text("from a file")
    dockerfile = "FROM e2bdev/base\nWORKDIR /srv/app\nCOPY hello.txt ./\nENV A=1 B=2\nRUN echo $A$B > sum\n"
    info = await build(builder(file_context_path=tmp_path).from_dockerfile(dockerfile))
    sandbox = await create(info.name)
    result = await sdk(sandbox.commands.run, "cat /srv/app/hello.txt /srv/app/sum; id -un; pwd")
    assert result.stdout == "from a file12\nuser\n/srv/app\n"
