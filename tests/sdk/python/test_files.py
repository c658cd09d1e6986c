"""Files are written, read, listed, moved and removed; every method of uploading works."""

import hashlib
import io
import random

import pytest
from e2b import FileNotFoundException, FileType, InvalidArgumentException, NotEnoughSpaceException

BYTES = random.Random(1).randbytes(3_000_000)


async def test_text_comes_back_as_it_was_written(sdk, sandbox, unique):
    text = "zeile\r\nünï🦀\x00end"
    info = await sdk(sandbox.files.write, f"/tmp/{unique}", text)
    assert (info.path, info.name, info.type) == (f"/tmp/{unique}", unique, FileType.FILE)
    assert await sdk(sandbox.files.read, f"/tmp/{unique}") == text


@pytest.mark.parametrize(
    "way",
    [{}, {"use_octet_stream": True}, {"gzip": True}],
    ids=["multipart", "octet-stream", "gzip"],
)
async def test_bytes_arrive_whole_whichever_way_they_are_sent(sdk, sandbox, unique, way):
    path = f"/tmp/{unique}"
    await sdk(sandbox.files.write, path, BYTES, **way)
    assert bytes(await sdk(sandbox.files.read, path, format="bytes")) == BYTES
    assert bytes(await sdk(sandbox.files.read, path, format="bytes", gzip=True)) == BYTES
    digest = (await sdk(sandbox.commands.run, f"sha256sum {path}")).stdout.split()[0]
    assert digest == hashlib.sha256(BYTES).hexdigest()


async def test_an_upload_can_be_made_while_it_is_sent_and_a_download_read_while_it_comes(sdk, sandbox, unique):
    path = f"/tmp/{unique}"
    pieces = [BYTES[i : i + 70_000] for i in range(0, len(BYTES), 70_000)]
    await sdk(sandbox.files.write, path, sdk.body(pieces))
    got = await sdk.chunks(await sdk(sandbox.files.read, path, format="stream"))
    assert len(got) > 1
    assert b"".join(got) == BYTES


async def test_an_open_file_can_be_sent(sdk, sandbox, unique):
    await sdk(sandbox.files.write, f"/tmp/{unique}", io.BytesIO(b"from a file"))
    assert await sdk(sandbox.files.read, f"/tmp/{unique}") == "from a file"


async def test_an_empty_file_is_empty_not_missing(sdk, sandbox, unique):
    path = f"/tmp/{unique}"
    await sdk(sandbox.files.write, path, "")
    assert await sdk(sandbox.files.read, path) == ""
    assert bytes(await sdk(sandbox.files.read, path, format="bytes")) == b""
    assert await sdk.chunks(await sdk(sandbox.files.read, path, format="stream")) == []


@pytest.mark.parametrize("octet_stream", [False, True], ids=["multipart", "octet-stream"])
async def test_many_files_arrive_each_at_its_own_path(sdk, sandbox, unique, octet_stream):
    files = [{"path": f"/tmp/{unique}/deep/{n}/name {n} é.txt", "data": f"content {n}"} for n in range(30)]
    infos = await sdk(sandbox.files.write_files, files, use_octet_stream=octet_stream)
    assert [info.path for info in infos] == [file["path"] for file in files]
    for file in files[::7]:
        assert await sdk(sandbox.files.read, file["path"]) == file["data"]


async def test_writing_makes_directories_and_overwrites(sdk, sandbox, unique):
    path = f"/home/user/{unique}/a/b/c.txt"
    await sdk(sandbox.files.write, path, "a much longer first version")
    await sdk(sandbox.files.write, path, "short")
    assert await sdk(sandbox.files.read, path) == "short"
    owner = await sdk(sandbox.commands.run, f"stat -c %U /home/user/{unique} /home/user/{unique}/a/b/c.txt")
    assert owner.stdout.split() == ["user", "user"]


async def test_paths_are_relative_to_the_home_of_whose_they_are(sdk, sandbox, unique):
    await sdk(sandbox.files.write, unique, "mine")
    assert await sdk(sandbox.files.read, f"/home/user/{unique}") == "mine"
    await sdk(sandbox.files.write, f"~/{unique}", "roots", user="root")
    assert await sdk(sandbox.files.read, f"/root/{unique}", user="root") == "roots"


async def test_a_missing_file_is_not_found(sdk, sandbox, unique):
    for ask in (
        lambda: sdk(sandbox.files.read, f"/tmp/{unique}"),
        lambda: sdk(sandbox.files.read, f"/tmp/{unique}", format="stream"),
        lambda: sdk(sandbox.files.get_info, f"/tmp/{unique}"),
        lambda: sdk(sandbox.files.list, f"/tmp/{unique}"),
        lambda: sdk(sandbox.files.rename, f"/tmp/{unique}", f"/tmp/{unique}.new"),
    ):
        with pytest.raises(FileNotFoundException, match=unique):
            await ask()
    assert await sdk(sandbox.files.exists, f"/tmp/{unique}") is False


async def test_a_directory_is_not_a_file_nor_a_file_a_directory(sdk, sandbox, unique):
    with pytest.raises(InvalidArgumentException):
        await sdk(sandbox.files.read, "/tmp")
    with pytest.raises(InvalidArgumentException):
        await sdk(sandbox.files.write, "/tmp", "x")
    await sdk(sandbox.files.write, f"/tmp/{unique}", "x")
    with pytest.raises(InvalidArgumentException):
        await sdk(sandbox.files.list, f"/tmp/{unique}")


async def test_information_about_a_file_is_the_file_systems(sdk, sandbox, unique):
    path = f"/tmp/{unique}"
    await sdk(sandbox.files.write, path, "12345")
    await sdk(sandbox.commands.run, f"chmod 640 {path}; touch -d @1700000000 {path}; ln -s {path} {path}.link")
    info = await sdk(sandbox.files.get_info, path)
    assert (info.name, info.path, info.type, info.size) == (unique, path, FileType.FILE, 5)
    assert (info.owner, info.group, info.permissions) == ("user", "user", "-rw-r-----")
    assert info.mode & 0o777 == 0o640
    assert info.modified_time.timestamp() == 1_700_000_000
    assert info.symlink_target is None
    link = await sdk(sandbox.files.get_info, f"{path}.link")
    assert (link.type, link.symlink_target) == (FileType.SYMLINK, path)
    assert (await sdk(sandbox.files.get_info, "/tmp")).type is FileType.DIR


async def test_listing_goes_as_deep_as_asked(sdk, sandbox, unique):
    top = f"/tmp/{unique}"
    await sdk(sandbox.commands.run, f"mkdir -p {top}/a/b && touch {top}/1 {top}/a/2 {top}/a/b/3 && ln -s /etc {top}/link")
    names = lambda entries: {entry.path.removeprefix(top + "/"): entry.type.value for entry in entries}
    assert names(await sdk(sandbox.files.list, top)) == {"a": "dir", "1": "file", "link": "symlink"}
    assert set(names(await sdk(sandbox.files.list, top, depth=2))) == {"a", "1", "link", "a/2", "a/b"}
    assert set(names(await sdk(sandbox.files.list, top, depth=3))) == {"a", "1", "link", "a/2", "a/b", "a/b/3"}


async def test_renaming_moves_and_says_where_to(sdk, sandbox, unique):
    await sdk(sandbox.files.write, f"/tmp/{unique}/old", "content")
    info = await sdk(sandbox.files.rename, f"/tmp/{unique}/old", f"/tmp/{unique}/new")
    assert (info.path, info.name) == (f"/tmp/{unique}/new", "new")
    assert await sdk(sandbox.files.read, f"/tmp/{unique}/new") == "content"
    assert await sdk(sandbox.files.exists, f"/tmp/{unique}/old") is False


async def test_removing_takes_directories_whole_and_twice_is_no_error(sdk, sandbox, unique):
    await sdk(sandbox.files.write, f"/tmp/{unique}/a/b", "x")
    await sdk(sandbox.files.remove, f"/tmp/{unique}")
    assert await sdk(sandbox.files.exists, f"/tmp/{unique}") is False
    await sdk(sandbox.files.remove, f"/tmp/{unique}")


async def test_making_a_directory_says_whether_it_was_new(sdk, sandbox, unique):
    assert await sdk(sandbox.files.make_dir, f"/tmp/{unique}/x/y") is True
    assert await sdk(sandbox.files.make_dir, f"/tmp/{unique}/x/y") is False
    assert (await sdk(sandbox.files.get_info, f"/tmp/{unique}/x/y")).owner == "user"


async def test_metadata_of_a_file_is_kept_with_it(sdk, sandbox, unique):
    path = f"/home/user/{unique}"
    written = await sdk(sandbox.files.write, path, "x", metadata={"origin": "test", "step": "2"})
    assert written.metadata == {"origin": "test", "step": "2"}
    assert (await sdk(sandbox.files.get_info, path)).metadata == {"origin": "test", "step": "2"}


async def test_whose_the_file_is_is_whose_request_it_was(sdk, sandbox, unique):
    await sdk(sandbox.files.write, f"/tmp/{unique}", "secret", user="root")
    assert (await sdk(sandbox.files.get_info, f"/tmp/{unique}")).owner == "root"


async def test_a_file_larger_than_the_disk_is_refused_as_such(sdk, sandbox, unique):
    await sdk(sandbox.commands.run, f"mkdir /tmp/{unique} && mount -t tmpfs -o size=1m none /tmp/{unique} && chmod 777 /tmp/{unique}", user="root")
    with pytest.raises(NotEnoughSpaceException):
        await sdk(sandbox.files.write, f"/tmp/{unique}/big", BYTES)
    await sdk(sandbox.commands.run, f"umount /tmp/{unique}", user="root")
