"""Directories are watched."""

import pytest
from e2b import FileNotFoundException, FileType


async def test_what_happens_in_a_directory_is_told(sdk, sandbox, unique):
    top = f"/tmp/{unique}"
    await sdk(sandbox.files.make_dir, top)
    watch = await sdk.watch(sandbox, top)
    await sdk(sandbox.files.write, f"{top}/file", "x")
    await watch.sees("create", "file")
    await watch.sees("write", "file")
    await sdk(sandbox.commands.run, f"chmod 600 {top}/file")
    await watch.sees("chmod", "file")
    await sdk(sandbox.files.rename, f"{top}/file", f"{top}/other")
    await watch.sees("rename", "file")
    await watch.sees("create", "other")
    await sdk(sandbox.files.remove, f"{top}/other")
    await watch.sees("remove", "other")
    await watch.stop()


async def test_a_recursive_watch_sees_directories_made_later_and_another_does_not(sdk, sandbox, unique):
    top = f"/tmp/{unique}"
    await sdk(sandbox.files.make_dir, f"{top}/a")
    deep = await sdk.watch(sandbox, top, recursive=True)
    flat = await sdk.watch(sandbox, top)
    await sdk(sandbox.files.write, f"{top}/a/one", "x")
    await deep.sees("create", "a/one")
    await sdk(sandbox.files.make_dir, f"{top}/later")
    await deep.sees("create", "later")
    await sdk(sandbox.files.write, f"{top}/later/two", "x")
    await deep.sees("create", "later/two")
    await flat.sees("create", "later")
    assert not any("/" in name for _, name in flat.seen())
    await deep.stop()
    await flat.stop()


async def test_events_can_carry_what_they_are_about(sdk, sandbox, unique):
    top = f"/tmp/{unique}"
    await sdk(sandbox.files.make_dir, top)
    watch = await sdk.watch(sandbox, top, include_entry=True)
    await sdk(sandbox.commands.run, f"mkdir {top}/dir")
    event = await watch.sees("create", "dir")
    assert (event.entry.type, event.entry.path, event.entry.owner) == (FileType.DIR, f"{top}/dir", "user")
    await watch.stop()


async def test_a_thousand_events_all_arrive(sdk, sandbox, unique):
    top = f"/tmp/{unique}"
    await sdk(sandbox.files.make_dir, top)
    watch = await sdk.watch(sandbox, top)
    await sdk(sandbox.commands.run, f"cd {top} && touch $(seq 1 1000)")
    await watch.until(lambda: len({name for kind, name in watch.seen() if kind == "create"}) == 1000)
    await watch.stop()


async def test_a_directory_that_is_not_there_cannot_be_watched(sdk, sandbox, unique):
    with pytest.raises(FileNotFoundException):
        await sdk.watch(sandbox, f"/tmp/{unique}")


async def test_a_stopped_watch_hears_nothing_more(sdk, sandbox, unique):
    top = f"/tmp/{unique}"
    await sdk(sandbox.files.make_dir, top)
    stopped, other = await sdk.watch(sandbox, top), await sdk.watch(sandbox, top)
    await stopped.stop()
    await sdk(sandbox.files.write, f"{top}/late", "x")
    await other.sees("write", "late")
    assert stopped.seen() == []
    await other.stop()
