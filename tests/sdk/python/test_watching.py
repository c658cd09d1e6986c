"""Directories are watched."""

import pytest
from e2b import FileNotFoundException, FileType


async def test_events_in_a_directory_are_reported(sdk, sandbox, unique):
    top = f"/tmp/{unique}"
    await sdk(sandbox.files.make_dir, top)
    watch = await sdk.watch(sandbox, top)
    await sdk(sandbox.files.write, f"{top}/file", "x")
    await watch.wait_for_event("create", "file")
    await watch.wait_for_event("write", "file")
    await sdk(sandbox.commands.run, f"chmod 600 {top}/file")
    await watch.wait_for_event("chmod", "file")
    await sdk(sandbox.files.rename, f"{top}/file", f"{top}/other")
    await watch.wait_for_event("rename", "file")
    await watch.wait_for_event("create", "other")
    await sdk(sandbox.files.remove, f"{top}/other")
    await watch.wait_for_event("remove", "other")
    await watch.stop()


async def test_only_a_recursive_watch_reports_events_in_new_directories(sdk, sandbox, unique):
    top = f"/tmp/{unique}"
    await sdk(sandbox.files.make_dir, f"{top}/a")
    deep = await sdk.watch(sandbox, top, recursive=True)
    flat = await sdk.watch(sandbox, top)
    await sdk(sandbox.files.write, f"{top}/a/one", "x")
    await deep.wait_for_event("create", "a/one")
    await sdk(sandbox.files.make_dir, f"{top}/later")
    await deep.wait_for_event("create", "later")
    await sdk(sandbox.files.write, f"{top}/later/two", "x")
    await deep.wait_for_event("create", "later/two")
    await flat.wait_for_event("create", "later")
    assert not any("/" in name for _, name in flat.seen())
    await deep.stop()
    await flat.stop()


async def test_events_can_contain_a_description_of_the_entry(sdk, sandbox, unique):
    top = f"/tmp/{unique}"
    await sdk(sandbox.files.make_dir, top)
    watch = await sdk.watch(sandbox, top, include_entry=True)
    await sdk(sandbox.commands.run, f"mkdir {top}/dir")
    event = await watch.wait_for_event("create", "dir")
    assert (event.entry.type, event.entry.path, event.entry.owner) == (FileType.DIR, f"{top}/dir", "user")
    await watch.stop()


async def test_a_thousand_events_all_arrive(sdk, sandbox, unique):
    top = f"/tmp/{unique}"
    await sdk(sandbox.files.make_dir, top)
    watch = await sdk.watch(sandbox, top)
    await sdk(sandbox.commands.run, f"cd {top} && touch $(seq 1 1000)")
    await watch.until(lambda: len({name for kind, name in watch.seen() if kind == "create"}) == 1000)
    await watch.stop()


async def test_a_missing_directory_cannot_be_watched(sdk, sandbox, unique):
    with pytest.raises(FileNotFoundException):
        await sdk.watch(sandbox, f"/tmp/{unique}")


async def test_a_stopped_watch_receives_no_events(sdk, sandbox, unique):
    top = f"/tmp/{unique}"
    await sdk(sandbox.files.make_dir, top)
    stopped, other = await sdk.watch(sandbox, top), await sdk.watch(sandbox, top)
    await stopped.stop()
    await sdk(sandbox.files.write, f"{top}/late", "x")
    await other.wait_for_event("write", "late")
    assert stopped.seen() == []
    await other.stop()
